"""What follows from a record: one finding or question with its value, and nothing from neighbours.

Records are made by hand, so that nothing here depends on how a loop is observed. Values are those
of the definition: how many micro-batches, which ratio, which distance.
"""

import json
import re

import pytest
from mistakes import FINDINGS, QUESTIONS
from neighbours import NEIGHBOURS
from records import COUNTS, QUARTERS, SCALE, graph, passes, record, rerun, said, window

from accumext.auditing import _accumulation, _rules
from accumext.auditing._events import view_of
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
    id, value, where, build, *words = case
    judgement = judge(build())
    found = judgement.questions if asks else judgement.findings
    assert [(one.id, one.where) for one in found] == [(id, where)]
    assert (judgement.findings if asks else judgement.questions) == ()
    assert found[0].value == pytest.approx(value, rel=1e-4)
    if words:
        evidence_has(found[0].evidence, words)
    assert found[0].name == KINDS[id].name
    begin = f"right if {KINDS[id].right_if}; else " if asks else ""
    if id != "memory.graph":  # whose cure depends on what the graph keeps
        begin += KINDS[id].cure
        assert found[0].cure == begin
    assert found[0].cure.startswith(begin)
    assert len(found[0].cure) > len(begin) - len(KINDS[id].cure)


@pytest.mark.parametrize(
    "build",
    [build for of_id in NEIGHBOURS.values() for build in of_id.values()],
    ids=[f"{id}-{words}" for id, of_id in NEIGHBOURS.items() for words in of_id],
)
def test_a_neighbour_of_a_mistake_is_none(build):
    assert said(build()) == ()


# --- evidence -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "build", "words"),
    [
        ("accumulation.divisor_missing",
         lambda: record(window(passes([2.0, 0.5, 1.0, 0.5], scale=SCALE), 1 / SCALE)),
         "multiplied by 0.5, 1, 2"),
        ("determinism.differs", lambda: rerun(0.25), "backward pass 5 is about 0.2 from"),
    ],
)  # fmt: skip
def test_evidence_of_one_mistake_of_several(id, build, words):
    (evidence,) = (one.evidence for one in said(build()) if one.id == id)
    evidence_has(evidence, [words])


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
    told = {case[0] for case, _ in CASES if case[4:]}
    assert told | {"determinism.differs"} == set(KINDS)


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
        if not any(list(rule(case[3]())) for case, _ in CASES)
    ]  # fmt: skip
    assert silent == []
