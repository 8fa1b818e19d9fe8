"""Optimizers.

Every class that torch.optim exports, beside itself without the wrapper.
"""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    CLASSES,
    WITHOUT_CLOSURE,
    accepts,
    batches_for,
    cases,
    make_optimizer,
    model_for,
)
from support.optimizer_oracle import (
    accumulated,
    adam,
    assert_close,
    assert_equal,
    closure_of,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    one_call,
    own_backward,
    parameters_of,
    train_by_hand,
    windows_of,
    wrapped,
)
from torch import nn
from torch.optim import lr_scheduler

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(9)


def test_it_is_an_optimizer_and_owns_nothing_of_one():
    """`isinstance(opt, Optimizer)`, with the wrapped one's groups, state and defaults"""
    model = make_model()
    opt = wrapped(model, adam, window=3)
    one_call(opt, loss_of(model, BATCHES[0]))
    for _ in range(2):  # the second time after a load, which rebinds them
        assert isinstance(opt, torch.optim.Optimizer)
        assert opt.param_groups is opt.optimizer.param_groups
        assert opt.state is opt.optimizer.state
        assert opt.defaults is opt.optimizer.defaults
        opt.load_state_dict(state_dict=opt.state_dict())
    assert "window=3" in repr(opt)
    assert "Adam" in repr(opt)


@pytest.mark.parametrize("loop", [one_call, own_backward])
@pytest.mark.parametrize(("name", "variant"), cases(WITHOUT_CLOSURE))
def test_a_window_of_one_is_the_bare_optimizer(name, variant, loop):
    """`window=1` is every class of `torch.optim` bit for bit, `foreach` and `fused` too"""
    batches = batches_for(name, [5] * 6, torch.float32)

    def train(wrap, loop):
        model = model_for(name, torch.float32)
        opt = wrap(make_optimizer(name, model.parameters(), variant))
        for batch in batches:
            loop(opt, loss_of(model, batch))
        return parameters_of(model)

    expected = train(lambda optimizer: optimizer, own_backward)
    assert not torch.equal(expected[0], parameters_of(model_for(name, torch.float32))[0])
    assert_equal(train(AccumulatingOptimizer, loop), expected)


@pytest.mark.parametrize("loop", [one_call, accumulated])
@pytest.mark.parametrize(("name", "variant"), cases(WITHOUT_CLOSURE))
def test_a_window_is_one_large_batch(name, variant, loop):
    """`window=3` is one large batch for every class: unequal weights, a partial last window"""
    sizes = [2, 3, 5, 4, 1, 3, 6, 2]
    batches = batches_for(name, sizes)
    reference = model_for(name)
    bare = make_optimizer(name, reference.parameters(), variant)
    for some in windows_of(batches, 3):
        own_backward(bare, loss_of(reference, torch.cat(some)))

    model = model_for(name)
    opt = AccumulatingOptimizer(make_optimizer(name, model.parameters(), variant), window=3)
    for batch, size in zip(batches, sizes):
        loop(opt, loss_of(model, batch), weight=size)
    opt.flush()
    assert opt.last.micro_batches == 2
    assert_close(parameters_of(model), parameters_of(reference))


@pytest.mark.parametrize("name", [name for name in CLASSES if accepts(name, "differentiable")])
def test_gradients_flow_through_a_differentiable_step(name):
    """`differentiable=True`: gradients flow through the step of a window of one"""

    def meta_gradients(wrap):
        start = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        grad = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        parameter = start.clone()
        opt = wrap(make_optimizer(name, [parameter], differentiable=True))
        parameter.grad = 1.5 * grad
        opt.step()
        meta = torch.autograd.grad(parameter.square().sum(), [start, grad])
        return [parameter.detach(), *meta]

    expected = meta_gradients(lambda optimizer: optimizer)
    assert expected[1].any()
    assert_equal(meta_gradients(AccumulatingOptimizer), expected)


@pytest.mark.parametrize("names", ["own", "raw"])
@pytest.mark.parametrize("window", [1, 3])
def test_the_closure_runs_once_per_step(window, names):
    """A closure runs once in every `step`, with gradients enabled, whatever the window"""
    model = make_model()
    opt = wrapped(model, adam, window=window)
    calls = []
    for batch in BATCHES:

        def closure(batch=batch):
            opt.zero_grad()
            loss = loss_of(model, batch)
            if names == "own":
                opt.backward(loss)
            else:
                loss.backward()
            calls.append(loss.item())
            return loss

        with torch.no_grad():
            assert opt.step(closure).item() == calls[-1]
    assert len(calls) == len(BATCHES)
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES, window))


@pytest.mark.parametrize(("name", "variant"), cases(WITHOUT_CLOSURE))
def test_steps_with_a_closure_without_gradients_and_on_the_same_ones(name, variant):
    """Closures, steps without gradients and on the same ones again: bit for bit, hooks too"""

    def train(wrap):
        model, calls = model_for(name), []
        opt = wrap(make_optimizer(name, model.parameters(), variant))
        opt.register_step_pre_hook(lambda *_: calls.append("pre"))
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        batches = batches_for(name, [4, 5])
        closure = closure_of(opt, model, batches[0])
        returned = [opt.step(closure).item() for _ in range(2)]
        opt.zero_grad()
        opt.step()
        for batch in batches:
            loss_of(model, batch).backward()
            opt.step()
            opt.step()
        if name != "SparseAdam":  # which does not take a dense zero
            opt.zero_grad(set_to_none=False)
            opt.step()
        return parameters_of(model), [returned, calls]

    (expected, facts), (actual, ours) = train(lambda bare: bare), train(AccumulatingOptimizer)
    assert_equal(actual, expected)
    assert ours == facts


