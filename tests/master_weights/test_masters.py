"""fp32 masters of half-precision parameters, beside the same optimizer run in float32 by hand."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support import optimizer_oracle as oracle
from support.masters import BATCHES, adamw, rounded, train, values, with_masters
from support.optimizer_oracle import INF
from support.tensors import HALF_DTYPES, dtype_id
from torch import nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.optimizer import _collecting
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

# Between the float32 norm of one pass and that of torch's norm of norms.
CLIP = 1e-6

fused_or_not = pytest.mark.parametrize(
    "make", [adamw, partial(adamw, fused=True)], ids=["plain", "fused"]
)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("loop", [oracle.one_call, oracle.own_backward])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("window", [1, 4])
@fused_or_not
def test_windows_reach_the_masters_unrounded(dtype, window, make, loop, max_norm):
    model, opt, masters = with_masters(make, window=window, max_norm=max_norm, dtype=dtype)
    batches = oracle.make_batches(12, dtype)
    for batch in batches:
        loop(opt, oracle.loss_of(model, batch))
    opt.zero_grad()
    assert (opt.stats()["clip_coef"] < 1.0) == (max_norm is not None)
    options = {"max_norm": max_norm, "dtype": dtype, "wide": torch.float32}
    by_hand = oracle.train_by_hand(make, batches, window, **options)
    oracle.assert_close(values(masters), by_hand, 0.0 if max_norm is None else CLIP)
    oracle.assert_equal(values(model.parameters()), rounded(masters, dtype))
    assert all(p.grad is None for p in [*model.parameters(), *masters])


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
    model, reference = Halved(), Halved()
    masters = accumext.masters(model.parameters())
    for (name, parameter), master in zip(model.named_parameters(), masters, strict=True):
        if name.startswith("narrow"):
            assert master.dtype == torch.float32
            assert isinstance(master, nn.Parameter)
            assert master.master_of.parameter is parameter
            oracle.assert_equal([master.detach()], [parameter.detach().float()])
        else:
            assert master is parameter
    small_steps = partial(oracle.sgd, lr=0.1)
    opt = AccumulatingOptimizer(small_steps(masters), masters=masters, window=2)
    trained = [p for p in reference.parameters() if p.requires_grad]
    by_hand = oracle.ByHand(trained, small_steps, wide=torch.float32)
    for batch in BATCHES[:2]:
        oracle.one_call(opt, model(batch.float()).square().mean())
        by_hand.add(reference(batch.float()).square().mean())
    by_hand.step()
    oracle.assert_equal(
        [p.detach() for p in model.parameters() if p.requires_grad], values(trained)
    )
    assert opt.last.nonfinite == []


def test_the_same_parameter_has_one_master():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    first, second = accumext.masters([weight, weight])
    assert first is second


@fused_or_not
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_skipped_window_leaves_everything(make, stochastic):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    options = {"window": 2, "scaler": scaler, "dtype": torch.float16}
    model, opt, masters = with_masters(make, stochastic=stochastic, **options)
    names = [f"n{i}" for i in range(len(masters))]
    opt.param_groups[0]["param_names"] = names
    for poison in (1.0, INF, 1.0):
        before = values([*masters, *model.parameters()])
        for batch, factor in zip(oracle.make_batches(2, torch.float16), (poison, 1.0)):
            oracle.one_call(opt, oracle.loss_of(model, batch) * factor)
        same = [torch.equal(*p) for p in zip(before, [*masters, *model.parameters()], strict=True)]
        assert all(same) == (poison == INF)
        assert opt.last.skipped == (poison == INF)
        assert opt.last.nonfinite == (names if poison == INF else [])
    assert scaler.get_scale() == 8.0


def wrap(parameters, masters=None):
    return AccumulatingOptimizer(oracle.sgd(parameters), masters=masters)


MUST = "AccumulatingOptimizer: masters must"
HOLD = f"{MUST} hold every master that the optimizer steps on, got"
OF = "masters: parameters"
ITERABLE, PASS = f"{OF} must be an iterable of parameters, got", "Pass model.parameters()"
REFUSED = [
    (lambda m, _: wrap(m), ValueError, f"{HOLD} None. Pass what"),
    (lambda m, _: wrap(m, m[1:]), ValueError, f"{HOLD} a"),
    (lambda m, half: wrap(half, m), ValueError, f"{MUST} be what the optimizer steps on, got mas"),
    (lambda m, _: wrap(m, m[0]), TypeError, f"{MUST} be what accumext.masters returned, or None"),
    (lambda _, half: accumext.masters(half[0]), TypeError, f"{OF} must be an"),
    (lambda *_: accumext.masters(nn.Linear(1, 1)), TypeError, f"{ITERABLE} Linear. {PASS}"),
    (lambda *_: accumext.masters(oracle.make_model()), TypeError, f"{ITERABLE} Sequential. {PASS}"),
    (lambda _, half: accumext.masters([half[0], 3]), TypeError, f"{OF}[1] must"),
    (lambda _, half: accumext.masters([half[0] * 2]), ValueError, f"{OF}[0] must be a leaf, got a"),
    (lambda *_: accumext.masters([], None, 1), TypeError, "masters: stochastic_rounding must be a"),
    (lambda *_: accumext.masters([], "nowhere"), ValueError, "masters: device must be None, for"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_masters_must_be(call, error, text):
    half = list(oracle.make_model(torch.bfloat16).parameters())
    with pytest.raises(error, match=oracle.says(text)):
        call(accumext.masters(half), half)


def test_a_scaler_around_the_step_is_refused():
    model, opt, _ = with_masters()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(oracle.loss_of(model, BATCHES[0])).backward()
    text = (
        "AccumulatingOptimizer.step: step must be called directly, not through scaler.step, got "
        "masters, whose gradients it cannot see. Pass the scaler to the constructor: "
        "AccumulatingOptimizer(..., scaler=scaler)"
    )
    with pytest.raises(RuntimeError, match=oracle.says(text)):
        scaler.step(opt)


@fused_or_not
@pytest.mark.parametrize("when", ["pre", "post"])
def test_an_exception_of_a_hook_leaves_all_as_before_or_as_after(when, make):
    model, opt, masters = with_masters(make, window=2)
    for batch in BATCHES[:2]:
        opt.backward(oracle.loss_of(model, batch))
    before = values([*model.parameters(), *masters])
    handle = getattr(opt, f"register_step_{when}_hook")(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    handle.remove()
    assert all(p.grad is None for p in [*model.parameters(), *masters])
    oracle.assert_equal(values(model.parameters()), rounded(masters))
    if when == "pre":
        oracle.assert_equal(values([*model.parameters(), *masters]), before)
        opt.step()
    assert opt.stepped
    options = {"dtype": torch.bfloat16, "wide": torch.float32}
    oracle.assert_equal(values(masters), oracle.train_by_hand(make, BATCHES[:2], 2, **options))


class Averaging(torch.optim.SGD):
    """Shows the average of parameters between `eval()` and `train()`, as schedule-free ones do."""

    @torch.no_grad()
    def eval(self, fails):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = parameter.clone()
            parameter.mul_(0.5)
        if fails:
            raise ZeroDivisionError
        return "evaluating"

    @torch.no_grad()
    def train(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["kept"])


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_follows_what_a_method_of_the_optimizer_writes(fails):
    model, opt, masters = with_masters(partial(Averaging, lr=0.1))
    train(opt, model)
    trained = values(masters)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert opt.eval(fails) == "evaluating"
    oracle.assert_equal(values(model.parameters()), [(m * 0.5).bfloat16() for m in trained])
    opt.train()
    oracle.assert_equal(values(model.parameters()), rounded(trained))
    oracle.assert_equal(values(masters), trained)


class WithoutHooks(torch.optim.Optimizer):
    """Its step needs a closure, and runs no hooks."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        value = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)
        return value

    step.hooked = True  # so that torch does not wrap it


