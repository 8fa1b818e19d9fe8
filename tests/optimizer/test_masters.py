"""fp32 masters of half-precision parameters, beside the same optimizer run in float32 by hand."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    sgd,
)
from torch import nn

import accumext
from accumext.demo.memory import peak_memory
from accumext.optimizer import _backward_hooks, _host_transfer, _masters
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

HALVES = (torch.bfloat16, torch.float16)
BATCHES = make_batches(12)

# Between the float32 norm of one pass and that of torch's norm of norms.
CLIP = 1e-6


def adamw(parameters, **kwargs):
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **kwargs})


def with_masters(model, make=adamw, device=None, stochastic=False, **kwargs):
    """An optimizer on masters of all parameters of a model, and these."""
    masters = accumext.masters(model.parameters(), device, stochastic)
    return AccumulatingOptimizer(make(masters), masters=masters, **kwargs), masters


class ByHand:
    """float32 parameters that any optimizer steps on; a model of half precision gets them rounded.

    Gradients are those of the half-precision model, by plain autograd, summed in float32.
    """

    def __init__(self, model, make=adamw, **kwargs):
        self.model, self.parameters = model, list(model.parameters())
        self.wide = [p.detach().to(torch.float32) for p in self.parameters]
        self.optimizer = make(self.wide, **kwargs)

    def gradients(self, losses):
        """The sum of the gradients of these losses, each of half precision."""
        sums = [None] * len(self.wide)
        for loss in losses:
            grads = torch.autograd.grad(loss, self.parameters)
            wide = [g.to(torch.float32) for g in grads]
            sums = wide if sums[0] is None else [a + b for a, b in zip(sums, wide, strict=True)]
        return sums

    def step(self, gradients, factor=1.0):
        for wide, grad in zip(self.wide, gradients, strict=True):
            wide.grad = grad * factor
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self):
        for parameter, wide in zip(self.parameters, self.wide, strict=True):
            parameter.copy_(wide)


def halves_of(batches, dtype):
    return [batch.to(dtype) for batch in batches]


def values(tensors):
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_windows_reach_the_masters_unrounded(dtype, window, fused):
    model, reference = make_model(dtype), make_model(dtype)
    opt, masters = with_masters(model, lambda p: adamw(p, fused=fused), window=window)
    by_hand = ByHand(reference, fused=fused)
    for batch in halves_of(BATCHES, dtype):
        opt.backward(loss_of(model, batch))
        opt.step()
    for begin in range(0, len(BATCHES), window):
        batches = halves_of(BATCHES[begin : begin + window], dtype)
        grads = by_hand.gradients(loss_of(reference, batch) for batch in batches)
        by_hand.step(grads, 1 / window)
    assert_equal(values(masters), by_hand.wide)
    assert_equal(values(model.parameters()), values(reference.parameters()))
    assert all(p.grad is None for p in [*model.parameters(), *masters])


def test_the_usual_loop_works_unchanged():
    model, reference = make_model(torch.bfloat16), make_model(torch.bfloat16)
    opt, masters = with_masters(model)
    by_hand = ByHand(reference)
    for batch in halves_of(BATCHES, torch.bfloat16):
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
        by_hand.step(by_hand.gradients([loss_of(reference, batch)]))
    assert_equal(values(masters), by_hand.wide)


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
        torch.testing.assert_close(master.detach(), wide, rtol=CLIP, atol=1e-7)


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


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda m, half: AccumulatingOptimizer(sgd(m)),
            ValueError,
            "AccumulatingOptimizer: masters must hold every master that the optimizer steps on, "
            "got None. Pass what accumext.masters returned",
        ),
        (
            lambda m, half: AccumulatingOptimizer(sgd(m), masters=m[1:]),
            ValueError,
            "AccumulatingOptimizer: masters must hold every master that the optimizer steps on, "
            "got a list without some",
        ),
        (
            lambda m, half: AccumulatingOptimizer(sgd(half), masters=m),
            ValueError,
            "AccumulatingOptimizer: masters must be what the optimizer steps on, got masters of "
            "its parameters. Make the optimizer of the masters, not of the model's parameters",
        ),
        (
            lambda m, half: AccumulatingOptimizer(sgd(m), masters=m[0]),
            TypeError,
            "AccumulatingOptimizer: masters must be what accumext.masters returned, or None, got "
            "a float32 tensor",
        ),
        (
            lambda m, half: accumext.masters(half[0]),
            TypeError,
            "masters: parameters must be an iterable of parameters, got a bfloat16 tensor",
        ),
        (
            lambda m, half: accumext.masters([half[0], 3]),
            TypeError,
            "masters: parameters[1] must be a parameter, got int",
        ),
        (
            lambda m, half: accumext.masters([half[0] * 2]),
            ValueError,
            "masters: parameters[0] must be a leaf, got a tensor with a graph",
        ),
        (
            lambda m, half: accumext.masters(half, stochastic_rounding=1),
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


def test_hooks_after_the_step_see_the_new_parameters():
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model)
    seen = []
    opt.register_step_post_hook(lambda *_: seen.extend(values(model.parameters())))
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    assert_equal(seen, [m.detach().bfloat16() for m in masters])
    assert not torch.equal(seen[0], make_model(torch.bfloat16)[0].weight.detach())


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


# Others that write parameters, checkpoints, copies


@pytest.mark.parametrize("stochastic", [False, True])
def test_masters_follow_parameters_that_others_write(stochastic):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, lambda p: sgd(p, lr=0.0), stochastic=stochastic)

    def step():
        opt.backward(loss_of(model, BATCHES[0].bfloat16()))
        opt.step()

    with torch.no_grad():
        for master in masters:
            master.add_(1e-4)  # what a training run has gathered below half a unit
    gathered = values(masters)
    step()
    rounded = values(model.parameters())
    model.load_state_dict(model.state_dict())  # writes what is there
    step()
    assert_equal(values(masters), gathered)
    if not stochastic:
        assert_equal(values(model.parameters()), rounded)
    with torch.no_grad():
        model[0].weight[0] = 5.0
    step()
    gathered[0][0] = 5.0
    assert_equal(values(masters), gathered)
    assert torch.equal(model[0].weight[0].detach(), torch.full((3,), 5.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_run_resumes_bit_for_bit(order, stochastic):
    def run(model, opt, batches):
        for batch in batches:
            opt.backward(loss_of(model, batch.bfloat16()))
            opt.step()

    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, stochastic=stochastic)
    run(model, opt, BATCHES[:6])
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    run(model, opt, BATCHES[6:])

    again = make_model(torch.bfloat16)
    with torch.no_grad():
        again[0].weight.mul_(2)
    resumed, restored = with_masters(again, stochastic=stochastic)
    loads = [lambda: again.load_state_dict(saved["model"])]
    loads.insert(order == "model first", lambda: resumed.load_state_dict(saved["opt"]))
    for load in loads:
        load()
    run(again, resumed, BATCHES[6:])
    assert_equal(values(restored), values(masters))
    assert_equal(values(again.parameters()), values(model.parameters()))


def test_checkpoints_move_between_runs_with_and_without_masters():
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    assert set(saved["masters"]["parameters"]) == set(range(len(masters)))
    bare = adamw(make_model(torch.bfloat16).parameters())
    bare.load_state_dict(saved)
    assert_equal(
        [state["exp_avg"].float() for state in bare.state.values()],
        [state["exp_avg"].bfloat16().float() for state in opt.state.values()],
    )
    other = make_model(torch.bfloat16)
    with torch.no_grad():
        other[0].weight.fill_(0.5)
    loaded, theirs = with_masters(other)
    loaded.load_state_dict(bare.state_dict())
    assert_equal(values(theirs), [p.detach().float() for p in other.parameters()])
    assert loaded.state[theirs[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["parameters"].pop(0), "be of the parameters [0, 1, 2, 3], got [1, 2, 3]"),
        (lambda m: m.pop("roundings"), "be what the state_dict of an optimizer with masters has"),
        (
            lambda m: m["parameters"].update({1: torch.zeros(9)}),
            "have shape [4], got [9]",
        ),
    ],
)
def test_a_checkpoint_of_other_masters_is_refused_before_anything_changes(change, text):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    before = values([*masters, *model.parameters()])
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    change(saved["masters"])
    with pytest.raises(ValueError, match=re.escape(text)):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.01
    assert_equal(values([*masters, *model.parameters()]), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_model_and_optimizer_trains_by_itself(copied):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, window=2)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    other, its = copied((model, opt))
    for net, optimizer in ((model, opt), (other, its)):
        optimizer.backward(loss_of(net, BATCHES[1].bfloat16()))
        optimizer.step()
    assert its.stepped
    assert its.param_groups[0]["params"][0] is not masters[0]
    assert_equal(values(other.parameters()), values(model.parameters()))
    assert_equal(values(its.param_groups[0]["params"]), values(masters))
    other_before = values(other.parameters())
    opt.backward(loss_of(model, BATCHES[2].bfloat16()))
    opt.flush()
    assert_equal(values(other.parameters()), other_before)


def test_a_window_with_masters_is_saved_and_loaded():
    def train(resume):
        model = make_model(torch.bfloat16)
        opt, masters = with_masters(model, window=3)
        for i, batch in enumerate(BATCHES[:3]):
            if i == 2 and resume:
                saved = copy.deepcopy(opt.accumulation_state_dict())
                opt.discard()
                opt.load_accumulation_state_dict(saved)
            opt.backward(loss_of(model, batch.bfloat16()))
            opt.step()
        return values(masters)

    assert_equal(train(True), train(False))


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


# Masters in the host's memory, of parameters on a device: here the CPU plays both


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
    at_the_pass, at_the_step = (4 + 2) * count, (4 if fused else 4 + 4) * count
    assert peak_memory(step) == pytest.approx(max(at_the_pass, at_the_step), rel=0.1)


@pytest.fixture
def on_a_device(monkeypatch):
    """Every parameter counts as one of a device, and every gradient that is sent is counted."""
    sent = []
    monkeypatch.setattr(_masters, "crosses", lambda parameter, master: True)
    send = _host_transfer._sent

    def counting(grad):
        sent.append(grad)
        return send(grad)

    monkeypatch.setattr(_host_transfer, "_sent", counting)
    monkeypatch.setattr(_host_transfer, "BUNDLE_BYTES", 30)  # two parameters or three
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", 1)
    return sent


def in_parts(opt, model, batch):
    with opt.micro_batch():
        opt.backward(0.5 * loss_of(model, batch))
        opt.backward(0.5 * loss_of(model, batch))
    opt.step()


def in_one(opt, model, batch):
    opt.backward(loss_of(model, batch))
    opt.step()


def by_the_user(opt, model, batch):
    loss_of(model, batch).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("loop", [in_one, by_the_user, in_parts])
@pytest.mark.parametrize(
    ("policy", "in_backward"),
    [("skip_window", False), ("skip_window", True), ("skip_micro_batch", False), ("raise", False)],
)
def test_masters_on_the_host(on_a_device, loop, policy, in_backward):
    options = {"accumulate_in_backward": in_backward, "on_nonfinite": policy}
    model, reference = make_model(torch.bfloat16), make_model(torch.bfloat16)
    opt, masters = with_masters(model, window=2, max_norm=0.1, **options)
    batches = halves_of(BATCHES[:4], torch.bfloat16)
    for batch in batches:
        loop(opt, model, batch)
    assert len(on_a_device) >= 4 * len(masters)
    assert all(p.grad is None for p in [*model.parameters(), *masters])
    by_hand = ByHand(reference)
    for begin in (0, 2):
        grads = by_hand.gradients(loss_of(reference, b) for b in batches[begin : begin + 2])
        total = torch.cat([g.flatten() / 2 for g in grads]).norm()
        by_hand.step(grads, 0.5 * min(1.0, 0.1 / (float(total) + 1e-6)))
    # The clip, and AdamW's quotient of a gradient and its size where both are small.
    for master, wide in zip(masters, by_hand.wide, strict=True):
        torch.testing.assert_close(master.detach(), wide, rtol=1e-5, atol=1e-6)


def test_masters_on_the_host_are_rounded_stochastically_too(on_a_device):
    """The same steps: 0.1 lies between 0.09961 and 0.10010, a fifth of the way from the latter."""
    weight = nn.Parameter(torch.full((3, 1000), 0.125, dtype=torch.bfloat16))
    masters = accumext.masters([weight], stochastic_rounding=True)
    opt = AccumulatingOptimizer(sgd(masters, lr=0.025), masters=masters)
    opt.backward(weight.sum())
    opt.step()
    below, above = 0.099609375, 0.10009765625
    assert set(weight.detach().flatten().tolist()) == {below, above}
    share = (weight.detach() == above).float().mean().item()
    assert share == pytest.approx(0.8, abs=0.05)  # seven standard deviations of 3000 draws


def test_gradients_leave_for_the_host_while_backward_runs(on_a_device):
    """Three of four are on their way before the last one, the first layer's weight's, is there."""
    model = make_model(torch.bfloat16)
    opt, _ = with_masters(model, window=2)
    model[0].weight.register_hook(lambda grad: seen.append(len(on_a_device)))
    seen = []
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    assert seen == [3]
    assert all(p.grad is None for p in model.parameters())


def test_a_window_of_masters_on_the_host_is_dropped_with_its_backward_pass(on_a_device):
    model = make_model(torch.bfloat16)
    opt, _ = with_masters(model, window=2)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))

    def stop(grad):
        raise Stop

    handle = model[0].weight.register_hook(stop)
    with pytest.raises(Stop) as caught:
        opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    handle.remove()
    assert "the open window was dropped" in "".join(getattr(caught.value, "__notes__", ()))
    assert all(p.grad is None for p in model.parameters())
    assert opt.main_grad(model[0].weight) is None


def test_the_model_follows_a_hook_that_writes_masters():
    """Such as one that keeps weights in a range after every step."""
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model)

    @torch.no_grad()
    def clamp(optimizer, *_):
        for master in optimizer.param_groups[0]["params"]:
            master.clamp_(-0.25, 0.25)

    opt.register_step_post_hook(clamp)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    assert_equal(values(model.parameters()), [m.detach().bfloat16() for m in masters])
    assert max(p.detach().abs().max() for p in model.parameters()) == 0.25
