"""Loggers and recipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import (
    OP,
    loss_of,
    make_batches,
    make_model,
    window_gradient,
    windows_of,
)
from support.programs import NO_WARNINGS

import accumext
from accumext import AccumulatingOptimizer

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))
NEEDS = {  # recipe -> what it imports beside torch
    "plain_pytorch": [],
    "with_accelerate": ["accelerate"],
    "with_ddp": [],
    "with_ignite": ["ignite"],
    "with_lightning": ["lightning"],
    "with_lightning_manual": ["lightning"],
    "with_tensorboard": ["tensorboard"],
    "with_torchrun_elastic": [],
    "with_trainer": ["transformers", "accelerate"],
}
STATS = ["total_norm", "clip_coef", "loss_scale", "weight", "micro_batches", "skipped"]
BATCHES = make_batches(6)
MAX_NORM = 0.1  # below the norm of every window
FLOAT32 = 1e-6  # TensorBoard keeps values in float32
EXACT = 1e-12


def build(dtype=torch.float64, fused=False):
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    return model, AccumulatingOptimizer(optimizer, window=2, max_norm=MAX_NORM)


def norms_by_hand():
    """The norm of each window's gradient before clipping, in plain PyTorch."""
    model = make_model()
    norms = []
    for batches in windows_of(BATCHES, 2):
        for parameter, grad in zip(model.parameters(), window_gradient(model, batches, [1.0, 1.0])):
            parameter.grad = grad
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return norms


def train(log):
    """Two micro-batches a window; `log(stats, window)` after each."""
    model, opt = build()
    windows = 0
    for batch in BATCHES:
        opt.backward(loss_of(model, batch))
        opt.step()
        windows += opt.stepped
        if opt.stepped:
            log(opt.stats(), windows)


def test_dict_logger(tmp_path):
    """A dict or JSON logger: `stats()` is a flat dict of floats, with the norm before clipping"""
    path = tmp_path / "stats.jsonl"
    with path.open("w") as file:
        train(lambda stats, window: file.write(json.dumps({"step": window, **stats}) + "\n"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", *STATS]] * 3
    assert [row["total_norm"] for row in rows] == pytest.approx(norms_by_hand(), rel=EXACT)
    assert [row["micro_batches"] for row in rows] == [2.0] * 3


def test_tensorboard(tmp_path):
    """TensorBoard: `add_scalar` takes `stats()` as it is, and the event file holds those values"""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    written = []

    def log(stats, window):
        written.append(stats)
        for name, value in stats.items():
            writer.add_scalar(f"window/{name}", value, window)

    with SummaryWriter(tmp_path) as writer:
        train(log)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"window/{name}" for name in STATS}
    for name in STATS:
        scalars = events.Scalars(f"window/{name}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        values = [stats[name] for stats in written]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=FLOAT32)
    norms = [scalar.value for scalar in events.Scalars("window/total_norm")]
    assert norms == pytest.approx(norms_by_hand(), rel=FLOAT32)


@pytest.mark.parametrize("every", [1, 3])
def test_device_reads(every):
    """Logging every n-th window reads the device in those windows alone, and once in each"""
    model, opt = build(torch.float32, fused=True)
    with cpu_as_device(), DeviceReads() as reads:
        for window in range(1, 7):
            for batch in BATCHES[:2]:
                opt.backward(loss_of(model, batch.float()))
                opt.step()
            assert opt.stepped
            assert (reads.count, reads.lists) == (0, (window - 1) // every)
            report = opt.last.total_norm, opt.last.clip_coef, opt.last.loss_scale, opt.last.weight
            assert all(value.shape == () for value in report)
            assert (reads.count, reads.lists) == (0, (window - 1) // every)
            if window % every == 0:
                assert opt.stats()["micro_batches"] == 2.0
                assert (reads.count, reads.lists) == (0, window // every)


@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe(recipe, tmp_path):
    """Each recipe in `examples/recipes` runs as it is, writes no file, and prints its window"""
    for package in NEEDS[recipe.stem]:
        pytest.importorskip(package)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(accumext.__file__).parents[1]),  # the package under test
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        **NO_WARNINGS,
    }
    done = subprocess.run(
        [sys.executable, str(recipe)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert OP not in done.stderr  # nor at its end, where a warning is no error
    assert "'total_norm': 0." in done.stdout.replace('"', "'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_run_that_resumes_on_other_ranks_is_the_same_run(tmp_path):
    """torchrun elastic: 2 ranks for 3 windows, then 3 ranks, end as one rank does"""
    recipe = ROOT / "examples" / "recipes" / "with_torchrun_elastic.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NO_WARNINGS}
    runs = [("whole", 1, 6), ("parts", 2, 3), ("parts", 3, 6)]
    said = []
    for folder, ranks_, windows in runs:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks_)]
        options = ["--checkpoint", str(tmp_path / folder), "--windows", str(windows)]
        done = subprocess.run(
            [sys.executable, *launch, str(recipe), *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[1].startswith("windows 0 to 3, ")
    assert said[2].startswith("windows 3 to 6, ")
    norms = [float(text.partition("'total_norm': ")[2].partition(",")[0]) for text in said]
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)  # six steps in float32
    assert norms[1] != pytest.approx(norms[0], rel=1e-2)


def test_recipes_are_documented():
    """Every recipe is shown in [recipes](recipes.md), as it is in the file"""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [path.stem for path in RECIPES] == sorted(NEEDS)
    for path in RECIPES:
        assert f"{{literalinclude}} ../examples/recipes/{path.name}\n" in text
