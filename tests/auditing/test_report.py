"""The report for people, for programs and as a picture; and what an audit says of wrong use."""

import json
import math
import re
import sys
from dataclasses import replace

import pytest
import records
import torch
from records import (
    ADAM,
    BOTH,
    CALL,
    OTHER,
    QUARTERS,
    SGD,
    STEP,
    backward,
    call,
    generator_and_critic,
    loss,
    other,
    own_sums,
    passes,
    random_sketch,
    record,
    step,
    total,
    window,
    windows,
)
from torch import nn

import accumext
from accumext.auditing import Audit, Finding, _report, _words
from accumext.auditing._events import Record, Truncated, Window, view_of
from accumext.auditing._judge import Judgement, judge
from accumext.auditing._observe import Observer
from accumext.auditing._words import KINDS, mib, numbered, several, some

ASKED = [id for id, kind in KINDS.items() if kind.right_if]


def finding(id: str, where: str = STEP, evidence: str = "seen so", asks: bool = False) -> Finding:
    return _words.finding(id, 4.0, where, evidence, asks)


def judgement(
    findings: tuple[Finding, ...] = (), questions: tuple[Finding, ...] = (), words: str = ""
) -> Judgement:
    return Judgement(True, findings, questions, ("4 graphs", *words.split()), tuple(words.split()))


def every(evidence: str = "word " * 40, words: str = "") -> Judgement:
    """All findings and all questions."""
    findings = tuple(finding(id, evidence=evidence) for id in KINDS)
    return judgement(findings, tuple(finding(id, asks=True) for id in ASKED), words)


def right_windows(number: int, size: int = 4) -> Record:
    return record(windows(1 / size, *[size] * number))


def of_both(number: int) -> Record:
    """Windows of two optimizers, in turn."""
    events = []
    for _ in range(number):
        own, theirs = passes([0.5] * 2), [other()]
        events += [*own, step(total(own)), *theirs]
        events += [step(total(theirs), optimizer=1, present=OTHER), call("zero_grad", (0, 1, 2))]
    return record(events, optimizers=(SGD, ADAM))


def lines_of(one: Record, said: Judgement | None = None) -> list[str]:
    return _report.text(one, said or judge(one)).split("\n")


@pytest.mark.parametrize(("k2", "word"), [(9, "truncated"), (10, "exact"), (None, "exact")])
def test_a_measured_call_is_called_truncated_if_it_is(k2, word):
    measured = Truncated("train.py:5", 0.0, k1=10, k2=k2, steps=10, distance=0.0)
    of = passes([0.5, 0.5])
    assert f"window 1: {word}, 2 x backward (8 targets), step" in "\n".join(
        lines_of(record([measured, *of, step(total(of))]))
    )


def closed(one: Record) -> Audit:
    """An audit whose block has closed with this record."""
    audit = Audit(Observer(None, None, 4), None)
    audit._record = one
    return audit


# --- for people -----------------------------------------------------------------------------------

LONG_FILE = "a_directory_of_many_words_" * 5 + ".py:1000"
SIZES = {
    "all of them": lambda: (right_windows(10), every()),
    "one long word": lambda: (right_windows(10), every("x" * 2000)),
    "a long name of a file": lambda: (
        right_windows(10), judgement((finding("accumulation.lost", LONG_FILE),))),
    "many kinds of events": lambda: (
        record([call("zero_grad"), call(f"unscale_{'x' * 40}")] * 50, window([backward()])),
        every()),
    "no window": lambda: (record(), every()),
    "two optimizers": lambda: (of_both(10), every()),
    "two optimizers, and three findings": lambda: (
        of_both(10), replace(every(), findings=every().findings[:3], questions=())),
    "six optimizers": lambda: (
        record(
            *([one, step(random_sketch(), optimizer=i)] for i, one in enumerate(passes([1.0] * 6))),
            optimizers=(SGD,) * 6),
        every()),
    "questions alone": lambda: (right_windows(10), replace(every(), findings=())),
    "much that was checked and not judged": lambda: (
        right_windows(10), every(words="factors " * 200)),
    "a long line that was not judged": lambda: (right_windows(10), every(words="x" * 500)),
    "nothing found, much not judged": lambda: (right_windows(10), judgement(words="y " * 300)),
}  # fmt: skip


