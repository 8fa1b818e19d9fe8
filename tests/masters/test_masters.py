"""fp32 masters of half-precision parameters, beside the same optimizer run in float32 by hand."""

from __future__ import annotations

import re

import pytest
import torch
from support.masters import BATCHES, ByHand, adamw, halves_of, values, with_masters
from support.optimizer_oracle import INF, assert_equal, loss_of, make_model, sgd
from torch import nn

import accumext
from accumext.demo.memory import peak_memory
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

HALVES = (torch.bfloat16, torch.float16)

# Between the float32 norm of one pass and that of torch's norm of norms.
CLIP = 1e-6


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_windows_reach_the_masters_unrounded(dtype, window, fused, own_backward):
    model, reference = make_model(dtype), make_model(dtype)
    opt, masters = with_masters(model, lambda p: adamw(p, fused=fused), window=window)
    by_hand = ByHand(reference, fused=fused)
    for batch in halves_of(BATCHES, dtype):
        loss = loss_of(model, batch)
        loss.backward() if own_backward else opt.backward(loss)
        opt.step()
        opt.zero_grad()
    for begin in range(0, len(BATCHES), window):
        batches = halves_of(BATCHES[begin : begin + window], dtype)
        grads = by_hand.gradients(loss_of(reference, batch) for batch in batches)
        by_hand.step(grads, 1 / window)
    assert_equal(values(masters), by_hand.wide)
    assert_equal(values(model.parameters()), values(reference.parameters()))
    assert all(p.grad is None for p in [*model.parameters(), *masters])


@pytest.mark.parametrize("fused", [False, True])
def test_the_clip_is_of_the_windows_float32_gradient(fused):
    model, reference = make_model(torch.bfloat16), make_model(torch.bfloat16)
    max_norm = 0.05
    opt, masters = with_masters(model, lambda p: adamw(p, fused=fused), window=2, max_norm=max_norm)
    by_hand = ByHand(reference, fused=fused)
    for batches in zip(*[iter(halves_of(BATCHES, torch.bfloat16))] * 2, strict=True):
        for batch in batches:
            opt.backward(loss_of(model, batch))
            opt.step()
        grads = by_hand.gradients(loss_of(reference, batch) for batch in batches)
        total = torch.cat([g.flatten() / 2 for g in grads]).norm()
        by_hand.step(grads, 0.5 * min(1.0, max_norm / (float(total) + 1e-6)))
        assert opt.stats()["clip_coef"] < 1.0
        assert opt.stats()["total_norm"] == pytest.approx(float(total), rel=CLIP)
    for master, wide in zip(masters, by_hand.wide, strict=True):
        # Near 0 it is that of what six steps have moved them by, 0.1 at most.
        torch.testing.assert_close(master.detach(), wide, rtol=CLIP, atol=0.1 * CLIP)


def test_updates_below_half_a_unit_add_up():
    """The rate is a twentieth of the space between bfloat16 numbers below 1."""
    steps, rate = 400, 2e-4

    def trained(make):
        weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        opt = make([weight])
        for _ in range(steps):
            opt.backward(weight.sum())
            opt.step()
        return weight.detach().float()

    def on_masters(parameters, stochastic=False):
        masters = accumext.masters(parameters, stochastic_rounding=stochastic)
        return AccumulatingOptimizer(sgd(masters, lr=rate), masters=masters)

    assert_equal([trained(lambda p: AccumulatingOptimizer(sgd(p, lr=rate)))], [torch.ones(64)])
    nearest = torch.tensor(1 - steps * rate, dtype=torch.bfloat16).float()
    assert_equal([trained(on_masters)], [nearest.expand(64)])
    rounded = trained(lambda p: on_masters(p, stochastic=True))
    # Of the two neighbours of 0.92, at 0.918 and 0.922.
    assert len(rounded.unique()) == 2
    assert (rounded - (1 - steps * rate)).abs().max() < 2**-8


