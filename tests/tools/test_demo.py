"""The demo: its text, what it learns, its comparison, and the command from end to end."""

import argparse
import functools
import importlib.util
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import accumext
from accumext.__main__ import module_of
from accumext._peak_memory import peak_memory

demo = module_of("demo")
from accumext.demo import reciter, report, ways  # noqa: E402
from accumext.demo.reciter import Reciter  # noqa: E402
from accumext.demo.report import Record  # noqa: E402
from accumext.demo.text import OPENING, Refused, Text, load_text  # noqa: E402

SMALL = {"batch": 4, "length": 12, "hidden": 16, "vocab": 300}
GRADIENT_TOLERANCE = 1e-5  # what the demo claims of float32 against float64


def new_run(**changes: object) -> tuple[Reciter, Record]:
    options = {"steps": 2, "seed": 0, "device": "cpu", "feedback": "scheduled", "plot": None}
    chosen = argparse.Namespace(**options | SMALL | changes)
    torch.manual_seed(chosen.seed)
    return Reciter(chosen.vocab, chosen.hidden), Record(chosen, {})


def run_demo(*options: object) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    return demo.main(parser.parse_args(["--steps=2", "--device=cpu", *small, *map(str, options)]))


def said(n: int) -> str:
    """Return docstring n of the library below, in 24 words and marks."""
    letter = chr(ord("a") + n)
    names = ", ".join(f"{letter}{other}" for other in "abcdef")
    return f"Part {letter} of the library (a small one) hands out {names}."


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Write ten files with one docstring of prose each, and what is not to count."""
    root = tmp_path_factory.mktemp("library")
    files = {
        f"module{n}.py": f'x = 1\n\ndef f(x):\n    """{said(n)}\n\n    The end.\n    """\n'
        + "    x += 1\n" * n
        for n in range(10)
    }
    files["again.py"] = f'"""{said(0)} And it goes on in another way than there."""'
    files["short.py"] = '"""Ten words are not enough for any of this."""'
    files["code.py"] = f'"""{"a = f[0] + 1; " * 20}"""\nx = """{said(20)}"""\n'
    files["site-packages/foreign.py"] = f'"""{said(21)}"""'
    (root / "site-packages").mkdir()
    for name, source in files.items():
        (root / name).write_text(source)
    return root


@pytest.fixture
def text(library):
    return load_text(300, 12, 8, root=library)


# --- the text ----------------------------------------------------------------------------------


def test_docstrings_are_the_prose_of_the_library_once_each(library):
    """Their words come first in the vocabulary, then the most frequent of the source"""
    text = load_text(300, 12, 10, root=library)
    assert text.docstrings.shape == (OPENING + 12, 10)
    columns = text.docstrings.T.tolist()
    # 20 words, to the comma after the fourth name
    assert sorted(map(text.show, columns)) == [said(n)[: -len(" ae, af.")] for n in range(10)]
    assert {word for column in columns for word in column} == set(range(text.used))
    assert len(set(text.words)) == len(text.words) < 300  # the library has no more
    assert {"f", "The", "="} <= set(text.words)  # also words of code
    assert not {"va", "vf"} & set(text.words)  # of the foreign file
    small = load_text(text.used + 1, 12, 10, root=library)
    assert small.words[text.used :] == ['"']  # six in every file


def test_a_seed_chooses_docstrings(library):
    first, again, other = (load_text(300, 12, 4, seed, library) for seed in (0, 0, 1))
    shown = [[t.show(column) for column in t.docstrings.T.tolist()] for t in (first, again, other)]
    assert shown[0] == shown[1] != shown[2]


def test_too_few_docstrings_are_refused(library):
    with pytest.raises(Refused, match=r"^demo: --batch and --length must leave 11 .* got 10 under"):
        load_text(300, 12, 11, root=library)


def test_numbers_are_shown_as_prose():
    text = Text(["He", "(", "not", "I", ")", ",", "said", "."], 8, torch.zeros(1, 1))
    assert text.show([0, 1, 2, 3, 4, 5, 6, 99, 7]) == "He (not I), said ?."


@pytest.mark.slow
def test_standard_library_of_this_python_is_enough():
    text = load_text(50_000, 96, 32)
    assert text.docstrings.shape == (OPENING + 96, 32)
    assert len(text.words) == 50_000
    assert 500 < text.used < 2_000


# --- learning ----------------------------------------------------------------------------------


def trained(text: Text, **changes: object) -> tuple[Reciter, Record]:
    model, record = new_run(**changes)
    reciter.train(model, text, record.settings, record)
    return model, record


def test_docstrings_are_learned_and_others_are_not(library):
    text = load_text(300, 12, 4, root=library)
    _, record = trained(text, steps=120, hidden=64, batch=2)
    first, last = record.training[0], record.training[-1]
    assert first.loss == pytest.approx(math.log(300), abs=0.5)
    assert last.loss < 0.2
    assert first.right < 0.5
    assert last.right > 0.95
    assert last.right_unseen < 0.75  # they have some words in common


def test_share_of_words_right_is_that_of_the_model_fed_its_own_words(text):
    model, record = trained(text, steps=12, hidden=64)
    shares = record.training[-1].right, record.training[-1].right_unseen
    for texts, share in zip(text.docstrings.split(4, dim=1), shares, strict=True):
        _, state = model.encoder(model.embedding(texts[: OPENING - 1]))
        state, token, right = state[0], texts[OPENING - 1], 0
        for target in texts[OPENING:]:
            state = model.cell(F.embedding(token, model.embedding.weight), state)
            token = (state @ model.head.weight.T + model.head.bias).max(-1).indices
            right += int((token == target).sum())
        assert share == right / (12 * 4) > 0


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock takes ten seconds."""
    looks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(report.time, "perf_counter", lambda: float(next(looks)))