@pytest.mark.parametrize("build", SIZES.values(), ids=SIZES)
def test_thirty_lines_of_98_characters(build):
    one, said = build()
    lines = lines_of(one, said)
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 98
    entries = [*said.findings, *said.questions]
    shown = sum(re.match(r"(\w+, )?window \d+: ", line) is not None for line in lines)
    assert shown == min(one.windows, 4 if len(entries) < 4 else 2)
    mark = "1." if said.findings else "?"
    assert not entries or any(line.startswith(f"{mark} {entries[0].name}") for line in lines)
    assert any(line.startswith("   checked  4 graphs") for line in lines)
    assert any(line.startswith("   not judged  ") for line in lines) == bool(said.unjudged)


def test_findings_are_numbered_and_the_rest_are_named():
    text = "\n".join(lines_of(right_windows(10), every("word")))
    assert text.startswith(
        f"accumext audit: {len(KINDS)} findings, {len(ASKED)} questions in 10 windows of 40 backw"
    )
    names = [kind.name for kind in KINDS.values()]
    shown = [
        kind.name for number, (id, kind) in enumerate(KINDS.items(), 1)
        if f"\n{number}. {kind.name}  ({STEP})  {id}\n" in text
    ]  # fmt: skip
    assert shown == names[: len(shown)]
    assert len(shown) >= 3
    assert f"\nand: {', '.join(names[len(shown) :])}"[:80] in text
    assert "[...]" in text  # the rest are more than a line


def test_questions_come_after_findings_and_have_a_mark():
    said = judgement(
        (finding("accumulation.lost"),),
        (finding("clip.part", CALL, "1 of 2", asks=True), finding("optimizer.decay", asks=True)),
    )
    lines = lines_of(right_windows(1), said)
    assert lines[0] == ("accumext audit: 1 finding, 2 questions in 1 window of 4 backward passes")
    kind = KINDS["clip.part"]
    at = lines.index(f"? {kind.name}  ({CALL})  clip.part")
    assert lines[at + 1] == "   seen  1 of 2"
    words = " ".join(" ".join(lines[at + 2 : lines.index("", at)]).split())
    assert words == f"is it right if {kind.right_if}; else {kind.cure}"
    marks = [line.split()[0] for line in lines if line.endswith(tuple(KINDS))]
    assert marks == ["1.", "?", "?"]


def test_windows_in_two_lines_each():
    of = [backward(0.5, 12), backward(0.5, 12)]
    many = backward(losses=[loss(0.2, 3) for _ in range(5)])
    events = [*of, call("unscale_"), records.clip(4.0, 2.0), step(total(of, 0.5)), call("update")]
    second = records.skipped([backward(1.0, None)])
    lost = window(passes([1 / 4] * 2), [0.0, 1.0])
    one = record(events, second, [many, step(random_sketch())], lost, passes([1]))
    lines = lines_of(one, judgement((finding("accumulation.lost"),)))
    assert lines[0] == "accumext audit: 1 finding in 4 windows of 6 backward passes"
    assert lines[1:4] == ["", "1. micro-batches lost  (train.py:20)  accumulation.lost",
                          "   seen  seen so"]  # fmt: skip
    assert lines[-11:] == [
        "",
        "   checked  4 graphs",
        "",
        "window 1: 2 x backward (12 targets), unscale_, clip 2 (norm 4, times 0.5), step",
        "          gradient: 1 times the mean of 2 losses; a graph keeps 100 B",
        "window 2: update, backward, step skipped",
        "          no gradient; a graph keeps 100 B",
        "window 3: zero_grad, backward of 5 losses (15 targets), step",
        "          gradient: no sum of these passes; a graph keeps 100 B",
        "window 4: 2 x backward (8 targets), step",
        "          gradient: 0.25 times the mean of 1 loss, without 1 pass; a graph keeps 100 B",
    ]


