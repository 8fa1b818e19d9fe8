"""The sums of a window: additions to them, planned before they run, and how they leave `.grad`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext.ops.any_tensors import group_by_device, scale_
from accumext.optimizer._engine import Engine
from accumext.optimizer._grads import grads_of, is_none, present
from accumext.optimizer._settings import OP
from accumext.optimizer._window import Window
from accumext.tensors import scalars
from accumext.tensors.checks import message
from accumext.tensors.kinds import (
    any_dtensor,
    dtype_of,
    fit_one_call,
    is_sparse,
    local_tensors,
    main_dtype,
    main_dtypes,
)
from accumext.tensors.scalars import Scalar, divide, equals, to_device
from accumext.tensors.torch_private import not_compiled, record_function, storage_users

_bytes_of = attrgetter("nbytes")
_requires_grad = attrgetter("requires_grad")
_storage_of = methodcaller("untyped_storage")
_bytes_of_storage = methodcaller("nbytes")


# Adding


def enlarge_base(window: Window, weight: Scalar) -> Window:
    """Make the largest weight the base. If the base changes, the sums are multiplied."""
    ledger, factor = window.ledger.with_larger_base(weight)
    if ledger is window.ledger:
        return window
    scale_(present(window.sums), factor)
    return window._replace(ledger=ledger, norm=None)


class Addition(NamedTuple):
    """An addition to sums that `run` carries out. Before that the window's sums are unchanged."""

    window: Window  # after the addition
    calls: list[tuple[torch.device, list[list[Tensor]]]]  # device, [sums, addends]
    factor: Scalar
    whole: bool = False  # whether one call writes every sum

    def run(self, norms: list[Tensor]) -> Window:
        """Run the calls. Each appends to `norms`: calls that have a norm already are left out."""
        for device, (sums, addends) in self.calls[len(norms) :]:
            factor = to_device(device, self.factor)
            ops.accumulate_recorded(norms, sums, addends, inv_scale=factor)
        return self.window._replace(norm=norms[0]) if self.whole else self.window


def adding(window: Window, grads: Sequence[Tensor | None], factor: Scalar) -> Addition:
    """Plan to add `grads * factor` to the sums. A parameter's first gradient becomes its sum."""
    counts = not equals(factor, 0.0)
    if not set(map(id, present(window.sums))).isdisjoint(map(id, grads)):
        contract = "be another tensor in every micro-batch of a window"
        advice = "Assign a copy: p.grad = grad.clone()"
        got = "one that the window holds its sum in"
        raise RuntimeError(message(OP, ".grad", contract, got, advice))
    together: list[Any] = [*window.sums, *grads]
    if counts and together and not any(map(is_none, together)) and fit_one_call(together):
        lists: list[Any] = [list(window.sums), list(grads)]
        return Addition(window, [(together[0].device, lists)], factor, whole=True)
    first, new, targets, addends = list[int](), list(window.sums), list[Tensor](), list[Tensor]()
    for i, (parameter, main, grad) in enumerate(zip(window.parameters, window.sums, grads)):
        if grad is None:
            continue
        if main is None and not counts:  # zeros, since the gradient times 0 may be NaN
            new[i] = torch.zeros_like(grad, dtype=main_dtype(parameter)).detach()
        elif main is None:
            first.append(i)
        elif not counts:
            continue
        elif grad.is_sparse or main.is_sparse:
            addend = grad.to(main.dtype) * factor
            new[i] = addend + main if main.is_sparse else main + addend
        else:
            targets.append(main)
            addends.append(grad)
    norm = None
    if first:
        norm = _take(new, window.parameters, first, [grads[i] for i in first], factor)
    every = present(new)
    calls = group_by_device(targets, addends)
    whole = len(calls) == 1 and len(targets) == len(every) and not any_dtensor(every)
    norm = norm if len(first) == len(every) else None
    return Addition(window._replace(sums=new, norm=norm), calls, factor, whole)


def adding_weighted(
    window: Window,
    grads: Sequence[Tensor | None],
    weight: Scalar,
    scale: Scalar,
    base: Scalar | None = None,
    found_inf: Scalar | None = None,
) -> Callable[[list[Tensor]], Window]:
    """Plan to count a micro-batch, as `Ledger.with_micro_batch` does, and to add its gradients."""
    ledger, ratio = window.ledger.with_micro_batch(weight, scale, base, found_inf)
    factor = (ratio if base is None else 1.0) * divide(ledger.base_scale, scale)
    return adding(window._replace(ledger=ledger, norm=None), grads, factor).run


def _take(
    sums: list[Tensor | None],
    parameters: Sequence[Tensor],
    indices: Sequence[int],  # of these gradients
    grads: Sequence[Any],
    factor: Scalar = 1.0,
) -> Tensor | None:
    """Make `grads * factor` the sums of parameters. No copy is made if the factor is 1 and a
    gradient has the dtype of the sum and memory of its own. Returns the norm of all gradients, if
    one call has computed it."""
    one = equals(factor, 1.0)
    dtypes = main_dtypes([parameters[i] for i in indices])
    if one and dtypes == list(map(dtype_of, grads)) and own_their_memory(grads):
        for i, grad in zip(indices, grads, strict=True):
            sums[i] = grad
        return None
    wide, sources = list[Tensor](), list[Tensor]()
    for i, grad, dtype in zip(indices, grads, dtypes, strict=True):
        if grad.is_sparse:
            sums[i] = grad.detach().to(dtype) if one else grad.detach().to(dtype) * factor
        elif one and grad.dtype == dtype:
            mine = own_their_memory([grad]) and not any(grad is other for other in sums)
            sums[i] = grad if mine else grad.detach().resolve_conj().clone()
        else:
            sources.append(grad.detach().resolve_conj())
            wide.append(torch.empty_like(sources[-1], dtype=dtype))
            sums[i] = wide[-1]
    norms = [
        ops.accumulate_(*lists, inv_scale=to_device(device, factor), overwrite=True)
        for device, lists in group_by_device(wide, sources)
    ]
    whole = len(norms) == 1 and len(wide) == len(grads) and not any_dtensor(wide)
    return norms[0] if whole else None


