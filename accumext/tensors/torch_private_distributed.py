"""The private names of DistributedDataParallel and fully_shard that accumext uses, each with the
reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# --- DistributedDataParallel ----------------------------------------------------------------------


def cancel_synchronisation(replica: nn.Module) -> None:
    """Undo the preparation of a forward pass outside `no_sync`. Only forward passes read `no_sync`,
    so the next backward pass would reduce gradients, even that of another forward pass."""
    reducer: Any = replica.reducer
    reducer._reset_state()


def synchronises_first_pass(replica: nn.Module) -> bool:
    """Tell whether the next backward pass reduces gradients even under `no_sync`, as the first with
    a static graph does (in one release of torch, an assertion fails there instead)."""
    return bool(replica.static_graph and not replica._static_graph_delay_allreduce_enqueued)


# --- fully_shard ----------------------------------------------------------------------------------


def _fsdp_parameters(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield `fully_shard`'s record of every parameter, and its mixed-precision policy."""
    for module in model.modules():
        state = sharded_state(module)
        for group in [] if state is None else _sharded_groups(state):
            for parameter in group.fsdp_params:
                yield parameter, state._mp_policy


def _sharded_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that are gathered together: several from torch 2.15 on."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


class ShardedParameter(NamedTuple):
    """A parameter that `fully_shard` splits."""

    shard: Tensor
    gathered: Tensor | None  # the parameter that the module holds while it is gathered
    dtype: torch.dtype  # of the gathered parameter
    grad_dtype: torch.dtype  # of its unreduced gradient
    elements: int  # of the gathered parameter, with the padding that makes shards equally large


def sharded_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    """Yield the sharded parameters of a model. Without a `reduce_dtype`, torch 2.15 keeps unreduced
    gradients in the dtype of the shard, earlier releases in that of the gathered parameter."""
    for parameter, policy in _fsdp_parameters(model):
        own = parameter.sharded_param.dtype
        dtype = policy.param_dtype or own
        unreduced = own if hasattr(parameter, "unsharded_grad_dtype") else dtype
        gathered = getattr(parameter, "_unsharded_param", None)  # exists once it was gathered
        shards = getattr(parameter.mesh_info, "shard_mesh_size", 1)  # 1 if it is replicated
        elements = parameter.padded_sharded_param_size.numel() * shards
        grad_dtype = policy.reduce_dtype or unreduced
        yield ShardedParameter(parameter.sharded_param, gathered, dtype, grad_dtype, elements)


def drop_unsharded_grads(root: Any) -> None:
    """Have FSDP drop gradients that it has not reduced, and the state that a failed pass left."""
    if is_root(root) and hasattr(root, "reset_iter_state"):  # from torch 2.13 on
        root.reset_iter_state()
    if hasattr(root, "finalize_backward"):  # from torch 2.15 on `reset_iter_state` drops all
        return
    for parameter, _ in _fsdp_parameters(root):
        if "unsharded_accumulated_grad" in vars(parameter):  # a property from torch 2.15 on
            parameter.unsharded_accumulated_grad = None
    for parameter in sharded_parameters(root):
        if parameter.gathered is not None:
            parameter.gathered.grad = None
    for module in root.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def sharded_modules() -> list[Any]:
    """Return all modules of this process that `fully_shard` was called with."""
    states = sys.modules.get("torch.distributed._composable_state")
    modules = [] if states is None else [ref() for ref in states._module_state_mapping.keyrefs()]
    return [module for module in modules if sharded_state(module) is not None]


def sharded_state(module: Any) -> Any:
    """Return FSDP's state of a module of `fully_shard`; None for any other object."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes long
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return module._get_fsdp_state()


def is_root(module: nn.Module) -> bool | None:
    """Tell whether a module of `fully_shard` is inside no other; None before the first forward."""
    root: bool | None = sharded_state(module)._is_root
    return root


def sums_gradients(root: nn.Module) -> bool:
    """Tell whether `set_gradient_divide_factor(1.0)` makes a module sum gradients."""
    states = filter(None, map(sharded_state, root.modules()))
    groups = chain.from_iterable(map(_sharded_groups, states))
    return any(group.gradient_divide_factor == 1.0 for group in groups)


# Names of phases of a state of `fully_shard`. In REPLAY_PHASE FSDP's hooks around a forward only
# cast, or with torch 2.10 do nothing: weights are gathered, and gradients are reduced later.
IDLE_PHASE, FORWARD_PHASE, REPLAY_PHASE = "IDLE", "FORWARD", "PRE_BACKWARD"


def sharding_phase(state: Any) -> str:
    """Return the phase of a state of `fully_shard`."""
    name: str = state._training_state.name
    return name


def set_sharding_phase(state: Any, name: str) -> None:
    """Put a state of `fully_shard` into another phase."""
    state._training_state = type(state._training_state)[name]


def begin_sharded_forward(state: Any, module: nn.Module, root: Tensor) -> Tensor:
    """Do as `fully_shard` does before a forward: gather weights, and put a node after the input,
    here the root, whose backward reduces gradients. Return the root with that node."""
    (root,), _ = state._pre_forward(module, (root,), {})
    return root


def end_sharded_forward(state: Any, module: nn.Module, outputs: list[Tensor]) -> None:
    """Do as `fully_shard` does after a forward: put hooks on the outputs that gather weights."""
    state._post_forward(module, (), outputs)
