"""The demo: its text, what it learns, its comparison, and the command from end to end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accumext import demo
from accumext.demo import cli, compare, report, train
from accumext.demo.memory import peak_memory
from accumext.demo.report import Record, Settings
from accumext.demo.text import OPENING, Refused, Text, load_text
from accumext.demo.train import Reciter

SMALL = {"batch": 4, "length": 12, "hidden": 16, "vocab": 300}
GRADIENT_TOLERANCE = 1e-5  # what the demo claims of float32 against float64
RESIDENT_TOLERANCE = 0.1  # pages, threads' stacks and the C library's own bookkeeping


def settings(**changes: object) -> Settings:
    values = {"steps": 2, "seed": 0, "device": "cpu", "feedback": "scheduled", **SMALL, **changes}
    return Settings(**values)  # type: ignore[arg-type]


def run_demo(*options: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    return demo.main(parser.parse_args(["--steps=2", "--device=cpu", *small, *options]))


def said(n: int) -> str:
    """Docstring n of the library below, in 24 words and marks."""
    letter = chr(ord("a") + n)
    names = ", ".join(f"{letter}{other}" for other in "abcdef")
    return f"Part {letter} of the library (a small one) hands out {names}."


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files with one docstring of prose each, and what is not to count."""
    root = tmp_path_factory.mktemp("library")
    for n in range(10):
        path = root / f"package{n % 3}" / f"module{n}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'x = 1\n\ndef f(x):\n    """{said(n)}\n\n    The end.\n    """\n' + "    x += 1\n" * n
        )
    (root / "again.py").write_text(f'"""{said(0)} And it goes on in another way than there."""')
    (root / "short.py").write_text('"""Ten words are not enough for any of this."""')
    (root / "code.py").write_text(f'"""{"a = f[0] + 1; " * 20}"""\nx = """{said(20)}"""\n')
    foreign = root / "site-packages" / "foreign.py"
    foreign.parent.mkdir()
    foreign.write_text(f'"""{said(21)}"""')
    return root


@pytest.fixture
def text(library: Path) -> Text:
    return load_text(300, 12, 8, root=library)


# --- the text ----------------------------------------------------------------------------------


def test_docstrings_are_the_prose_of_the_library_once_each(library: Path):
    text = load_text(300, 12, 10, root=library)
    assert text.docstrings.shape == (OPENING + 12, 10)
    shown = sorted(text.show(column) for column in text.docstrings.T.tolist())
    # 20 words, to the comma after the fourth name
    assert shown == [said(n)[: -len(" ae, af.")] for n in range(10)]


def test_a_seed_chooses_docstrings(library: Path):
    first, again, other = (load_text(300, 12, 4, seed, library) for seed in (0, 0, 1))
    shown = [[t.show(column) for column in t.docstrings.T.tolist()] for t in (first, again, other)]
    assert shown[0] == shown[1] != shown[2]


def test_vocabulary_is_the_words_used_and_then_the_most_frequent(library: Path):
    text = load_text(300, 12, 4, root=library)
    shown = {word for column in text.docstrings.T.tolist() for word in column}
    assert shown == set(range(text.used))
    assert len(set(text.words)) == len(text.words) < 300  # the library has no more
    assert {"f", "The", "="} <= set(text.words)  # also words of code
    assert not {"va", "vf"} & set(text.words)  # of the foreign file
    small = load_text(text.used + 1, 12, 4, root=library)
    assert small.words[text.used :] == ['"']  # six in every file


def test_what_the_text_does_not_have_is_refused(library: Path):
    with pytest.raises(Refused, match=r"^demo: --batch and --length must leave 11 .* got 10 under"):
        load_text(300, 12, 11, root=library)
    with pytest.raises(Refused, match=r"^demo: --batch and --length must leave 1 .* got 0 under"):
        load_text(300, 12, 1, root=library / "nowhere")
    with pytest.raises(Refused, match=r"^demo: --vocab must be at least \d+, .* got 9$"):
        load_text(9, 12, 1, root=library)


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
    chosen = settings(**changes)
    torch.manual_seed(chosen.seed)
    model, record = Reciter(chosen.vocab, chosen.hidden), Record(chosen, {})
    train.train(model, text, chosen, record)
    return model, record


def test_docstrings_are_learned_and_others_are_not(library: Path):
    text = load_text(300, 12, 4, root=library)
    _, record = trained(text, steps=120, hidden=64, batch=2)
    first, last = record.training[0], record.training[-1]
    assert first.loss == pytest.approx(math.log(300), abs=0.5)
    assert last.loss < 0.2
    assert first.right is not None
    assert first.right < 0.5
    assert last.right is not None
    assert last.right > 0.95
    assert last.right_unseen is not None
    assert last.right_unseen < 0.75  # they have some words in common


def test_share_of_words_right_is_that_of_the_model_fed_its_own_words(text: Text):
    model, record = trained(text, steps=12, hidden=64)
    for texts, share in (
        (text.docstrings[:, :4], record.training[-1].right),
        (text.docstrings[:, 4:], record.training[-1].right_unseen),
    ):
        _, state = model.encoder(model.embedding(texts[: OPENING - 1]))
        state, token, right = state[0], texts[OPENING - 1], 0
        for target in texts[OPENING:]:
            state = model.cell(F.embedding(token, model.embedding.weight), state)
            token = (state @ model.head.weight.T + model.head.bias).max(-1).indices
            right += int((token == target).sum())
        assert share == right / (12 * 4)
        assert share > 0


def test_same_seed_same_losses(text: Text):
    losses = [[s.loss for s in trained(text, seed=n, steps=4)[1].training] for n in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes ten seconds."""
    looks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(report.time, "perf_counter", lambda: float(next(looks)))


