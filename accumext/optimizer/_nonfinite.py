"""What an inf or NaN does: the policies of `on_nonfinite`, two of which look before they add."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accumext import ops
from accumext.ops.any_tensors import global_norm
from accumext.optimizer._engine import Engine, Policy
from accumext.optimizer._grads import grads_of, present
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._report import named
from accumext.optimizer._sums import adding_weighted, summed_out_of_grad
from accumext.optimizer._window import Window
from accumext.tensors.checks import message
from accumext.tensors.kinds import dense_storages, main_dtypes, nonfinite, zero_flag
from accumext.tensors.scalars import Scalar, divide, equals, maximum, to_device, to_host_if_free
from accumext.tensors.torch_private import sparse_values


def raise_nonfinite(
    engine: Engine,
    op: str,
    grads: Sequence[Tensor | None],  # by parameter
    weight: Scalar,
    base: Scalar | None = None,
) -> None:
    """Raise for a micro-batch that counts and is not finite, with the names of the parameters.

    Gradients averaged over shards, whose loss was multiplied by `weight / base`, count on all
    processes, which check them together, also if this process has weight zero.
    """
    there = [i for i, grad in enumerate(grads) if grad is not None]
    found = present(grads)
    if not found or (equals(weight, 0.0) and base is None):
        return
    found_inf = zero_flag(found[0].device)
    global_norm(found, norm_type=2.0, found_inf=found_inf)
    if bool(found_inf):
        names, parameters = engine.names(), engine.tensors.parameters()
        mine = named([names[parameters[there[i]]] for i in nonfinite(found)])
        got = f"inf or NaN in {mine or 'shards of other processes'}"
        raise RuntimeError(message(op, "gradients", "be finite", got))


def adding_if_finite(
    window: Window, grads: Sequence[Tensor | None], weight: Scalar, scale: Scalar, *_: object
) -> Callable[[list[Tensor]], Window]:
    """Plan to add a micro-batch if it is finite, and else to keep the sums bit for bit.

    A new window's base of the weights is 1: the weight of a dropped micro-batch must not scale the
    sums. A given base is ignored, since settings refuse shards, and a flag: the kernel looks.
    """
    ledger = window.ledger
    base = 1.0 if ledger.base_weight is None else ledger.base_weight
    if equals(weight, 0.0):  # counts for nothing, finite or not
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
        if grad.is_sparse:  # its addend is computed separately, and added at the end
            grad = grad.coalesce()
            addend = grad.to(main.dtype, copy=True)
            sparse_values(addend).zero_()
            joined.append((i, addend))
            targets.append(addend)
        else:
            targets.append(main)
    written = dense_storages(targets)
    sources = dense_storages([g.coalesce() if g.is_sparse else g for _, g in there])
    factor = to_device(found_inf.device, divide(ledger.base_scale, scale) * (weight / base))

    def run(norms: list[Tensor]) -> Window:
        if not norms:
            ops.accumulate_recorded(
                norms, written, sources, inv_scale=factor, found_inf=found_inf, if_finite=True
            )
        kept = 1.0 - to_host_if_free(found_inf)
        count = ledger.micro_batches
        after = ledger._replace(
            micro_batches=count + 1,
            base_weight=base,
            loss_scale=scale,
            counted=(float(count) if ledger.counted is None else ledger.counted) + kept,
            found_inf=maximum(ledger.found_inf, 1.0 - kept),
        )
        if equals(kept, 0.0):
            bad = nonfinite([grad for _, grad in there])
            left_out = window.left_out + tuple(window.parameters[there[i][0]] for i in bad)
            return window._replace(ledger=after, left_out=left_out)
        new = list(sums)
        for i, addend in joined:
            new[i] = new[i] + addend  # type: ignore[operator]
        after = after._replace(weight=ledger.weight + weight * kept)
        return window._replace(ledger=after, sums=new, norm=None)

    return run


def _out_of_grad_if_finite(window: Window, parameters: Sequence[Tensor]) -> Window:
    ledger, start = window.ledger, Window(unreduced=window.unreduced).of(parameters)
    return adding_if_finite(start, grads_of(parameters), ledger.weight, ledger.base_scale)([])


def counted(window: Window) -> Window:
    """Set `counted` of a window of one micro-batch: 1, or 0 and no sums if it is not finite."""
    ledger = window.ledger
    if nonfinite(present(window.sums)):
        left = Ledger(ledger.micro_batches, 0.0, loss_scale=ledger.loss_scale, found_inf=1.0)
        return Window(ledger=left, unreduced=window.unreduced)
    return window._replace(ledger=ledger._replace(counted=1.0))


POLICIES = {
    "skip_window": Policy(adding_weighted, summed_out_of_grad),
    "skip_micro_batch": Policy(
        adding_if_finite, _out_of_grad_if_finite, counted=counted, apart=True, leaves_out=True
    ),
    "raise": Policy(adding_weighted, summed_out_of_grad, check=raise_nonfinite, apart=True),
    "step": Policy(adding_weighted, summed_out_of_grad, looks=False),
}