def test_windows_whose_losses_are_not_known():
    of = [*passes([1 / 4] * 4, [None] * 4, reduction="sum"), backward(where="train.py:12")]
    assert lines_of(record(window(of)))[-2:] == [
        "window 1: 4 x backward, backward (8 targets), step",
        "          gradient: 0.25 of each of 4 passes + 1 times the mean of 1 loss; a graph keeps "
        "100 B",
    ]


def test_windows_of_each_optimizer_by_its_name():
    lines = lines_of(of_both(5))
    assert lines[0] == "accumext audit: no findings in 10 windows of 15 backward passes"
    shown = [line.partition(":")[0] for line in lines if "window " in line and ": " in line]
    assert shown == ["SGD, window 1", "SGD, window 2", "Adam, window 1", "Adam, window 2"]


def test_a_pass_of_two_optimizers_is_one():
    first = lines_of(generator_and_critic())[0]
    assert first.endswith(" in 2 windows of 2 backward passes")


def test_nothing_found():
    assert lines_of(right_windows(1, 1)) == [
        "accumext audit: no findings in 1 window of 1 backward pass",
        "",
        "   checked  factors of 1 window, 1 graph",
        "",
        "window 1: backward (8 targets), step",
        "          gradient: 1 times the mean of 1 loss; a graph keeps 100 B",
    ]


def test_what_was_not_judged_is_said():
    one = record(own_sums(1.0, 4), passes([1.0]), step(random_sketch()))
    lines = lines_of(one)
    at = lines.index("   checked  factors of 1 window, 5 graphs")
    assert " ".join(" ".join(lines[at + 1 : at + 3]).split()) == (
        "not judged factors of 1 window: the gradient is no sum of the passes, as after a change "
        "of its elements, or after several calls of a closure; divisors of 1 window: losses [...]"
    )
    assert lines[at + 3] == ""


def of_other_lines() -> Record:
    return records.ranked(8.0, 8.0, lines=(records.LOOP, records.STEP))


def of_two_optimizers_of_parts() -> Record:
    """What steps has no gradient, as ZeRO's parts have none."""
    parts = [replace(SGD, parameters=frozenset({n})) for n in BOTH]
    lasts = [step(random_sketch(), present=frozenset(), optimizer=n) for n in range(2)]
    return record(other(), *lasts, optimizers=tuple(parts))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (of_other_lines, ("factors of 1 window: another process runs other lines",)),
        (of_two_optimizers_of_parts,
         ("SGD steps on tensors that no backward pass reaches, as ZeRO's parts are: nothing of its "
          "windows",)),
    ],
)  # fmt: skip
def test_what_was_not_judged_is_said_once(build, said):
    assert judge(build()).unjudged == said


def windows_of(number: int) -> tuple[Window, ...]:
    return view_of(right_windows(number), 0).windows


@pytest.mark.parametrize(
    ("said", "text"),
    [(mib(0), "0 B"), (mib(1023), "1023 B"), (mib(1024), "1 KiB"), (mib(3 * 2**29), "1.5 GiB"),
     (mib(2**52), "4096 TiB"), (some([]), ""), (some(["a", "b", "c"]), "a, b, c"),
     (some("abcde"), "a, b, c and 2 more"), (some("abcde", 4), "a, b, c, d and 1 more"),
     (several(0, "pass"), "0 passes"), (several(1, "pass"), "1 pass"),
     (several(2, "micro-batch"), "2 micro-batches"), (several(2, "clip"), "2 clips"),
     (several(0, "finding", "no"), "no findings"),
     (numbered(windows_of(1)), "window 1"), (numbered(windows_of(6)), "windows 1, 2, 3, 4, 5, 6"),
     (numbered(windows_of(8)), "windows 1, 2, 3, 4, 5, 6 and 2 more")],
)  # fmt: skip
def test_words_for_bytes_and_names(said, text):
    assert said == text


