"""A watch over loops that train wrongly without an error, with a warning for each, given once.

A loop is wrong from its beginning, so checks that cost time are made in the first windows alone, by
a `Watch`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.linalg import vector_norm
from torch.optim import Optimizer

from accumext.optimizer._accelerate import is_accelerated
from accumext.optimizer._engine import LEAVING, Engine, others_of
from accumext.optimizer._grads import GONE, grads_of, is_none, present
from accumext.optimizer._proxy import OptimizerProxy
from accumext.optimizer._scaler import has_scaled, is_product, scalers_in_use
from accumext.optimizer._warnings import warn_of_release, warn_of_scaled
from accumext.optimizer._wrong_losses import are_counts, is_divided, summed_sizes
from accumext.tensors import scalars
from accumext.tensors.kinds import main_dtype, versions
from accumext.tensors.scalars import Scalar
from accumext.tensors.torch_private import gradient_hooks, leaf_of, not_compiled

_WINDOWS = 2  # how many windows are watched
_LOOKED_AT = 8  # about how many parameters are read, to see whether all were written
_CHANGED = "changed between two micro-batches of a window, by no step"
_Row = TypeVar("_Row")
_ROUNDING = 0.01  # tolerated in the logarithm of a factor


class Watch:
    """Watches the first windows of an optimizer, and then removes itself."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._windows = 0  # full windows so far
        self._divided = 0  # losses in a row that were divided by the window
        self._summed: list[tuple[float, tuple[int, int]]] = []  # in a row: weight, `summed_sizes`
        self._without = 0  # calls of step in a row that found no gradient
        self._alone = 0  # windows of one micro-batch in a row that `flush` has closed
        self._since = 0  # backward passes since the last call of step, each a micro-batch
        self._before_steps = set[int]()  # numbers of them, of all calls
        self._numbers: list[dict[str, float]] = []  # of each group, at the first call in a window
        self._held: _Held | None = None  # parameters at the last call of step, if it did not step
        self._factor: float | None = None  # by which the last gradients were changed before step
        self._passes: _Passes | None = None  # backward passes since the last call of step
        self._versions: Sequence[int | None] = ()  # of parameters, before a first backward pass
        self._sought = False  # whether GradScalers were looked for, which takes time
        self._own: list[Tensor | None] = []  # totals of some gradients that an own pass has left
        # Gradients that are there already, and that no wrapper has left: references and versions.
        leaves = [] if GONE or LEAVING else [p for p in parameters if p.is_leaf]
        grads = present(grads_of(leaves))
        self._earlier = list(zip(map(ref, grads), versions(grads)))

    def see_loss(self, engine: Engine, loss: Tensor, weight: Scalar, retains: bool) -> None:
        """Warn before a backward pass if the loss is divided by the window, as `step` does, or is
        the sum of what its weight counts, so that `step` divides too little."""
        window = engine.settings.window
        if window == 1:
            return
        self.see_earlier(engine, passes=0)
        if engine.settings.scaler is None and not self._sought and is_product(loss):
            self._sought = True
            if any(has_scaled(scaler, loss) for scaler in scalers_in_use()):
                warn_of_scaled(engine)
        alone = engine.state.micro_batch is None
        # Two losses of one graph are two micro-batches, as the documentation says.
        self._since += window if retains else alone
        whole = alone and engine.settings.reduction == "mean"
        self._divided = self._divided + 1 if whole and is_divided(loss, window) else 0
        if self._divided == window:
            engine.warn_once(
                "divided",
                f"the loss was divided by {window}, and a window is the mean of its micro-batches "
                "already. Pass the loss itself: opt.backward(loss)",
            )
        sizes = summed_sizes(loss) if whole else None
        number = None if sizes is None else scalars.known_number(weight)
        if sizes is None or number is None:
            self._summed.clear()
            return
        self._summed.append((number, sizes))
        if len(self._summed) == window and are_counts(*map(list, zip(*self._summed))):
            engine.warn_once(
                "summed",
                "the loss is a sum, and its weight the number of its terms, so the gradient of the "
                "window is that many times a mean. Pass the mean, opt.backward(loss / n, weight=n)",
            )

    def see_earlier(self, engine: Engine, passes: int) -> None:
        """Warn if the first micro-batch has gradients that were there before the wrapper was made,
        to which autograd has added `passes` times. So much adds up in the bare optimizer, too."""
        before, self._earlier = self._earlier, []
        if not before or engine.settings.window == 1:
            return
        grads = present(grads_of(engine.tensors.parameters()))
        now = {id(grad): version for grad, version in zip(grads, versions(grads))}
        known = [(now.get(id(grad())), version) for grad, version in before]
        if any(new is not None and new - passes == old for new, old in known):
            engine.warn_once(
                "earlier",
                "gradients that were in .grad before the optimizer was wrapped are part of its "
                "first micro-batch. Call opt.zero_grad() first to leave them out",
            )

    def see_flush(self, engine: Engine) -> None:
        """Warn before a flush that closes the window, if windows never fill."""
        window = engine.settings.window
        self._since = 0
        self._summed.clear()  # windows that never fill are watched for ever
        self._alone = self._alone + 1 if engine.state.micro_batches == 1 else 0
        if self._alone == window > 1:
            engine.warn_once(
                "flushed",
                f"flush closed {window} windows in a row that held one micro-batch, so "
                f"window={window} has no effect. Call opt.step() after every micro-batch, and "
                "opt.flush() after the last of an epoch",
            )

    @torch.no_grad()
    def before_backward(
        self, parameters: Sequence[Tensor], pending: Sequence[Tensor | None]
    ) -> None:
        """Look, before a first backward pass, at parameters and what an own pass has left."""
        self._versions = versions(parameters)
        self._own = [_total(*pair) for pair in _some(list(zip(parameters, pending)))]

    @torch.no_grad()
    def see_backward(self, engine: Engine, parameters: Sequence[Tensor]) -> None:
        """Warn after a first backward pass if hooks in it have stepped on parameters, or if it has
        added to the gradients of an own pass the same ones, bit for bit."""
        sums, now = engine.state.window.of(parameters).sums, versions(parameters)
        if any(m is None and a != b for a, b, m in zip(self._versions, now, sums)):
            warn_of_release(engine)
        own, self._own = self._own, []
        if all(map(is_none, own)):
            return
        both = [_total(*pair) for pair in _some(list(zip(parameters, sums)))]
        known = [(a, b) for a, b in zip(own, both) if a is not None]
        twice = all(b is not None and bool(b == 2 * a) for a, b in known)
        if twice and any(bool(a) for a, _ in known):  # not all 0
            engine.warn_once(
                "twice",
                "opt.backward has added the gradient that a backward pass of your own had left in "
                ".grad once more, so the micro-batch counts it twice. Leave loss.backward() out",
            )

    @not_compiled
    def see_step(
        self, engine: Engine, parameters: Sequence[Tensor], pending: bool, scaled: bool
    ) -> None:
        """Make the checks of a call of step; `scaled` if a GradScaler makes it."""
        window, size = engine.state.window, engine.settings.window
        self._see_gradients(engine, parameters)
        self.see_earlier(engine, passes=1)
        self._before_steps.add(self._since)
        self._since = 0
        if size > 1:
            self._see_groups(engine, first=window.ledger.micro_batches + pending <= 1)
            self._see_writes(engine, parameters, stays=window.ledger.micro_batches + pending < size)
            if (caller := _optimizer_around()) is not None:
                _warn_of_one_around(
                    engine, f"{type(caller).__name__} calls step in every micro-batch"
                )
        if self._passes is not None:
            self._passes.end()
            if size > 1 and pending and scaled:
                self._see_factor(engine, self._passes.factor(parameters))
            clips = not (scaled or (dist.is_available() and dist.is_initialized()))
            told = "around" in engine.warned  # an optimizer around may have written gradients
            if size > 1 and pending and not told and self._passes.sum_up(parameters, clips):
                engine.warn_once(
                    "sums",
                    "every gradient was added to, or changed, since autograd made it, and "
                    f"window={size} counts this call of step as one micro-batch. Call step after "
                    "every backward pass, not after every window; put several passes that are one "
                    "micro-batch into `with opt.micro_batch():`; and leave the clip to max_norm",
                )
        if window.ledger.micro_batches + pending >= size:
            self._windows, self._alone = self._windows + 1, 0
        if self._windows == _WINDOWS:
            self._see_passes(engine)
            engine.watch = None
            return
        watches = size > 1 and pending and not engine.reducer.sharded
        goes_on = not self._windows or self._factor is not None  # two factors are compared
        self._passes = _Passes(parameters) if watches and goes_on else None

    def _see_passes(self, engine: Engine) -> None:
        """Warn if every call of step came after as many backward passes, each a micro-batch. One
        call after all those of a window is right."""
        window, counts = engine.settings.window, self._before_steps
        if len(counts) == 1 and 1 < (count := max(counts)) < window and "full" not in engine.warned:
            engine.warn_once(
                "passes",
                f"every call of step came after {count} calls of opt.backward, each of which is a "
                f"micro-batch: window={window} is full after {window // count} calls of step. Put "
                "passes that are one micro-batch into `with opt.micro_batch():`, or call step "
                "after every pass",
            )

    def _see_gradients(self, engine: Engine, parameters: Sequence[Tensor]) -> None:
        window, calls = engine.state.window, max(engine.settings.window, 2)
        found = not all(map(is_none, (*grads_of(parameters), *window.sums)))
        if found or window.ledger.counted is not None or engine.reducer.shared:
            self._without = 0  # a gradient was dropped, or may be on another process
        elif any(parameter.requires_grad for parameter in parameters):
            self._without += 1
        if self._without == calls:
            if any(gradient_hooks(parameter)[1] for parameter in parameters):
                warn_of_release(engine)
                return
            text = (
                f"{calls} calls of step found no gradient of any parameter. Call zero_grad after "
                "step, not before it, and make the optimizer of the parameters that the loss is "
                "computed from, after the last of them was replaced"
            )
            if others_of(engine):
                text += ". Another AccumulatingOptimizer has taken gradients of them: use one"
            engine.warn_once("nothing", text)

    def _see_groups(self, engine: Engine, first: bool) -> None:
        """Warn if a schedule, or an optimizer around this one, has changed parameter groups."""
        before, numbers = self._numbers, list(map(_numbers_of, engine.optimizer.param_groups))
        if first or not before:
            self._numbers = numbers
            return
        pairs = list(zip(before, numbers))  # groups may have been added
        changed = {k for old, new in pairs for k in old if k in new and old[k] != new[k]}
        if "lr" in changed:
            engine.warn_once(
                "rates",
                "the learning rate changed inside a window. Change it between two: if opt.stepped: "
                "schedule.step()",
            )
        elif changed:
            _warn_of_one_around(engine, f"{min(changed)!r} of a parameter group {_CHANGED}")

    def _see_writes(self, engine: Engine, parameters: Sequence[Tensor], stays: bool) -> None:
        """Warn if all parameters were written between two micro-batches of the second window. In
        the first window, a loop may clamp parameters to a range for the first time."""
        held, self._held = self._held, None
        if engine.reducer.sharded:  # sums of sharded parameters are collective
            return
        written = held is not None and held.report is engine.state.last and held.all_written()
        if written and not others_of(engine):  # other optimizers may have stepped on them
            _warn_of_one_around(
                engine,
                f"the parameters {_CHANGED} of this optimizer. If step of the wrapped one is "
                "called, leave that out",
            )
        if stays and self._windows:
            sums = engine.state.window.of(parameters).sums
            reached = zip(parameters, grads_of(parameters), sums, strict=False)
            self._held = _Held(engine, [p for p, *grads in reached if not all(map(is_none, grads))])

    def _see_factor(self, engine: Engine, factor: float | None) -> None:
        """Warn if gradients were multiplied by more than a loss scale, which changes by powers of
        two."""
        before, self._factor = self._factor, factor
        if before and factor and factor / before > 0:
            powers = math.log2(factor / before)
            if abs(powers - round(powers)) > _ROUNDING:
                engine.warn_once(
                    "unscaled clip",
                    "a clip after scaler.unscale_ clips one micro-batch, not the window. Leave it "
                    "to max_norm",
                )


