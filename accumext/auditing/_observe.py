"""Watch a loop: what is patched or hooked while an audit is open, and what it writes down.

Nothing is read from a device before the audit closes. The patched functions are those through which
every loop goes, by whatever name it has imported them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from accumext.auditing._events import Call, Clipped, Pass, Record, only
from accumext.auditing._followed import parameters_of
from accumext.auditing._graph import SCALED, leaves, own_means
from accumext.auditing._lines import runs_inside
from accumext.auditing._modules import Averages, batch_norms, modules_of, replicas_of
from accumext.auditing._passes import UNNAMED, Parameters, Passes
from accumext.auditing._states import States
from accumext.auditing._steps import Journal, Steps
from accumext.auditing._torch_private import (
    CLIPS,
    is_being_made,
    is_dtensor,
    is_half,
    scale_tensor,
)
from accumext.ops import wgrad_fusion

_OURS = accumext.tbptt.__code__  # it detaches states by itself, and how far that goes is measured


@contextmanager
def replaced(
    owner: Any, name: str, call: Callable[..., Any], watching: Callable[[], bool]
) -> Iterator[None]:
    """Replace a function by `call(original, *args)`, which runs while the audit is watching; put
    the original back afterwards."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs) if watching() else original(*args, **kwargs)

    setattr(owner, name, instead)
    try:
        yield
    finally:
        if vars(owner).get(name) is instead:  # else somebody has patched it since
            setattr(owner, name, original)


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


