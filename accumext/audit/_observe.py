"""Watch a loop: what is patched or hooked while an audit is open, and what it writes down."""

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
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import accumext
from accumext import _torch_private as private
from accumext._tensor_kinds import HALF_DTYPES, is_dtensor
from accumext.audit._events import (
    Cleared,
    Clipped,
    Event,
    Pass,
    Record,
    Scheduled,
    Sketch,
    Stepped,
    Unscaled,
    Updated,
)
from accumext.audit._graph import Losses, SavedTensors
from accumext.audit._sketch import SIZE, dense, sketch
from accumext.optimizer import AccumulatingOptimizer

Draft = Callable[[], Event]  # reads from the device what an event says

_OURS = (os.path.dirname(torch.__file__), os.path.dirname(accumext.__file__))
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


def line() -> str:
    """The line of the loop that is running: the user's own if it is in a library's loop."""
    frame: FrameType | None = sys._getframe(1)
    outermost = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OURS):
            place = f"{os.path.basename(path)}:{frame.f_lineno}"
            if not path.startswith(_INSTALLED):
                return place
            outermost = outermost or place
        frame = frame.f_back
    return outermost


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


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of wrappers, such as those of accumext, Accelerate and Lightning."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


class Parameters:
    """The parameters that an audit knows, by number: the optimizer's, then the model's others."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # by id; of masters too
        self._names: dict[int, str] = {}
        self._nodes: dict[int, Any] = {}  # kept: a leaf makes its node anew once nobody holds it

    def __len__(self) -> int:
        return len(self.tensors)

    def add(self, tensor: Tensor) -> None:
        """Know a parameter, and of a master the parameter that it stands for."""
        link = getattr(tensor, "master_of", None)
        original = tensor if link is None else link.parameter
        number = self._numbers.setdefault(id(original), len(self.tensors))
        self._numbers[id(tensor)] = number
        if number == len(self.tensors):
            self.tensors.append(original)

    def name(self, model: nn.Module) -> None:
        """Know a model's parameters, and their names."""
        for name, tensor in model.named_parameters():
            self.add(tensor)
            self._names[self._numbers[id(tensor)]] = name.removeprefix("module.")

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(id(tensor))

    def numbers(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(n for t in tensors if (n := self.number(t)) is not None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names.get(i, f"parameter {i}") for i in range(len(self)))

    def hook(self, see: Callable[[int, Tensor], None]) -> Iterator[Any]:
        """Have `see` called with every gradient that is about to be added to a `.grad`."""
        for number, tensor in enumerate(self.tensors):
            if tensor.requires_grad and number not in self._nodes and not is_dtensor(tensor):
                node = self._nodes[number] = get_gradient_edge(tensor).node
                yield node.register_prehook(functools.partial(_first_of, see, number))

    def shards(self) -> Iterator[tuple[int, Tensor]]:
        """Parameters whose gradients are summed over processes before they reach `.grad`."""
        return ((n, t) for n, t in enumerate(self.tensors) if is_dtensor(t))


def _first_of(see: Callable[[int, Tensor], None], number: int, grads: tuple[Any, ...]) -> None:
    if grads[0] is not None:
        see(number, grads[0])


class Observer:
    """The events of a loop, until so many windows are closed."""

    def __init__(self, model: nn.Module | None, optimizer: Any, windows: int) -> None:
        self.left = windows
        self.parameters = Parameters()
        self.on_done: Callable[[], None] | None = None  # called once no window is left
        self._model, self._optimizer = model, unwrapped(optimizer)
        self._wrapper = optimizer if isinstance(optimizer, AccumulatingOptimizer) else None
        self._report = None if self._wrapper is None else self._wrapper.last
        self._factors: list[Callable[[], float]] = []  # the wrapper's clip of the last window
        self._drafts: list[Draft] = []
        self._saved = SavedTensors()
        self._sketches: dict[int, Tensor] | None = None  # of the pass that runs
        self._sums: dict[int, list[Tensor]] = {}  # of half-precision gradients, in float32
        self._scale: Tensor | None = None  # of a loss that was scaled and has not flowed back
        self._sizes: dict[int, int] = {}  # optimizers that have stepped: parameters of each group
        self._trained: dict[int, list[Tensor]] = {}  # the parameters of each
        self._clipped: list[Tensor] = []  # that are not the optimizer's
        self._through_scaler, self._scheduling, self._calls = False, False, 0
        self._used: tuple[dict[int, Tensor], Any, Any] | None = None
        self._hooks = ExitStack()  # put back when no window is left
        self._stack = ExitStack()
        self.measured = False  # whether a truncated gradient was
        if optimizer is not None:
            self._attach(self._optimizer)
        if model is not None:
            self.parameters.name(model)

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Watch from here on."""
        with ExitStack() as stack:
            for owner, name, call in self._patches():
                stack.enter_context(replaced(owner, name, call))
            stack.enter_context(self._saved.watch())
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before_step),
                (register_optimizer_step_post_hook, self._after_step),
            ):
                stack.callback(register(hook).remove)
            self._stack = stack.pop_all()

    def _patches(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield torch.autograd, "backward", self._backward
        yield Optimizer, "zero_grad", self._zero_grad
        yield nn.Module, "zero_grad", self._zero_grad
        yield clip_grad, "_clip_grads_with_norm_", self._clip
        yield accumext, "clip_grad_norm_", self._our_clip
        yield Optimizer, "__init__", self._built
        yield AccumulatingOptimizer, "__init__", self._wrapped
        for name in ("scale", "unscale_", "step", "update"):
            yield GradScaler, name, getattr(self, f"_scaler_{name}")
        for cls in _subclasses(LRScheduler):
            if "step" in vars(cls):
                yield cls, "step", self._schedule

    def close(self) -> None:
        """Put everything back."""
        self._settle_wrapper()
        self._finish()
        self._stack.close()

    def _finish(self) -> None:
        self.left, self._saved.watching = 0, False
        self._hooks.close()
        self._sums.clear()

    def record(self) -> Record:
        """What was seen, read from the device."""
        events = tuple(draft() for draft in self._drafts)
        known = self.parameters
        trained = [known.numbers(tensors) for tensors in self._trained.values()]
        audited = self._own()
        every = Counter(known.number(t) for tensors in self._trained.values() for t in tensors)
        tensors = known.tensors
        return Record(
            events=events,
            names=known.names,
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            trained=frozenset().union(*trained),
            twice=frozenset(n for n, times in every.items() if n is not None and times > 1),
            audited=known.numbers(audited),
            wrapped=self._wrapper is not None,
            sums=self._wrapper is not None and self._wrapper.reduction == "sum",
            half=frozenset(n for n, t in enumerate(tensors) if t.dtype in HALF_DTYPES),
        )

    @property
    def reduces(self) -> bool:
        """Whether processes that DistributedDataParallel joins are audited together."""
        joined = isinstance(self._model, DistributedDataParallel)
        return joined and dist.is_initialized() and dist.get_world_size() > 1

    def patch(self, patched: AbstractContextManager[None]) -> None:
        """Patch one thing more until the audit closes."""
        self._stack.enter_context(patched)

    def buffers(self) -> Iterable[Tensor]:
        """The model's; none where it is not known."""
        return [] if self._model is None else self._model.buffers()

    def write(self, event: type[Event], **fields: Callable[[], Any]) -> None:
        """Keep an event; its fields are asked for when the audit closes."""
        where, time = line(), perf_counter()
        self._drafts.append(
            lambda: event(where, time, **{name: field() for name, field in fields.items()})
        )

    # --- optimizers and models --------------------------------------------------------------------

    def _attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        for tensor in self._own():
            self.parameters.add(tensor)

    def _own(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [tensor for group in groups for tensor in group["params"]]

    def _built(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if self.left and self._optimizer is None:
            self._attach(optimizer)

    def _wrapped(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **kwargs)
        if self.left and self._wrapper is None and unwrapped(wrapper) is self._optimizer:
            self._wrapper = wrapper

    def _find_model(self) -> None:
        """The module that has most of the optimizer's parameters, and is in no other."""
        mine = set(map(id, self._own()))
        best = 0
        for candidate in gc.get_objects():
            if mine and issubclass(type(candidate), nn.Module):
                shared = len(mine & set(map(id, candidate.parameters())))
                size = shared * 10**6 + sum(1 for _ in candidate.modules())
                if shared and size > best:
                    self._model, best = candidate, size
        if self._model is not None:
            self.parameters.name(self._model)

    def _is_mine(self, owner: Any) -> bool:
        return owner is self._model or unwrapped(owner) is self._optimizer

    def _settle_wrapper(self) -> None:
        """Complete the last window of a wrapper, which tells its clip, or that it skipped."""
        report = None if self._wrapper is None or not self.left else self._wrapper.last
        if report is None or report is self._report:
            return
        if self._used is None:
            self._write_step(None, skipped=lambda: True)
        self._report, self._used = report, None
        self._factors.append(lambda: float(report.clip_coef))
        self._count()

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            self._finish()
            if self.on_done is not None:
                self.on_done()

    # --- backward passes --------------------------------------------------------------------------

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        nodes = [t.grad_fn for t in roots if isinstance(t, Tensor) and t.grad_fn is not None]
        nested = self._sketches is not None or kwargs.get("inputs") is not None
        if not (self.left and self._optimizer is not None and nodes) or nested:
            return original(tensors, *args, **kwargs)
        with self._pass(roots[0], nodes[0]):
            return original(tensors, *args, **kwargs)

    @contextmanager
    def _pass(self, root: Tensor, node: Any) -> Iterator[None]:
        self._settle_wrapper()
        if self._model is None:
            self._find_model()
        known, start = self.parameters, perf_counter()
        for tensor in self._own():
            known.add(tensor)
        for handle in known.hook(self._see):
            self._hooks.callback(handle.remove)
        self._saved.parameters = {
            private.local_part(t).data_ptr() if is_dtensor(t) else t.data_ptr(): n
            for n, t in enumerate(known.tensors)
        }
        self._saved.leaves = {id(t): n for n, t in enumerate(known.tensors)}
        scale, self._scale = self._scale, None
        losses = Losses(node)
        graph = self._saved.graph(losses.classes)
        before = {n: sketch(t.grad) for n, t in known.shards() if t.grad is not None}
        found = self._sketches = dict[int, Tensor]()
        complete = False
        try:
            yield
            complete = True
        finally:
            self._sketches = None
            self._saved.end_pass()
            read = losses.end()
            for n, t in known.shards():
                if t.grad is not None:
                    found[n] = sketch(t.grad) - before.get(n, 0.0)
            value = root.detach().sum().clone()
            if complete and found:
                sent = self._sent(found)
                self.write(
                    Pass,
                    start=lambda: start,
                    gradient=lambda: self._matrix(found),
                    reached=lambda: frozenset(found),
                    losses=lambda: read()[0],
                    coefficient=lambda: read()[1],
                    scale=lambda: 1.0 if scale is None else float(scale),
                    value=lambda: float(value),
                    graph=lambda: graph,
                    sent=lambda: sent,
                )

    def _see(self, number: int, grad: Tensor) -> None:
        if self._sketches is None:
            return
        one = sketch(grad)
        self._sketches[number] = self._sketches.get(number, 0.0) + one
        if grad.dtype in HALF_DTYPES and self._wrapper is None:
            with torch.no_grad():
                sums = self._sums.setdefault(number, [torch.zeros_like(dense(grad)).float()])
                sums[0] += dense(grad)

    def _matrix(self, rows: dict[int, Tensor]) -> Sketch:
        matrix = torch.zeros(len(self.parameters), SIZE, dtype=torch.float64)
        for number, row in rows.items():
            matrix[number] = row.cpu()
        return matrix

    def _sent(self, found: dict[int, Tensor]) -> int:
        if not (self.reduces and getattr(self._model, "require_backward_grad_sync", False)):
            return 0
        grads = [self.parameters.tensors[n] for n in found]
        return sum(t.numel() * t.element_size() for t in grads)

    # --- what is done to gradients ----------------------------------------------------------------

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        if self.left and self._is_mine(owner):
            self._settle_wrapper()
            self.write(Cleared)
        original(owner, *args, **kwargs)

    def _clip(
        self, original: Any, parameters: Any, max_norm: Any, total_norm: Tensor, *args: Any
    ) -> None:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        original(tensors, max_norm, total_norm, *args)
        self._write_clip(tensors, max_norm, total_norm)

    def _our_clip(
        self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm: Tensor = original(tensors, max_norm, *args, **kwargs)
        self._write_clip(tensors, max_norm, norm)
        return norm

    def _write_clip(self, tensors: list[Tensor], max_norm: Any, norm: Tensor) -> None:
        if not self.left or self._optimizer is None:
            return
        norm = norm.full_tensor() if is_dtensor(norm) else norm.detach().clone()
        self.write(
            Clipped,
            norm=lambda: float(norm),
            max_norm=lambda: float(max_norm),
            parameters=lambda: self.parameters.numbers(tensors),
            others=lambda: len(self._untrained(tensors)),
        )

    def _untrained(self, tensors: list[Tensor]) -> list[Tensor]:
        trained = {id(t) for some in (*self._trained.values(), self._own()) for t in some}
        masters = [getattr(t, "master_of", None) for t in self._own()]
        trained |= {id(link.parameter) for link in masters if link is not None}
        return [t for t in tensors if id(t) not in trained]

    # --- scalers and schedules --------------------------------------------------------------------

    def _scaler_scale(self, original: Any, scaler: GradScaler, *args: Any) -> Any:
        scaled = original(scaler, *args)
        scale = private.scale_tensor(scaler) if self.left and scaler.is_enabled() else None
        if scale is not None:
            self._scale = scale.detach().clone()
        return scaled

    def _scaler_unscale_(self, original: Any, scaler: GradScaler, optimizer: Any) -> None:
        original(scaler, optimizer)
        if self.left and scaler.is_enabled() and unwrapped(optimizer) is self._optimizer:
            self.write(Unscaled)

    def _scaler_step(
        self, original: Any, scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        mine = self.left and self._wrapper is None and unwrapped(optimizer) is self._optimizer
        if not (mine and scaler.is_enabled()):
            return original(scaler, optimizer, *args, **kwargs)
        before, self._through_scaler = len(self._drafts), True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._through_scaler = False
        if len(self._drafts) == before:
            self._through_scaler = True
            self._write_step(None, skipped=lambda: True)
            self._through_scaler = False
        return result

    def _scaler_update(self, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if self.left and scaler.is_enabled():
            self.write(Updated)

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        inner, self._scheduling = self._scheduling, True
        started = getattr(scheduler, "_step_count", 1) > 0  # the first is the constructor's
        mine = unwrapped(getattr(scheduler, "optimizer", None)) is self._optimizer
        try:
            result = original(scheduler, *args, **kwargs)
        finally:
            self._scheduling = inner
        if self.left and started and mine and not inner:
            self._settle_wrapper()
            self.write(Scheduled)
        return result

    # --- steps ------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if not self.left or isinstance(optimizer, AccumulatingOptimizer):
            return None
        self._trained[id(optimizer)] = [p for g in optimizer.param_groups for p in g["params"]]
        if optimizer is not self._optimizer:
            return None
        self._settle_wrapper()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._calls = 0
        if closure is None:
            self._take_used()
            return None

        def watched() -> Any:
            result = closure()
            self._calls += 1
            self._take_used()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _take_used(self) -> None:
        grads = [(self.parameters.number(t), t.grad) for t in self._own()]
        left = {n: sketch(g) for n, g in grads if n is not None and g is not None}
        factors = [getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")]
        kept = [f.detach().clone() if isinstance(f, Tensor) else f for f in factors]
        self._used = (left, *kept)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.left or optimizer is not self._optimizer or self._used is None:
            return
        left, scale, found_inf = self._used
        self._write_step(
            left,
            scale=lambda: 1.0 if scale is None else float(scale),
            skipped=lambda: found_inf is not None and float(found_inf) > 0,
        )
        if self._wrapper is None:
            self._used = None

    def _write_step(
        self,
        left: dict[int, Tensor] | None,
        skipped: Callable[[], bool],
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        calls, scaler = self._calls, self._through_scaler
        errors = self._half_errors() if left is not None else []
        factors = self._factors = list[Callable[[], float]]()

        def half(column: int) -> float:
            sums = [sum(float(row[k]) for row in errors) for k in (0, 1, 2)]
            return float((sums[column] / sums[2]) ** 0.5) if errors and sums[2] else 0.0

        self.write(
            Stepped,
            used=lambda: None if left is None or skipped() else self._matrix(left) / scale(),
            left=lambda: None if left is None else self._matrix(left),
            present=lambda: frozenset(left or ()),
            factor=lambda: factors[0]() if factors else 1.0,
            skipped=skipped,
            through_scaler=lambda: scaler,
            closure_calls=lambda: calls,
            half_error=lambda: half(0),
            half_rounding=lambda: half(1),
        )
        if self._wrapper is None:
            self._count()

    @torch.no_grad()
    def _half_errors(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Squares of the error of each sum in half precision, of one rounding, and of the sum."""
        rows = []
        for number, (total,) in self._sums.items():
            grad = self.parameters.tensors[number].grad
            if grad is not None and grad.dtype in HALF_DTYPES:
                used, square = dense(grad).float(), total.square().sum()
                factor = (used * total).sum() / square  # of unscaling and clipping
                once = (total.to(grad.dtype).float() - total).square().sum()
                error = (used - factor * total).square().sum() / factor.square()
                rows.append((error, once, square))
        self._sums.clear()
        return rows
