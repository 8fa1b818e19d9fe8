"""Modules of `fully_shard` (FSDP2) that a call uses many times, gathered once per call.

FSDP2 works in the hooks of a module's forward. The hook before it gathers the weights, and puts a
node after the inputs whose backward reduces the gradients. The hook after it frees the weights
again, and puts a hook on the outputs that gathers them for the backward pass. So a module that is
called at every step or slice may be gathered and freed every time, in the backward pass, too, and a
module whose weights are read without a call is not gathered at all. Here the call as a whole is the
module's forward:

- Before the call the module's forward begins. Its input is a 0-dim tensor, the root, on which the
  call's loss depends. Autograd runs later nodes first, so FSDP's node after the root runs when all
  uses in the call have given their gradients, and before the backward of earlier operations.
- During the call the module is in the phase in which FSDP gathers and reduces nothing. That phase
  is for activation checkpointing, which runs a forward again between the hook on the outputs and
  the reduction. Inputs and outputs are still cast as the MixedPrecisionPolicy says.
- After the call the module's forward ends with the call's outputs as its own. So the weights are
  gathered before the first node of the call runs backward, also for steps and slices that run
  again. Gathering fills the same tensors, without raising their versions. Until then the weights
  are freed, if they were not gathered before the call.

No setting of a module is changed, so `set_requires_gradient_sync` and the like work as always, and
nothing has to be undone after a backward pass that fails. The public `register_fsdp_forward_method`
makes one function's body a forward. It is not enough, for it cannot begin when a callable first
calls a module, and does not end if the body raises.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accumext.tensors.checks import message
from accumext.tensors.torch_private import backward_runs, base_of, not_compiled
from accumext.tensors.torch_private_distributed import (
    FORWARD_PHASE,
    IDLE_PHASE,
    REPLAY_PHASE,
    begin_sharded_forward,
    end_sharded_forward,
    set_sharding_phase,
    sharded_modules,
    sharded_state,
    sharding_phase,
)


class _Held(NamedTuple):
    """A module whose forward has begun."""

    module: Any
    was_sharded: bool
    root: Tensor  # 0, with FSDP's node after it


_all_held: set[Any] = set()  # the states of modules held by calls, which may be nested


def gathered_once(
    op: str, *called: Any, read: Iterable[Any] = ()
) -> AbstractContextManager[GatheredOnce | None]:
    """Return a context in which every module of `fully_shard` is gathered once: modules in `read`
    and modules whose methods are `called` from the beginning, others from their first call on. It
    gives None if there are no such modules."""
    # If FSDP, whose import takes long, is not imported, there are none.
    modules = sharded_modules() if "torch.distributed.fsdp" in sys.modules else []
    return GatheredOnce(op, modules, called, read) if modules else nullcontext()


class GatheredOnce:
    """One call of this package, as a forward of every sharded module in it."""

    def __init__(
        self, op: str, modules: Iterable[Any], called: Iterable[Any], read: Iterable[Any]
    ) -> None:
        self._op = op
        self._modules = modules  # all sharded modules of the process
        self._called, self._read = called, read
        self._held: dict[Any, _Held] = {}  # by FSDP's state of a module, or of several together
        self._outputs: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> GatheredOnce:
        try:
            for given in self._read:
                for module in given.modules() if isinstance(given, nn.Module) else ():
                    self._hold(module)
            for function in self._called:
                self._hold(getattr(function, "__self__", None))
            for module in self._modules:
                if sharded_state(module) not in self._held:
                    hook = module.register_forward_pre_hook(self._before_forward, prepend=True)
                    self._hooks.append(hook)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if kind is not None:
            self._outputs = []
        self._release()

    def finish(self, loss: Tensor, others: Iterable[Tensor] = ()) -> Tensor:
        """Return the loss, made to depend on the roots of the held modules. `others` are tensors
        from which a backward pass may begin, too. To be called last in the context."""
        if not self._held:
            return loss
        if loss.requires_grad:
            for held in self._held.values():
                loss = loss + held.root.to(loss.dtype)
        # Put hooks on the bases of views: a write into a view would drop hooks on it.
        self._outputs = [base_of(t) for t in (loss, *others) if t.requires_grad]
        return loss

    @not_compiled
    def _before_forward(self, module: nn.Module, _: object) -> None:
        if threading.get_ident() == self._thread:
            self._hold(module)

    def _hold(self, module: Any) -> None:
        state = sharded_state(module)
        if state is None:
            return
        phase = sharding_phase(state)
        if phase == FORWARD_PHASE or state in _all_held:  # it is gathered
            return
        if phase == REPLAY_PHASE:
            if not backward_runs():
                contract = "be reset after a backward pass that failed"
                outermost = "of the outermost fully_shard module"
                advice = f"Call zero_grad() and then reset_iter_state() {outermost}"
                got = f"{type(module).__name__}, which was not"
                raise RuntimeError(message(self._op, "modules", contract, got, advice))
            module.unshard()
            return
        parameters = list(module.parameters())
        device = parameters[0].device if parameters else None
        root = torch.zeros((), device=device, requires_grad=True)
        was_sharded = any(map(is_shard, parameters))
        try:
            root = begin_sharded_forward(state, module, root)
        except BaseException:
            set_sharding_phase(state, IDLE_PHASE)
            raise
        self._held[state] = _Held(module, was_sharded, root)
        _all_held.add(state)
        set_sharding_phase(state, REPLAY_PHASE)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        while self._held:
            state, held = self._held.popitem()  # in reverse order: FSDP's root, held first, last
            _all_held.discard(state)
            set_sharding_phase(state, FORWARD_PHASE)
            end_sharded_forward(state, held.module, self._outputs)
            if held.was_sharded:
                held.module.reshard()
        self._outputs = []


def is_shard(tensor: Any) -> bool:
    """Tell whether a tensor is a DTensor, such as a parameter that is not gathered."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