@pytest.mark.usefixtures("clock")
def test_without_a_number_of_steps_training_ends_by_the_clock(text: Text):
    # two looks before the first step, one after each, and one for the line of progress of step 1
    _, record = trained(text, steps=None)
    assert len(record.training) == 5  # 60 s from the second look on
    assert record.training[-1].right is not None


# --- the memory figure -------------------------------------------------------------------------


def test_peak_memory_sees_what_was_alive_together():
    mebibyte = 2**20

    def call() -> torch.Tensor:
        first = torch.ones(3 * mebibyte, dtype=torch.uint8)
        del first
        second = torch.ones(2 * mebibyte, dtype=torch.uint8)
        third = torch.ones(5 * mebibyte, dtype=torch.uint8)
        del third
        return second

    before = torch.ones(11 * mebibyte, dtype=torch.uint8)
    assert peak_memory(call) == 7 * mebibyte
    assert len(before) == 11 * mebibyte


def test_peak_memory_sees_the_backward_pass():
    weight = torch.ones(512, 1024, requires_grad=True)  # 2 MiB

    def call() -> None:
        weight.exp().sum().backward()

    peak = peak_memory(call)
    # exp's result, kept for backward, and the gradient made from it
    assert peak == pytest.approx(2 * weight.nbytes, abs=1024)


@pytest.mark.process
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux's counter")
def test_peak_memory_agrees_with_the_operating_system():
    script = """
        import torch, torch.nn as nn, torch.nn.functional as F
        from accumext.demo.memory import peak_memory

        torch.set_num_threads(1)
        head, hidden = nn.Linear(64, 50_000), torch.ones(16, 64)

        def status(name):
            for line in open("/proc/self/status"):
                if line.startswith(name):
                    return int(line.split()[1]) * 1024

        def call():
            losses = [F.cross_entropy(head(hidden), torch.arange(16)) for _ in range(24)]
            torch.stack(losses).sum().backward()
            head.zero_grad()

        call()
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        call()
        print(status("VmHWM") - before, peak_memory(call))
    """
    # every large block comes from the system and returns to it, so that resident means allocated
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    resident, counted = map(int, done.stdout.split())
    assert counted == pytest.approx(resident, rel=RESIDENT_TOLERANCE)


# --- the comparison ----------------------------------------------------------------------------


def compared(text: Text, curve: bool = False, **changes: object) -> Record:
    chosen = settings(**changes)
    torch.manual_seed(0)
    model, record = Reciter(chosen.vocab, chosen.hidden), Record(chosen, {})
    # an untrained model would always feed the same word
    torch.nn.init.normal_(model.head.bias)
    torch.nn.init.normal_(model.embedding.weight)
    compare.compare(model, text.docstrings[:, :4], chosen, record, curve)
    assert all(parameter.grad is None for parameter in model.parameters())
    return record


def test_rows_of_the_comparison_differ_only_where_they_should(text: Text):
    record = compared(text)
    ours, plain, per_token = record.comparison
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    assert per_token.loss == pytest.approx(plain.loss, rel=1e-6)
    assert ours.gradient_distance < GRADIENT_TOLERANCE
    assert plain.gradient_distance < GRADIENT_TOLERANCE
    assert per_token.gradient_distance > 0.01
    assert all(row.seconds > 0 and row.peak_memory > 0 for row in record.comparison)
    assert record.repetitions == 3


@pytest.mark.usefixtures("clock")
def test_after_two_minutes_nothing_is_repeated(text: Text):
    assert compared(text).repetitions == 1


def test_distance_is_relative_to_the_exact_gradient():
    exact = [torch.tensor([3.0, 0.0]).double(), torch.tensor([4.0]).double()]
    assert compare.relative_distance([torch.tensor([3.0, 0.5]), torch.tensor([4.0])], exact) == 0.1


