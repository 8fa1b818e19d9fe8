"""Watch a loop: what is patched or hooked while an audit is open, and what it writes down.

Nothing is read from a device before the audit closes. What is patched are functions through which
every loop goes, by whatever name it has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import accumext
from accumext.auditing._events import Call, Clipped, Pass, Record
from accumext.auditing._followed import parameters_of
from accumext.auditing._graph import SCALED, leaves
from accumext.auditing._modules import Averages, batch_norms, modules_of, optimized
from accumext.auditing._passes import Parameters, Passes, stands_for
from accumext.auditing._steps import Journal, Steps
from accumext.auditing._torch_private import (
    CLIPS,
    is_being_made,
    is_dtensor,
    is_half,
    scale_tensor,
)


@contextmanager
def replaced(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """`call(original, *args)` in place of a function, and the original again afterwards."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, instead)
    try:
        yield
    finally:
        if vars(owner).get(name) is instead:  # not under a patch of somebody else's
            setattr(owner, name, original)


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


class Observer:
    """The events of a loop, until so many windows are closed; `stops`: then `Done` is raised.

    Without an optimizer all that step are followed, or the one of this `number` among them alone.
    """

    def __init__(
        self,
        model: nn.Module | None,
        wrapper: Any,
        windows: int,
        stops: bool = False,
        number: int | None = None,
    ) -> None:
        self.parameters, self.journal = Parameters(), Journal()
        self._passes = Passes(self.parameters)
        self.steps = Steps(
            self.journal, self.parameters, self._passes, wrapper, windows, stops, number
        )
        self.measured = False  # whether a truncated gradient was
        self.joined: DistributedDataParallel | None = None  # by which processes are
        self._given, self._found = model, list[nn.Module]()
        self._state = (-1, -1)  # parameters and steps when modules were looked for
        self._averages: Averages | None = None
        self._norms: dict[str, nn.Module] = {}
        self._backwards, self._scheduling = 0, False
        self._stack = ExitStack()  # of what is put back when the block ends
        self._know()

    @property
    def watching(self) -> bool:
        return self.journal.watching

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Watch from here on."""
        with ExitStack() as stack:
            for owner, name, call in self._patches():
                stack.enter_context(replaced(owner, name, call))
            stack.enter_context(self._passes.saved.watch())
            self.steps.open(stack)
            self._stack = stack.pop_all()

    def _patches(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        if self.steps.chosen is None:
            yield Optimizer, "__init__", self._made
        yield torch.autograd, "backward", self._backward
        yield Optimizer, "zero_grad", self._zero_grad
        yield nn.Module, "zero_grad", self._zero_grad
        yield from ((owner, name, self._clip) for owner, name in CLIPS)
        yield accumext, "clip_grad_norm_", self._clip
        yield GradScaler, "scale", self._scaler_scale
        yield GradScaler, "unscale_", functools.partial(self._scaler_call, "unscale_")
        yield GradScaler, "step", self._scaler_step
        yield GradScaler, "update", functools.partial(self._scaler_call, "update")
        yield AveragedModel, "update_parameters", self._averaged
        yield from (
            (cls, "step", self._schedule) for cls in _subclasses(LRScheduler) if "step" in vars(cls)
        )

    def enter(self, context: AbstractContextManager[None]) -> None:
        """Leave something else when the audit closes."""
        self._stack.enter_context(context)

    def close(self) -> None:
        """Put everything back."""
        self.steps.close()
        self._stack.close()

    def record(self, ended: bool) -> Record:
        """What was seen, read from the device."""
        known, steps = self.parameters, self.steps
        self._know()
        return Record(
            events=self.journal.events(),
            names=known.names,
            bytes=sum(t.numel() * t.element_size() for t in known.tensors),
            optimizers=tuple(one.facts(known) for one in steps.followed),
            trained=known.among(steps.trained.values()),
            half=frozenset(n for n, t in enumerate(known.tensors) if is_half(t)),
            passes=self._backwards,
            steps=tuple((name, times) for (_, name), times in steps.taken.items()),
            ended=ended,
            asked="" if steps.chosen is None else type(steps.chosen.optimizer).__name__,
        )

    # --- models -----------------------------------------------------------------------------------

    def _know(self) -> None:
        self.steps.know()
        for model in self._models():
            for name, tensor in model.named_parameters():
                self.parameters.add(tensor, name)
        self._passes.saved.know(self.parameters.tensors)

    def _models(self) -> list[nn.Module]:
        """Those found, then the given one, whose names count."""
        return self._found if self._given is None else [*self._found, self._given]

    def _made(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        for tensor in parameters_of(made.param_groups) if self.watching else []:
            self.parameters.add(tensor)
        self._know()

    @cached_property
    def _optimized(self) -> frozenset[int]:
        """The ids of what optimizers have, of those that have stepped or are alive at the end."""
        return frozenset(id(stands_for(t)) for t in (*self.steps.trained.values(), *optimized()))

    def buffers(self) -> Iterable[Tensor]:
        """Those of the models that are known."""
        return [buffer for model in self._models() for buffer in model.buffers()]

    def _find_modules(self, root: Tensor) -> None:
        """The models, and the DistributedDataParallel around one where there are processes."""
        if self.steps.chosen is None:
            for leaf in leaves(root.grad_fn):
                if isinstance(leaf, nn.Parameter):
                    self.parameters.add(leaf)
        self._know()
        tensors, state = self.parameters.tensors, (len(self.parameters.tensors), self.steps.number)
        if state == self._state:
            return
        given = set() if self._given is None else {id(p) for p in self._given.parameters()}
        joins = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        more = len(tensors) != self._state[0]
        if more and (joins or any(id(tensor) not in given for tensor in tensors)):
            self._found = modules_of(tensors)
            replicas = [m for m in self._found if isinstance(m, DistributedDataParallel)]
            self.joined = replicas[0] if joins and replicas else None
            self._know()
        models, self._state = self._models(), state
        self._norms = {k: v for model in models for k, v in batch_norms(model).items()}
        new = Averages(models, [t for one in self.steps.followed for t in one.tensors()])
        self._averages = new.since(self._averages)

    # --- backward passes --------------------------------------------------------------------------

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        own = self._passes.running is None and bool(roots) and isinstance(roots[0], Tensor)
        if self.watching:
            self.steps.settle()
        if not (self.watching and own and roots[0].grad_fn is not None):
            return original(tensors, *args, **kwargs)
        self._backwards += 1
        self._find_modules(roots[0])
        self._look_at_averages()
        self.steps.notice_clears()
        given = args[0] if args else kwargs.get("grad_tensors")
        asleep = {name: norm for name, norm in self._norms.items() if not norm.training}
        alone = self.joined is not None and not self.joined.require_backward_grad_sync
        with self._passes.watch(roots[0], asleep) as fields:
            result = original(tensors, *args, **kwargs)
        if fields:
            self.steps.fill()
            one = len(roots) == 1 and roots[0].numel() == 1
            of_one = not isinstance(given, (list, tuple)) or given[0] is None
            self.journal.write(
                Pass, **fields, scalar=one and of_one, sent=self._sent(fields["order"]),
                without_sync=alone,
            )  # fmt: skip
        return result

    def _sent(self, reached: Iterable[int]) -> int:
        """Bytes that were reduced, as the replica's last forward pass has prepared it."""
        if self.joined is None or not self.joined.require_forward_param_sync:
            return 0
        grads = [self.parameters.tensors[n] for n in reached]
        return sum(t.numel() * t.element_size() for t in grads)

    # --- what is done to gradients ----------------------------------------------------------------

    def _write_call(self, name: str, tensors: Iterable[Tensor]) -> None:
        known, about = self.parameters, list(tensors)
        self.journal.write(Call, name=name, parameters=lambda: known.among(about))

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        self.steps.settle()
        groups = getattr(owner, "param_groups", None)
        self._write_call("zero_grad", parameters_of(groups) if groups else owner.parameters())
        original(owner, *args, **kwargs)
        self.steps.notice_clears(told=True)

    def _clip(
        self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = result = original(tensors, max_norm, *args, **kwargs)
        if result is None:
            norm = args[0] if args else kwargs["total_norm"]
        if self.watching:
            self._write_clip(tensors, max_norm, norm)
        return result

    def _write_clip(self, tensors: list[Tensor], max_norm: Any, norm: Any) -> None:
        norm = norm.full_tensor() if is_dtensor(norm) else norm.detach().clone()
        most = max_norm.clone() if isinstance(max_norm, Tensor) else max_norm
        known, filled = self.parameters, {id(t) for t in tensors if t.grad is not None}

        def untrained() -> int:
            """Parameters that no optimizer has; those without a gradient count if all are such."""
            ids = {id(t) for t in tensors}
            left = ids - self._optimized
            return len(left if left == ids else left & filled)

        self.journal.write(
            Clipped,
            norm=lambda: float(norm),
            max_norm=lambda: float(most),
            parameters=lambda: known.among(tensors),
            others=untrained,
            filled=bool(filled),
        )

    # --- averages, scalers, schedules -------------------------------------------------------------

    def _averaged(self, original: Any, average: Any, *args: Any, **kwargs: Any) -> Any:
        self._look_at_averages()
        result = original(average, *args, **kwargs)
        self.steps.settle()
        if self._averages is not None:
            self._averages.look()
        self.journal.write(Call, name="average")
        return result

    def _look_at_averages(self) -> None:
        """Write down that one was written, at the first line that shows it."""
        if self._averages is not None and self.watching:
            moved = self._averages.look()
            self.journal.write(Call, only_if=lambda: moved(self._optimized), name="average")

    def _scaler_scale(self, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        scale = scale_tensor(scaler) if self.watching and scaler.is_enabled() else None
        loss = args[0] if args else kwargs.get("outputs")
        if scale is not None and isinstance(loss, Tensor) and scaled.grad_fn is not None:
            noted = scale.detach().clone(), loss.detach().sum().clone()
            scaled.grad_fn.metadata[SCALED] = noted
        return scaled

    def _scaler_call(
        self, name: str, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any
    ) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled() and not self.steps.through_scaler:
            stepping = [*args, *kwargs.values()][0] if name == "unscale_" else None
            about = [] if stepping is None else parameters_of(stepping.param_groups)
            self._write_call(name, about)

    def _scaler_step(self, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        steps, stepping = self.steps, args[0] if args else kwargs["optimizer"]
        one = steps.follow(stepping) if self.watching and scaler.is_enabled() else None
        if one is None or one.wrapper is not None:
            return original(scaler, *args, **kwargs)
        windows, steps.through_scaler = one.windows, True
        try:
            result = original(scaler, *args, **kwargs)
            if self.watching and one.windows == windows:
                steps.write(one, None)
        finally:
            steps.through_scaler = False
        return result

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        inner, self._scheduling = self._scheduling, True
        made = not is_being_made(scheduler)
        try:
            result = original(scheduler, *args, **kwargs)
        finally:
            self._scheduling = inner
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
        if made and not inner:
            self.steps.settle()
            self._write_call("schedule", parameters_of(groups))
        return result
