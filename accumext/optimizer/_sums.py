"""The sums of a window: the only place where gradients are added and multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext.ops.any_tensors import (
    global_norm,
    group_by_device,
    scale_,
)
from accumext.optimizer._grads import grads_of, is_none, present
from accumext.optimizer._report import named
from accumext.optimizer._settings import OP
from accumext.optimizer._window import Box, Window
from accumext.tensors import scalars
from accumext.tensors.checks import message
from accumext.tensors.kinds import (
    any_dtensor,
    dense_storages,
    dtype_of,
    fit_one_call,
    is_sparse,
    local_tensors,
    main_dtype,
    main_dtypes,
    nonfinite,
    zero_flag,
)
from accumext.tensors.scalars import Scalar, divide, maximum, to_device, to_host_if_free
from accumext.tensors.torch_private import (
    not_compiled,
    record_function,
    sparse_values,
    storage_users,
)

_bytes_of = attrgetter("nbytes")
_requires_grad = attrgetter("requires_grad")
_storage_of = methodcaller("untyped_storage")
_bytes_of_storage = methodcaller("nbytes")


_ONE: Scalar = 1.0
_NONE: Scalar = 0.0


# The unit


def count_in(
    window: Window,
    weight: Scalar,
    scale: Scalar,
    fixed: Scalar | None = None,
    found_inf: Scalar = _NONE,
) -> tuple[Window, Scalar]:
    """Count a micro-batch whose loss had this scale. The first sets the unit, and the scale.

    Its gradients are to be multiplied by the window's scale and by what is returned beside the
    window: weight / unit.

    Args:
        fixed: the unit where it is known without looking at weights.
        found_inf: what somebody else found in the gradients.
    """
    unit, sums_scale, ratio = window.unit, window.scale, _ONE
    if unit is None:
        sums_scale = scale
    if fixed is not None:
        unit = fixed if unit is None else unit
        ratio = weight if not isinstance(unit, Tensor) and unit == 1.0 else weight / unit
    elif unit is not None:
        ratio = 1.0 if weight is unit else weight / unit
    elif isinstance(weight, Tensor):  # the unit divides: it is no zero of the device
        unit = torch.where(weight > 0, weight, 1.0)
        ratio = (weight > 0).double()
    elif weight == 0.0:
        ratio = 0.0
    else:
        unit = weight
    counted = window._replace(
        micro_batches=window.micro_batches + 1,
        weight=window.weight + weight,
        unit=unit,
        scale=sums_scale,
        loss_scale=scale,
        found_inf=window.found_inf if found_inf is _NONE else maximum(window.found_inf, found_inf),
        norm=None,
        agreed=False,  # after a step that failed the weight is the mean of what was there then
    )
    return counted, ratio


def enlarge_unit(window: Window, weight: Scalar) -> Window:
    """Make the unit the largest weight, so that no loss is multiplied by more than its scale: half
    precision has no room above. Writes the sums where that changes it."""
    unit = window.unit
    if unit is None or weight is unit:
        return window
    if not isinstance(unit, Tensor) and not isinstance(weight, Tensor):
        if weight <= unit:
            return window
        larger: Scalar = weight
    else:
        larger = maximum(weight, unit) if isinstance(weight, Tensor) else maximum(unit, weight)
    scale_(present(window.sums), unit / larger)
    return window._replace(unit=larger, norm=None)


# Adding


class Plan(NamedTuple):
    """Sums that are about to be written. Until then nothing has changed that can be seen."""

    window: Window  # once they are
    calls: list[tuple[torch.device, list[list[Tensor]]]]  # sums, addends
    factor: Scalar
    whole: bool = False  # whether one call writes every sum

    def run(self, norms: list[Tensor]) -> Window:
        """Add what `norms`, one from each call that has run, does not tell to be added already."""
        for device, (sums, addends) in self.calls[len(norms) :]:
            factor = to_device(device, self.factor)
            ops.accumulate_recorded(norms, sums, addends, inv_scale=factor)
        return self.window._replace(norm=norms[0]) if self.whole else self.window


def adding(window: Window, grads: Sequence[Tensor | None], factor: Scalar) -> Plan:
    """Plan to add `grads * factor` to the sums. A parameter's first gradient becomes its sum."""
    counts = isinstance(factor, Tensor) or factor != 0.0
    if not set(map(id, present(window.sums))).isdisjoint(map(id, grads)):
        contract = "be another tensor in every micro-batch of a window"
        advice = "Assign a copy: p.grad = grad.clone()"
        got = "one that the window holds its sum in"
        raise RuntimeError(message(OP, ".grad", contract, got, advice))
    together: list[Any] = [*window.sums, *grads]
    if counts and together and not any(map(is_none, together)) and fit_one_call(together):
        lists: list[Any] = [list(window.sums), list(grads)]
        return Plan(window, [(together[0].device, lists)], factor, whole=True)
    first, new, targets, addends = list[int](), list(window.sums), list[Tensor](), list[Tensor]()
    for i, (parameter, main, grad) in enumerate(zip(window.parameters, window.sums, grads)):
        if grad is None:
            continue
        if main is None and not counts:  # what counts for nothing may hold NaN
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
    return Plan(window._replace(sums=new, norm=norm), calls, factor, whole)