# --- for programs, and as a picture ---------------------------------------------------------------


def test_json_and_back():
    one = record(
        window(passes([1 / 4] * 4), [0.0, 0.0, 0.0, 1.0]), window(passes([0.5] * 2), time=1.5),
        passes([1.0]), optimizers=(replace(SGD, decayed=(1,)),),
    )  # fmt: skip
    audit = closed(one)
    read = json.loads(json.dumps(audit.to_json(), allow_nan=False))
    assert read == audit.to_json()
    assert [Finding(**entry) for entry in read["findings"]] == list(audit.findings)
    assert [Finding(**entry) for entry in read["questions"]] == list(audit.questions)
    assert {"accumulation.lost"} <= {entry["id"] for entry in read["findings"]}
    assert [entry["id"] for entry in read["questions"]] == [
        "accumulation.unused",
        "optimizer.decay",
    ]
    assert (read["seen"], read["optimizers"]) == (True, ["SGD", "SGD"])
    assert read["checked"] == ["factors of 2 windows", "7 graphs"]
    assert read["not_judged"] == []
    first, events = read["windows"]
    assert [event["what"] for event in first] == ["backward (8 targets)"] * 4 + ["step"]
    assert [event["what"] for event in events] == [
        "zero_grad", "backward (8 targets)", "backward (8 targets)", "step",
    ]  # fmt: skip
    assert events[-1] == {"what": "step", "where": STEP, "time": 1.5, "graph_bytes": None}
    assert [event["graph_bytes"] for event in events] == [None, 100, 100, None]


def test_json_of_several_optimizers():
    """The windows of each after those of the other, each with its optimizer"""
    read = closed(of_both(2)).to_json()
    assert read["optimizers"] == ["SGD", "SGD", "Adam", "Adam"]
    assert [[event["what"] for event in events if "backward" in event["what"]]
            for events in read["windows"]] == [
        ["backward (8 targets)"] * 2, ["backward (8 targets)"] * 2,
        ["backward (8 targets)"], ["backward (8 targets)"],
    ]  # fmt: skip


def test_json_of_nothing():
    assert json.loads(json.dumps(closed(record()).to_json())) == {
        "findings": [], "questions": [], "seen": False, "checked": ["factors of 0 windows",
        "0 graphs"], "not_judged": [], "optimizers": [], "windows": [],
    }  # fmt: skip


def test_json_says_what_was_not_judged():
    (words,) = closed(record(own_sums(1.0, 4))).to_json()["not_judged"]
    assert words.startswith("divisors of 1 window: ")


def test_json_has_no_nan():
    """Which json.dumps writes, but no other language reads."""
    used = random_sketch()
    used[0, 0] = math.nan
    audit = closed(record(backward(value=math.nan), records.clip(math.nan), step(used)))
    assert [f.id for f in audit.findings] == ["step.nonfinite"]
    json.dumps(audit.to_json(), allow_nan=False)


def spans(collection) -> list[tuple[float, float]]:
    boxes = [path.get_extents() for path in collection.get_paths()]
    return [(box.x0, box.width) for box in boxes]