@pytest.mark.usefixtures("clock")
def test_without_a_number_of_steps_training_ends_by_the_clock(text):
    # two looks before the first step, one after each, and one for the line of progress of step 1
    _, record = trained(text, steps=None)
    assert len(record.training) == 5  # 60 s from the second look on
    assert record.training[-1].right is not None


# --- the comparison ----------------------------------------------------------------------------


def test_peak_memory_sees_what_was_alive_together():
    mebibyte = 2**20

    def call():
        first = torch.ones(3 * mebibyte, dtype=torch.uint8)
        del first
        second = torch.ones(2 * mebibyte, dtype=torch.uint8)
        third = torch.ones(5 * mebibyte, dtype=torch.uint8)
        del third
        return second

    before = torch.ones(11 * mebibyte, dtype=torch.uint8)
    assert peak_memory(call) == 7 * mebibyte
    assert len(before) == 11 * mebibyte


def compared(text: Text, **changes: object) -> Record:
    model, record = new_run(**changes)
    # an untrained model would always feed the same word
    torch.nn.init.normal_(model.head.bias)
    torch.nn.init.normal_(model.embedding.weight)
    ways.compare(model, text.docstrings[:, :4], record.settings, record)
    assert all(parameter.grad is None for parameter in model.parameters())
    return record


def test_rows_of_the_comparison_differ_only_where_they_should(library):
    """And memory grows with the steps, that of plain PyTorch in proportion to their logits"""
    record = compared(load_text(20_000, 12, 8, root=library), vocab=20_000, plot="demo.png")
    ours, plain, per_token = record.comparison
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    assert per_token.loss == pytest.approx(plain.loss, rel=1e-6)
    assert ours.gradient_distance < GRADIENT_TOLERANCE
    assert plain.gradient_distance < GRADIENT_TOLERANCE
    assert per_token.gradient_distance > 0.01
    assert all(row.seconds > 0 for row in record.comparison)
    assert record.repetitions == 3
    for row in record.comparison:
        steps, peaks = zip(*row.memory.items())
        assert steps == (1, 3, 6, 9, 12)
        assert peaks[-1] == row.peak_memory
        assert all(after >= 0.98 * before for before, after in pairwise(peaks))
        if row is plain:
            assert peaks[3] - peaks[2] == pytest.approx(peaks[4] - peaks[3], rel=0.1)
            assert peaks[4] - peaks[3] > 3 * 4 * 20_000 * 4  # logits: three steps of four rows


