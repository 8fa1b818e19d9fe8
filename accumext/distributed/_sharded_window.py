"""Windows of parameters that `fully_shard` splits over processes: weights and synchronisation.

FSDP averages gradients over processes at the end of a backward pass. A weight that differs between
processes is therefore multiplied into the loss, and only the sum of all weights is sent, once per
window. The loss is multiplied by `weight / unit`, with a unit that all processes know without
communication and that keeps the factor near 1: a gradient of half precision may overflow if it is
multiplied by thousands of tokens and a loss scale.

With synchronize="window" FSDP keeps the gradients of a window unsharded, with the unsharded
parameters, until the window is closed. From torch 2.15 on it can be told to reduce them then.
Before that the last backward pass reduces them, so it must be known to be the last as it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumext.tensors import checks
from accumext.tensors.kinds import Group, is_dtensor, local_tensor, main_dtype
from accumext.tensors.scalars import Scalar
from accumext.tensors.torch_private_distributed import (
    drop_unsharded_grads,
    is_root,
    sharded_parameters,
    sharded_state,
    sums_gradients,
)


class ShardedWindow:
    """What a window of sharded parameters has in addition to its sums."""

    def __init__(self) -> None:
        self.unit: Scalar = 1.0  # losses of the next window are multiplied by weight / unit
        self.idle = True  # no micro-batch has begun since all processes closed a window together
        self.is_open = False  # whether the context `holding` is active
        self._holding: list[Any] = []  # roots that hold gradients of the open window
        self._held: list[tuple[Tensor, Tensor]] = []  # unsharded parameters and gradients, if seen
        self._reduced = False  # whether the last backward pass has reduced these gradients

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> ShardedWindow | None:
        """Return one for an optimizer of these parameters; None if none is sharded."""
        return cls() if any(map(is_dtensor, parameters)) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(ShardedWindow()), "unit": self.unit}

    def note_weight(self, mean: Scalar) -> None:
        """Choose the next unit, near the mean weight: a power of 2 changes no bit of a gradient."""
        if isinstance(mean, Tensor):
            self.unit = torch.where(mean > 0, mean, self.unit).log2().round().exp2()
        elif mean > 0.0:
            self.unit = 2.0 ** round(math.log2(mean))

    @property
    def holds(self) -> bool:
        """Tell whether FSDP holds unreduced gradients of the open window."""
        return bool(self._holding) and not self._reduced

    def roots_to_hold(self, op: str, model: nn.Module, reduction: checks.Reduction) -> list[Any]:
        """Return a model's outermost `fully_shard` modules; raise if `holding` cannot take them."""
        fail = partial(checks.fail_value, op, "model")
        sharded = [module for module in model.modules() if sharded_state(module) is not None]
        inner = {child for module in sharded for child in module.modules() if child is not module}
        roots = [module for module in sharded if module not in inner]
        if not roots:
            fail("hold fully_shard modules if synchronize='window'", checks.type_name(model))
        if any(is_root(root) is False for root in roots):
            fail("be all of what FSDP gathers together if synchronize='window'", "a part of it")
        if not self._holding and reduction == "mean" and any(map(sums_gradients, roots)):
            contract = "average gradients over processes with reduction='mean'"
            advice = "Set the number of data-parallel processes, or use reduction='sum'"
            fail(contract, "set_gradient_divide_factor(1.0)", advice)
        if self._holding and roots != self._holding:
            contract = "be the same in every micro-batch of a window with synchronize='window'"
            fail(contract, "another")
        self._refuse_cleared(op)
        return roots

    @contextmanager
    def holding(self, roots: list[Any], model: nn.Module, last: bool) -> Iterator[None]:
        """Have backward passes leave gradients unsharded and unreduced. Before torch 2.15, that of
        the `last` micro-batch, which fills the window, reduces them."""
        reduces = last and not all(map(_can_finalize, roots))
        self._holding, self._held, self._reduced, self.idle = roots, [], False, False
        for root in roots:
            _leave_unreduced(root, not reduces)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
        self._reduced = reduces
        whole = [p for p in model.parameters() if not is_dtensor(p)]
        self._held = [(p, p.grad) for p in whole if p.grad is not None]

    def refuse_to_collect(self, op: str) -> None:
        """Raise, before anything has changed, if `collect` cannot be called."""
        self._refuse_cleared(op)
        if self.holds and not all(map(_can_finalize, self._holding)):
            contract = "be full to be synchronised, or torch 2.15 or later"
            advice = "Call opt.discard(), or use synchronize='backward'"
            got = f"a part of one, with torch {torch.__version__}"
            raise RuntimeError(checks.message(op, "the window", contract, got, advice))

    def collect(self) -> None:
        """Have FSDP reduce the gradients that it holds into `.grad` of the sharded parameters."""
        self._held = []  # FSDP frees each gradient that it has sent
        for root in self._holding if self.holds else ():
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.finalize_backward()
            _leave_unreduced(root, False)
        self._forget()

    def drop(self) -> None:
        """Have FSDP drop the gradients that it holds, and the state that an exception has left. May
        be called again after an exception."""
        for root in self._holding:
            drop_unsharded_grads(root)
            _leave_unreduced(root, False)
        self._forget()

    def refuse_while_held(self, op: str) -> None:
        """Raise for an operation that needs the open window's gradients, if FSDP holds them."""
        if self.holds:
            contract = "be closed while FSDP holds its gradients unreduced"
            advice = "Do this when opt.stepped is True"
            raise RuntimeError(checks.message(op, "the window", contract, "an open one", advice))

    def refuse_synchronised(self, op: str) -> NoReturn:
        """Raise for gradients that a backward pass outside of `holding` has reduced."""
        contract = "be formed inside `with opt.micro_batch(model):` if synchronize='window'"
        raise RuntimeError(checks.message(op, "gradients", contract, "some of another pass"))

    def _refuse_cleared(self, op: str) -> None:
        """Raise if somebody has cleared or replaced a gradient that FSDP holds."""
        if any(parameter.grad is not grad for parameter, grad in self._held):
            name, got = "gradients that FSDP holds", "some that were cleared"
            contract = "stay where they are until the window is closed"
            advice = "Use opt.zero_grad(), not that of the model; opt.discard() drops the window"
            raise RuntimeError(checks.message(op, name, contract, got, advice))

    def _forget(self) -> None:
        """Forget the roots, parameters and gradients that were held."""
        self._holding, self._held, self._reduced = [], [], False