def test_the_model_follows_a_step_with_a_closure_and_without_hooks():
    parameter = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    masters = accumext.masters([parameter])
    opt = AccumulatingOptimizer(WithoutHooks(masters), masters=masters)

    def closure():
        (parameter * 0.25).backward()

    opt.step(closure)
    assert (masters[0].item(), parameter.item()) == (0.75, 0.75)


def test_the_model_follows_a_hook_that_writes_masters():
    """Such as one that keeps weights in a range after every step."""
    model, opt, masters = with_masters()
    seen = []

    @torch.no_grad()
    def clamp(optimizer, *_):
        for master in optimizer.param_groups[0]["params"]:
            master.clamp_(-0.25, 0.25)

    opt.register_step_post_hook(lambda *_: seen.extend(values(model.parameters())))
    opt.register_step_post_hook(clamp)
    train(opt, model)
    oracle.assert_equal(values(model.parameters()), rounded(masters))
    assert max(p.detach().abs().max() for p in model.parameters()) == 0.25
    # A hook before it has seen the step's parameters in the model.
    assert not torch.equal(seen[0], oracle.make_model(torch.bfloat16)[0].weight.detach())
    oracle.assert_equal([s.clamp(-0.25, 0.25) for s in seen], values(model.parameters()))


def test_zero_grad_and_main_grad_are_of_the_models_parameters():
    model, opt, _ = with_masters(window=2)
    weight = model[0].weight
    opt.backward(oracle.loss_of(model, BATCHES[0]))
    assert opt.main_grad(weight).dtype == torch.float32
    oracle.loss_of(model, BATCHES[1]).backward()
    assert weight.grad is not None
    opt.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    opt.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("directly", [False, True])