@pytest.mark.usefixtures("clock")
def test_after_two_minutes_nothing_is_repeated(text):
    assert compared(text).repetitions == 1


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def reads_library(library, monkeypatch):
    """The command learns the words of that library: to read Python's takes seconds."""
    monkeypatch.setattr(demo, "load_text", functools.partial(load_text, root=library))


@pytest.mark.usefixtures("reads_library")
def test_tiny_run_from_end_to_end(tmp_path, capfd, monkeypatch):
    """What is printed, written and drawn is the same"""
    figure = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert run_demo(f"--plot={tmp_path / 'demo.png'}", f"--json={tmp_path / 'demo.json'}") == 0
    out, err = capfd.readouterr()
    assert not err
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.startswith("A GRU learns") == (accumext.backend() != "reference")  # else why
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert len(record["training"]) == 2
    assert f"step   2: loss {record['training'][1]['loss']:6.3f}, " in out
    assert [row["name"] for row in record["comparison"]] == list(ways.WAYS)
    for row in record["comparison"]:
        for number in (f"{row['loss']:.5f}", f"{row['gradient_distance']:.1e}"):
            assert number in out
    opening, recited = record["recitals"][0]
    assert f"{opening} ... ... {recited}" in " ".join(out.split())
    assert not record["interrupted"]

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    right, memory = drawn[0].axes
    for line, name in zip(right.lines, ("right", "right_unseen"), strict=True):
        assert list(line.get_ydata()) == [step[name] for step in record["training"]]
    for line, row in zip(memory.lines, record["comparison"], strict=True):
        assert [str(steps) for steps in line.get_xdata()] == list(row["memory"])
        assert list(line.get_ydata()) == [peak / 1e6 for peak in row["memory"].values()]
    assert memory.get_ylim()[0] == 0  # so that lengths on the axis compare


@pytest.mark.usefixtures("reads_library")
def test_interrupt_keeps_what_was_done(tmp_path, capsys, monkeypatch):
    """A picture of a run that has nothing yet is drawn without a warning"""
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return peak_memory(*arguments)

    monkeypatch.setattr(ways, "peak_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(f"--json={tmp_path / 'demo.json'}")
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert record["interrupted"]
    assert len(record["training"]) == 2
    assert [row["name"] for row in record["comparison"]] == ["accumext.decode_loss"]
    out = capsys.readouterr().out
    assert "interrupted: the figures above" in out
    assert "nan" not in out
    pytest.importorskip("matplotlib")
    report.write_plot(new_run()[1], tmp_path / "demo.png")


REFUSED = {
    "--vocab=9": "--vocab must be at least ",
    "--json=nowhere/demo": "--json must be a file that can be written, got nowhere/demo (No such",
    "--plot=.": "--plot must be a file that can be written, got . (Is a directory",
    "--plot=there": "--plot must be another file than --json, got there",
}


@pytest.mark.usefixtures("reads_library")
@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_be_done_is_said_before_the_run(option, tmp_path, capsys, monkeypatch):
    """An output file stays as it was"""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("what was there")
    if not option.startswith("--vocab"):
        monkeypatch.setattr(demo, "load_text", None)  # calling it would be an error
    assert run_demo("--json=there", option) == 2
    assert capsys.readouterr().err.startswith(f"demo: {REFUSED[option]}")
    assert Path("there").read_text() == "what was there"


def test_missing_matplotlib_is_said_before_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_demo(f"--plot={tmp_path / 'demo.png'}") == 2
    assert "pip install matplotlib" in capsys.readouterr().err