class Observer:
    """The observer of a loop, until `windows` windows are closed; `stops`: then `Done` is raised.

    Without an optimizer all that step are followed, or only the one at index `number` of them.
    """

    def __init__(
        self, model: nn.Module | None, wrapper: Any, windows: int, stops: bool = False,
        number: int | None = None,
    ) -> None:  # fmt: skip
        self.parameters = Parameters()
        self.journal = Journal(self.parameters)
        self._passes = Passes(self.parameters)
        self.steps = Steps(
            self.journal, self.parameters, self._passes, wrapper, windows, stops, number
        )
        self.measured = False  # whether a truncated gradient was measured
        self.joined: list[DistributedDataParallel] = []  # join processes
        self._given, self._found = model, list[nn.Module]()
        self._state = (-1, -1)  # numbers of parameters and steps at the last search
        self._averages, self._states = Averages(), States(lambda: self.watching)
        self._norms: dict[str, nn.Module] = {}
        self._backwards, self._scheduling = 0, False
        self._stack = ExitStack()  # puts the originals back when the block ends
        self._know()

    @property
    def watching(self) -> bool:
        return self.journal.watching

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Begin to watch the loop."""

        def watching() -> bool:
            self.steps.settle()
            return self.watching

        with ExitStack() as stack:
            for owner, name, call in self._patches():
                stack.enter_context(replaced(owner, name, call, watching))
            stack.enter_context(self._passes.saved.watch())
            stack.enter_context(self._states.watch())
            wgrad_fusion.observers.append(self._passes.see_sum)
            stack.callback(wgrad_fusion.observers.remove, self._passes.see_sum)
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
        """Enter a context that is left when the audit closes."""
        self._stack.enter_context(context)

    def close(self) -> None:
        """Stop watching, and put the originals back."""
        self.steps.close()
        self._stack.close()

    def record(self, ended: bool) -> Record:
        """Return what was seen, read from the device."""
        known, steps, events = self.parameters, self.steps, tuple(own_means(self.journal.events()))
        if ended:
            self._know()
        reached = frozenset[int]().union(*(one.reached for one in only(events, Pass)))
        trained = known.among(steps.trained.values())
        idle = [one for one in steps.alive if id(one) not in steps.met and not ended]
        waiting = [one for one in idle if known.among(parameters_of(one)) & reached - trained]
        return Record(
            events=events,
            names=known.names,
            bytes=known.bytes_of(range(len(known.tensors))),
            optimizers=tuple(one.facts(known) for one in steps.followed),
            trained=trained.union(*(known.among(parameters_of(one)) for one in waiting)),
            waiting=tuple(type(one).__name__ for one in waiting),
            strays=tuple(self._strays()),
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
        """Return the models that were found, then the given one, whose names take precedence."""
        return self._found if self._given is None else [*self._found, self._given]

    def _made(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        for tensor in parameters_of(made):
            self.parameters.add(tensor)
        self._know()

    def buffers(self) -> Iterable[Tensor]:
        """Return the buffers of the known models."""
        return [buffer for model in self._models() for buffer in model.buffers()]

    def _strays(self) -> Iterator[str]:
        """Yield parameters in no module and no optimizer that passes before and after a step reach:
        neither temporary replacements of parameters nor tensors gathered from shards."""
        sharded = any(map(is_dtensor, self.parameters.tensors))
        for leaf, first, last in () if sharded else self.steps.leaves.values():
            number = self.parameters.number(leaf)
            unnamed = number is None or self.parameters.names[number].startswith(UNNAMED)
            if unnamed and last > first and id(leaf) not in self.steps.optimized:
                yield f"a parameter of shape {list(leaf.shape)}"

    def _find_modules(self, root: Tensor) -> None:
        """Find the models and, if there are several processes, what joins these."""
        steps = self.steps.taken.total()
        if self.steps.chosen is None or steps != self._state[1]:
            for leaf in leaves(root.grad_fn):
                if isinstance(leaf, nn.Parameter):
                    _, first, _ = self.steps.leaves.get(id(leaf), (leaf, steps, steps))
                    self.steps.leaves[id(leaf)] = leaf, first, steps
                    if self.steps.chosen is None:
                        self.parameters.add(leaf)
        self._know()
        tensors = self.parameters.tensors
        state = len(tensors), steps
        if state == self._state:
            return
        given = set() if self._given is None else {id(p) for p in self._given.parameters()}
        joins = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        more = len(tensors) != self._state[0]
        if more and (joins or any(id(tensor) not in given for tensor in tensors)):
            self._found = modules_of(tensors)
            self.joined = replicas_of(tensors) if joins else []
            self._know()
        models, self._state = self._models(), state
        self._norms = {k: v for model in models for k, v in batch_norms(model).items()}
        self._averages.find(models, [t for one in self.steps.followed for t in one.tensors()])

    # --- backward passes --------------------------------------------------------------------------

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        backward = functools.partial(original, tensors, *args, **kwargs)
        inside = self._passes.running is not None
        if inside or not roots or not isinstance(roots[0], Tensor) or roots[0].grad_fn is None:
            return backward()
        self._backwards += 1
        self._find_modules(roots[0])
        self._look_at_averages()
        self.steps.notice_clears()
        given = args[0] if args else kwargs.get("grad_tensors")
        retains = bool(args[1] if len(args) > 1 else kwargs.get("retain_graph"))
        detached = self._states.end() and not runs_inside(_OURS)
        asleep = {name: norm for name, norm in self._norms.items() if not norm.training}
        alone = any(not one.require_backward_grad_sync for one in self.joined)
        result, event = self._passes.run(backward, roots[0], asleep, retains)
        if event is not None:
            self.steps.fill()
            one = len(roots) == 1 and roots[0].numel() == 1
            of_one = not isinstance(given, (list, tuple)) or given[0] is None
            # DistributedDataParallel decides in the forward pass whether the next pass reduces.
            reducing = [one for one in self.joined if one.require_forward_param_sync]
            reduced = self.parameters.among(p for one in reducing for p in one.parameters())
            self.journal.write(
                event, scalar=one and of_one, reduced=reduced, without_sync=alone, detached=detached
            )
        return result

    # --- what is done to gradients ----------------------------------------------------------------

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        of_module = isinstance(owner, nn.Module)
        about = owner.parameters() if of_module else parameters_of(owner)
        self.journal.write_call("zero_grad", about)
        original(owner, *args, **kwargs)
        self.steps.notice_clears(told=True)

    def _clip(
        self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = result = original(tensors, max_norm, *args, **kwargs)
        if result is None:
            norm = args[0] if args else kwargs["total_norm"]
        norm = norm.full_tensor() if is_dtensor(norm) else norm.detach().clone()
        most = max_norm.clone() if isinstance(max_norm, Tensor) else max_norm
        ids, filled = {id(t) for t in tensors}, {id(t) for t in tensors if t.grad is not None}

        def clipped(where: str, time: float) -> Clipped:
            about, left = self.parameters.among(tensors), ids - self.steps.optimized
            # Tensors without a gradient count only if no optimizer has any of them.
            others = len(left if left == ids else left & filled)
            return Clipped(where, time, float(norm), float(most), about, others, bool(filled))

        self.journal.write(clipped)
        return result

    # --- averages, scalers, schedules -------------------------------------------------------------

    def _averaged(self, original: Any, average: Any, *args: Any, **kwargs: Any) -> Any:
        self._look_at_averages()
        result = original(average, *args, **kwargs)
        self._averages.look()
        self.journal.write_call("average")
        return result

    def _look_at_averages(self) -> None:
        """Write down that an average was written, at the first line that shows it."""
        moved = self._averages.look()
        if moved is not None:
            self.journal.write(
                lambda where, time: (
                    Call(where, time, "average") if moved(self.steps.optimized) else None
                )
            )

    def _scaler_scale(self, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        scale = scale_tensor(scaler) if scaler.is_enabled() else None
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
            about = parameters_of([*args, *kwargs.values()][0]) if name == "unscale_" else []
            self.journal.write_call(name, about)

    def _scaler_step(self, original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        steps, stepping = self.steps, args[0] if args else kwargs["optimizer"]
        one = steps.find(stepping) if scaler.is_enabled() else None
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
        inner = self._scheduling or is_being_made(scheduler)
        before, self._scheduling = self._scheduling, True
        try:
            result = original(scheduler, *args, **kwargs)
        finally:
            self._scheduling = before
        if not inner:
            stepping = getattr(scheduler, "optimizer", None)
            number = functools.partial(self.steps.number_of, stepping)
            self.journal.write_call("schedule", parameters_of(stepping), number)
        return result