def _take(
    sums: list[Tensor | None],
    parameters: Sequence[Tensor],
    indices: Sequence[int],  # of these gradients
    grads: Sequence[Any],
    factor: Scalar = 1.0,
) -> Tensor | None:
    """Make `grads * factor` sums: the tensors themselves, where their memory is their own, they are
    of the sums' dtype and the factor is 1. Returns the norm of all if one call has found it."""
    one = not isinstance(factor, Tensor) and factor == 1.0
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


@not_compiled  # which cannot trace what storages tell
def own_their_memory(grads: Sequence[Tensor]) -> bool:
    """Tell whether nothing but these can be seen in their memory, nor two of them in one place: no
    view, such as of a DDP bucket, no expanded tensor, no part of a buffer."""
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


# Users of a storage that one tensor alone has: the tensor, and the storage object asked.
_probe = torch.zeros(1, device="cpu")
(_ALONE,) = storage_users([_probe.untyped_storage()])
del _probe


def adopt(window: Window, grads: Sequence[Tensor | None]) -> Window:
    """Take the sums from `.grad`, where autograd has added to them."""
    sums = list(window.sums)
    new = [i for i, grad in enumerate(grads) if grad is not None and grad is not sums[i]]
    _take(sums, window.parameters, new, [grads[i] for i in new])
    return window._replace(sums=sums, norm=None)


def made(window: Window, index: int) -> tuple[Window, Tensor]:
    """The sum of a parameter, of zeros where it had none."""
    main = window.sums[index]
    if main is None:
        parameter, sums = window.parameters[index], list(window.sums)
        main = sums[index] = torch.zeros_like(parameter, dtype=main_dtype(parameter)).detach()
        window = window._replace(sums=sums)
    return window._replace(norm=None), main


# Adding what is finite alone


def add_if_finite(
    window: Window, grads: Sequence[Tensor | None], weight: Scalar, scale: Scalar
) -> Callable[[list[Tensor]], Window]:
    """Return a function that adds a micro-batch if finite, and else leaves the sums bit for bit.

    The unit is 1, so that no dropped micro-batch can show in the sum of the others.

    Returns:
        As `Plan.run`: it appends a norm to a list when the kernel has run, which it does once.
    """
    window = window._replace(unit=(unit := 1.0 if window.unit is None else window.unit))
    if not isinstance(weight, Tensor) and weight == 0.0:  # counts for nothing, finite or not
        grads = [None if g is None else torch.zeros_like(g).detach() for g in grads]
    there = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
    found_inf = zero_flag(there[0][1].device if there else None)
    sums, joined = list(window.sums), list[tuple[int, Tensor]]()
    targets, dtypes = list[Tensor](), main_dtypes(window.parameters)
    for i, grad in there:
        main = sums[i]
        if main is None:
            main = torch.zeros_like(grad, dtype=dtypes[i]).detach()
        elif main.is_sparse and not grad.is_sparse:
            main = main.to_dense()
        sums[i] = main
        if grad.is_sparse:  # what it adds is formed apart, and joined below
            grad = grad.coalesce()
            addend = grad.to(main.dtype, copy=True)
            sparse_values(addend).zero_()
            joined.append((i, addend))
            targets.append(addend)
        else:
            targets.append(main)
    written = dense_storages(targets)
    sources = dense_storages([g.coalesce() if g.is_sparse else g for _, g in there])
    factor = to_device(found_inf.device, divide(window.scale, scale) * (weight / unit))

    def run(norms: list[Tensor]) -> Window:
        if not norms:
            ops.accumulate_recorded(
                norms, written, sources, inv_scale=factor, found_inf=found_inf, if_finite=True
            )
        kept = 1.0 - to_host_if_free(found_inf)
        count = window.micro_batches
        finite = float(count) if window.finite is None else window.finite
        after = window._replace(
            micro_batches=count + 1,
            loss_scale=scale,
            finite=finite + kept,
            found_inf=maximum(window.found_inf, 1.0 - kept),
        )
        if not isinstance(kept, Tensor) and kept == 0.0:
            bad = nonfinite([grad for _, grad in there])
            names = tuple(window.parameters[there[i][0]] for i in bad)
            return after._replace(dropped=window.dropped + names)
        new = list(sums)
        for i, addend in joined:
            new[i] = new[i] + addend  # type: ignore[operator]
        weight_now = window.weight + weight * kept
        return after._replace(sums=new, weight=weight_now, norm=None)

    return run


