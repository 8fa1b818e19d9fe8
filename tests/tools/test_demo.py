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
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accumext import demo
from accumext.demo import cli, compare, outputs, plot, train
from accumext.demo import model as model_module
from accumext.demo.compare import curve_lengths
from accumext.demo.memory import peak_memory
from accumext.demo.model import WordModel
from accumext.demo.prose import END, join_words, paragraphs, split_words
from accumext.demo.record import MemoryPoint, Record, Settings, Step
from accumext.demo.text import is_held_out, load_text, source_paths
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
        said = (
            f"# File {n} adds {m % 7}, or module{m} times x, to what it gets.\n"
            for m in range(n + 1)
        )
        path.write_text("\nx += 1\n".join(said), encoding="utf-8")
    foreign = root / "site-packages" / "foreign.py"
    foreign.parent.mkdir()
    foreign.write_text("# This is a foreign file, which is not read.\n")
    return root


def words_of(library: Path, paths: list[str]) -> list[str]:
    """The words of the files above, by their one form of sentence."""
    found = []
    for path in paths:
        for line in (library / path).read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                found += [*line[1:].replace(",", " ,").replace(".", " .").split(), END]
    return found


SOURCE = '''
"""The first line says `what` it *is*.

It takes "a few" words and a 'name' (or two) and hands os.path.join() on with
**options that nobody else would think of, and it doesn't stop there but goes on for a
while, since a sentence with so many marks would not count as one of prose if it were short...

    >>> x = [1, 2, 3] + f(4); y["a"] = x[0] + 7
"""

text = """
A string that is no docstring and must not be read by anybody.
"""  # nor is this comment, at the end of a line of code, read by anybody

def f(x):
    #: A comment of two lines, which
    # is one paragraph; a half-open range.

    # too short
    return """But this is no docstring either, nor is it a comment.""", 'a # b'
'''


def test_prose_is_docstrings_and_comments_without_code():
    assert [join_words(list(paragraph)) for paragraph in paragraphs(SOURCE)] == [
        "The first line says what it is.",
        "It takes “a few” words and a “name” (or two) and hands os.path.join() on with **options "
        "that nobody else would think of, and it doesn't stop there but goes on for a while, since "
        "a sentence with so many marks would not count as one of prose if it were short...",
        "A comment of two lines, which is one paragraph; a half-open range.",
    ]


