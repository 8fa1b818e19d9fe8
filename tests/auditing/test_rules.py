"""What follows from a record: one finding or question with its value, and nothing from neighbours.

Records are made by hand, so that nothing here depends on how a loop is observed. Values are those
of the definition: how many micro-batches, which ratio, which distance. Then what is
said of several mistakes and of several optimizers, and what could not be told.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from records import (
    ADAM,
    BOTH,
    CALL,
    COUNTS,
    LOOP,
    OTHER,
    OTHERS,
    QUARTERS,
    SCALE,
    SGD,
    average,
    backward,
    call,
    clip,
    graph,
    of_ranks,
    other,
    own_sums,
    passes,
    random_sketch,
    record,
    said,
    skipped,
    step,
    total,
    two,
    updated_inside,
    window,
    windows,
    with_earlier,
    with_nan,
)
from rulings import FINDINGS, NEIGHBOURS, QUESTIONS, SUMMING

from accumext.auditing import _accumulation, _rules
from accumext.auditing._events import Record, view_of
from accumext.auditing._judge import judge
from accumext.auditing._words import KINDS


def evidence_has(evidence, words):
    assert all(some in evidence for some in words), evidence
    assert not re.search(r"\b(?:nan|0x)\b", evidence)
    json.dumps(evidence)


CASES = [*((case, False) for case in FINDINGS), *((case, True) for case in QUESTIONS)]
RULES = {
    **{rule.__name__: lambda one, rule=rule: rule(view_of(one, 0))
       for rule in (*_accumulation.RULES, *_rules.OF_A_VIEW)},
    **{rule.__name__: rule for rule in _rules.OF_A_RECORD},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "asks"), CASES, ids=[f"{c[0]}-{c[1]:g}{'?' * asks}" for c, asks in CASES]
)
def test_a_mistake_is_all_that_is_said(case, asks):
    """Its id, its line, its value, words of its evidence; and a question where it may be meant"""
    id, value, where, one, *words = case
    judgement = judge(one)
    found = judgement.questions if asks else judgement.findings
    assert [(one.id, one.where) for one in found] == [(id, where)]
    assert (judgement.findings if asks else judgement.questions) == ()
    assert found[0].value == pytest.approx(value, rel=1e-4)
    if words:
        evidence_has(found[0].evidence, words)
    assert found[0].name == KINDS[id].name
    begin = f"right if {KINDS[id].right_if}; else " if asks else ""
    assert found[0].cure.startswith(begin)
    rest = found[0].cure.removeprefix(begin)
    own = {
        "memory.graph": "",  # depends on what the graph keeps
        "accumulation.divisor_missing": "divide the loss of a pass by its 5 losses; ",
        "processes.not_reduced": "one pass, as accumext.chunked_loss makes of the slices",
    }
    assert rest
    assert rest == KINDS[id].cure or (id in own and rest.startswith(own[id]))


@pytest.mark.parametrize(
    "one",
    [one for of_id in NEIGHBOURS.values() for one in of_id.values()],
    ids=[f"{id}-{words}" for id, of_id in NEIGHBOURS.items() for words in of_id],
)
def test_a_neighbour_of_a_mistake_is_none(one):
    assert said(one) == ()


# --- evidence -------------------------------------------------------------------------------------


def test_evidence_of_one_mistake_of_several():
    said_of_it = said(record(window(passes([2.0, 0.5, 1.0, 0.5], scale=SCALE), 1 / SCALE)))
    (evidence,) = (one.evidence for one in said_of_it if one.id == "accumulation.divisor_missing")
    evidence_has(evidence, ["multiplied by 0.5, 1, 2"])


def test_distance_of_equal_weights_is_that_of_the_definition():
    of = passes(QUARTERS, COUNTS)
    (question,) = said(record(window(of)))
    plain = [one.gradient * 4 for one in of]
    right = sum(n * g for n, g in zip(COUNTS, plain, strict=True)) / sum(COUNTS)
    apart = (sum(plain) / 4 - right).norm() / right.norm()
    assert f"{apart:.2g} from the mean over all targets" in question.evidence


def test_cures_of_one_graph_say_what_is_lost():
    exact, cut = "accumext.decode_loss keeps no logits, with the same", "torch.utils.checkpoint"
    for classes, words in ((0.5, cut), (0.6, exact)):
        (question,) = said(graph(16, 16_000, classes))
        assert f"; else {words}" in question.cure
        assert "truncates" in question.cure


# --- the table ------------------------------------------------------------------------------------


def test_every_id_has_cases_and_neighbours():
    assert {case[0] for case, _ in CASES} == set(NEIGHBOURS)
    assert set(NEIGHBOURS) == set(KINDS)


def test_every_id_has_words_of_its_evidence():
    assert {case[0] for case, _ in CASES if case[4:]} == set(KINDS)


def test_what_asks_is_right_if():
    """And what never asks has no such words"""
    assert {case[0] for case in QUESTIONS} == {id for id, kind in KINDS.items() if kind.right_if}


def test_ids_are_words_and_kinds_have_names_and_cures():
    assert [id for id in KINDS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", id)] == []
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)
    assert [id for id, kind in KINDS.items() if not kind.cure] == ["memory.graph"]
    words = " / ".join(word for kind in KINDS.values() for word in kind if word)
    assert not re.search(r"  |\n|right if| /  / ", words)
    assert all(word == word.strip() for kind in KINDS.values() for word in kind)


def test_every_rule_has_a_case():
    silent = [
        name for name, rule in RULES.items()
        if not any(list(rule(case[3])) for case, _ in CASES)
    ]  # fmt: skip
    assert silent == []


# --- several mistakes -----------------------------------------------------------------------------


def test_the_worst_is_first():
    last = window(passes(QUARTERS), through_scaler=True)
    events = [
        call("schedule"),
        *window(passes([1.0] * 4, COUNTS)),
        *window([backward(scale=SCALE)]),
        *(replace(last[-2], used=with_nan()) if event is last[-2] else event for event in last),
    ]
    judgement = judge(record(events, optimizers=(replace(SGD, decayed=(1,)),)))
    assert [finding.id for finding in judgement.findings] == [
        "step.nonfinite",
        "scaler.unscale_missing",
    ]
    assert [question.id for question in judgement.questions] == [
        "accumulation.divisor_missing",
        "accumulation.unequal_counts",
        "schedule.before_first_step",
        "optimizer.decay",
    ]


def test_an_update_that_changes_the_scale_inside_a_window():
    judgement = judge(updated_inside(ratio=2.0))
    assert [(one.id, one.value, one.where) for one in judgement.findings] == [
        ("scaler.mixed", 2.0, LOOP),
        ("scaler.updated_inside", 1, CALL),
    ]
    assert judgement.questions == ()


# --- several optimizers ---------------------------------------------------------------------------


def of_two(first: float, second: float, lines: tuple[str, str] = (LOOP, OTHERS)) -> Record:
    """Windows of four and of two micro-batches, of optimizers each with its loss, in turn."""
    own = passes([first] * 4, where=lines[0])
    theirs = [other(coefficient=second, where=lines[1]) for _ in range(2)]
    return two(
        own, theirs, step(total(own)),
        step(total(theirs), optimizer=1, present=OTHER), call("zero_grad", BOTH | OTHER),
    )  # fmt: skip


def test_each_optimizer_is_judged():
    assert said(of_two(1 / 4, 1 / 2)) == ()
    found = said(of_two(1 / 4, 1.0))
    assert [(one.id, one.value, one.where) for one in found] == [
        ("accumulation.divisor_missing", pytest.approx(2.0), OTHERS)
    ]
    assert len(said(of_two(1.0, 1.0))) == 2


def test_of_one_line_the_largest_value_is_said():
    for first, second in ((1.0, 1.0), (1.0, 1 / 2), (1 / 4, 1.0)):
        right = 4.0 if first == 1.0 else 2.0
        (one,) = said(of_two(first, second, (LOOP, LOOP)))
        assert (one.id, one.value) == ("accumulation.divisor_missing", pytest.approx(right))


def test_a_question_and_a_finding_of_one_id_are_both_said():
    of = [backward(1.0, where=LOOP) for _ in range(4)]
    theirs = [other(coefficient=1.0, where=LOOP) for _ in range(3)]
    judgement = judge(two(
        of, theirs[:1], step(total(of)), step(total(theirs[:1]), optimizer=1, present=OTHER),
        call("zero_grad", BOTH | OTHER),
        theirs[1:], step(total(theirs[1:]), optimizer=1, present=OTHER),
    ))  # fmt: skip
    for found, value in ((judgement.questions, 4.0), (judgement.findings, 2.0)):
        assert [(one.id, one.value) for one in found] == [
            ("accumulation.divisor_missing", pytest.approx(value))
        ]


def test_a_view_has_what_is_about_its_parameters():
    one = of_two(1 / 4, 1 / 2)
    first, second = (view_of(one, number) for number in (0, 1))
    kinds = [[type(e).__name__ for e in view.windows[0].events] for view in (first, second)]
    assert kinds == [["Pass"] * 4 + ["Stepped"], ["Pass"] * 2 + ["Call", "Stepped"]]
    assert [e.name for e in (*first.rest, *second.rest)] == ["step", "zero_grad", "zero_grad"]
    assert [first.rest[0].parameters, second.windows[0].events[2].parameters] == [OTHER, BOTH]
    assert [len(view.passes) for view in (first, second)] == [4, 2]


def test_a_step_of_what_no_pass_reaches_is_about_nothing():
    one = two(window([backward()]), step(random_sketch(OTHER), optimizer=1, present=OTHER))
    (_, theirs) = view_of(one, 0).rest
    assert (theirs.name, theirs.parameters) == ("step", frozenset())


def test_a_window_knows_the_step_before():
    view = view_of(record(windows(1 / 4, 4, 4, 4)), 0)
    assert [one.index for one in view.windows] == [0, 1, 2]
    steps = [one.step for one in view.windows]
    assert [one.previous for one in view.windows] == [None, *steps[:2]]


# --- what was looked at ---------------------------------------------------------------------------


def test_nothing_was_seen():
    assert not judge(record()).seen
    assert not judge(record(passes(QUARTERS))).seen
    assert not judge(record(step(random_sketch()))).seen
    assert not judge(record(window([backward()]), optimizers=(ADAM,), events=())).seen
    assert judge(record(window([backward()]))).seen
    assert judge(record(skipped([backward()]))).seen
    assert judge(record(step(random_sketch()), passes=3)).seen  # of other parameters


CHECKED = [
    (lambda: record(windows(1 / 4, 4)), ("factors of 1 window", "4 graphs")),
    (lambda: record(window([*passes(QUARTERS), backward(where="train.py:12")])),
     ("factors of 1 window", "5 graphs")),
    (lambda: record(windows(1.0, 4, 2), optimizers=SUMMING), ("factors of 2 windows", "6 graphs")),
    (lambda: of_two(1 / 4, 1 / 2), ("factors of 2 windows", "6 graphs")),
    (lambda: record(backward(), step(random_sketch())), ("factors of 0 windows", "1 graph")),
    (lambda: record(window([backward()]), call("schedule"), average(), average(),
                    backward(), clip(), step(random_sketch())),
     ("factors of 1 window", "2 graphs", "1 schedule step", "2 average updates", "1 clip")),
]  # fmt: skip


@pytest.mark.parametrize(("build", "right"), CHECKED, ids=[" ".join(r) for _, r in CHECKED])
def test_what_was_checked(build, right):
    assert judge(build()).checked == right


UNJUDGED = {
    "factors of 2 windows: the gradient is no sum of the passes": lambda: record(
        windows(1 / 4, 4), *([one, step(random_sketch())] for one in passes([1.0] * 2))),
    "factors of 1 window: the gradient is no sum": lambda: record(
        window([backward()], closure_calls=2)),
    "factors of 1 window: the loop keeps gradients by itself": lambda: record(
        a := backward(), call("zero_grad"), b := backward(), step(total([a, b], [1.0, 0.5]))),
    "factors of 2 windows: the gradient holds one of an earlier": lambda: with_earlier(0.5),
    "factors of 2 windows: no step had a gradient": lambda: record(skipped([backward()]) * 2),
    "divisors of 2 windows: losses that end in sum()": lambda: record(own_sums(1.0, 4, 4)),
    "factors of 1 window: the ranks' gradients were not reduced alike": lambda: of_ranks(
        *(record(backward(), step(random_sketch())) for _ in range(2))),
    "divisors of 1 window: a pass was given its gradient, as after slices of a head, which "
    "accumext.chunked_loss runs in one pass": lambda: record(window([backward(scalar=False)])),
    "Adam steps on tensors that no backward pass reaches": lambda: two(
        window([backward()]), step(random_sketch(OTHER), optimizer=1, present=OTHER)),
}  # fmt: skip


@pytest.mark.parametrize("words", UNJUDGED)
def test_what_could_not_be_told(words):
    (only,) = judge(UNJUDGED[words]()).unjudged
    assert only.startswith(words)


@pytest.mark.parametrize(
    "build",
    [lambda: record(windows(1 / 4, 4)),
     lambda: record(skipped([backward()]), window([backward()])),
     lambda: record(step(torch.zeros(3, 8), present=frozenset()), window([backward()])),
     lambda: of_two(1 / 4, 1 / 2)],
    ids=["a mean", "some skipped", "a step without a pass", "two optimizers"],
)  # fmt: skip
def test_all_was_told(build):
    assert judge(build()).unjudged == ()