def test_memory_curves_are_those_of_the_first_steps_and_rise(library: Path):
    text = load_text(20_000, 12, 8, root=library)
    record = compared(text, curve=True, vocab=20_000)
    curves: dict[str, list[tuple[int, int]]] = {}
    for point in record.memory:
        curves.setdefault(point.name, []).append((point.steps, point.peak_memory))
    for row in record.comparison:
        steps, peaks = zip(*curves[row.name])
        assert steps == (1, 3, 6, 9, 12)
        assert peaks[-1] == row.peak_memory
        assert all(after >= 0.98 * before for before, after in pairwise(peaks))
    plain = dict(curves["plain PyTorch"])
    logits = 3 * 4 * 20_000 * 4  # three steps of four rows
    assert plain[9] - plain[6] == pytest.approx(plain[12] - plain[9], rel=0.1)
    assert plain[12] - plain[9] > logits


# --- the command -------------------------------------------------------------------------------


def test_tiny_run_from_end_to_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_demo(f"--json={tmp_path / 'demo.json'}") == 0
    out, err = capfd.readouterr()
    assert not err
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert len(record["training"]) == 2
    assert f"step   2: loss {record['training'][1]['loss']:6.3f}, " in out
    assert [row["name"] for row in record["comparison"]] == list(compare.WAYS)
    for row in record["comparison"]:
        assert f"{row['loss']:.5f}" in out
        assert f"{row['seconds']:.2f}" in out
        assert f"{row['gradient_distance']:.1e}" in out
        assert f"comparing: gradients and memory of {row['name']}\n" in out
    opening, recited = record["recitals"][0]
    assert f"{opening} ... ... {recited}" in " ".join(out.split())
    assert {point["steps"] for point in record["memory"]} == {12}
    assert not record["interrupted"]
    assert "minutes" not in out  # the steps were given
    assert all(len(line) <= 80 for line in out.splitlines())


def test_how_long_it_takes_is_said_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_text", interrupted)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(KeyboardInterrupt):
        demo.main(parser.parse_args(["--device=cpu"]))
    out = capsys.readouterr().out
    assert out.startswith("This takes about 2 minutes: 60 s of learning, ")
    assert out.endswith("s in all, 0 steps\n")


def test_plot_is_a_png_and_its_points_are_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    assert run_demo(f"--plot={tmp_path / 'demo.png'}", f"--json={tmp_path / 'demo.json'}") == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    right, memory = drawn[0].axes
    for line, name in zip(right.lines, ("right", "right_unseen"), strict=True):
        assert list(line.get_ydata()) == [step[name] for step in record["training"]]
    for line, name in zip(memory.lines, compare.WAYS, strict=True):
        points = [point for point in record["memory"] if point["name"] == name]
        assert list(line.get_xdata()) == [point["steps"] for point in points] == [1, 3, 6, 9, 12]
        assert list(line.get_ydata()) == [point["peak_memory"] / 1e6 for point in points]
    drawn[0].canvas.draw()  # at its own resolution
    for axes in drawn[0].axes:
        assert axes.title.get_window_extent().x1 <= drawn[0].bbox.x1  # not cut
        assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert memory.get_ylim()[0] == 0  # so that lengths on the axis compare


def test_plot_of_a_run_that_was_interrupted_at_once(tmp_path: Path):
    pytest.importorskip("matplotlib")
    report.write_plot(Record(settings(), {}), tmp_path / "demo.png")  # a warning would be an error
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_interrupt_keeps_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def interrupted(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return peak_memory(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compare, "peak_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(f"--json={tmp_path / 'demo.json'}")
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert record["interrupted"]
    assert len(record["training"]) == 2
    assert [row["name"] for row in record["comparison"]] == ["accumext.decode_loss"]
    out = capsys.readouterr().out
    assert "interrupted: the figures above" in out
    assert "nan" not in out


def test_missing_matplotlib_is_said_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_demo(f"--plot={tmp_path / 'demo.png'}") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--steps=0", "must be at least 1, got 0"),
        ("--hidden=x", "invalid"),
        ("--feedback=own", "invalid choice"),
    ],
)
def test_wrong_option(option: str, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run_demo(option)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["json", "plot"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [("nowhere/demo", "No such file"), (".", "Is a directory"), ("file/demo", "Not a directory")],
)
def test_file_that_cannot_be_written_is_said_before_the_run(
    option: str,
    path: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    if option == "plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli, "load_text", None)  # calling it would be an error
    (tmp_path / "file").touch()
    assert run_demo(f"--{option}={tmp_path / path}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"demo: --{option} must be a file that can be written, got {tmp_path}")
    assert f"({reason}" in error


def test_a_refused_run_leaves_an_output_file_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "there").write_text("what was there")
    assert run_demo(f"--json={tmp_path / 'there'}", "--vocab=9") == 2
    assert capsys.readouterr().err.startswith("demo: --vocab must be at least ")
    assert (tmp_path / "there").read_text() == "what was there"


def test_one_file_for_both_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo"
    assert run_demo(f"--json={path}", f"--plot={path}") == 2
    said = f"demo: --plot must be another file than --json, got {path}\n"
    assert capsys.readouterr().err == said