@not_compiled  # torch.compile cannot trace questions to storages
def own_their_memory(grads: Sequence[Tensor]) -> bool:
    """Tell whether each of these tensors fills memory that nothing else uses, so that it can be
    written: no view, such as of a DDP bucket, no expanded tensor, no part of a buffer."""
    parts = local_tensors(grads)
    if any(map(is_sparse, parts)):
        return False
    for shared in (Tensor.is_inference, Tensor.is_neg, Tensor.is_conj, _requires_grad):
        if any(map(shared, parts)):
            return False
    storages = list(map(_storage_of, parts))
    return (
        list(map(_bytes_of, parts)) == list(map(_bytes_of_storage, storages))
        and all(map(torch.UntypedStorage.resizable, storages))
        and set(storage_users(storages)) <= {_ALONE}
        and len(set(map(id, grads))) == len(grads)
    )


# The use count of a storage that one tensor alone has: the tensor, and the queried storage object.
_probe = torch.zeros(1, device="cpu")
(_ALONE,) = storage_users([_probe.untyped_storage()])
del _probe


def adopt(window: Window, grads: Sequence[Tensor | None]) -> Window:
    """Take the sums from `.grad`, where autograd has added to them."""
    sums = list(window.sums)
    new = [i for i, grad in enumerate(grads) if grad is not None and grad is not sums[i]]
    _take(sums, window.parameters, new, [grads[i] for i in new])
    return window._replace(sums=sums, norm=None)


def is_plain(main: Tensor) -> bool:
    """Tell whether an operator can add to a sum."""
    return fit_one_call([main]) and not main.requires_grad


def with_sum(window: Window, index: int) -> tuple[Window, Tensor]:
    """Return the sum of a parameter, created as zeros if it had none, and the window with it."""
    main = window.sums[index]
    if main is None:
        parameter, sums = window.parameters[index], list(window.sums)
        main = sums[index] = torch.zeros_like(parameter, dtype=main_dtype(parameter)).detach()
        window = window._replace(sums=sums)
    return window._replace(norm=None), main


# A micro-batch


def move_out_of_grad(engine: Engine, parameters: Sequence[Tensor]) -> None:
    """Move the window's sums out of `.grad`, so that another micro-batch can use `.grad`."""
    state = engine.state
    window = state.window
    if not state.in_grad:
        if (aligned := window.of(parameters)) is not window:
            engine.update(window=aligned)
        return
    with torch.no_grad():
        out = engine.policy.out_of_grad(window, parameters)
    engine.commit(state._replace(window=out), parameters)


def summed_out_of_grad(window: Window, parameters: Sequence[Tensor]) -> Window:
    """Return a window of phase IN_GRAD with the gradients in `.grad` as sums of its own."""
    return adding(window.opened(parameters), grads_of(parameters), 1.0).run([])


def add_micro_batch(
    engine: Engine,
    op: str,
    parameters: Sequence[Tensor],
    grads: list[Tensor | None],  # of the micro-batch
    weight: Scalar,
    scale: Scalar,  # loss scale that they are multiplied with
    *,
    found_inf: Scalar | None = None,  # an outer GradScaler's flag for them, if there is one
    accumulated: bool = False,  # whether an outer GradScaler cannot have seen them
    base: Scalar | None = None,  # if given, the loss was multiplied by `weight / base`, too
) -> None:
    """Add one micro-batch to the window and empty `.grad`; after an exception both or neither.

    In no_grad. Consumed gradients go, too: the window may have taken the same tensor as a sum.
    """
    policy = engine.policy
    if policy.check is not None:
        policy.check(engine, op, grads, weight, base)
    move_out_of_grad(engine, parameters)
    before, norms = engine.state, list[Tensor]()  # a norm says that the kernel has run
    with record_function("accumext::accumulate"):
        here = engine.tensors.send(grads)()
        run = policy.adding(before.window, here, weight, scale, base, found_inf)

        def rest() -> None:
            state = before._replace(window=run(norms), micro_batch=None, other_pass=None)
            after = state._replace(accumulated=accumulated or before.accumulated)
            engine.commit(after, parameters)

        try:
            rest()
        except BaseException:
            if norms and engine.state is before:
                rest()
            raise


# Multiplying


def multiply(done: list[Any], tensors: Sequence[Tensor], factor: Scalar) -> None:
    """Multiply in place, and append to `done` so that no signal can come in between."""
    for device, (mine,) in group_by_device(list(tensors)):
        ops.scale_recorded(done, mine, to_device(device, factor))


def products(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], factor: Scalar
) -> tuple[list[Tensor], list[Tensor]]:
    """Return `tensor * factor`, each in its dtype, and norms of the products, one per device. If
    squares overflow, the norms are largest magnitudes instead: they tell whether all is finite."""
    made = [
        t.to(dtype, copy=True) if t.is_sparse else torch.empty_like(t, dtype=dtype)
        for t, dtype in zip(tensors, dtypes, strict=True)
    ]
    norms = [
        ops.multiply_valid(mine, sources, to_device(device, factor))
        for device, (mine, sources) in group_by_device(made, list(tensors))
    ]
    if all(map(scalars.on_host, norms)) and not all(map(math.isfinite, norms)):
        norms = [ops.total_norm(mine, norm_type=math.inf) for _, (mine,) in group_by_device(made)]
    return made, norms