def test_words_carry_their_names_and_marks_stand_alone():
    assert split_words("He said \"os.sep\", or 'x'; the users' 2.5 -- well, isn't it (a/b)?") == [
        *["He", "said", "“", "os.sep", "”", ",", "or", "“", "x", "”", ";", "the", "users", "”"],
        *["2.5", "--", "well", ",", "isn't", "it", "(", "a", "/", "b", ")", "?"],
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
    expected = words_of(library, [path for path in paths if path in held_out])
    training = set(words_of(library, [path for path in paths if path not in held_out]))
    known = set(text.words)
    assert known < training | {"<unk>"}
    assert len(known) == 2 + (len(training) - 1) * 10 // 12  # others are what "<unk>" learns from
    shown = [text.words[n] for n in text.held_out.tolist()]
    assert shown == [word if word in known else "<unk>" for word in expected]
    assert len(text.training) + len(text.held_out) == len(words_of(library, paths))


def test_a_paragraph_that_is_there_twice_is_read_once(tmp_path: Path):
    for path, own in (("abc.py", "a"), ("random.py", "b")):  # one of each set
        (tmp_path / path).write_text(f"# All rights to this text are mine.\nx = {own}\n" * 2)
        with (tmp_path / path).open("a") as file:
            file.write(f"# This text is only in file {own}.\n")
    text = load_text(50, tmp_path)
    words = len(["This", "text", "is", "only", "in", "file", "a", ".", END])
    assert len(text.training) == words + len(
        ["All", *["rights", "to", "this", "text", "are", "mine", "."], END]
    )
    assert len(text.held_out) == words


def test_entropy_and_unigram_loss_are_those_of_the_counted_words(library: Path):
    text = load_text(8, library)
    words = words_of(library, [path for path in source_paths(library) if not is_held_out(path)])
    others = Counter(word for word in words if word != END)
    kept = {END, *(word for word, _ in others.most_common(6))}
    counts = Counter(word if word in kept else "<unk>" for word in words)
    shares = [count / len(words) for count in counts.values()]
    entropy = -sum(share * math.log(share) for share in shares)
    assert text.entropy == pytest.approx(entropy, abs=ENTROPY_TOLERANCE)

    unseen = [text.words[n] for n in text.held_out.tolist()]
    smoothed = {word: (counts[word] + 1) / (len(words) + 8) for word in counts}
    loss = -sum(math.log(smoothed[word]) for word in unseen) / len(unseen)
    assert text.unigram_loss(text.held_out) == pytest.approx(loss, abs=ENTROPY_TOLERANCE)


@pytest.mark.slow
def test_standard_library_of_this_python_is_read_as_far_as_needed():
    text = load_text(300)
    assert len(text.words) == 300
    assert 200_000 <= len(text.training) < 1_000_000
    assert 0 < text.entropy < math.log(300)
    assert text.training.max() < 300
    with pytest.raises(RuntimeError, match=r"^demo: the standard library must be there as \.py"):
        load_text(300, Path(__file__).parent / "nowhere")


def test_beginnings_are_those_of_unseen_paragraphs_that_go_on(library: Path):
    text = load_text(1000, library)
    held_out = words_of(library, [path for path in source_paths(library) if is_held_out(path)])
    sentences = " ".join(word if word != END else "\n" for word in held_out).split("\n")
    columns = text.beginnings(5, 6)
    assert columns.shape == (6, 5)
    for column in columns.T.tolist():
        words = [text.words[n] for n in column]
        assert "<unk>" not in words
        assert any(sentence.split()[:6] == words for sentence in sentences)
    assert text.beginnings(5, 40).shape == (40, 0)  # no paragraph is so long


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
    record = Record(chosen, {})
    compare.compare(model, [next(batches), next(batches)], chosen, record)
    rows = record.comparison
    ours, plain, per_token = rows
    assert not record.memory
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


@pytest.mark.slow
def test_memory_curve_is_that_of_the_first_steps(library: Path):
    text, chosen = load_text(300, library), settings(vocab=300, length=16)
    model = WordModel(text.unigram, chosen.hidden)
    record = Record(chosen, {})
    batches = training_batches(text, chosen)
    compare.compare(model, [next(batches)], chosen, record, curve=True)
    points = {(point.name, point.steps): point.peak_memory for point in record.memory}
    assert {steps for _, steps in points} == {2, 4, 8, 12, 16}
    assert len(points) == len(record.memory) == 15
    for row in record.comparison:
        assert points[row.name, 16] == row.peak_memory
    # one graph holds every step: as much for each four steps as for the four before
    plain = [points["plain PyTorch", steps] for steps in (4, 8, 12, 16)]
    steps = [after - before for before, after in pairwise(plain)]
    assert min(steps) > 4 * 300 * 4 * 4  # logits of four steps: floats of V words, B rows
    assert max(steps) < 1.2 * min(steps)
    assert curve_lengths(1) == []
    assert curve_lengths(3) == [1, 2]


def test_continuation_is_the_most_probable_words_at_a_low_temperature(
    library: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_module, "TEMPERATURE", 1e-4)
    text, chosen = load_text(50, library), settings(vocab=50)
    model = WordModel(text.unigram, chosen.hidden)
    (batch,) = held_out_batches(text, chosen, 1)
    never = torch.zeros(50, dtype=torch.bool)
    never[model.head.bias.argmax()] = True  # the likeliest word before training
    state, token, steps = model.encode(batch), batch.context[-1], []
    for _ in range(6):
        state = model.cell(F.embedding(token, model.embedding.weight), state)
        logits = state @ model.head.weight.T + model.head.bias
        token = logits.masked_fill(never, -math.inf).max(-1).indices
        steps.append(token)
    greedy = torch.stack(steps).T.tolist()
    end = greedy[0][3]  # a word that ends some row, or none
    sampled = model.continuation(batch.context, 6, end, never, torch.Generator())
    assert sampled == [row[: row.index(end)] if end in row else row for row in greedy]


def test_continuations_name_no_unknown_word_and_are_those_of_the_seed(library: Path):
    text, chosen = load_text(1000, library), settings(vocab=1000)
    model = WordModel(
        torch.full((1000,), 1e-3), chosen.hidden
    )  # unused words are as likely as used
    shown = [cli._continuations(model, text, settings(vocab=1000, seed=n)) for n in (0, 0, 1)]
    assert len(shown[0]) == 4
    assert shown[0] == shown[1] != shown[2]
    assert not any("<unk>" in one.beginning + one.continuation for one in shown[0])
    assert any(one.continuation for one in shown[0])


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
    assert record["continuations"]
    assert all(
        " ".join(one["beginning"].split()[:3]) in " ".join(out.split())
        for one in record["continuations"]
    )
    assert not record["memory"]
    assert "training 2/2: loss" in err
    pieces = [line for line in err.splitlines() if line.startswith("comparing")]
    total = len(pieces)
    assert [line.split()[1] for line in pieces] == [f"{n}/{total}:" for n in range(1, total + 1)]
    assert all(any(name in line for line in pieces) for name in compare.MODES)
    assert not record["interrupted"]


@pytest.mark.slow
def test_smallest_vocabulary(capfd: pytest.CaptureFixture[str]):
    assert run_demo("--vocab=2") == 0
    assert "how the model goes on" not in capfd.readouterr().out  # with no word to do it


@pytest.mark.slow
def test_same_seed_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The faster precision is measured, and may differ from run to run.
    monkeypatch.setattr(train, "_WORTHWHILE", float("inf"))
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_demo(f"--json={tmp_path / name}", f"--seed={seed}")
        steps = json.loads((tmp_path / name).read_text(encoding="utf-8"))["training"]
        losses.append([step["loss"] for step in steps])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_plot_is_a_png_and_its_points_are_in_the_record(tmp_path: Path):
    pytest.importorskip("matplotlib")
    assert run_demo(f"--plot={tmp_path / 'demo.png'}", f"--json={tmp_path / 'demo.json'}") == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert {point["steps"] for point in record["memory"]} == {1, 3, 6, 9, 12}
    assert {point["name"] for point in record["memory"]} == set(compare.MODES)


def test_plot_of_a_run_that_was_interrupted_at_once(tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot.write_plot(Record(settings(), {}), tmp_path / "demo.png")  # a warning would be an error
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_plot_counts_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    record = Record(settings(), {}, training=[Step(6.0 - n, 1.0, 1.0, 1.0, None) for n in range(3)])
    record.memory = [MemoryPoint("a way", 1, 1000), MemoryPoint("a way", 2, 2000)]
    plot.write_plot(record, tmp_path / "demo.png")
    for axes in drawn[0].axes:
        assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert drawn[0].axes[1].get_ylim()[0] == 0  # so that lengths on the axis compare


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
    assert capsys.readouterr().out == "interrupted before the first step was done\n"


def test_missing_matplotlib_is_said_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_demo("--plot=demo.png") == 2
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


def test_trying_an_output_file_leaves_it_as_it_was(tmp_path: Path):
    there, new, link = tmp_path / "there", tmp_path / "new", tmp_path / "link"
    there.write_text("what was there")
    link.symlink_to(tmp_path / "target")
    for path in (there, new, link):
        arguments = argparse.Namespace(device="cpu", json=path, plot=None)
        assert outputs.problem(arguments) is None
    assert there.read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_one_file_for_both_outputs(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo"
    arguments = argparse.Namespace(device="cpu", json=path, plot=path)
    assert outputs.problem(arguments) == (
        f"demo: --plot must be another file than --json, got {path}"
    )


def test_rows_longer_than_the_text_are_refused(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = load_text(300, library)
    longest = min(len(text.training), len(text.held_out)) - train.CONTEXT
    longest_rows = settings(length=longest)
    assert next(training_batches(text, longest_rows)).targets.shape == (longest, 4)
    assert held_out_batches(text, longest_rows, 1)[0].targets.shape == (longest, 4)

    monkeypatch.setattr(cli, "load_text", lambda vocabulary: text)
    assert run_demo(f"--length={longest + 1}") == 2
    said = f"--length must be at most {longest:,}, as the text has it, got {longest + 1}"
    assert said in capsys.readouterr().err
    assert cli._too_long(longest_rows, text) is None