def _numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter group on the host, without bools such as `train_mode`."""
    numbers = {k: scalars.known_number(v) for k, v in group.items() if not isinstance(v, bool)}
    return {key: number for key, number in numbers.items() if number is not None}


def _warn_of_one_around(engine: Engine, what: str) -> None:
    """Warn of an optimizer around this one, or a schedule, that acts at every call of step."""
    engine.warn_once(
        "around",
        f"{what}. An optimizer around this one acts in every micro-batch: put "
        "AccumulatingOptimizer outermost, around that one, or pass window=1; and call schedules "
        "only if opt.stepped",
    )


def _optimizer_around() -> Optimizer | None:
    """Return the optimizer whose `step` calls this one's, if there is one.

    An optimizer of a trainer, such as Accelerate's or Lightning's (whose class inherits ours), only
    hands the call on, and does not count. Only frames of a `step` are read: reading `f_locals`
    keeps all variables of a frame alive.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if code.co_name == "step" and not module.startswith("accumext."):
            caller = frame.f_locals.get("self")
            if isinstance(caller, Optimizer) and not isinstance(caller, OptimizerProxy):
                return None if is_accelerated(caller) else caller
        frame = frame.f_back
    return None


def _some(rows: Sequence[_Row]) -> Sequence[_Row]:
    """Return about `_LOOKED_AT` of all rows, the last too: others may train the first ones."""
    every = -(-len(rows) // _LOOKED_AT) or 1
    return rows[::-every]


def _total(parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the sum of a dense gradient's elements, in the dtype of its main gradient."""
    if grad is None or grad.is_sparse:
        return None
    return grad.sum(dtype=main_dtype(parameter))


class _Held:
    """Versions and norms of some parameters, at a call of step that leaves the window open."""

    def __init__(self, engine: Engine, parameters: Sequence[Tensor]) -> None:
        self.report = engine.state.last  # another one after a step or flush
        self._parameters = _some(parameters)
        self._versions = versions(self._parameters)
        # Not sums: gradients of a softmax's logits add up to 0, so those of its layer never change.
        self._norms = list(map(vector_norm, self._parameters))

    def all_written(self) -> bool:
        """Tell whether all these parameters have changed since."""
        now = versions(self._parameters)
        if not now or any(old is None or old == new for old, new in zip(self._versions, now)):
            return False
        return all(bool(vector_norm(p) != old) for p, old in zip(self._parameters, self._norms))


class _Gradient(NamedTuple):
    """The gradient in `.grad` of a parameter after a backward pass."""

    tensor: ReferenceType[Tensor]
    version: int
    passes: int  # backward passes that it sums
    total: Tensor  # sum of its elements


class _Passes:
    """Records the backward passes that reach parameters, until `end`."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._left = dict[int, _Gradient]()  # by the id of a parameter
        # Hooks are on autograd nodes: on parameters, copies and pickles would contain them.
        self._nodes = [get_gradient_edge(p).node for p in parameters if p.requires_grad]
        self._handles = [node.register_hook(partial(self._take, node)) for node in self._nodes]

    @torch.no_grad()
    def _take(self, node: Any, *_: object) -> None:
        parameter = leaf_of(node)
        if parameter is None or parameter.grad is None:  # a hook of the user's was faster
            return
        grad, before = parameter.grad, self._left.get(id(parameter))
        version, passes = versions([grad])[0] or 0, 1
        # Autograd adds in one write. After zeros that `zero_grad` wrote, counting starts anew.
        if before is not None and before.tensor() is grad and version == before.version + 1:
            passes += before.passes
        self._left[id(parameter)] = _Gradient(ref(grad), version, passes, grad.sum())

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def factor(self, parameters: Sequence[Tensor]) -> float | None:
        """Return the factor by which all gradients were multiplied since autograd computed them;
        None if nobody has written them. Writes of a GradScaler are not seen."""
        known = [(p.grad, self._left[id(p)]) for p in parameters if id(p) in self._left]
        grads = [grad for grad, left in known if grad is not None and left.tensor() is grad]
        now = versions(grads)
        if not known or len(grads) < len(known):
            return None
        if any(v == left.version or left.passes > 1 for v, (_, left) in zip(now, known)):
            return None
        before = sum(float(left.total) for _, left in known)
        return sum(float(grad.sum()) for grad in grads) / before if before else None

    def sum_up(self, parameters: Sequence[Tensor], clips: bool) -> bool:
        """Tell whether all present gradients are sums of several passes, or were changed since.

        Args:
            clips: whether only a clip, no GradScaler or DistributedDataParallel, changes gradients.
        """
        grads = [(p.grad, self._left[id(p)]) for p in parameters if id(p) in self._left]
        known = [(grad, left) for grad, left in grads if grad is not None]
        if not known or any(left.tensor() is not grad for grad, left in known):
            return False
        once = [(grad, left) for grad, left in known if left.passes == 1]
        if not (once and clips):
            return not once
        now = versions([grad for grad, _ in once])
        if any(version == left.version for version, (_, left) in zip(now, once)):
            return False
        # A clip called only for its norm writes, too, but multiplies by 1.
        return any(bool((grad.sum() - left.total).abs() > 0) for grad, left in once)