def closing_groups(parameters: Sequence[Tensor], group: Group | None) -> tuple[list[Group], int]:
    """Return the groups over which a window's numbers are summed one after the other, and the
    number of shards. If mesh and group span all processes, that is one group."""
    sharded: list[Any] = list(filter(is_dtensor, parameters))
    groups: list[Group] = []
    shards = 1
    if sharded:
        mesh = max((p.device_mesh for p in sharded), key=lambda mesh: mesh.size())
        groups, shards = [mesh.get_group(i) for i in range(mesh.ndim)], mesh.size()
    if group is not None:
        groups.append(group)
    if len(groups) > 1 and math.prod(g.size() for g in groups) == dist.get_world_size():
        return [cast("Group", dist.group.WORLD)], shards
    return groups, shards


def window_memory(model: nn.Module, synchronize: checks.Synchronize) -> int:
    """Return the bytes per process of an open window, without the model's parameters and shards.

    With `synchronize="backward"` they are those of the sums of its shards. With "window" they are
    those of unsharded gradients, in `MixedPrecisionPolicy.reduce_dtype` if there is one, and of
    unsharded parameters, which are gathered once for all micro-batches.

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
    checks.instance(op, "model", model, nn.Module, "be a torch.nn.Module")
    checks.one_of(op, "synchronize", synchronize, checks.SYNCHRONIZE)
    total = 0
    summed: set[Tensor] = set(model.parameters())  # parameters whose sums the window holds itself
    for shard, gathered, dtype, grad_dtype, elements in sharded_parameters(model):
        summed -= {shard, gathered}
        if synchronize == "backward":
            summed.add(shard)
            continue
        total += elements * dtype.itemsize
        if shard.requires_grad:
            total += shard.numel() * grad_dtype.itemsize
    trained = [parameter for parameter in summed if parameter.requires_grad]
    return total + sum(local_tensor(p).numel() * main_dtype(p).itemsize for p in trained)


def _can_finalize(root: Any) -> bool:
    """Tell whether this torch can be told to reduce gradients after the backward pass."""
    return hasattr(root, "finalize_backward")


def _leave_unreduced(root: Any, on: bool) -> None:
    """Choose whether backward passes leave gradients unreduced and parameters gathered."""
    root.set_requires_gradient_sync(not on)
    root.set_reshard_after_backward(not on)
    if _can_finalize(root):
        root.set_manual_backward_finalization(on)
