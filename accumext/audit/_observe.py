"""Watch a loop: what is patched or hooked while an audit is open, and what it writes down.

Nothing is read from a device before the audit closes. What is patched are functions through which
every loop goes, by whatever name it has them.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, optimizer
from torch.optim.lr_scheduler import LRScheduler

import accumext
from accumext._tensor_kinds import HALF_DTYPES, is_dtensor
from accumext._torch_private import CLIPS, is_being_made, scale_tensor
from accumext.audit._events import Call, Clipped, Event, HalfSum, Pass, Record, Sketch, Stepped
from accumext.audit._passes import Parameters, Passes, Sketches, stands_for
from accumext.optimizer import AccumulatingOptimizer

_OURS = tuple(os.path.join(package.__path__[0], "") for package in (torch, accumext))
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


def is_own(path: str) -> bool:
    """Whether a file is the user's, and not of the standard library or installed."""
    return not path.startswith(_INSTALLED) and "site-packages" not in path


def line() -> str:
    """The line of the loop that is running: the user's own if it is in a library's loop."""
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OURS):
            place = f"{os.path.basename(path)}:{frame.f_lineno}"
            if is_own(path):
                return place
            innermost = innermost or place
        frame = frame.f_back
    return innermost


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


def shells(wrapper: Any) -> Iterator[Any]:
    """A wrapper, such as those of accumext, Accelerate and Lightning, and what it is around."""
    yield wrapper
    while hasattr(getattr(wrapper, "optimizer", None), "param_groups"):
        wrapper = wrapper.optimizer
        yield wrapper


def unwrapped(wrapper: Any) -> Any:
    """The optimizer inside of wrappers."""
    *_, inner = shells(wrapper)
    return inner


def ours_in(wrapper: Any) -> AccumulatingOptimizer | None:
    """The AccumulatingOptimizer among wrappers."""
    ours = (shell for shell in shells(wrapper) if isinstance(shell, AccumulatingOptimizer))
    return next(ours, None)


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


def module_of(parameters: Iterable[Tensor]) -> nn.Module | None:
    """The module that has most of some parameters, and is in no other."""
    ids = {id(stands_for(tensor)) for tensor in parameters}
    sizes = {
        module: (len(ids & set(map(id, module.parameters()))), sum(1 for _ in module.modules()))
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
    }
    best = max(sizes, key=sizes.__getitem__, default=None)
    return None if best is None or not sizes[best][0] else best


class Done(BaseException):
    """All windows are closed; not an Exception, which loops catch."""


class Used:
    """The gradients that a step finds, and what a fused optimizer does to them."""

    def __init__(self, left: Sketches, stepping: Any) -> None:
        self.left = left
        values = (getattr(stepping, name, None) for name in ("grad_scale", "found_inf"))
        self._scale, self._skip = (v.clone() if isinstance(v, Tensor) else v for v in values)

    def skipped(self) -> bool:
        return self._skip is not None and float(self._skip) > 0

    def gradient(self, size: int) -> Sketch | None:
        """With rows for so many parameters; None if it was not used."""
        scale = 1.0 if self._scale is None else float(self._scale)
        return None if self.skipped() else self.left.on_host(size) / scale


def _parameters_of(trained: dict[int, list[dict[str, Any]]]) -> list[Tensor]:
    """The parameters of the groups that optimizers have stepped on. An optimizer made of others has
    theirs, which are the same groups."""
    groups = {id(group): group for some in trained.values() for group in some}
    return [tensor for group in groups.values() for tensor in group["params"]]


