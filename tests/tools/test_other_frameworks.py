"""The recipes for frameworks that are no extra of ours: each runs where its framework is installed.

In float64, beside plain PyTorch that steps on each window's true mean. Where batches are random or
depend on what was learned, that runs in the same trainer in the wrapper's place.
"""

import math
import runpy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support import ROOT
from support import optimizer_oracle as oracle
from torch import Tensor
from torch.nn.functional import cross_entropy

import accumext

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
    pytest.mark.filterwarnings("error:AccumulatingOptimizer"),
]
EPOCHS, WINDOW, MAX_NORM, LR = 3, 4, 0.5, 0.5
SIZES = [4, 4, 2] * EPOCHS  # micro-batches of each window


@pytest.fixture(autouse=True)
def double():
    """Set the default dtype, of which the recipes make tensors and models."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(name: str, capsys: pytest.CaptureFixture[str]) -> list[Tensor]:
    """Run a recipe as it is, which prints its last window; return the parameters."""
    names = runpy.run_path(str(ROOT / "examples" / "recipes" / f"with_{name}.py"))
    assert "last window: {'total_norm': " in capsys.readouterr().out
    return oracle.parameters_of(names["model"])


def by_definition(schedule: Sequence[float] = (LR,) * len(SIZES)) -> list[Tensor]:
    """Return the parameters after SGD on each window's gradient, with these learning rates."""
    torch.manual_seed(0)
    rows = torch.randn(160, 8)
    model = torch.nn.Linear(8, 4)
    sgd = partial(torch.optim.SGD, lr=LR, momentum=0.9)
    by_hand = oracle.ByHand(model.parameters(), sgd, max_norm=MAX_NORM)
    norms = []
    windows = oracle.windows_of(rows.split(16), WINDOW) * EPOCHS
    for window, lr in zip(windows, schedule, strict=True):
        for x in window:
            by_hand.add(cross_entropy(model(x), x[:, :4].argmax(1)))
        norms.append(by_hand.norm())
        by_hand.optimizer.param_groups[0]["lr"] = lr
        by_hand.step()
    assert min(norms) < MAX_NORM < max(norms)  # some are clipped, and some are not
    return oracle.parameters_of(model)


class Windows(torch.optim.Optimizer):
    """In the wrapper's place: gradients are kept, and a step takes the mean of a window's."""

    sizes: list[int]

    def __init__(self, optimizer, window, max_norm):
        super().__init__(optimizer.param_groups, {})  # the very dicts
        self.optimizer, self.window, self.max_norm = optimizer, window, max_norm
        self.kept: list[list[Tensor | None]] = []

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.kept.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        if len(self.kept) == self.window:
            self.flush()
        return loss

    def flush(self):
        if self.kept:
            self.sizes.append(len(self.kept))
            for p, grads in zip(self.parameters(), zip(*self.kept)):
                found = [g for g in grads if g is not None]
                p.grad = torch.stack(found).sum(0) / len(self.kept) if found else None
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()  # not every loop does so before it goes on
            self.kept = []

    def stats(self) -> dict[str, Any]:
        return {"total_norm": 0.0}


def assert_as_in_its_place(name, capsys, monkeypatch, sizes, tolerance=oracle.EXACT):
    """Compare a recipe with the same that has `Windows` in the wrapper's place."""
    model = trained(name, capsys)
    Windows.sizes = []
    monkeypatch.setattr(accumext, "AccumulatingOptimizer", Windows)
    report(name, model, trained(name, capsys), tolerance)
    assert Windows.sizes == sizes


def report(name, actual, expected, tolerance=oracle.EXACT):
    """Compare, and print the largest difference for the table of docs/frameworks.md."""
    print(name, max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True)))
    oracle.assert_close(actual, expected, tolerance)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("skorch", "skorch"),
        ("fabric", "lightning"),
        ("speechbrain", "speechbrain"),
        ("composer", "composer"),
    ],
)
def test_windows_of_known_rows(name, module, capsys):
    pytest.importorskip(module)
    report(name, trained(name, capsys), by_definition())


def test_fastai(capsys, monkeypatch):
    learner = pytest.importorskip("fastai.learner")
    # The loss that it shows is kept in float32.
    monkeypatch.setattr(learner.AvgSmoothLoss, "accumulate", lambda self, learn: None)
    report("fastai", trained("fastai", capsys), by_definition())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(stage, capsys, monkeypatch):
    """It takes no float64"""
    deepspeed = pytest.importorskip("deepspeed")
    make = deepspeed.initialize

    def initialize(config, **kwargs):
        return make(config={**config, "zero_optimization": {"stage": stage}}, **kwargs)

    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    report(f"deepspeed, ZeRO {stage}", trained("deepspeed", capsys), by_definition(), 1e-6)


def test_timm(capsys):
    """Its schedule counts windows"""
    pytest.importorskip("timm")
    steps = len(SIZES)
    cosine = [LR / 2 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]
    report("timm", trained("timm", capsys), by_definition(cosine))


def test_darts(capsys, monkeypatch):
    pytest.importorskip("darts")
    assert_as_in_its_place("darts", capsys, monkeypatch, SIZES)


def test_neuralforecast(capsys, monkeypatch):
    """It makes float32 of all series"""
    pytest.importorskip("neuralforecast")
    torch.set_default_dtype(torch.float32)
    assert_as_in_its_place("neuralforecast", capsys, monkeypatch, [4, 4, 2], 1e-6)


def test_stable_baselines3(capsys, monkeypatch):
    """Four rollouts, each with three epochs of three minibatches"""
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.torch_layers import FlattenExtractor

    # Observations come as float32.
    monkeypatch.setattr(FlattenExtractor, "forward", lambda self, x: self.flatten(x).double())
    assert_as_in_its_place("stable_baselines3", capsys, monkeypatch, [4, 4, 1] * 4)
