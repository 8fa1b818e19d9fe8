"""The benchmark of memory: its peaks are those of a count by hand, its pictures show them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ROOT
from support.once import once
from support.programs import run_script
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the JSON of a quick run on a CPU, and its pictures."""
    pytest.importorskip("matplotlib")

    def quick(folder: Path) -> None:
        to = f"--json={folder / 'result.json'}", f"--plot={folder / 'memory'}"
        done = run_script("bench/memory.py", "--device=cpu", "--quick", *to)
        assert done.returncode == 0, done.stderr
        (folder / "printed").write_text(done.stdout)

    return once(tmp_path_factory, "bench-memory", quick)


@pytest.fixture
def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def peaks(result: dict[str, Any], name: str) -> list[int]:
    return [case["contenders"][name]["peak_bytes"] for case in result["cases"]]


def kept_by_autograd(steps: int) -> int:
    """Bytes of all memory that the graph of a plain loop keeps, but for the parameters'."""
    embedding, cell = nn.Embedding(VOCABULARY, SIZE), nn.GRUCell(SIZE, SIZE)
    head = nn.Linear(SIZE, VOCABULARY)
    parameters = {
        parameter.untyped_storage().data_ptr()
        for module in (embedding, cell, head)
        for parameter in module.parameters()
    }
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters | {targets.untyped_storage().data_ptr()}:
            kept[memory.data_ptr()] = memory
        return tensor

    losses, state, token = [], None, torch.zeros(BATCH, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for target in targets:
            state = cell(embedding(token), state)
            logits = head(state)
            losses.append(F.cross_entropy(logits, target))
            token = logits.detach().argmax(-1)
    return sum(memory.nbytes() for memory in kept.values())


def test_every_number_of_steps_has_the_three_ways(run: Path, result: dict[str, Any]) -> None:
    shape = "steps", "batch", "vocabulary", "size"
    expected = [(steps, BATCH, VOCABULARY, SIZE) for steps in STEPS]
    assert [tuple(case[key] for key in shape) for case in result["cases"]] == expected
    assert result["failed"] == {}
    assert result["machine"]["torch"] == torch.__version__
    printed = (run / "printed").read_text()
    for case, steps in zip(result["cases"], STEPS):
        assert set(case["contenders"]) == {PLAIN, PER_TOKEN, OURS}
        assert case["left_out"] == {}
        (line,) = [line for line in printed.splitlines() if line.startswith(f"T={steps} ")]
        found = (case["contenders"][name]["peak_bytes"] for name in (PLAIN, PER_TOKEN, OURS))
        assert line.split()[4:] == [f"{peak / 2**20:.2f}" for peak in found]


def test_plain_autograd_grows_by_what_its_graph_keeps(result: dict[str, Any]) -> None:
    measured = peaks(result, PLAIN)
    kept = [kept_by_autograd(steps) for steps in STEPS]
    assert kept[1] - kept[0] > 4 * (STEPS[1] - STEPS[0]) * BATCH * VOCABULARY  # probabilities
    for one, other in ((0, 1), (1, 2)):
        steps = STEPS[other] - STEPS[one]
        grown, expected = measured[other] - measured[one], kept[other] - kept[one]
        assert abs(grown - expected) < SCALARS * steps


def test_a_backward_pass_per_token_grows_by_tokens_and_losses(result: dict[str, Any]) -> None:
    measured = peaks(result, PER_TOKEN)
    # The gradients of embedding and head in one step, beside those that are left and do not count;
    # and of one step the probabilities, their gradient, and for a moment the logits.
    assert 2 * SIZE + BATCH < measured[0] / (4 * VOCABULARY) < 2 * SIZE + 3 * BATCH
    grown, steps = measured[2] - measured[0], STEPS[2] - STEPS[0]
    assert 0 <= grown < (SCALARS + TOKEN * BATCH) * steps


def test_decode_loss_grows_by_states_and_tokens(result: dict[str, Any]) -> None:
    measured = peaks(result, OURS)
    state = 4 * SIZE
    for one, other in ((0, 1), (1, 2)):
        grown, steps = measured[other] - measured[one], STEPS[other] - STEPS[one]
        # States and pre-activations, four numbers a unit; in the backward pass states' gradients.
        assert 5 * state * BATCH * steps <= grown <= (6 * state + TOKEN) * BATCH * steps


def texts(picture: Path) -> list[ElementTree.Element]:
    drawn = ElementTree.fromstring(picture.read_text())
    return list(drawn.iter("{http://www.w3.org/2000/svg}text"))


def words(picture: Path) -> list[str]:
    return ["".join(text.itertext()) for text in texts(picture)]


def colours(picture: Path) -> set[str]:
    styles = "; ".join(text.get("style", "") for text in texts(picture)).split("; ")
    return {part for part in styles if part.startswith("fill")}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_have_names_and_values(run: Path, result: dict[str, Any], theme: str) -> None:
    picture = run / f"memory_{theme}.svg"
    last = result["cases"][-1]["contenders"]
    for name, label in LABELS.items():
        (found,) = [text for text in words(picture) if text.startswith(f"{label}: ")]
        assert found == f"{label}: {last[name]['peak_bytes'] / 2**20:.2g} MiB"
    assert {"0", "20", "40", "60", "steps"} < set(words(picture))
    assert all("sans-serif" in text.get("style", "") for text in texts(picture))
    drawn = ElementTree.fromstring(picture.read_text())
    width, height = (float(drawn.get(side, "").removesuffix("pt")) for side in ("width", "height"))
    assert width / height == pytest.approx(3 / 2)


def test_axes_are_linear_and_the_highest_point_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peaks = {100: 3, 200: 2, 300: 1.5}
    cases = [
        {"steps": steps, "contenders": {OURS: {"peak_bytes": peak * 2**30}}}
        for steps, peak in peaks.items()
    ]
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"cases": cases, "failed": {}}))
    done = run_script("bench/memory.py", f"--from={file}", f"--plot={tmp_path / 'memory'}")
    assert done.returncode == 0, done.stderr
    picture = tmp_path / "memory_light.svg"
    assert f"{LABELS[OURS]}: 3 GiB at most" in words(picture)
    assert {"0", "100", "200", "300", "1 GiB", "2 GiB", "3 GiB"} < set(words(picture))


