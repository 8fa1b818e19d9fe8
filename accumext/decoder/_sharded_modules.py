"""Modules that `fully_shard` has wrapped one by one, gathered once for many uses of their weights.

FSDP gathers a module's parameters around its `forward`, and reduces their gradients when a backward
pass has left it: once for every call. Here a module is used many times, in steps or slices, or only
its weights are read. So the whole computation is made one forward pass of the module: parameters
are gathered as that begins; its hooks do nothing while it lasts, as in a recomputation; a gradient
that reaches a result gathers them again where they were given up, and they are reduced once, at the
end of that backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from accumext._torch_private import (
    abandon_sharded_forward,
    begin_sharded_forward,
    end_sharded_forward,
    sharded_state,
)

_R = TypeVar("_R")


def with_gathered(modules: Iterable[object], compute: Callable[[], _R]) -> _R:
    """What `compute` returns, with modules gathered that it uses, by their weights or by calls.

    Args:
        modules: those whose weights are read, also by modules in them. Others are found when they
            are called for the first time.
        compute: its result may nest tensors.
    """
    begun: dict[Any, nn.Module] = {}  # by state: several modules may share one

    def gather(module: nn.Module, *_: object) -> None:
        state = sharded_state(module)
        if state is not None and state not in begun:
            begun[state] = module
            begin_sharded_forward(module)

    handle = register_module_forward_pre_hook(gather)
    try:
        for given in modules:
            for module in given.modules() if isinstance(given, nn.Module) else ():
                gather(module)
        result = compute()
    except BaseException:
        for module in begun.values():
            abandon_sharded_forward(module)
        raise
    finally:
        handle.remove()
    for module in reversed(begun.values()):
        result = end_sharded_forward(module, result)
        if not torch.is_grad_enabled():  # no backward pass will give them up
            module.reshard()  # type: ignore[operator]
    return result