def take_out(box: Box, parameters: Sequence[Tensor]) -> None:
    """Take the window out of `.grad`, where another micro-batch is to come."""
    window = box.state.window
    if not window.in_grad:
        if (aligned := window.of(parameters)) is not window:
            box.state = box.state._replace(window=aligned)
        return
    grads = grads_of(parameters)
    with torch.no_grad():
        if window.unchecked:
            start = Window(held_back=window.held_back).of(parameters)
            out = add_if_finite(start, grads, window.weight, window.scale)([])
        else:
            start = window._replace(in_grad=False, sums=()).of(parameters)
            out = adding(start, grads, 1.0).run([])
    out = out._replace(loss_scale=window.loss_scale)
    box.commit(box.state._replace(window=out), parameters)


# A micro-batch


def add_micro_batch(
    box: Box,
    op: str,
    parameters: list[Tensor],
    grads: list[Tensor | None],  # of the micro-batch
    weight: Scalar,
    scale: Scalar,  # what they are multiplied with
    *,
    found_inf: Scalar = 0.0,  # what somebody else found in them
    accumulated: bool = False,  # whether an outer GradScaler is too late then
    carried: bool = False,  # whether the loss was multiplied by its weight, too
) -> None:
    """Add one micro-batch to the window and empty `.grad`; after an exception neither. In no_grad.

    Used-up gradients go, too: the window may have taken the same tensor from another parameter.
    """
    policy = box.settings.on_nonfinite
    if policy == "raise":
        raise_nonfinite(box, op, grads, weight, carried)
    take_out(box, parameters)
    window = box.state.window
    with record_function("accumext::accumulate"):
        here = box.target.send(grads)()
        if policy == "skip_micro_batch":
            run = add_if_finite(window, here, weight, scale)
        else:
            fixed = box.sharded.unit if carried and box.sharded is not None else None
            window, ratio = count_in(window, weight, scale, fixed, found_inf)
            factor = (1.0 if carried else ratio) * divide(window.scale, scale)
            run = adding(window, here, factor).run
        _commit(box, run, parameters, accumulated)


def _commit(
    box: Box,
    run: Callable[[list[Tensor]], Window],  # adds, once: a norm in the list says that it did
    parameters: Sequence[Tensor],
    accumulated: bool,
) -> None:
    """Add, and store that it was done; after an exception both or neither."""
    before, norms = box.state, list[Tensor]()

    def rest() -> None:
        after = before._replace(
            window=run(norms),
            accumulated=accumulated or before.accumulated,
            micro_batch=None,
            other_pass=None,
        )
        box.commit(after, parameters)

    try:
        rest()
    except BaseException:
        if norms and box.state is before:
            rest()
        raise


def raise_nonfinite(
    box: Box,
    op: str,
    grads: Sequence[Tensor | None],  # by parameter
    weight: Scalar,
    carried: bool = False,
) -> None:
    """Refuse a micro-batch that counts and is not finite, naming the parameters.

    Gradients averaged over shards count on all processes, which look at them together, also where
    the weight of this one is zero.
    """
    counts = carried or isinstance(weight, Tensor) or weight > 0.0
    there = [i for i, grad in enumerate(grads) if grad is not None]
    found = present(grads)
    if not counts or not found:
        return
    found_inf = zero_flag(found[0].device)
    global_norm(found, norm_type=2.0, found_inf=found_inf)
    if bool(found_inf):
        names, parameters = box.names(), box.target.parameters()
        mine = named([names[parameters[there[i]]] for i in nonfinite(found)])
        got = f"inf or NaN in {mine or 'shards of other processes'}"
        raise RuntimeError(message(op, "gradients", "be finite", got))


# Multiplying


def multiply(done: list[Any], tensors: Sequence[Tensor], factor: Scalar) -> None:
    """Multiply in place, and append to `done` in the same moment, as signals see it."""
    for device, (mine,) in group_by_device(list(tensors)):
        ops.scale_recorded(done, mine, to_device(device, factor))


def products(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], factor: Scalar
) -> tuple[list[Tensor], list[Tensor]]:
    """`tensor * factor`, each in a dtype; and norms of what came out, the largest element of one
    whose squares overflow."""
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
