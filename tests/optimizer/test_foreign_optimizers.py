"""Optimizers of other packages, each kind as the least class that does what they do."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import optimizer_oracle as oracle
from torch import nn

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = oracle.make_batches(6)


def held_by(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


# Optimizers that put another tensor into `.grad` during their step


class Copies(torch.optim.SGD):
    """As bitsandbytes does where a gradient is not contiguous."""

    def step(self, closure=None):
        loss = super().step(closure)
        for p in held_by(self):
            p.grad = None if p.grad is None else p.grad.clone()
        return loss


class Projects(torch.optim.SGD):
    """As the 8-bit classes of GaLore and APOLLO: the gradient that is left has another shape."""

    def step(self, closure=None):
        loss = super().step(closure)
        for p in held_by(self):
            if p.grad is not None:
                whole, p.grad = p.data, None
                p.data = whole.new_zeros(1)
                p.grad = whole.new_ones(1)
                p.data = whole
        return loss


class Clears(torch.optim.SGD):
    """As heavyball."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad()
        return loss


REBINDING = {cls.__name__: partial(cls, lr=0.1, momentum=0.9) for cls in (Copies, Projects, Clears)}


@pytest.mark.parametrize("kind", ["float64", "half", "masters", "a closure"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("make", REBINDING.values(), ids=REBINDING)
def test_what_a_step_leaves_in_grad_is_no_gradient(make, window, kind):
    """No call of zero_grad clears it. By hand every step is given the gradient of its window."""
    dtype = torch.float64 if kind in ("float64", "a closure") else torch.bfloat16
    model = oracle.make_model(dtype)
    masters = accumext.masters(model.parameters()) if kind == "masters" else None
    opt = AccumulatingOptimizer(
        make(masters or model.parameters()), window=window, max_norm=1.0, masters=masters
    )
    for batch in BATCHES:
        loss = oracle.loss_of(model, batch.to(dtype))
        if kind == "a closure":
            opt.step(lambda loss=loss: opt.backward(loss))
        else:
            opt.backward(loss)
            opt.step()
        if opt.stepped and window > 1:
            assert all(p.grad is None for p in (*model.parameters(), *held_by(opt)))
    expected = oracle.train_by_hand(
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        [batch.to(dtype) for batch in BATCHES],
        window,
        max_norm=1.0,
        dtype=dtype,
        wide=torch.float32 if masters else None,
    )
    # Half precision is rounded where the norm, found in another order, has its last bit.
    tolerance = {torch.float64: oracle.EXACT, torch.bfloat16: 1e-2}[dtype]
    oracle.assert_close([p.detach() for p in held_by(opt)], expected, tolerance)


def test_zeros_that_a_step_puts_beside_the_gradients_are_none():
    """As muon gives them to parameters without a gradient."""

    def fill(optimizer, *_):
        for p in held_by(optimizer):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    parameters = [oracle.scalar(), oracle.scalar()]
    opt = AccumulatingOptimizer(oracle.sgd(parameters), window=2)
    opt.register_step_pre_hook(fill)
    for _ in range(2):
        opt.backward(parameters[0] * 1.0)
        opt.step()
    assert [p.grad for p in parameters] == [None, None]
    assert [p.item() for p in parameters] == [-1.0, 0.0]


def test_what_lies_beside_the_gradients_of_a_window_stays():
    """Zeros that `zero_grad` left, of a parameter that has no gradient in the window."""
    parameters = [oracle.scalar(), oracle.scalar()]
    opt = AccumulatingOptimizer(oracle.sgd(parameters))
    with opt.micro_batch():
        (parameters[0] * 1.0).backward()
    parameters[1].grad = zeros = torch.zeros_like(parameters[1])
    opt.zero_grad(set_to_none=False)
    opt.flush()
    assert parameters[1].grad is zeros
    assert [p.item() for p in parameters] == [-1.0, 0.0]


def test_a_second_step_finds_that_what_was_left_is_used():
    parameter = oracle.scalar()
    opt = AccumulatingOptimizer(Copies([parameter], lr=1.0))
    opt.backward(parameter * 2.0)
    opt.step()
    opt.step()
    assert parameter.item() == -2.0


class Fails(Copies):
    """It has put another tensor there before it raises."""

    fails = True

    def step(self, closure=None):
        for p in held_by(self):
            p.grad = p.grad * 100.0
        if self.fails:
            raise ZeroDivisionError
        for p in held_by(self):
            p.grad = p.grad / 100.0
        return super().step(closure)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_that_fails_leaves_the_gradient_that_it_was_given(window, max_norm):
    parameter = oracle.scalar()
    opt = AccumulatingOptimizer(Fails([parameter], lr=1.0), window=window, max_norm=max_norm)
    for _ in range(window - 1):
        opt.backward(parameter * 2.0)
        opt.step()
    opt.backward(parameter * 2.0)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    Fails.fails = False
    opt.flush()
    Fails.fails = True
    assert opt.stepped
    assert parameter.item() == pytest.approx(-2.0 if max_norm is None else -1.0, rel=1e-5)


# Groups whose entries are the optimizer's own affair


class Own(torch.optim.Optimizer):
    """A step of the gradient itself, whatever its groups hold."""

    def __init__(self, params, **group):
        super().__init__(params, group)

    @torch.no_grad()
    def step(self, closure=None):
        for p in held_by(self):
            p.sub_(0 if p.grad is None else p.grad)


ENTRIES = [
    *({"lr": lr} for lr in (None, "auto", object(), float("nan"), 1j, [0.1], 10**400, len)),
    *({"lr": torch.tensor(lr)} for lr in ([0.1, 0.2], [], 1j)),
    {"lr": torch.tensor(0.1, device="meta")},
    {},
    *({"lr": 0.1, "param_names": names} for names in (None, 3, ["a", "b"], len)),
]


@pytest.mark.parametrize("entries", ENTRIES)
def test_any_entry_of_a_group(entries):
    """Rates that are no numbers are not compared, names that do not fit are not used."""
    parameter = oracle.scalar()
    opt = AccumulatingOptimizer(Own([parameter], **entries), window=2)
    for factor in (1.0, 3.0, oracle.INF, 1.0):
        opt.step(lambda factor=factor: opt.backward(parameter * factor))
    assert parameter.item() == -2.0
    assert opt.last.skipped
    assert opt.last.nonfinite == [0]


# Optimizers around an optimizer that never call `Optimizer.__init__`, and so run no hooks


class Around(torch.optim.Optimizer):
    """As torch's PostLocalSGDOptimizer and AcceleratedOptimizer."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler = optimizer, scaler

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self):
        self.optimizer.step()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 3])
def test_an_optimizer_without_hooks(window, dtype, fused):
    """In half precision on masters, which a fused kernel writes without a sign of it."""
    model = oracle.make_model(dtype)
    masters = accumext.masters(model.parameters()) if dtype == torch.bfloat16 else None
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=fused)
    around = Around(sgd(masters or model.parameters()))
    opt = AccumulatingOptimizer(around, window=window, masters=masters)
    batches = [batch.to(dtype) for batch in BATCHES]
    oracle.run(opt, model, batches)
    wide = torch.float32 if masters else None
    expected = oracle.train_by_hand(sgd, batches, window, dtype=dtype, wide=wide)
    # Where gradients are of half precision another order of float32 sums shows in the last bits.
    oracle.assert_close([p.detach() for p in held_by(opt)], expected, 1e-4 if wide else 1e-12)
    oracle.assert_equal(oracle.parameters_of(model), [p.detach().to(dtype) for p in held_by(opt)])


def test_an_optimizer_without_groups_is_refused():
    """As SafeFP16Optimizer of pytorch-optimizer."""
    text = f"{oracle.OP}: optimizer must have param_groups, got Optimizer. Wrap the optimizer that"
    with pytest.raises(TypeError, match=oracle.says(text)):
        AccumulatingOptimizer(torch.optim.Optimizer.__new__(torch.optim.Optimizer))


def test_a_step_without_hooks_that_fails_leaves_the_window():
    parameter = oracle.scalar()
    inner = oracle.sgd([parameter])
    opt = AccumulatingOptimizer(Around(inner), window=2)
    fails = inner.register_step_pre_hook(lambda *_: 1 / 0)
    opt.backward(parameter * 1.0)
    opt.backward(parameter * 3.0)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    fails.remove()
    opt.step()
    assert parameter.item() == -2.0


@pytest.mark.parametrize(
    ("scaler", "steps", "reason"),
    [
        (torch.amp.GradScaler("cpu"), 1, "a GradScaler"),
        (None, 4, "gradient_accumulation_steps=4"),
        (None, 1, None),
    ],
)
def test_an_optimizer_that_accelerate_has_prepared(scaler, steps, reason, monkeypatch):
    state = SimpleNamespace(GradientState=lambda: SimpleNamespace(num_steps=steps))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    module = SimpleNamespace(AcceleratedOptimizer=Around)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", module)
    prepared = Around(oracle.sgd([oracle.scalar()]), scaler)
    if reason is None:
        assert AccumulatingOptimizer(prepared).optimizer is prepared
        return
    text = (
        f"{oracle.OP}: optimizer must be wrapped before Accelerate prepares it, got "
        f"AcceleratedOptimizer with {reason}. Wrap the inner one, then prepare that: "
        f"accelerator.prepare({oracle.OP}(optimizer, ...))"
    )
    with pytest.raises(ValueError, match=oracle.says(text)):
        AccumulatingOptimizer(prepared)


@pytest.mark.parametrize(("name", "value", "got"), [("window", 2, "2"), ("max_norm", 1.0, "float")])
def test_an_optimizer_of_opacus_takes_a_window_of_one(name, value, got, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.optimizers", SimpleNamespace(DPOptimizer=Around))
    private = Around(oracle.sgd([oracle.scalar()]))
    only = 1 if name == "window" else None
    text = (
        f"{oracle.OP}: {name} must be {only} for DPOptimizer, which steps on gradients of single "
        f"samples, not on .grad, got {got}. Opacus accumulates by itself, in BatchMemoryManager"
    )
    with pytest.raises(ValueError, match=oracle.says(text)):
        AccumulatingOptimizer(private, **{name: value})
    opt = AccumulatingOptimizer(private)
    with pytest.raises(ValueError, match=oracle.says(text)):
        setattr(opt, name, value)


# `zero_grad` with another signature, and what it leaves


class Zeroing(torch.optim.SGD):
    """As apex and fairscale: it takes nothing, and this one leaves zeros."""

    def zero_grad(self):
        super().zero_grad(set_to_none=False)


class ByName(torch.optim.SGD):
    def zero_grad(self, *, set_to_none=False):
        super().zero_grad(set_to_none)


class Anything(torch.optim.SGD):
    def zero_grad(self, **kwargs):
        super().zero_grad(**kwargs)


class ByAnotherName(torch.optim.SGD):
    def zero_grad(self, verbose=False):
        assert not verbose
        super().zero_grad()


def replaced(parameters, **options):
    optimizer = torch.optim.SGD(parameters, **options)
    clear = optimizer.zero_grad
    optimizer.zero_grad = lambda: clear(set_to_none=False)
    return optimizer


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("make", [Zeroing, ByName, Anything, ByAnotherName, replaced])
def test_zero_grad_of_any_signature(make, window):
    """Zeros that it leaves are no gradient to `flush`, which would step on by the momentum."""
    model = oracle.make_model()
    make = partial(make, lr=0.1, momentum=0.9)
    opt = AccumulatingOptimizer(make(model.parameters()), window=window)
    oracle.loss_of(model, BATCHES[0]).backward()
    opt.zero_grad()
    opt.flush()
    assert not opt.stepped
    model.zero_grad()
    oracle.run(opt, model, BATCHES, oracle.own_backward)
    for batch in BATCHES:
        opt.zero_grad()
        oracle.one_call(opt, oracle.loss_of(model, batch))
        opt.zero_grad()
    opt.zero_grad(set_to_none=False)
    opt.flush()
    assert not opt.stepped
    expected = oracle.train_by_hand(
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), [*BATCHES, *BATCHES], window
    )
    oracle.assert_close(oracle.parameters_of(model), expected)


class Sums(torch.optim.SGD):
    """As AdaScale, and Opacus: it keeps something of every backward pass until zero_grad."""

    passes = 0

    def zero_grad(self):
        super().zero_grad()
        self.passes = 0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("masters", [False, True])
def test_a_zero_grad_that_clears_more_is_called_between_windows_alone(masters, set_to_none):
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    copies = accumext.masters([parameter]) if masters else None
    sums = Sums(copies or [parameter], lr=1.0)
    opt = AccumulatingOptimizer(sums, window=3, masters=copies)
    for passes in (1, 2, 3, 1, 2, 3):
        sums.passes += 1
        assert sums.passes == passes
        parameter.sum().backward()
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)
        parameter.sum().backward()
        opt.zero_grad(set_to_none=set_to_none)
        assert parameter.grad is None or not parameter.grad.any()
    assert parameter.tolist() == [-2.0, -2.0]


# Steps that need a closure although their signature has a default, or the graph of a gradient


class Sharpness(torch.optim.SGD):
    """As SAM: a second gradient, at other parameters."""

    def step(self, closure=None):
        if closure is None:
            raise ValueError("SAM requires closure.")
        with torch.no_grad():
            for p in held_by(self):
                p.add_(p.grad)
                p.grad = None
        closure()
        return super().step()


class Calling(torch.optim.SGD):
    """As GSAM: it does not look whether there is one."""

    def step(self, closure=None):
        loss = closure()
        super().step()
        return loss


class Named(Sharpness):
    """It takes the closure by name alone."""

    def step(self, *, closure=None):
        return super().step(closure)


class Second(torch.optim.SGD):
    """As AdaHessian."""

    def step(self, closure=None):
        parameters = held_by(self)
        total = torch.stack([p.grad.sum() for p in parameters]).sum()
        second = torch.autograd.grad(total, parameters)
        with torch.no_grad():
            for p, curvature in zip(parameters, second, strict=True):
                p.sub_(p.grad / (1 + curvature.abs()))


CLOSURES = {  # settings, and whether an opt.backward comes before
    "a window": ({"window": 2}, False),
    "a clip": ({"max_norm": 1.0}, False),
    "a scaler": ({"scaler": torch.amp.GradScaler("cpu")}, False),
    "opt.backward": ({}, True),
}


@pytest.mark.parametrize("make", [Sharpness, Calling])
@pytest.mark.parametrize("case", CLOSURES)
def test_a_closure_that_the_step_itself_needs_is_refused_in_words(make, case):
    options, before = CLOSURES[case]
    model = oracle.make_model()
    opt = AccumulatingOptimizer(make(model.parameters(), lr=0.1), **options)
    started = [p.clone() for p in oracle.parameters_of(model)]

    def closure():
        loss = oracle.loss_of(model, BATCHES[0])
        (loss if opt.scaler is None else opt.scaler.scale(loss)).backward()
        return loss

    text = (
        f"{oracle.OP}.step: the optimizer must step without the closure, which was evaluated "
        f"before, got {make.__name__}. {make.__name__} gets it with window=1"
    )
    if before:
        opt.backward(oracle.loss_of(model, BATCHES[0]))
    for _ in range(opt.window - 1):
        opt.step(closure)
    with pytest.raises(RuntimeError, match=oracle.says(text)) as raised:
        opt.step(closure)
    assert raised.value.__cause__ is not None
    oracle.assert_equal(oracle.parameters_of(model), started)
    opt.discard()


@pytest.mark.parametrize("make", [Sharpness, Calling, Named])
def test_a_step_that_needs_its_closure_has_it_in_a_window_of_one(make):
    def train(wrap):
        model = oracle.make_model()
        opt = wrap(make(model.parameters(), lr=0.1))
        for batch in BATCHES:
            oracle.loss_of(model, batch).backward()
            opt.step(closure=lambda batch=batch: oracle.loss_of(model, batch).backward())
            opt.zero_grad()
        return oracle.parameters_of(model)

    oracle.assert_equal(train(AccumulatingOptimizer), train(lambda optimizer: optimizer))


class TwoSteps(Sharpness):
    """As SAM without a closure."""

    def first_step(self):
        with torch.no_grad():
            for p in held_by(self):
                p.add_(p.grad)

    def second_step(self):
        torch.optim.SGD.step(self)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cleared", ["by the wrapper", "by the optimizer", "not"])
def test_a_step_of_another_name_uses_the_gradient_of_backward_up(cleared):
    def train(wrap):
        model = oracle.make_model()
        bare = TwoSteps(model.parameters(), lr=0.1)
        opt = wrap(bare)
        for batch in BATCHES:
            for step in (opt.first_step, opt.second_step):
                if wrap is AccumulatingOptimizer:
                    opt.backward(oracle.loss_of(model, batch))
                else:
                    opt.zero_grad()
                    oracle.loss_of(model, batch).backward()
                step()
                if cleared != "not":
                    (opt if cleared == "by the wrapper" else bare).zero_grad()
        return oracle.parameters_of(model)

    oracle.assert_equal(train(AccumulatingOptimizer), train(lambda optimizer: optimizer))


def test_an_error_of_a_closure_or_of_a_step_without_one_is_its_own():
    parameter = oracle.scalar()
    for make in (Sharpness, Calling):
        opt = AccumulatingOptimizer(make([parameter], lr=1.0))
        opt.backward(parameter * 1.0)
        with pytest.raises((ValueError, TypeError)):
            opt.step()
        with pytest.raises(KeyError, match="closure"):
            opt.step(lambda: {}["closure"])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_differentiates_gradients_has_their_graph_in_a_window_of_one(count):
    def train(wrap):
        model = oracle.make_model()
        opt = wrap(Second(model.parameters()))
        for number, batch in enumerate(BATCHES, 1):
            (oracle.loss_of(model, batch) / count).backward(create_graph=True)
            if number % count == 0:
                opt.step()
                opt.zero_grad()
        return oracle.parameters_of(model)

    oracle.assert_equal(train(AccumulatingOptimizer), train(lambda optimizer: optimizer))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("case", ["a window", "masters"])
def test_a_step_that_differentiates_gradients_is_refused_their_sums(case):
    dtype = torch.float64 if case == "a window" else torch.bfloat16
    model = oracle.make_model(dtype)
    masters = accumext.masters(model.parameters()) if case == "masters" else None
    window = 2 if case == "a window" else 1
    opt = AccumulatingOptimizer(
        Second(masters or model.parameters()), window=window, masters=masters
    )
    text = (
        f"{oracle.OP}.step: the optimizer must step without the graph of .grad, which the sums of "
        "a window do not have, got Second. Pass window=1, without masters, and add gradients up by "
        "hand: (loss / n).backward(create_graph=True) n times, then opt.step()"
    )
    for batch in BATCHES[: window - 1]:
        oracle.loss_of(model, batch.to(dtype)).backward(create_graph=True)
        opt.step()
    oracle.loss_of(model, BATCHES[0].to(dtype)).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=oracle.says(text)):
        opt.step()
    opt.discard()