@pytest.mark.parametrize("number", [0, 3, 40])
def test_a_figure_has_the_windows(number, tmp_path):
    """Of two passes each, which take a second"""
    pytest.importorskip("matplotlib")
    events = []
    for begin in range(0, 10 * number, 10):
        of = [backward(0.5, start=begin + s, time=begin + s + 1.0) for s in (0.0, 2.0)]
        events += [*of, step(total(of), time=begin + 4.0)]
    path = tmp_path / "windows.png"
    rows, memory = closed(record(events)).plot(path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [spans(one) for one in rows.collections] == [[(0.0, 1.0), (2.0, 1.0)]] * number
    steps = [line for line in rows.lines if line.get_label().lstrip("_") == "step"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in steps] == [
        ([4.0], [row]) for row in range(1, number + 1)
    ]
    assert [bar.get_height() * 2**20 for bar in memory.patches] == [100] * 2 * number


def test_a_figure_of_two_optimizers_has_a_row_for_each_window():
    """And a pass that reaches both has one bar, and a kind of event one label"""
    pytest.importorskip("matplotlib")
    rows, memory = closed(generator_and_critic()).plot().axes
    assert [round(path.get_extents().y0 + 0.3) for one in rows.collections
            for path in one.get_paths()] == [1, 1, 2]  # fmt: skip
    assert len(memory.patches) == 2
    labels = [text.get_text() for text in rows.get_legend().get_texts()]
    assert labels == ["zero_grad", "unscale_", "clip", "step", "update", "schedule"]
    assert list(rows.get_yticks()) == [1, 2]


def test_a_figure_needs_matplotlib(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install 'accumext\[demo\]'$"):
        closed(right_windows(1)).plot()


# --- check ----------------------------------------------------------------------------------------


def lost_and_clipped() -> Audit:
    """Two findings, one question."""
    of = passes([1 / 4] * 4)
    clip = records.clip(0.5, others=3)
    return closed(record(
        windows(1 / 4, 4), of, clip, step(total(of, [0.0, 1.0, 1.0, 1.0]), present=BOTH),
        optimizers=(replace(SGD, decayed=(1,)),),
    ))  # fmt: skip


def test_check_raises_the_report():
    audit = lost_and_clipped()
    with pytest.raises(RuntimeError) as caught:
        audit.check()
    assert str(caught.value) == str(audit)
    assert "1. micro-batches lost" in str(audit)
    assert closed(right_windows(2)).check() is None


def test_check_lets_questions_pass():
    audit = closed(record(window(passes([1.0] * 4))))
    assert [one.id for one in audit.questions] == ["accumulation.divisor_missing"]
    assert audit.check() is None


IGNORED: dict[str, tuple[list[str], bool]] = {
    "nothing": ([], False),
    "all ids": (["accumulation.lost", "accumulation.partial", "clip.other_parameters"], True),
    "a word and an id": (["accumulation", "clip.other_parameters"], True),
    "words": (["clip", "accumulation"], True),
    "one word": (["accumulation"], False),
    "one id of two": (["accumulation.lost", "accumulation.partial"], False),
    "a question": (["clip", "optimizer.decay"], False),
    "an empty id": ([""], False),
}


@pytest.mark.parametrize(("ids", "right"), IGNORED.values(), ids=IGNORED)
@pytest.mark.parametrize("given", ["list", "set", "path", "name of a file"])
def test_check_ignores_ids_and_their_first_words(ids, right, given, tmp_path):
    """Also from a file, with an id per line and remarks"""
    audit = lost_and_clipped()
    assert {"accumulation.lost", "clip.other_parameters"} <= {f.id for f in audit.findings}
    path = tmp_path / "accepted.txt"
    path.write_text(
        "".join(["# Accepted: clip\n\n", *(f"  {id}   # clip is meant\n" for id in ids)])
    )
    made = {"list": ids, "set": set(ids), "path": path, "name of a file": str(path)}[given]
    if right:
        assert audit.check(ignore=made) is None
    else:
        with pytest.raises(RuntimeError, match="micro-batches lost"):
            audit.check(made)


def test_check_says_what_is_accepted():
    audit = lost_and_clipped()
    with pytest.raises(RuntimeError) as caught:
        audit.check(["accumulation"])
    assert str(caught.value).startswith(f"{audit}\n\naccepted: accumulation.")


@pytest.mark.parametrize("id", ["accum", "accumulation.", "clip.other", "micro-batches lost"])
def test_check_refuses_what_is_no_id(id):
    """Also where nothing is wrong: a misspelt id would never be missed"""
    for audit in (lost_and_clipped(), closed(right_windows(2))):
        with pytest.raises(
            ValueError, match=f"^audit: ignore must hold ids of findings, got {id}$"
        ):
            audit.check(["clip", id])


def test_a_file_that_is_not_there_is_no_id():
    with pytest.raises(FileNotFoundError):
        lost_and_clipped().check(ignore="accumulation.lost")


NOTHING = {
    "no step": (lambda: record(passes(QUARTERS)), "0 steps after 4 backward passes", "none",
                "why  no step of a torch.optim.Optimizer ran: run as far as one"),
    "nothing": (record, "0 steps after 0 backward passes", "none",
                "why  no step of a torch.optim.Optimizer ran: run as far as one"),
    "another steps": (
        lambda: record(passes(QUARTERS), steps=(("SGD", 3), ("Adam", 1)), asked="AdamW"),
        "0 steps of AdamW after 4 backward passes", r"SGD \(3\), Adam \(1\)",
        r"pass  the optimizer that steps, audit\(model, optimizer\), or none, which follows all"),
    "no pass": (lambda: record(step(random_sketch()), steps=(("SGD", 1),)),
                "1 step after 0 backward passes", r"SGD \(1\)",
                r"why  no backward\(\) went through a graph"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "first", "seen", "advice"), NOTHING.values(), ids=NOTHING)
def test_check_raises_where_nothing_was_seen(build, first, seen, advice):
    """And says what was seen, and what to pass"""
    audit = closed(build())
    right = (
        rf"^accumext audit: nothing was judged: {first}\n"
        rf"   seen  steps of optimizers of torch: {seen}\n   {advice}"
    )
    for ignore in ((), list(KINDS)):
        with pytest.raises(RuntimeError, match=right) as caught:
            audit.check(ignore)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 5
    assert max(map(len, lines)) <= 98
    assert (audit.findings, audit.to_json()["seen"]) == ((), False)


# --- wrong use ------------------------------------------------------------------------------------


READ = {
    "findings": lambda audit: audit.findings,
    "questions": lambda audit: audit.questions,
    "judgement": lambda audit: audit.judgement,
    "record": lambda audit: audit.record,
    "check": Audit.check,
    "to_json": Audit.to_json,
    "plot": Audit.plot,
    "against": lambda audit: accumext.audit(against=audit),
}


@pytest.mark.parametrize("name", READ)
def test_results_before_the_block_closes(name):
    if name == "plot":
        pytest.importorskip("matplotlib")
    read, audit = READ[name], accumext.audit(nn.Linear(2, 2))
    closed_first = "^audit: the block must be closed, got "
    with pytest.raises(RuntimeError, match=f"{closed_first}one that was not entered$"):
        read(audit)
    assert str(audit) == "accumext audit: not entered"
    with audit:
        assert str(audit) == "accumext audit: open"
        with pytest.raises(RuntimeError, match=f"{closed_first}an open one$"):
            read(audit)
    if name == "check":
        with pytest.raises(RuntimeError, match="nothing was judged"):
            read(audit)
    else:
        read(audit)


def test_a_block_is_entered_once():
    audit = accumext.audit()
    again = pytest.raises(RuntimeError, match=r"^audit: a block must be entered once, got a second")
    with audit, again, audit:
        pass
    with again, audit:
        pass


WRONG = [
    ({"model": nn.Linear}, TypeError, "audit: model must be an nn.Module or None, got type"),
    ({"optimizer": torch.ones(2)}, TypeError,
     "audit: optimizer must be an optimizer or None, got a float32 tensor"),
    ({"windows": 0}, ValueError, "audit: windows must be at least 1, got 0"),
    ({"windows": 2.0}, TypeError, "audit: windows must be an int, got float"),
    ({"windows": True}, TypeError, "audit: windows must be an int, got bool"),
    ({"against": "first"}, TypeError, "audit: against must be an audit or None, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_arguments(arguments, kind, words):
    with pytest.raises(kind, match=f"^{words}$"):
        accumext.audit(**arguments)