class Observer:
    """The events of a loop, until so many windows are closed; `stops`: then `Done` is raised."""

    def __init__(
        self, model: nn.Module | None, wrapper: Any, windows: int, stops: bool = False
    ) -> None:
        self.left, self._stops = windows, stops
        self.parameters = Parameters()
        self.measured = False  # whether a truncated gradient was
        self.joined: DistributedDataParallel | None = None  # by which processes are
        self._searched = False
        self._model, self._optimizer = model, unwrapped(wrapper)
        self._wrapper = ours_in(wrapper)
        self._report = None if self._wrapper is None else self._wrapper.last
        self._clip_of_window: list[Callable[[], float]] = []  # the wrapper's, once it is known
        self._drafts: list[Callable[[], Event]] = []
        self._passes = Passes(self.parameters)
        self._trained: dict[int, list[dict[str, Any]]] = {}  # groups of what has stepped
        self._through_scaler, self._scheduling, self._closures = False, False, 0
        self._used: Used | None = None  # by the last step, until it is written
        self._stack = ExitStack()  # of what is put back when the block ends
        if self._wrapper is not None:
            self._passes.sum_nothing()
        self._know()

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Watch from here on."""
        with ExitStack() as stack:
            for owner, name, call in self._patches():
                stack.enter_context(replaced(owner, name, call))
            stack.enter_context(self._passes.saved.watch())
            before = optimizer.register_optimizer_step_pre_hook(self._before_step)
            stack.callback(before.remove)
            after = optimizer.register_optimizer_step_post_hook(self._after_step)
            stack.callback(after.remove)
            self._stack = stack.pop_all()

    def _patches(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield torch.autograd, "backward", self._backward
        yield Optimizer, "zero_grad", self._zero_grad
        yield nn.Module, "zero_grad", self._zero_grad
        yield from ((owner, name, self._clip) for owner, name in CLIPS)
        yield accumext, "clip_grad_norm_", self._clip
        yield Optimizer, "__init__", self._made
        yield AccumulatingOptimizer, "__init__", self._wrapped
        yield GradScaler, "scale", self._scaler_scale
        yield GradScaler, "unscale_", functools.partial(self._scaler_call, "unscale_")
        yield GradScaler, "step", self._scaler_step
        yield GradScaler, "update", functools.partial(self._scaler_call, "update")
        yield from (
            (cls, "step", self._schedule) for cls in _subclasses(LRScheduler) if "step" in vars(cls)
        )

    def enter(self, context: AbstractContextManager[None]) -> None:
        """Leave something else when the audit closes."""
        self._stack.enter_context(context)

    def close(self) -> None:
        """Put everything back."""
        try:
            self.settle()
        finally:
            self._finish()
            self._stack.close()

    def _finish(self) -> None:
        self.left = 0
        self._passes.close()

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            self._finish()
            if self._stops:
                raise Done

    def write(self, event: type[Event], **fields: Any) -> None:
        """Keep an event; fields that are functions are asked when the audit closes."""
        where, time = line(), perf_counter()
        self._drafts.append(
            lambda: event(where, time, **{k: v() if callable(v) else v for k, v in fields.items()})
        )

    def record(self) -> Record:
        """What was seen, read from the device."""
        known = self.parameters
        owners = Counter(map(known.number, _parameters_of(self._trained)))
        return Record(
            events=tuple(draft() for draft in self._drafts),
            names=known.names,
            bytes=sum(t.numel() * t.element_size() for t in known.tensors),
            trained=frozenset(n for n in owners if n is not None),
            twice=frozenset(n for n, times in owners.items() if n is not None and times > 1),
            audited=known.among(t for t in self._own() if t.requires_grad),
            wrapped=self._wrapper is not None,
            sums=self._wrapper is not None and self._wrapper.reduction == "sum",
            half=frozenset(n for n, t in enumerate(known.tensors) if t.dtype in HALF_DTYPES),
        )

    # --- optimizers and models --------------------------------------------------------------------

    def _own(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [tensor for group in groups for tensor in group["params"]]

    def _know(self) -> None:
        for tensor in self._own():
            self.parameters.add(tensor)
        for name, tensor in [] if self._model is None else self._model.named_parameters():
            self.parameters.add(tensor, name)
        self._passes.saved.know(self.parameters.tensors)

    def buffers(self) -> Iterable[Tensor]:
        """The model's; none where it is not known."""
        return [] if self._model is None else self._model.buffers()

    def _made(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        if self.left and self._optimizer is None:
            self._optimizer = made
            self._know()

    def _wrapped(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **kwargs)
        if self.left and self._wrapper is None and unwrapped(wrapper) is self._optimizer:
            self._wrapper = wrapper
            self._passes.sum_nothing()

    def _find_modules(self) -> None:
        """The model, and the DistributedDataParallel around it where there are processes."""
        joins = dist.is_available() and dist.is_initialized()
        if not self._searched and (self._model is None or joins):
            self._searched = True
            outermost = module_of(self._own())
            self._model = outermost if self._model is None else self._model
            if isinstance(outermost, DistributedDataParallel) and dist.get_world_size() > 1:
                self.joined = outermost

    def _is_mine(self, owner: Any) -> bool:
        """Whether it is the audited optimizer, in a wrapper or not."""
        return self._optimizer is not None and unwrapped(owner) is self._optimizer

    def settle(self) -> None:
        """Complete the last window of a wrapper, which tells its clip, or that it skipped."""
        report = None if self._wrapper is None or not self.left else self._wrapper.last
        if report is None or report is self._report:
            return
        if self._used is None:
            self._write_step(None)
        self._report, self._used = report, None
        self._clip_of_window.append(lambda: float(report.clip_coef))
        self._count()

    # --- backward passes --------------------------------------------------------------------------

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        own = self.left and self._optimizer is not None and self._passes.running is None
        known = own and isinstance(roots[0], Tensor)
        if not (known and roots[0].grad_fn is not None):
            return original(tensors, *args, **kwargs)
        self.settle()
        self._find_modules()
        self._know()
        with self._passes.watch(roots[0]) as fields:
            result = original(tensors, *args, **kwargs)
        if fields:
            self.write(Pass, **fields, sent=self._sent(fields["reached"]))
        return result

    def _sent(self, reached: frozenset[int]) -> int:
        if self.joined is None or not self.joined.require_backward_grad_sync:
            return 0
        grads = [self.parameters.tensors[n] for n in reached]
        return sum(t.numel() * t.element_size() for t in grads)

    # --- what is done to gradients ----------------------------------------------------------------

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        if self.left and (owner is self._model or self._is_mine(owner)):
            self.settle()
            self.write(Call, name="zero_grad")
        original(owner, *args, **kwargs)

    def _clip(
        self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = result = original(tensors, max_norm, *args, **kwargs)
        if result is None:
            norm = args[0] if args else kwargs["total_norm"]
        self._write_clip(tensors, max_norm, norm)
        return result

    def _write_clip(self, tensors: list[Tensor], max_norm: Any, norm: Any) -> None:
        if not self.left or self._optimizer is None:
            return
        norm = norm.full_tensor() if is_dtensor(norm) else norm.detach().clone()
        known = self.parameters

        def untrained() -> int:
            every = [*self._own(), *_parameters_of(self._trained)]
            return len({id(t) for t in tensors} - {id(stands_for(t)) for t in every})

        self.write(
            Clipped,
            norm=lambda: float(norm),
            max_norm=lambda: float(max_norm),
            parameters=lambda: known.among(tensors),
            others=untrained,
        )

    # --- scalers and schedules --------------------------------------------------------------------

    def _scaler_scale(self, original: Any, scaler: GradScaler, *args: Any) -> Any:
        scaled = original(scaler, *args)
        scale = scale_tensor(scaler) if self.left and scaler.is_enabled() else None
        if scale is not None:
            self._passes.scale = scale.detach().clone()
        return scaled

    def _scaler_call(
        self, name: str, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any
    ) -> None:
        original(scaler, *args, **kwargs)
        mine = name == "update" or self._is_mine(args[0])
        if self.left and scaler.is_enabled() and mine and not self._through_scaler:
            self.write(Call, name=name)

    def _scaler_step(
        self, original: Any, scaler: GradScaler, stepping: Any, *args: Any, **kwargs: Any
    ) -> Any:
        mine = self.left and self._wrapper is None and self._is_mine(stepping)
        if not (mine and scaler.is_enabled()):
            return original(scaler, stepping, *args, **kwargs)
        left, self._through_scaler = self.left, True
        try:
            result = original(scaler, stepping, *args, **kwargs)
            if self.left == left:
                self._write_step(None)
        finally:
            self._through_scaler = False
        return result

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        inner, self._scheduling = self._scheduling, True
        made = not is_being_made(scheduler)
        try:
            result = original(scheduler, *args, **kwargs)
        finally:
            self._scheduling = inner
        mine = self._is_mine(getattr(scheduler, "optimizer", None))
        if self.left and made and mine and not inner:
            self.settle()
            self.write(Call, name="schedule")
        return result

    # --- steps ------------------------------------------------------------------------------------

    def _before_step(self, stepping: Any, args: Any, kwargs: Any) -> Any:
        if not self.left or isinstance(stepping, AccumulatingOptimizer):
            return None
        self._trained[id(stepping)] = list(stepping.param_groups)
        if stepping is not self._optimizer:
            return None
        self.settle()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._closures = 0
        if closure is None:
            self._take_used()
            return None

        def watched() -> Any:
            result = closure()
            self._closures += 1
            self._take_used()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _take_used(self) -> None:
        self._used = Used(self.parameters.take(self._own()), self._optimizer)

    def _after_step(self, stepping: Any, args: Any, kwargs: Any) -> None:
        if self.left and stepping is self._optimizer and self._used is not None:
            self._write_step(self._used)
            if self._wrapper is None:
                self._used = None

    def _write_step(self, used: Used | None) -> None:
        """Of a step that used gradients, or that was skipped."""
        known, clip = self.parameters, list[Callable[[], float]]()
        self._clip_of_window = clip
        sums = [] if used is None else self._passes.half_sums()
        self.write(
            Stepped,
            used=lambda: None if used is None else used.gradient(len(known.tensors)),
            left=lambda: None if used is None else used.left.on_host(len(known.tensors)),
            present=frozenset() if used is None else frozenset(used.left.present),
            factor=lambda: clip[0]() if clip else 1.0,
            skipped=lambda: used is None or used.skipped(),
            through_scaler=self._through_scaler,
            closure_calls=self._closures,
            half_sums=lambda: tuple(HalfSum(*map(float, row)) for row in sums if row[2]),
        )
        if self._wrapper is None:
            self._count()
