"""What an audit leaves as it is: torch's classes and modules, the user's objects, the memory."""

import contextlib
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from audited import N, network, of_rows, rows, scaler_of, sgd, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer, lr_scheduler, swa_utils

import accumext
import accumext.auditing  # or the first audit would add it to the attributes of accumext
from accumext.recurrence.observing import observers

REGISTERING = [sys.modules["torch.optim.optimizer"], torch.nn.modules.module]
OWNERS = [
    Tensor, nn.Module, nn.Linear, Optimizer, torch.optim.SGD, torch.amp.GradScaler,
    torch.cuda.amp.GradScaler, torch.autograd.Function, lr_scheduler.LRScheduler,
    lr_scheduler.ExponentialLR, lr_scheduler.ReduceLROnPlateau, lr_scheduler.SequentialLR,
    nn.parallel.DistributedDataParallel, accumext.AccumulatingOptimizer,
    torch, torch.autograd, torch.autograd.graph, torch.nn.utils, torch.nn.utils.clip_grad,
    torch.nn.functional, torch.optim, torch.utils.checkpoint, torch.distributed, accumext,
    sys.modules["accumext.loops._tbptt"], sys.modules["accumext.decoder._decode_loss"], swa_utils,
    swa_utils.AveragedModel, *REGISTERING,
]  # fmt: skip


def of_torch() -> list[Any]:
    """Attributes of classes and modules by identity, hooks of all modules, modes that are on."""
    found: list[Any] = []
    for owner in OWNERS:
        for name, value in vars(owner).items():
            if not name.startswith("__") or name in ("__init__", "__call__", "__setattr__"):
                found.append((owner, name, id(value)))
    for module in REGISTERING:
        for name, value in vars(module).items():
            if name.startswith("_global") and hasattr(value, "items"):
                found.append((name, list(value.items())))
    return [
        *found,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_grad_enabled(),
        list(observers),
    ]


def of_objects(model: nn.Module, *others: Any) -> list[Any]:
    """Hooks and attributes of the user's own objects."""
    found: list[Any] = []
    for parameter in model.parameters():
        of_tensor = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found += [list((hooks or {}).items()) for hooks in of_tensor]
        found.append(sorted(vars(parameter)))
    for owner in (*model.modules(), *others):
        found.append(sorted(vars(owner)))
        found += [list(value.items()) for name, value in vars(owner).items() if "hooks" in name]
        found.append({name: id(value) for name, value in vars(owner).items() if callable(value)})
    return found


class Stop(Exception):
    """An exception of the user's."""


@pytest.mark.parametrize("raising", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("windows", [1, 100], ids=["seen", "left-early"])
def test_all_is_put_back(raising, windows):
    model, scaler = network(), scaler_of()
    optimizer = sgd(model)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = swa_utils.AveragedModel(model)

    def loop():
        for i, (x, y) in enumerate(rows(2 * N + 2)):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                average.update_parameters(model)
        if raising:
            raise Stop

    def state():
        return [of_torch(), of_objects(model, optimizer, schedule, scaler, *average.modules())]

    with contextlib.suppress(Stop):
        loop()  # what a loop leaves by itself
    before = state()
    ends = pytest.raises(Stop) if raising else contextlib.nullcontext()
    with ends, accumext.audit(model, optimizer, windows=windows) as audit:
        assert state() != before  # or this test would see nothing
        loop()
    assert state() == before
    assert not observers
    assert audit.findings == (), str(audit)


def test_an_optimizer_made_inside_is_put_back():
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


def test_the_graph_is_freed_in_the_block():
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
def test_nothing_is_kept_alive(make):
    """Model, parameters and optimizer die while the closed audit lives"""
    model = network()
    optimizer = make(model)
    audit = train(accumext.audit, model, optimizer, rows(6), n=1)
    references = [weakref.ref(t) for t in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert all(reference() is None for reference in references)
    assert audit.findings == ()
    assert str(audit)


def test_an_audit_in_an_audit():
    """Both see their own"""
    before = of_torch()
    model, inner = network(), network()
    optimizer = sgd(model)
    with accumext.audit(model, optimizer) as audit:
        second = train(accumext.audit, inner, sgd(inner), n=1)
        for x, y in rows():
            of_rows(model, x, y).backward()
        optimizer.step()
    assert of_torch() == before
    assert [(f.id, f.value) for f in audit.questions] == [
        ("accumulation.divisor_missing", pytest.approx(4 * N))
    ]
    assert audit.findings == second.findings == second.questions == ()