def test_pictures_are_for_either_page(run: Path) -> None:
    assert colours(run / "memory_light.svg") <= {"fill: #000000"}  # black is also the default
    assert colours(run / "memory_dark.svg") == {"fill: #cfd0d0"}
    for theme in ("light", "dark"):
        drawn = (run / f"memory_{theme}.svg").read_text()
        assert "#ffffff" not in drawn  # transparent
        assert "<dc:date>" not in drawn


def test_from_a_file_the_same_bytes_are_drawn(run: Path, tmp_path: Path) -> None:
    source = f"--from={run / 'result.json'}"
    done = run_script("bench/memory.py", source, f"--plot={tmp_path / 'again'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    for theme in ("light", "dark"):
        drawn = (run / f"memory_{theme}.svg").read_bytes()
        assert (tmp_path / f"again_{theme}.svg").read_bytes() == drawn


def test_the_documentation_has_the_pictures_of_its_result(tmp_path: Path) -> None:
    """Labels and values; the bytes depend on the release of matplotlib."""
    pytest.importorskip("matplotlib")
    source = "--from=bench/results/memory_cpu.json"
    done = run_script("bench/memory.py", source, f"--plot={tmp_path / 'memory'}")
    assert done.returncode == 0, done.stderr
    for theme in ("light", "dark"):
        name = f"memory_{theme}.svg"
        assert words(tmp_path / name) == words(ROOT / "docs" / name)
