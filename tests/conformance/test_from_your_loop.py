"""From your loop: both sides of every diff, in float64."""

import importlib
import sys
import types
from contextlib import contextmanager

import pytest
import torch
import your_loops
from ranks import across
from support import ROOT
from support.optimizer_oracle import EXACT, NAN, assert_close, parameters_of
from torch import nn
from torch.nn import functional
from your_loops import FOLDER, LOOPS, OTHERS, SIDES, WORLD, N, by_definition, function, loader

PLAIN = ("tutorial", "amp", "head_slices")
STAND_INS = ("apex", "liger", "cce")
DECODERS = ("greedy_decoder", "backward_per_token", "backward_once")
FRAMEWORKS = ("accelerate", "lightning", "ignite", "trainer")

pytestmark = [
    *your_loops.frameworks,
    # Also of its end, and of what is skipped
    pytest.mark.filterwarnings("error:AccumulatingOptimizer:UserWarning"),
]


def linear_cross_entropy(e, c, targets, bias=None, reduction="mean"):
    """Stand in for Apple's cut_cross_entropy, which needs a GPU."""
    logits = functional.linear(e.flatten(0, -2), c, bias)
    return functional.cross_entropy(logits, targets.flatten(), reduction=reduction)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """A stand-in: the argument order of Liger's module, and torch's arithmetic."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, lin_weight, _input, target, bias=None):
        return linear_cross_entropy(_input, lin_weight, target, bias, self.reduction)


class Amp:
    """A stand-in for `apex.amp`: the three calls, one loss scale, and no half precision."""

    SCALE = 1024.0

    def initialize(self, model, optimizer, opt_level):
        return model, optimizer

    def master_params(self, optimizer):
        return (p for group in optimizer.param_groups for p in group["params"])

    @contextmanager
    def scale_loss(self, loss, optimizer, delay_unscale=False):
        yield loss * self.SCALE
        if not delay_unscale:
            for parameter in self.master_params(optimizer):
                parameter.grad /= self.SCALE


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Stand in for packages that need a GPU, or that nobody maintains any more."""
    packages = {
        "apex": {"amp": Amp()},
        "liger_kernel": {},
        "liger_kernel.transformers": {
            "LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss
        },
        "cut_cross_entropy": {"linear_cross_entropy": linear_cross_entropy},
    }
    for name, contents in packages.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)


class Labelled(nn.Module):
    """The interface that the Trainer calls: keyword arguments in, a dict with the loss out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return {"loss": functional.cross_entropy(self.model(x), labels)}


def trained(name, side, batches, tmp_path, model=None):
    """Run `train` of one side; return the parameters and what it returned."""
    train, loop = function(name, side), LOOPS[name]
    model = loop.model() if model is None else model
    if name == "lightning":
        options = your_loops.LIGHTNING | {"default_root_dir": tmp_path}
        returned = train(model, loader(batches), N, **options)
    elif name == "trainer":
        size = {"per_device_train_batch_size": len(batches[0][0])}
        data = [{"x": x, "labels": y} for batch in batches for x, y in zip(*batch)]
        options = your_loops.TRAINER | size
        returned = train(Labelled(model), data, N, output_dir=str(tmp_path), **options)
    else:
        returned = train(model, loader(batches), N, *(["cpu"] if loop.device else []))
    return parameters_of(model), returned


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FRAMEWORKS]


@pytest.mark.parametrize("name", [*PLAIN, *STAND_INS, *DECODERS, *SLOW])
def test_both_sides_are_the_same_training(name, tmp_path, monkeypatch):
    """Plain loops, AMP, frameworks, decoders, stand-ins of apex, Liger and cut_cross_entropy"""
    if name in FRAMEWORKS:
        pytest.importorskip({"trainer": "transformers"}.get(name, name))
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    loop = LOOPS[name]
    batches = loop.batches()
    expected, norms = by_definition(loop, batches)
    if loop.max_norm is not None:
        assert max(norms) > loop.max_norm > min(norms)  # a factor in all of them would be seen
    losses = []
    for side in SIDES:
        parameters, returned = trained(name, side, batches, tmp_path)
        assert_close(parameters, expected)
        losses.append(returned)
    if name in DECODERS[1:]:  # which collect their loss
        assert losses[0] == pytest.approx(losses[1].item(), rel=EXACT)


@across(WORLD)
def test_several_processes(rank, world):
    """DistributedDataParallel with `no_sync`, two processes: the same parameters"""
    loop = LOOPS["ddp"]
    expected, norms = by_definition(loop, loop.batches(), N * world)
    assert max(norms) > loop.max_norm > min(norms)
    for side in SIDES:
        model = loop.model()
        function("ddp", side)(model, loader(loop.batches()[rank::world]), N)
        assert_close(parameters_of(model), expected)


def test_the_loss_of_a_head_in_slices():
    """The loss of Liger's head and `chunked_loss`: the same loss and gradients"""
    model, (x, y) = LOOPS["liger"].model(), LOOPS["liger"].batches()[3]
    expected = LOOPS["liger"].loss(model, (x, y))
    grads = torch.autograd.grad(expected, list(model.parameters()))
    for side in SIDES:
        model.zero_grad()
        loss = function("liger_chunked", side)(model, x, y)
        loss.backward()
        assert_close([loss, *(p.grad for p in model.parameters())], [expected, *grads])


