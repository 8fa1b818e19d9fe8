"""The report for people, for programs and as a picture; and what an audit says of wrong use."""

import json
import math
import sys

import pytest
import records
import torch
from records import STEP, backward, call, loss, passes, random_sketch, record, step, total, window
from torch import nn

import accumext
from accumext.audit import Audit, Finding, _report
from accumext.audit._events import Record
from accumext.audit._infer import CURES, mib, some
from accumext.audit._observe import Observer


def finding(name: str, where: str = STEP, evidence: str = "seen so") -> Finding:
    return Finding(name, evidence, CURES[name], 4.0, where)


def every_finding(evidence: str = "word " * 40) -> tuple[Finding, ...]:
    return tuple(finding(name, evidence=evidence) for name in CURES)


def right_windows(number: int, size: int = 4) -> Record:
    return record(*(window(passes([1 / size] * size)) for _ in range(number)))


def lines_of(one: Record, *findings: Finding) -> list[str]:
    return _report.text(one, findings).split("\n")


def closed(one: Record) -> Audit:
    """An audit whose block has closed with this record."""
    audit = Audit(Observer(None, None, 4), None)
    audit._record = one
    return audit


# --- for people -----------------------------------------------------------------------------------

SIZES = {
    "all findings": lambda: (right_windows(10), every_finding()),
    "one long word": lambda: (right_windows(10), every_finding("x" * 2000)),
    "a long name of a file": lambda: (
        right_windows(10),
        (finding("divisor missing", "a_directory_of_many_words_" * 5 + ".py:1000"),),
    ),
    "many kinds of events": lambda: (
        record([call("zero_grad"), call(f"unscale_{'x' * 40}")] * 50, window([backward()])),
        every_finding(),
    ),
    "no window": lambda: (record(), every_finding()),
}


@pytest.mark.parametrize("build", SIZES.values(), ids=SIZES)
def test_thirty_lines_of_98_characters(build):
    one, found = build()
    lines = lines_of(one, *found)
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 98
    assert sum(line.startswith("window") for line in lines) == min(one.windows, 4)
    assert any(line.startswith(f"1. {found[0].name}") for line in lines)


def test_findings_are_numbered_and_the_rest_are_named():
    text = "\n".join(lines_of(right_windows(10), *every_finding("word")))
    shown = [name for number, name in enumerate(CURES, 1) if f"\n{number}. {name}  (" in text]
    assert shown == list(CURES)[: len(shown)]
    assert len(shown) >= 3
    assert f"\nand: {', '.join(list(CURES)[len(shown) :])}"[:80] in text
    assert "[...]" in text  # the rest are more than a line


def test_windows_in_two_lines_each():
    of = [backward(0.5, 12), backward(0.5, 12)]
    many = backward(losses=[loss(0.2, 3) for _ in range(5)])
    events = [*of, call("unscale_"), records.clip(4.0, 2.0), step(total(of, 0.5)), call("update")]
    second = records.skipped([backward(1.0, None)])
    one = record(events, second, [many, step(random_sketch())], passes([1]))
    first, _, name, seen, *_, last = lines_of(one, finding("divisor missing"))[:-6]
    assert first == "accumext audit: 1 finding in 3 windows of 4 backward passes"
    assert (name, seen, last) == ("1. divisor missing  (train.py:20)", "   seen  seen so", "")
    assert lines_of(one)[-6:] == [
        "window 1: 2 x backward (12 targets), unscale_, clip 2 (norm 4, times 0.5), step",
        "          gradient: 1 times the mean of 2 losses; a graph keeps 100 B",
        "window 2: update, backward, step skipped",
        "          no gradient; a graph keeps 100 B",
        "window 3: zero_grad, backward of 5 losses (15 targets), step",
        "          gradient: not a known sum of these passes; a graph keeps 100 B",
    ]
    assert lines_of(right_windows(1, 1))[0].endswith(": no findings in 1 window of 1 backward pass")


@pytest.mark.parametrize(
    ("said", "text"),
    [(mib(0), "0 B"), (mib(1023), "1023 B"), (mib(1024), "1 KiB"), (mib(3 * 2**29), "1.5 GiB"),
     (mib(2**52), "4096 TiB"), (some([]), ""), (some(["a", "b", "c"]), "a, b, c"),
     (some("abcde"), "a, b, c and 2 more")],
)  # fmt: skip
def test_words_for_bytes_and_names(said, text):
    assert said == text


# --- for programs, and as a picture ---------------------------------------------------------------


def test_json_and_back():
    audit = closed(record(window(passes([1.0] * 4), time=1.5), passes([1.0])))
    read = json.loads(json.dumps(audit.to_json(), allow_nan=False))
    assert read == audit.to_json()
    assert [Finding(**entry) for entry in read["findings"]] == list(audit.findings)
    assert audit.findings
    (events,) = read["windows"]
    assert [event["what"] for event in events] == ["backward (8 targets)"] * 4 + ["step"]
    assert events[-1] == {"what": "step", "where": STEP, "time": 1.5, "graph_bytes": None}
    assert [event["graph_bytes"] for event in events] == [100] * 4 + [None]


def test_json_has_no_nan():
    """Which json.dumps writes, but no other language reads."""
    used = random_sketch()
    used[0, 0] = math.nan
    audit = closed(record(backward(value=math.nan), records.clip(math.nan), step(used)))
    assert [f.name for f in audit.findings] == ["step on inf or nan"]
    json.dumps(audit.to_json(), allow_nan=False)


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
    spans = [
        [(box.x0, box.width) for box in (p.get_extents() for p in collection.get_paths())]
        for collection in rows.collections
    ]
    assert spans == [[(0.0, 1.0), (2.0, 1.0)]] * number
    steps = [line for line in rows.lines if line.get_label().lstrip("_") == "step"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in steps] == [
        ([4.0], [row]) for row in range(1, number + 1)
    ]
    assert [bar.get_height() * 2**20 for bar in memory.patches] == [100] * 2 * number


def test_a_figure_needs_matplotlib(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install 'accumext\[demo\]'$"):
        closed(right_windows(1)).plot()


# --- wrong use ------------------------------------------------------------------------------------


def test_check_raises_the_report():
    audit = closed(record(window(passes([1.0] * 4))))
    with pytest.raises(RuntimeError) as caught:
        audit.check()
    assert str(caught.value) == str(audit)
    assert "1. divisor missing" in str(audit)
    assert closed(right_windows(2)).check() is None


READ = {
    "findings": lambda audit: audit.findings,
    "record": lambda audit: audit.record,
    "check": Audit.check,
    "to_json": Audit.to_json,
    "plot": Audit.plot,
    "against": lambda audit: accumext.audit(against=audit),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_results_before_the_block_closes(read):
    audit = accumext.audit(nn.Linear(2, 2))
    before = pytest.raises(RuntimeError, match=r"^audit: the block must be closed, got an open one")
    with before:
        read(audit)
    with audit, before:
        read(audit)
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