def test_lbfgs_is_handed_its_closure():
    """LBFGS with `window=1`: its closure runs as often as it likes, bit for bit"""

    results = []
    for wrap in (lambda bare: bare, AccumulatingOptimizer):
        model, losses = make_model(), []
        opt = wrap(make_optimizer("LBFGS", model.parameters()))
        closure = closure_of(opt, model, BATCHES[0], losses)
        values = [opt.step(closure).item() for _ in range(3)]
        results.append((parameters_of(model), [losses, values]))
    (expected, seen), (actual, ours) = results
    assert_equal(actual, expected)
    assert ours == seen
    assert len(seen[0]) > 3
    assert opt.stepped
    assert opt.stats()["skipped"] == 0.0


def test_lbfgs_has_no_windows():
    """LBFGS with `window` above 1, a clip or a scaler is refused in words"""
    lbfgs = make_optimizer("LBFGS", make_model().parameters())
    for name, value in {"window": 2, "max_norm": 1.0, "scaler": growing_scaler()}.items():
        text = rf"^AccumulatingOptimizer: {name} must be \w+ for LBFGS, which needs a closure, got"
        with pytest.raises(ValueError, match=text):
            AccumulatingOptimizer(lbfgs, **{name: value})


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. (2024): parameters are y while training, the average x otherwise."""

    def __init__(self, params, lr=0.2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _swap(self, training, weight):
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.detach().lerp_(self.state[p]["z"], weight(group["beta"]))
                group["training"] = training

    def train(self):
        self._swap(True, lambda beta: 1 - beta)

    def eval(self):
        self._swap(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            share, lr, beta = 1 / group["k"], group["lr"], group["beta"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)


@pytest.mark.parametrize("window", [1, 3])
def test_schedule_free_optimizers(window):
    """Schedule-free optimizers: `train()` and `eval()` reach them, also inside a window"""
    reference, model = make_model(), make_model()
    bare = ScheduleFree(reference.parameters())
    opt = wrapped(model, ScheduleFree, window=window)
    for some in windows_of(BATCHES, window):
        own_backward(bare, loss_of(reference, torch.cat(some)))
    bare.eval()
    for i, batch in enumerate(BATCHES):
        opt.backward(loss_of(model, batch))
        opt.eval()
        if (i + 1) % window == 0:
            with pytest.raises(RuntimeError, match="not in train mode"):
                opt.step()
        opt.train()
        opt.step()
    opt.eval()
    assert_close(parameters_of(model), parameters_of(reference))
    assert not hasattr(wrapped(model, adam), "train")


# The compiler's own imports use what torch has deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "window", "max_norm", "scheduled", "scaled"),
    [
        ("plain", 1, None, "before", False),
        ("plain", 3, 1e-3, "before", True),
        ("plain", 3, None, "after", False),
        ("capturable", 3, 1e-3, "after", False),  # on a CPU only compiled
        ("fused", 3, 1e-3, "before", False),  # whose kernel torch does not compile
    ],
)
def test_a_compiled_step(kind, window, max_norm, scheduled, scaled):
    """`torch.compile` of `opt.step`, scheduler made before or after: no recompilation per step"""
    compilations = torch._dynamo.utils.counters["frames"]
    batches = windows_of(make_batches(12 * window), window)
    options = {} if kind == "plain" else {kind: True}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None

    def train(wrap, run_window):
        torch._dynamo.reset()
        model, graphs, counts = make_model(), [], []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        opt = wrap(make_optimizer("Adam", model.parameters(), "tensor-lr", **options))
        if scheduled == "before":
            scheduler = lr_scheduler.ExponentialLR(opt, 0.9)
            step = torch.compile(opt.step, backend=backend)
        else:  # it replaces `step`, so what is compiled has to look that up
            step = torch.compile(lambda: opt.step(), backend=backend)
        for number, some in enumerate(batches):
            run_window(opt, model, some, step)
            if scheduled == "after" and number == 0:
                scheduler = lr_scheduler.ExponentialLR(opt, 0.9)
            else:
                scheduler.step()
            counts.append(compilations["total"])
        assert kind == "fused" or any("addcdiv" in code for code in graphs)
        return parameters_of(model), counts

    def joined(opt, model, some, step):
        opt.zero_grad()
        loss_of(model, torch.cat(some)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        step()

    def micro_batches(opt, model, some, step):
        for batch in some:
            loss = loss_of(model, batch)
            (scaler.scale(loss) if scaled else loss).backward()
            step()
            opt.zero_grad()

    expected, _ = train(lambda bare: bare, joined)
    actual, counts = train(
        lambda bare: AccumulatingOptimizer(bare, window=window, max_norm=max_norm, scaler=scaler),
        micro_batches,
    )
    assert_close(actual, expected)
    assert counts[-1] == counts[3] > 0
