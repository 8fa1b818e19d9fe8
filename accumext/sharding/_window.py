"""Windows of parameters that are split over processes (`fully_shard`): weights and synchronisation.

FSDP averages gradients over processes at the end of a backward pass. A weight that differs between
processes is therefore multiplied into the loss, and only the sum of all weights is sent, once per
window. What it is multiplied in as, weight / unit, stays near 1 in later windows, since a gradient
of half precision may not hold a sum over thousands of tokens times a loss scale; the unit is one
that all processes know without asking.

With synchronize="window" FSDP leaves the gradients of a window where autograd has summed them, with
the unsharded parameters, until the window is closed. From torch 2.15 on it can be told to reduce
them then; before that the last backward pass does it, which has to be known as it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumext import _checks
from accumext._scalars import Scalar
from accumext._tensor_kinds import Group, is_dtensor, local_tensor, main_dtype
from accumext._torch_private import (
    drop_unsharded_grads,
    gathered_parameters,
    is_root,
    sharded_state,
    sums_gradients,
)


class ShardedWindow:
    """What a window of sharded parameters needs beside its sums."""

    def __init__(self) -> None:
        self._unit: Scalar = 1.0  # of weights: 1, then about their mean in the last window
        self._holding: list[Any] = []  # roots that hold gradients of the open window
        self._held: list[tuple[Tensor, Tensor]] = []  # unsharded parameters and gradients, if seen
        self._reduced = False  # whether the last backward pass has reduced them
        self.is_open = False  # whether a micro-batch is being held
        self.idle = True  # nothing was begun since all processes have closed a window together

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> ShardedWindow | None:
        """For an optimizer of these parameters; None if none is sharded."""
        return cls() if any(map(is_dtensor, parameters)) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(ShardedWindow()), "_unit": self._unit}

    # Weights

    @property
    def unit(self) -> Scalar:
        """What weights of the next window are divided by before a loss is multiplied by them."""
        return self._unit

    def note_weight(self, mean: Scalar) -> None:
        """Choose the next window's unit: a power of 2, which changes no bit of a gradient.

        Args:
            mean: weight of a micro-batch of one process in this window.
        """
        if isinstance(mean, Tensor):
            positive = mean > 0
            unit = torch.exp2(torch.where(positive, mean, 1.0).log2().round())
            self._unit = torch.where(positive, unit, self._unit)
        elif mean > 0.0:
            self._unit = 2.0 ** round(math.log2(mean))

    # synchronize="window"

    @property
    def holds(self) -> bool:
        """Whether FSDP has gradients of the open window, which nothing else has."""
        return bool(self._holding) and not self._reduced

    def roots_to_hold(self, op: str, model: nn.Module, reduction: _checks.Reduction) -> list[Any]:
        """The `fully_shard` modules of a model for `holding`.

        Raises:
            ValueError: there is none, it is a part of another, others hold the open window, or FSDP
                sums gradients whose mean is wanted.
            RuntimeError: gradients of the open window were cleared.
        """
        roots = _roots(model)
        if not roots:
            contract = "hold fully_shard modules where synchronize='window'"
            _checks.fail_value(op, "model", contract, _checks.type_name(model))
        if any(is_root(root) is False for root in roots):
            contract = "be all of what FSDP gathers together, where synchronize='window'"
            _checks.fail_value(op, "model", contract, "a part of it")
        if not self._holding and reduction == "mean" and any(map(sums_gradients, roots)):
            contract = "average gradients over processes with reduction='mean'"
            advice = "Set the number of data-parallel processes, or use reduction='sum'"
            _checks.fail_value(op, "model", contract, "set_gradient_divide_factor(1.0)", advice)
        if self._holding and roots != self._holding:
            contract = "be the same in every micro-batch of a window with synchronize='window'"
            _checks.fail_value(op, "model", contract, "another")
        self._refuse_cleared(op)
        return roots

    @contextmanager
    def holding(self, roots: list[Any], model: nn.Module, last: bool) -> Iterator[None]:
        """In it, backward passes leave their gradients unsharded and unreduced.

        Args:
            last: whether the micro-batch fills the window.
        """
        reduces = last and not all(map(_can_finalize, roots))
        self._holding, self._held, self._reduced, self.idle = roots, [], False, False
        for root in roots:
            if _can_finalize(root):
                root.set_manual_backward_finalization(True)
            _set_synchronising(root, reduces)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
        self._reduced = reduces
        pairs = [(p, p.grad) for p in model.parameters() if not is_dtensor(p)]
        self._held = [(parameter, grad) for parameter, grad in pairs if grad is not None]

    def refuse_to_collect(self, op: str) -> None:
        """Raise, before anything has changed, where `collect` cannot be called.

        Raises:
            RuntimeError: this torch reduces only in the backward pass that fills a window, or the
                gradients were cleared.
        """
        self._refuse_cleared(op)
        if self.holds and not all(map(_can_finalize, self._holding)):
            contract = "be full to be synchronised, or torch 2.15 or later"
            advice = "Call opt.discard(), or use synchronize='backward'"
            got = f"a part of one, with torch {torch.__version__}"
            raise RuntimeError(_checks.message(op, "the window", contract, got, advice))

    def collect(self) -> None:
        """Have FSDP reduce what it holds into `.grad` of the sharded parameters."""
        self._held = []  # FSDP frees each gradient that it has sent
        for root in self._holding if self.holds else ():
            _set_synchronising(root, True)
            root.finalize_backward()
            root.set_manual_backward_finalization(False)
        self._forget()

    def drop(self) -> None:
        """Have FSDP drop what it holds, and whatever state an exception has left it in."""
        roots = self._holding
        self._forget()
        for root in roots:
            if is_root(root) and hasattr(root, "reset_iter_state"):  # from torch 2.13 on
                root.reset_iter_state()
            if _can_finalize(root):
                root.set_manual_backward_finalization(False)
            else:
                drop_unsharded_grads(root)
            _set_synchronising(root, True)

    def refuse_while_held(self, op: str) -> None:
        """Raise for what needs the gradients of the open window while FSDP holds them."""
        if self.holds:
            contract = "be closed, where FSDP holds its gradients unreduced"
            advice = "Do this where opt.stepped is true"
            text = _checks.message(op, "the window", contract, "an open one", advice)
            raise RuntimeError(text)

    def refuse_synchronised(self, op: str) -> NoReturn:
        """Raise for gradients that a backward pass outside of `holding` has reduced."""
        contract = "be formed inside `with opt.micro_batch(model):` where synchronize='window'"
        raise RuntimeError(_checks.message(op, "gradients", contract, "some of another pass"))

    def _forget(self) -> None:
        self._holding, self._held, self._reduced = [], [], False

    def _refuse_cleared(self, op: str) -> None:
        """Raise if somebody has cleared or replaced a gradient that FSDP holds."""
        if any(parameter.grad is not grad for parameter, grad in self._held):
            contract = "stay where they are until the window is closed"
            advice = "Use opt.zero_grad(), not that of the model; opt.discard() drops the window"
            got = "some that were cleared"
            text = _checks.message(op, "gradients that FSDP holds", contract, got, advice)
            raise RuntimeError(text)


def closing_groups(parameters: Sequence[Tensor], group: Group | None) -> tuple[list[Group], int]:
    """Groups over which a window's numbers are summed one after the other, and how many shards.

    One, of all processes, where those are what the mesh of the shards and the group span.
    """
    sharded: list[Any] = list(filter(is_dtensor, parameters))
    groups: list[Group] = []
    shards = 1
    if sharded:
        mesh = max((p.device_mesh for p in sharded), key=lambda mesh: mesh.size())
        groups += [mesh.get_group(i) for i in range(mesh.ndim)]
        shards = mesh.size()
    if group is not None:
        groups.append(group)
    if len(groups) > 1 and math.prod(g.size() for g in groups) == dist.get_world_size():
        return [cast("Group", dist.group.WORLD)], shards
    return groups, shards


def window_memory(model: nn.Module, synchronize: _checks.Synchronize) -> int:
    """Bytes per process that an open window of a model holds beside its parameters and shards.

    With `synchronize="backward"` those of the sums of its shards. With "window" those of
    unsharded gradients, in `MixedPrecisionPolicy.reduce_dtype` if there is one, and of unsharded
    parameters, which are gathered once for all micro-batches.

    Args:
        model: trained with `fully_shard`; parameters that are not sharded count as they are.
        synchronize: as for `AccumulatingOptimizer`.

    Returns:
        Bytes.

    Raises:
        TypeError: `model` is no module.
        ValueError: `synchronize` is neither "backward" nor "window".

    Example:
        >>> accumext.window_memory(model, "window") / 2**30
        5.2
    """
    op = "window_memory"
    if not isinstance(model, nn.Module):
        _checks.fail_type(op, "model", "be a torch.nn.Module", _checks.type_name(model))
    _checks.one_of(op, "synchronize", synchronize, _checks.SYNCHRONIZE)
    total = 0
    others = set(model.parameters())
    for shard, whole, dtype, grad_dtype in gathered_parameters(model):
        others -= {shard, whole}
        if synchronize == "window":
            total += _padded(shard) * dtype.itemsize
            if shard.requires_grad:
                total += shard.numel() * grad_dtype.itemsize
        elif shard.requires_grad:
            total += local_tensor(shard).numel() * main_dtype(shard).itemsize
    for parameter in others:
        if parameter.requires_grad:
            total += local_tensor(parameter).numel() * main_dtype(parameter).itemsize
    return total


def _padded(parameter: Any) -> int:
    """Elements of a gathered parameter, of which every process has sent equally many."""
    shards = 1
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            shards *= parameter.device_mesh.size(dimension)
    rows = parameter.shape[0] if parameter.dim() else 1
    padded: int = -(-rows // shards) * shards * (parameter.numel() // max(rows, 1))
    return padded


def _roots(model: nn.Module) -> list[Any]:
    """The outermost `fully_shard` modules in a model."""
    roots: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if sharded_state(module) is not None and module not in inside:
            roots.append(module)
            inside |= set(module.modules())
    return roots


def _can_finalize(root: Any) -> bool:
    """Whether this torch reduces gradients after the backward pass, when it is told to."""
    return hasattr(root, "finalize_backward")


def _set_synchronising(root: Any, on: bool) -> None:
    """Whether backward passes reduce gradients, and give the gathered parameters up."""
    root.set_requires_gradient_sync(on)
    root.set_reshard_after_backward(on)
