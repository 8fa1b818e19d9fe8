"""The demo: its text, its memory figure, its comparison, and the command from end to end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accumext import demo
from accumext.demo import cli, compare, train
from accumext.demo.memory import peak_memory
from accumext.demo.model import WordModel
from accumext.demo.record import Settings
from accumext.demo.text import is_held_out, load_text, source_paths, split_words
from accumext.demo.train import held_out_batches, teacher_share, training_batches

SMALL = {"batch": 4, "length": 12, "hidden": 16, "vocab": 300}
ENTROPY_TOLERANCE = 1e-9  # float64 sums of a few hundred terms in another order
GRADIENT_TOLERANCE = 1e-5  # what the demo claims of float32 against float64
RESIDENT_TOLERANCE = 0.1  # pages, threads' stacks and the C library's own bookkeeping

# Paths whose CRC-32 was worked out once: another hash would move files between the two sets.
KNOWN_PATHS = {"abc.py": False, "json/decoder.py": False, "random.py": True}


def settings(**changes: object) -> Settings:
    values = {"steps": 2, "seed": 0, "device": "cpu", "feedback": "scheduled", **SMALL, **changes}
    return Settings(**values)  # type: ignore[arg-type]


def run_demo(*options: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    return demo.main(parser.parse_args(["--steps=2", "--device=cpu", *small, *options]))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard library of 60 files, with a third-party folder that does not belong to it."""
    root = tmp_path_factory.mktemp("library")
    for n in range(60):
        path = root / f"package{n % 3}" / f"module{n}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def f{n % 5}(x):\n    return x + {n % 7}\n" * (n + 1), encoding="utf-8")
    foreign = root / "site-packages" / "foreign.py"
    foreign.parent.mkdir()
    foreign.write_text("foreign = 1\n")
    return root


def test_words_are_words_marks_and_line_ends():
    assert split_words("def f_1(x):\n\treturn 'é' # 2.5\r\n") == [
        *["def", "f_1", "(", "x", ")", ":", "\n"],
        *["return", "'", "é", "'", "#", "2", ".", "5", "\n"],
    ]


def test_split_is_stable_and_disjoint(library: Path):
    assert {path: is_held_out(path) for path in KNOWN_PATHS} == KNOWN_PATHS
    paths = source_paths(library)
    held_out = {path for path in paths if is_held_out(path)}
    assert len(paths) == len(set(paths)) == 60
    assert not any("site-packages" in path for path in paths)
    assert held_out
    assert held_out < set(paths)

    text = load_text(1000, library)
    expected = [
        word
        for path in paths
        if path in held_out
        for word in split_words((library / path).read_text(encoding="utf-8"))
    ]
    assert [text.words[n] for n in text.held_out.tolist()] == expected
    assert len(text.training) + len(text.held_out) == sum(
        len(split_words((library / path).read_text(encoding="utf-8"))) for path in paths
    )


def test_entropy_and_unigram_loss_are_those_of_the_counted_words(library: Path):
    text = load_text(8, library)
    words = [
        word
        for path in source_paths(library)
        if not is_held_out(path)
        for word in split_words((library / path).read_text(encoding="utf-8"))
    ]
    kept = {word for word, _ in Counter(words).most_common(7)}
    counts = Counter(word if word in kept else "<unk>" for word in words)
    shares = [count / len(words) for count in counts.values()]
    entropy = -sum(share * math.log(share) for share in shares)
    assert text.entropy == pytest.approx(entropy, abs=ENTROPY_TOLERANCE)

    unseen = [text.words[n] for n in text.held_out.tolist()]
    smoothed = {word: (counts[word] + 1) / (len(words) + 8) for word in counts}
    loss = -sum(math.log(smoothed[word]) for word in unseen) / len(unseen)
    assert text.unigram_loss(text.held_out) == pytest.approx(loss, abs=ENTROPY_TOLERANCE)


def test_standard_library_of_this_python_is_read_as_far_as_needed():
    text = load_text(300)
    assert len(text.words) == 300
    assert 200_000 <= len(text.training) < 1_000_000
    assert 0 < text.entropy < math.log(300)
    assert text.training.max() < 300
    with pytest.raises(RuntimeError, match=r"^demo: the standard library must be there as \.py"):
        load_text(300, Path(__file__).parent / "nowhere")


def test_batches_continue_their_context(library: Path):
    text, chosen = load_text(1000, library), settings()
    for batch in (next(training_batches(text, chosen)), held_out_batches(text, chosen, 2)[1]):
        assert batch.targets.shape == (12, 4)
        stretch = torch.cat([batch.context, batch.targets])[:, 0].tolist()
        streams = (text.training.tolist(), text.held_out.tolist())
        assert any(
            stretch == stream[n : n + len(stretch)]
            for stream in streams
            for n in range(len(stream))
        )