@pytest.mark.parametrize("side", SIDES)
def test_one_step(side):
    """y = w x: a whole batch and its samples one by one make the same step"""
    w, x = nn.Parameter(torch.tensor(1.0).double()), torch.tensor([4.0, 2.0]).double()
    (grad,) = torch.autograd.grad(functional.mse_loss(w * x, 2 * x), [w])
    assert grad.item() == -20.0
    function("whole_batch", side)(w, x)
    assert w.item() == pytest.approx(1.2, rel=EXACT)


def last_window(name, count, tmp_path):
    """Return so many batches, and the parameters of both sides after them."""
    if name not in PLAIN:
        pytest.importorskip(name)
    batches = LOOPS[name].batches()[:count]
    (before, _), (after, _) = (trained(name, side, batches, tmp_path) for side in SIDES)
    return batches, before, after


@pytest.mark.parametrize("name", ["tutorial", "accelerate", "lightning"])
def test_a_last_window_of_two(name, tmp_path, monkeypatch):
    """A last window of two: loop, Accelerate, Lightning step half as far, `flush` on the mean"""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    batches, before, after = last_window(name, 2 * N + 2, tmp_path)
    mean, _ = by_definition(LOOPS[name], batches)
    assert_close(after, mean)
    assert_close(before, by_definition(LOOPS[name], batches, divisor=N)[0])
    far = [(b - m).norm() > 1e-3 * m.norm() for b, m in zip(before, mean)]
    assert all(far) or name != "tutorial"  # the others clip both


@pytest.mark.parametrize("name", ["amp", "ignite", "head_slices"])
def test_a_last_window_that_nobody_steps_on(name, tmp_path):
    """A loop with a modulo alone never steps on its last two batches; `flush` does"""
    batches, before, after = last_window(name, N + 2, tmp_path)
    assert_close(before, by_definition(LOOPS[name], batches[:N])[0])
    assert_close(after, by_definition(LOOPS[name], batches)[0])


def test_a_window_that_amp_skips(tmp_path):
    """AMP: a NaN skips the window on both sides, and moves the schedule on both"""
    batches = LOOPS["amp"].batches()
    batches[N + 1][0][0, 0] = NAN
    (before, _), (after, _) = (trained("amp", side, batches, tmp_path) for side in SIDES)
    assert_close(after, before)
    assert all(parameter.isfinite().all() for parameter in after)


def test_the_page_shows_the_files(tmp_path, monkeypatch, capsys):
    """Every pair of files is on the page as it is, and in these tests"""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    loop_diffs = importlib.import_module("loop_diffs")
    pairs = {path.stem.rpartition("_")[0] for path in FOLDER.glob("*.py")}
    files = {f"{pair}_{side}.py" for pair in pairs for side in SIDES}
    assert {path.name for path in FOLDER.glob("*.py")} == files
    assert pairs == {*LOOPS, *OTHERS}
    text = loop_diffs.PAGE.read_text(encoding="utf-8")
    assert sorted(loop_diffs.MARKED.findall(text)) == sorted(pairs)
    assert loop_diffs.main(["--check"]) == 0

    page = tmp_path / "page.md"
    page.write_text(text.replace("+    optimizer.flush()\n", "", 1), encoding="utf-8")
    assert loop_diffs.main(["--check", "--page", str(page)]) == 1
    assert "does not show the files" in capsys.readouterr().out
    assert loop_diffs.main(["--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text