def test_groups_added_later_may_hold_masters(directly):
    """Also where the group is added to the wrapped optimizer."""
    model = oracle.make_model(torch.bfloat16)
    masters = accumext.masters(model.parameters())
    opt = AccumulatingOptimizer(oracle.sgd(masters[:2], lr=0.1), masters=masters)
    (opt.optimizer if directly else opt).add_param_group({"params": masters[2:], "lr": 0.2})
    train(opt, model)
    for parameter, master in zip(model.parameters(), masters, strict=True):
        oracle.assert_equal([parameter.detach()], rounded([master]))
        assert not torch.equal(master.detach(), master.detach().bfloat16().float())


@pytest.mark.parametrize("in_backward", [False, True], ids=["afterwards", "in-backward"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_memory_of_masters_is_as_predicted(fused, window, in_backward, monkeypatch):
    """As docs/optimizer.md says; per parameter, beside the optimizer's own state."""
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", oracle.ONE_BY_ONE)
    count, layers = 2**18, 16
    parameters = [
        nn.Parameter(torch.randn(count // layers, dtype=torch.bfloat16)) for _ in range(layers)
    ]
    made = []
    assert peak_memory(lambda: made.extend(accumext.masters(parameters))) == 4 * count
    adamw = torch.optim.AdamW(made, fused=fused, foreach=None if fused else False)
    options = {"masters": made, "max_norm": 1.0, "accumulate_in_backward": in_backward}
    opt = AccumulatingOptimizer(adamw, window=window, **options)

    def step():
        for _ in range(window):
            oracle.one_call(opt, sum(p.sum() for p in parameters))

    step()
    assert opt.last.clip_coef < 1.0
    # The pass makes half gradients beside the float32 sums, which the step multiplies in place. One
    # layer's is little, and so is what the step takes of a layer.
    if in_backward:
        assert peak_memory(step) < (4 + 1) * count
    else:
        assert peak_memory(step) == pytest.approx((4 + 2) * count, rel=0.1)
