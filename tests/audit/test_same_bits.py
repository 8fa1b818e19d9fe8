"""What an audit leaves as it is: every bit of the loop, torch, and the user's objects."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import right_kinds
import right_loops
import torch
import wrong_calls
import wrong_loops
import wrong_models
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer, lr_scheduler
from wrong_loops import N, network, of_rows, rows, scaler_of, sgd

import accumext

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning"),
]


def a_pass_that_fails(watch: Callable[..., Any]) -> Any:
    """A micro-batch whose backward pass raises half way, and a loop that goes on."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            hidden = model[1](model[0](x))
            if i % N == 2:
                hidden.register_hook(lambda grad: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                (cross_entropy(model[2](hidden), y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


LOOPS = [
    a_pass_that_fails,
    right_loops.amp_with_clipping,
    right_loops.amp_with_accumulation,
    right_loops.accumulation,
    right_loops.mean_over_tokens,
    right_loops.discriminator,
    right_loops.variational_autoencoder,  # draws from torch's generator
    right_loops.language_model,
    right_loops.lbfgs,
    right_loops.window_of_the_wrapper,
    right_loops.half_precision_in_the_wrapper,
    right_kinds.checkpointed,  # dropout, in-place activations
    right_kinds.gradient_penalty,
    right_kinds.fused,
    right_kinds.sparse_gradients,
    right_kinds.step_in_backward,
    wrong_calls.clip_after_every_backward,
    wrong_calls.clip_of_scaled_gradients,
    wrong_calls.step_on_nan,
    wrong_calls.update_with_every_micro_batch,
    wrong_loops.running_total_with_retain_graph,
    wrong_loops.zero_grad_forgotten,
    wrong_loops.gradients_freed_for_a_validation,
    wrong_models.sum_of_many_in_bfloat16,
    wrong_models.backward_at_every_token,
    wrong_models.measured_truncation,
]


class Unwatched:
    """Nobody looks on."""

    def measure_truncation(self, *args: Any, **kwargs: Any) -> None:
        """Not measured."""


def end_of(loop: Callable[..., Any], watched: bool) -> tuple[list[Tensor], list[Any]]:
    """Parameters, buffers and state of the optimizer as bytes, and the generators, afterwards."""
    kept: list[Any] = []

    def watch(model: nn.Module, optimizer: Any, **options: Any) -> Any:
        kept.append((model, optimizer))
        if watched:
            return accumext.audit(model, optimizer, **options)
        return contextlib.nullcontext(Unwatched())

    random.seed(0)
    torch.manual_seed(0)
    loop(watch)
    model, optimizer = kept[-1]
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors, [torch.get_rng_state(), random.getstate()]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_bits(loop: Callable[..., Any]) -> None:
    """Parameters, gradients, optimizer and generators are equal bit by bit, NaN as well"""
    (plain, generators), (seen, after) = end_of(loop, watched=False), end_of(loop, watched=True)
    assert len(plain) == len(seen)
    for a, b in zip(plain, seen):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = (t.detach().to_dense().contiguous().view(-1) for t in (a, b))
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(generators[0], after[0])
    assert generators[1] == after[1]


# --- what torch and the user's objects have before and afterwards ---------------------------------

CLASSES = [
    Tensor, nn.Module, nn.Linear, Optimizer, torch.optim.SGD, torch.optim.Adam,
    torch.amp.GradScaler, torch.cuda.amp.GradScaler, lr_scheduler.LRScheduler,
    lr_scheduler.ExponentialLR, lr_scheduler.ReduceLROnPlateau, lr_scheduler.SequentialLR,
    lr_scheduler.OneCycleLR, nn.parallel.DistributedDataParallel, accumext.AccumulatingOptimizer,
    torch.autograd.Function,
]  # fmt: skip
REGISTERING = [sys.modules["torch.optim.optimizer"], torch.nn.modules.module]
MODULES = [
    torch, torch.autograd, torch.autograd.graph, torch.nn.utils, torch.nn.utils.clip_grad,
    torch.nn.functional, torch.optim, torch.optim.lr_scheduler, torch.amp, torch.amp.grad_scaler,
    torch.utils.checkpoint, torch.distributed, accumext, sys.modules["accumext.tbptt"],
    *REGISTERING,
]  # fmt: skip


def identities() -> dict[str, int]:
    """Every attribute of torch's classes and modules by its identity."""
    found = {}
    for owner in (*CLASSES, *MODULES):
        for name, value in vars(owner).items():
            if not name.startswith("__") or name in ("__init__", "__call__", "__setattr__"):
                found[f"{owner.__name__}.{name}"] = id(value)
    return found


def registries() -> dict[str, list[Any]]:
    """The hooks that torch calls for all modules and optimizers, and the modes that are on."""
    found = {}
    for module in REGISTERING:
        for name, value in vars(module).items():
            if name.startswith("_global") and hasattr(value, "items"):
                found[name] = list(value.items())
    found["modes"] = [
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_grad_enabled(),
    ]
    return found


def hooks(model: nn.Module, optimizer: Optimizer, schedule: Any, scaler: Any) -> list[Any]:
    """Hooks and attributes of the user's own objects."""
    found: list[Any] = []
    for parameter in model.parameters():
        of_tensor = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found += [list((h or {}).items()) for h in of_tensor]
        found.append(sorted(vars(parameter)))
    for owner in (*model.modules(), optimizer):
        for name, value in vars(owner).items():
            if "hooks" in name:
                found.append((name, list(value.items())))
        found.append(sorted(vars(owner)))
    for owner in (optimizer, schedule, scaler):
        found.append({n: id(v) for n, v in vars(owner).items() if callable(v)})
    return found


class Stop(Exception):
    """An exception of the user's."""


@pytest.mark.parametrize("raising", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("windows", [1, 100], ids=["seen", "left-early"])
def test_all_is_put_back(raising: bool, windows: int) -> None:
    """Classes, modules, registries, hooks and attributes, by identity"""
    model, scaler = network(), scaler_of()
    optimizer = sgd(model)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loop() -> None:
        for i, (x, y) in enumerate(rows(2 * N + 2)):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
        if raising:
            raise Stop

    with contextlib.suppress(Stop):
        loop()  # what a loop leaves by itself
    before = identities(), registries(), hooks(model, optimizer, schedule, scaler)
    with contextlib.ExitStack() as stack:
        if raising:
            stack.enter_context(pytest.raises(Stop))
        with accumext.audit(model, optimizer, windows=windows) as audit:
            inside = identities(), registries(), hooks(model, optimizer, schedule, scaler)
            loop()
    after = identities(), registries(), hooks(model, optimizer, schedule, scaler)
    assert inside != before  # or this test would see nothing
    for seen, expected in zip(after, before):
        assert seen == expected
    assert audit.findings == (), str(audit)


def test_an_optimizer_made_inside_is_put_back() -> None:
    """No attribute and no hook of it stays"""
    bare = sgd(network())
    with accumext.audit():
        model = network()
        optimizer = sgd(model)
        of_rows(model, *rows(1)[0]).backward()
        optimizer.step()
    assert set(vars(optimizer)) == set(vars(bare))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


@contextlib.contextmanager
def audited(watched: bool, model: nn.Module) -> Iterator[None]:
    with accumext.audit(model, sgd(model)) if watched else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "audit"])
def test_a_saved_tensor_that_is_written_to(watched: bool) -> None:
    """The same error as without an audit"""
    model, (x, y) = network(), rows(1)[0]
    with audited(watched, model):
        hidden = model[1](model[0](x))
        loss = cross_entropy(model[2](hidden), y)
        hidden.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "audit"])