class Halved(nn.Module):
    """A bfloat16 layer between float32 ones, of which one is frozen."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first = nn.Linear(3, 4)
            self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
            self.frozen = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
            self.last = nn.Linear(4, 2)

    def forward(self, inputs):
        hidden = self.frozen(self.narrow(self.first(inputs).to(torch.bfloat16)))
        return self.last(hidden.float())


def test_only_trained_half_precision_parameters_have_masters():
    model = Halved()
    masters = accumext.masters(model.parameters())
    for (name, parameter), master in zip(model.named_parameters(), masters, strict=True):
        if name.startswith("narrow"):
            assert master.dtype == torch.float32
            assert isinstance(master, nn.Parameter)
            assert master.master_of.parameter is parameter
            assert_equal([master.detach()], [parameter.detach().float()])
        else:
            assert master is parameter
    opt = AccumulatingOptimizer(sgd(masters, lr=0.1), masters=masters, window=2)
    reference = Halved()
    parameters = [p for p in reference.parameters() if p.requires_grad]
    wide = [p.detach().float() for p in parameters]
    for batch in BATCHES[:2]:
        opt.backward(model(batch.float()).square().mean())
        opt.step()
    sums = [torch.zeros_like(w) for w in wide]
    for batch in BATCHES[:2]:
        grads = torch.autograd.grad(reference(batch.float()).square().mean(), parameters)
        sums = [s + g.float() for s, g in zip(sums, grads, strict=True)]
    stepped = [(w - 0.1 * (s * 0.5)).to(p.dtype) for w, s, p in zip(wide, sums, parameters)]
    assert_equal([p.detach() for p in model.parameters() if p.requires_grad], stepped)
    assert opt.last.nonfinite == []


def test_the_same_parameter_has_one_master():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    first, second = accumext.masters([weight, weight])
    assert first is second


# Skipped windows, errors


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_skipped_window_leaves_everything(fused, stochastic):
    model = make_model(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    options = {"stochastic": stochastic, "window": 2, "scaler": scaler}
    opt, masters = with_masters(model, lambda p: adamw(p, fused=fused), **options)
    names = [f"n{i}" for i in range(len(masters))]
    opt.param_groups[0]["param_names"] = names
    for poison in (1.0, INF, 1.0):
        before = values([*masters, *model.parameters()])
        for i, batch in enumerate(halves_of(BATCHES[:2], torch.float16)):
            opt.backward(loss_of(model, batch) * (poison if i == 0 else 1.0))
            opt.step()
        after = values([*masters, *model.parameters()])
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert all(same) == (poison == INF)
        assert opt.last.skipped == (poison == INF)
        assert opt.last.nonfinite == (names if poison == INF else [])
    assert scaler.get_scale() == 8.0


def test_a_scaler_around_the_step_is_refused():
    model = make_model(torch.bfloat16)
    opt, _ = with_masters(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, BATCHES[0].bfloat16())).backward()
    text = (
        "AccumulatingOptimizer.step: step must be called directly, not through scaler.step, got "
        "masters, whose gradients it cannot see. Pass the scaler to the constructor: "
        "AccumulatingOptimizer(..., scaler=scaler)"
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(text)):
        scaler.step(opt)


MUST = "AccumulatingOptimizer: masters must"
HOLD = f"{MUST} hold every master that the optimizer steps on, got"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m, _: AccumulatingOptimizer(sgd(m)), ValueError, f"{HOLD} None. Pass what"),
        (lambda m, _: AccumulatingOptimizer(sgd(m), masters=m[1:]), ValueError, f"{HOLD} a"),
        (
            lambda m, half: AccumulatingOptimizer(sgd(half), masters=m),
            ValueError,
            f"{MUST} be what the optimizer steps on, got masters of its parameters. Make the",
        ),
        (
            lambda m, _: AccumulatingOptimizer(sgd(m), masters=m[0]),
            TypeError,
            f"{MUST} be what accumext.masters returned, or None, got a float32 tensor",
        ),
        (lambda _, half: accumext.masters(half[0]), TypeError, "masters: parameters must be an"),
        (lambda _, half: accumext.masters([half[0], 3]), TypeError, "masters: parameters[1] must"),
        (
            lambda _, half: accumext.masters([half[0] * 2]),
            ValueError,
            "masters: parameters[0] must be a leaf, got a tensor with a graph",
        ),
        (
            lambda _, half: accumext.masters(half, stochastic_rounding=1),
            TypeError,
            "masters: stochastic_rounding must be a bool, got int",
        ),
    ],
)
def test_what_masters_must_be(make, error, text):
    half = list(make_model(torch.bfloat16).parameters())
    with pytest.raises(error, match="^" + re.escape(text)):
        make(accumext.masters(half), half)


class Stop(Exception):
    """What a hook raises."""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_of_a_hook_leaves_all_as_before_or_as_after(when, fused):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, lambda p: adamw(p, fused=fused), window=2)

    def stop(*_):
        raise Stop

    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.backward(loss_of(model, BATCHES[1].bfloat16()))
    before = values([*model.parameters(), *masters])
    register = opt.register_step_pre_hook if when == "before" else opt.register_step_post_hook
    handle = register(stop)
    with pytest.raises(Stop):
        opt.step()
    handle.remove()
    assert all(p.grad is None for p in [*model.parameters(), *masters])
    assert_equal([p.detach() for p in model.parameters()], [m.bfloat16() for m in values(masters)])
    if when == "before":
        assert_equal(values([*model.parameters(), *masters]), before)
        opt.step()
    assert opt.stepped
    expected = make_model(torch.bfloat16)
    by_hand = ByHand(expected, fused=fused)
    losses = [loss_of(expected, batch.bfloat16()) for batch in BATCHES[:2]]
    by_hand.step(by_hand.gradients(losses), 0.5)
    assert_equal(values(masters), by_hand.wide)


class Averaging(torch.optim.SGD):
    """Shows the average of parameters between `eval()` and `train()`, as schedule-free ones do."""

    @torch.no_grad()
    def eval(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = parameter.clone()
            parameter.mul_(0.5)
        return "evaluating"

    @torch.no_grad()
    def train(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["kept"])


def test_the_model_follows_what_a_method_of_the_optimizer_writes():
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, lambda p: Averaging(p, lr=0.1))
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    trained = values(masters)
    assert opt.eval() == "evaluating"
    assert_equal(values(model.parameters()), [(m * 0.5).bfloat16() for m in trained])
    opt.train()
    assert_equal(values(model.parameters()), [m.bfloat16() for m in trained])
    assert_equal(values(masters), trained)


def test_the_model_follows_a_hook_that_writes_masters():
    """Such as one that keeps weights in a range after every step."""
    model, seen = make_model(torch.bfloat16), []
    opt, masters = with_masters(model)

    @torch.no_grad()
    def clamp(optimizer, *_):
        for master in optimizer.param_groups[0]["params"]:
            master.clamp_(-0.25, 0.25)

    opt.register_step_post_hook(lambda *_: seen.extend(values(model.parameters())))
    opt.register_step_post_hook(clamp)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    assert_equal(values(model.parameters()), [m.detach().bfloat16() for m in masters])
    assert max(p.detach().abs().max() for p in model.parameters()) == 0.25
    # A hook before it has seen the step's parameters in the model.
    assert not torch.equal(seen[0], make_model(torch.bfloat16)[0].weight.detach())
    assert_equal([s.clamp(-0.25, 0.25) for s in seen], values(model.parameters()))


def test_zero_grad_and_main_grad_are_of_the_models_parameters():
    model = make_model(torch.bfloat16)
    opt, _ = with_masters(model, window=2)
    weight = model[0].weight
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    assert opt.main_grad(weight).dtype == torch.float32
    loss_of(model, BATCHES[1].bfloat16()).backward()
    assert weight.grad is not None
    opt.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    opt.zero_grad()
    assert weight.grad is None


def test_groups_added_later_may_hold_masters():
    model = make_model(torch.bfloat16)
    masters = accumext.masters(model.parameters())
    opt = AccumulatingOptimizer(sgd(masters[:2], lr=0.1), masters=masters)
    opt.add_param_group({"params": masters[2:], "lr": 0.2})
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert_equal([parameter.detach()], [master.detach().bfloat16()])
        assert not torch.equal(master.detach(), master.detach().bfloat16().float())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_memory_of_masters_is_as_predicted(fused, window):
    """As docs/optimizer.md says; per parameter, beside the optimizer's own state."""
    count, layers = 2**18, 16
    parameters = [
        nn.Parameter(torch.randn(count // layers, dtype=torch.bfloat16)) for _ in range(layers)
    ]
    made = []
    assert peak_memory(lambda: made.extend(accumext.masters(parameters))) == 4 * count
    opt = AccumulatingOptimizer(
        torch.optim.AdamW(made, fused=fused, foreach=None if fused else False),
        masters=made,
        window=window,
        max_norm=1.0,
    )

    def step():
        for _ in range(window):
            opt.backward(sum(p.sum() for p in parameters))
            opt.step()

    step()
    assert opt.last.clip_coef < 1.0
    # The pass makes half gradients beside the float32 sums, which the step multiplies in place.
    assert peak_memory(step) == pytest.approx((4 + 2) * count, rel=0.1)
