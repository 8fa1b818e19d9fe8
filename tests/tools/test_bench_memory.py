"""The benchmark of memory: its peaks are those of a count by hand, its pictures show them."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.decode_oracle import plain_losses
from support.programs import run_bench, run_script
from torch import nn

pytestmark = pytest.mark.process

PLAIN, PER_TOKEN, OURS = "plain autograd", "backward per token (truncated)", "accumext"
STEPS, BATCH, VOCABULARY, SIZE = (16, 32, 64), 16, 2003, 16
LABELS = {
    PLAIN: "plain PyTorch, one graph",
    PER_TOKEN: "backward per token, truncated",
    OURS: "decode_loss",
}
# Scalars of a step have a few bytes each: losses, their means and gradients.
SCALARS = 64
# Bytes that a token has besides its states: what was fed and predicted, its loss, and the numbers
# that its row of probabilities is divided and multiplied by; a 1 in the sums of the biases'
# gradients. docs/decoder_inside.md says the same.
TOKEN = 49


def kept_by_autograd(steps: int) -> int:
    """Count the bytes that the graph of a plain loop keeps, but for the parameters."""
    embedding, cell = nn.Embedding(VOCABULARY, SIZE), nn.GRUCell(SIZE, SIZE)
    head = nn.Linear(SIZE, VOCABULARY)
    parameters = {
        parameter.untyped_storage().data_ptr()
        for module in (embedding, cell, head)
        for parameter in module.parameters()
    }
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters | {targets.untyped_storage().data_ptr()}:
            kept[memory.data_ptr()] = memory
        return tensor

    def step(token, state):
        state = cell(embedding(token), state)
        return head(state), state

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = [*plain_losses(step, targets, None)]
    assert len(losses) == steps  # which keep the graph
    return sum(memory.nbytes() for memory in kept.values())


def words(picture: Path) -> list[str]:
    drawn = ElementTree.fromstring(picture.read_text())
    texts = drawn.iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in texts]


def test_peaks_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    result, printed = run_bench(
        "memory", tmp_path, "--device=cpu", "--quick", f"--plot={tmp_path / 'memory'}"
    )
    shape = "steps", "batch", "vocabulary", "size"
    expected = [(steps, BATCH, VOCABULARY, SIZE) for steps in STEPS for _ in LABELS]
    assert [tuple(row[key] for key in shape) for row in result["rows"]] == expected
    peaks: dict[str, list[int]] = {}
    for steps in STEPS:
        rows = [row for row in result["rows"] if row["steps"] == steps]
        found = {row["contender"]: row["peak_bytes"] for row in rows}
        assert list(found) == list(LABELS)
        (line,) = [line for line in printed.splitlines() if line.startswith(f"T={steps} ")]
        assert line.split()[4:] == [f"{peak / 2**20:.2f}" for peak in found.values()]
        for name, peak in found.items():
            peaks.setdefault(name, []).append(peak)
    check_peaks(peaks)
    for theme in ("light", "dark"):
        for name, label in LABELS.items():
            said = f"{label}: {peaks[name][-1] / 2**20:.2g} MiB"
            assert said in words(tmp_path / f"memory_{theme}.svg")


def check_peaks(peaks: dict[str, list[int]]) -> None:
    """Check that plain autograd grows by its graph, others by states, tokens and losses."""
    kept = [kept_by_autograd(steps) for steps in STEPS]
    for one, other in ((0, 1), (1, 2)):
        steps = STEPS[other] - STEPS[one]
        grown = {name: peak[other] - peak[one] for name, peak in peaks.items()}
        assert abs(grown[PLAIN] - (kept[other] - kept[one])) < SCALARS * steps
        assert 0 <= grown[PER_TOKEN] < (SCALARS + TOKEN * BATCH) * steps
        # States and pre-activations, four numbers a unit; in the backward pass states' gradients.
        state = 4 * SIZE * BATCH * steps
        assert 5 * state <= grown[OURS] <= 6 * state + TOKEN * BATCH * steps
    # The gradients of embedding and head in one step, beside those that are left and do not count;
    # and of one step the probabilities, their gradient, and for a moment the logits.
    assert 2 * SIZE + BATCH < peaks[PER_TOKEN][0] / (4 * VOCABULARY) < 2 * SIZE + 3 * BATCH


def test_the_documentation_has_the_pictures_of_its_result(tmp_path):
    """Labels and values; the bytes depend on the release of matplotlib."""
    pytest.importorskip("matplotlib")
    source = "--from=bench/results/memory_cpu.json"
    done = run_script("bench/memory.py", source, f"--plot={tmp_path / 'memory'}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for theme in ("light", "dark"):
        name = f"memory_{theme}.svg"
        assert words(tmp_path / name) == words(ROOT / "docs" / name)