def test_a_second_backward(watched: bool) -> None:
    """The same error as without an audit"""
    model = network()
    with audited(watched, model):
        loss = of_rows(model, *rows(1)[0])
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_the_graph_is_freed_in_the_block() -> None:
    """Nothing of a pass lives longer than without an audit: its loss, its activations"""
    model = network()
    optimizer = sgd(model)
    alive = []
    with accumext.audit(model, optimizer):
        for x, y in rows(4):
            hidden = model[0](x)
            loss = cross_entropy(model[2](model[1](hidden)), y)
            loss.backward()
            alive += [weakref.ref(hidden), weakref.ref(loss)]
            del hidden, loss
            optimizer.step()
            optimizer.zero_grad()
            assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("make", [sgd, lambda m: accumext.AccumulatingOptimizer(sgd(m))])
def test_nothing_is_kept_alive(make: Callable[[nn.Module], Any]) -> None:
    """Model, parameters and optimizer die while the closed audit lives"""
    model = network()
    optimizer = make(model)
    with accumext.audit(model, optimizer) as audit:
        for x, y in rows(6):
            of_rows(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    references = [weakref.ref(t) for t in (model, optimizer, *model.parameters())]
    del model, optimizer, x, y
    gc.collect()
    assert all(reference() is None for reference in references)
    assert audit.findings == ()
    assert str(audit)


def test_a_block_is_entered_once() -> None:
    """Neither while it is open, nor when it is closed"""
    model = network()
    audit = accumext.audit(model, sgd(model))
    with audit:
        with pytest.raises(RuntimeError, match=r"^audit: "), audit:
            pass
        of_rows(model, *rows(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"^audit: "), audit:
        pass


def test_an_audit_in_an_audit() -> None:
    """Either it is refused and nothing has changed, or both see their own"""
    before = identities(), registries()
    model, inner = network(), network()
    optimizer, other, second = sgd(model), sgd(inner), None
    with accumext.audit(model, optimizer) as audit:
        with contextlib.suppress(RuntimeError), accumext.audit(inner, other) as second:
            of_rows(inner, *rows(1)[0]).backward()
            other.step()
            other.zero_grad()
        for x, y in rows():
            of_rows(model, x, y).backward()
        optimizer.step()
    assert (identities(), registries()) == before
    assert [f.name for f in audit.findings] == ["divisor missing"]
    assert audit.findings[0].value == pytest.approx(4 * N)
    assert second is None or second.findings == ()
