"""What an inf or NaN does (`on_nonfinite`): a policy for each answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accumext import ops
from accumext.ops.any_tensors import global_norm
from accumext.optimizer._grads import grads_of, present
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._report import Name, named
from accumext.optimizer._sums import adding, counted
from accumext.optimizer._window import EngineLike, Phase, Window
from accumext.tensors.checks import OnNonfinite, message
from accumext.tensors.kinds import dense_storages, main_dtypes, nonfinite, zero_flag
from accumext.tensors.scalars import Scalar, divide, equals, maximum, to_device, to_host_if_free
from accumext.tensors.torch_private import sparse_values


class Policy(ABC):
    """An answer to gradients that are not finite. What most answers have in common stands here."""

    apart = True  # whether a micro-batch is looked at before it is added, in a second set of sums
    leaves_out = False  # whether bad micro-batches count nowhere

    def look(
        self,
        op: str,
        engine: EngineLike,
        grads: Sequence[Tensor | None],  # by parameter
        weight: Scalar,
        carried: bool = False,
    ) -> None:
        """Look at a micro-batch before it is added."""
        return

    def adding(
        self,
        window: Window,
        grads: Sequence[Tensor | None],
        weight: Scalar,
        scale: Scalar,
        *,
        base: Scalar | None = None,
        found_inf: Scalar = 0.0,
        carried: bool = False,
    ) -> Callable[[list[Tensor]], Window]:
        """Return what adds a micro-batch, as `Plan.run` does."""
        return counted(
            window, grads, weight, scale, base=base, found_inf=found_inf, carried=carried
        )

    def taken_out(
        self, window: Window, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> Window:
        """Take the only micro-batch of a window out of `.grad`."""
        return adding(window.opened(parameters), grads, 1.0).run([])

    def out_of_grad(self, window: Window, parameters: Sequence[Tensor]) -> Window:
        """Return the window without `.grad`, which stays as it is."""
        return window.out_of_grad(parameters)

    def counting(self, ledger: Ledger) -> Ledger:
        """Return numbers with which processes can agree on those that count."""
        return ledger

    @abstractmethod
    def refuse_sum(self, op: str, names: Callable[[], list[Name]]) -> None:
        """Look at a sum that is not finite, or whose norm is not, before it is skipped."""


class SkipWindow(Policy):
    """No step on a window in which anything is not finite."""

    apart = False

    def refuse_sum(self, op: str, names: Callable[[], list[Name]]) -> None:
        """Skip it."""


class Raise(Policy):
    """An error, before the micro-batch is added."""

    def look(
        self,
        op: str,
        engine: EngineLike,
        grads: Sequence[Tensor | None],
        weight: Scalar,
        carried: bool = False,
    ) -> None:
        """Raise for one that counts and is not finite.

        Gradients averaged over shards count on all processes, which look at them together, also
        if the weight of this one is zero.
        """
        there = [i for i, grad in enumerate(grads) if grad is not None]
        found = present(grads)
        if not found or (equals(weight, 0.0) and not carried):
            return
        found_inf = zero_flag(found[0].device)
        global_norm(found, norm_type=2.0, found_inf=found_inf)
        if bool(found_inf):
            names, parameters = engine.names(), engine.target.parameters()
            mine = named([names[parameters[there[i]]] for i in nonfinite(found)])
            got = f"inf or NaN in {mine or 'shards of other processes'}"
            raise RuntimeError(message(op, "gradients", "be finite", got))

    def refuse_sum(self, op: str, names: Callable[[], list[Name]]) -> None:
        """Raise, though each micro-batch was finite."""
        found = named(names())
        got = f"inf or NaN in {found}" if found else "a norm that is not"
        advice = "Call opt.discard() to drop the window"
        raise RuntimeError(message(op, "the window's sum", "be finite", got, advice))


class SkipMicroBatch(Policy):
    """A micro-batch that is not finite counts nowhere."""

    leaves_out = True

    def adding(
        self,
        window: Window,
        grads: Sequence[Tensor | None],
        weight: Scalar,
        scale: Scalar,
        *,
        base: Scalar | None = None,
        found_inf: Scalar = 0.0,
        carried: bool = False,
    ) -> Callable[[list[Tensor]], Window]:
        """Return what adds a micro-batch if finite, and else leaves the sums bit for bit."""
        return adding_if_finite(window, grads, weight, scale)

    def taken_out(
        self, window: Window, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> Window:
        """Take it out of `.grad`, if it is finite."""
        ledger = window.ledger
        start = Window(unreduced=window.unreduced).of(parameters)
        return adding_if_finite(start, grads, ledger.weight, ledger.base_scale)([])

    def out_of_grad(self, window: Window, parameters: Sequence[Tensor]) -> Window:
        """Return the window without `.grad`; an empty one if what lies there is not finite."""
        if window.phase is not Phase.IN_GRAD:
            return window.of(parameters)
        ledger = window.ledger
        if nonfinite(present(grads_of(parameters))):
            left = Ledger(ledger.micro_batches, 0.0, loss_scale=ledger.loss_scale, found_inf=1.0)
            return Window(ledger=left, unreduced=window.unreduced)
        out = window.out_of_grad(parameters)
        return out._replace(ledger=ledger._replace(counted=1.0))

    def counting(self, ledger: Ledger) -> Ledger:
        """Return numbers with which processes can agree on those that count."""
        if ledger.counted is not None:
            return ledger
        return ledger._replace(counted=float(ledger.micro_batches))

    def refuse_sum(self, op: str, names: Callable[[], list[Name]]) -> None:
        """Skip it."""


def policy_of(on_nonfinite: OnNonfinite) -> Policy:
    """Return the policy that a setting names."""
    if on_nonfinite == "skip_window":
        return SkipWindow()
    return Raise() if on_nonfinite == "raise" else SkipMicroBatch()


def adding_if_finite(
    window: Window, grads: Sequence[Tensor | None], weight: Scalar, scale: Scalar
) -> Callable[[list[Tensor]], Window]:
    """Return what adds a micro-batch if it is finite, and else leaves the sums bit for bit.

    The base of the weights is 1, so that nothing left out can show in the sum of the others.
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