def test_seed_chooses_the_batches(library: Path):
    text = load_text(1000, library)
    first, again, other = (
        next(training_batches(text, settings(seed=seed))).targets for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_share_of_targets_follows_the_feedback():
    shares = {
        mode: [teacher_share(settings(feedback=mode), progress) for progress in (0, 0.5, 1)]
        for mode in ("teacher", "greedy", "scheduled")
    }
    assert shares["teacher"] == [1, 1, 1]
    assert shares["greedy"] == [0, 0, 0]
    assert 1 == shares["scheduled"][0] > shares["scheduled"][1] > shares["scheduled"][2] > 0


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


@pytest.mark.parametrize("feedback", ["scheduled", "greedy", "teacher"])
def test_rows_of_the_comparison_differ_only_where_they_should(library: Path, feedback: str):
    text, chosen = load_text(300, library), settings(feedback=feedback)
    model = WordModel(text.unigram, chosen.hidden)
    # an untrained model would always feed the most frequent word
    torch.nn.init.normal_(model.head.bias)
    batches = training_batches(text, chosen)
    rows: list[compare.Row] = []
    compare.compare(model, [next(batches), next(batches)], chosen, rows)
    ours, plain, per_token = rows
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    assert per_token.loss == pytest.approx(plain.loss, rel=1e-6)
    assert ours.gradient_distance < GRADIENT_TOLERANCE
    assert plain.gradient_distance < GRADIENT_TOLERANCE
    assert per_token.gradient_distance > 0.01
    assert all(row.seconds > 0 and row.peak_memory > 0 for row in rows)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_distance_is_relative_to_the_exact_gradient():
    exact = [torch.tensor([3.0, 0.0]).double(), torch.tensor([4.0]).double()]
    assert compare.relative_distance([torch.tensor([3.0, 0.5]), torch.tensor([4.0])], exact) == 0.1


def test_continuation_takes_the_most_probable_word(library: Path):
    text, chosen = load_text(50, library), settings(vocab=50)
    model = WordModel(text.unigram, chosen.hidden)
    (batch,) = held_out_batches(text, chosen, 1)
    words = model.continuation(batch, 3)
    state, token = model.encode(batch), batch.context[-1]
    for word in words:
        state = model.cell(F.embedding(token, model.embedding.weight), state)
        token = (state @ model.head.weight.T + model.head.bias).max(-1).indices
        assert torch.equal(word, token)


def test_tiny_run_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert run_demo(f"--json={tmp_path / 'demo.json'}") == 0
    out, err = capfd.readouterr()
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert len(record["training"]) == 2
    assert all(math.isfinite(step["loss"]) for step in record["training"])
    assert f"unigram entropy of the text        {record['text']['entropy']:.3f}" in out
    assert f"{record['held_out']['loss']:.3f} nats per word" in out
    assert [row["name"] for row in record["comparison"]] == list(compare.MODES)
    assert all(f"{row['gradient_distance']:.1e}" in out for row in record["comparison"])
    assert len(record["continuations"]) == 3
    assert "step 2/2: loss" in err
    assert not record["interrupted"]


def test_same_seed_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Which precision is faster is measured, and may differ from run to run.
    monkeypatch.setattr(train, "_WORTHWHILE", float("inf"))
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_demo(f"--json={tmp_path / name}", f"--seed={seed}")
        steps = json.loads((tmp_path / name).read_text(encoding="utf-8"))["training"]
        losses.append([step["loss"] for step in steps])
    assert losses[0] == losses[1] != losses[2]


def test_plot_is_a_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    assert run_demo(f"--plot={tmp_path / 'demo.png'}") == 0
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
    assert run_demo(f"--json={tmp_path / 'demo.json'}") == cli.INTERRUPTED == 130
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert record["interrupted"]
    assert len(record["training"]) == 2
    assert [row["name"] for row in record["comparison"]] == ["accumext.decode_loss"]
    assert "interrupted: the figures above" in capsys.readouterr().out


def test_interrupt_before_anything_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(vocabulary: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_text", interrupted)
    assert run_demo() == 130
    assert "interrupted" in capsys.readouterr().out


def test_missing_matplotlib_is_said_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_demo("--plot=demo.png") == 1
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--steps=0", "must be at least 1, got 0"),
        ("--vocab=1", "must be at least 2, got 1"),
        ("--hidden=x", "invalid"),
        ("--feedback=own", "invalid choice"),
    ],
)
def test_wrong_option(option: str, said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run_demo(option)
    assert said in capsys.readouterr().err


def test_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_demo(f"--json={tmp_path / 'nowhere' / 'demo.json'}") == 1
    assert "--json must be in a folder that exists" in capsys.readouterr().err
