"""Entry of gradients into a window: `AccumulatingOptimizer.backward`, `accumulate` and
`micro_batch`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from threading import Lock
from types import NoneType
from typing import Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from accumext.master_weights import params_of
from accumext.ops.any_tensors import (
    scale_,
)
from accumext.optimizer._agreement import agree_on_shards
from accumext.optimizer._factors import normaliser
from accumext.optimizer._grads import (
    GONE,
    clear,
    clear_these,
    fresh,
    grad_of,
    grads_of,
    is_none,
    present,
    put,
)
from accumext.optimizer._other_passes import (
    forget_parts,
    part_from_others,
    run_beside_others,
    scale_of_pending,
)
from accumext.optimizer._processes import WindowAllReduce, hold_back
from accumext.optimizer._scaler import current_scale, scale_for
from accumext.optimizer._settings import OP, check_weight
from accumext.optimizer._sums import (
    add_micro_batch,
    adding,
    adopt,
    count_in,
    enlarge_unit,
    made,
    raise_nonfinite,
    take_out,
)
from accumext.optimizer._window import (
    ALIVE,
    LEAVING,
    NO_WINDOW,
    Box,
    OpenMicroBatch,
    Window,
    explain,
)
from accumext.optimizer._wrong_loops import warn_of_a_full_window
from accumext.tensors.checks import fail_type, fail_value, message, type_name
from accumext.tensors.kinds import (
    HALF_DTYPES,
    fit_one_call,
    versions,
)
from accumext.tensors.scalars import Scalar, divide
from accumext.tensors.torch_private import record_function

# Bytes of gradients that one call adds. A GPU moves them, and the sums, in about the time that a
# call takes to launch, so more in a call saves little, and less would cost calls.
BUNDLE_BYTES = 4 * 2**20

UNWEIGHTED: Final = 1.0  # the default weight: this object, which needs no check
_ONE: Scalar = 1.0


def check_loss_and_weight(op: str, loss: object, weight: object) -> Scalar:
    """The loss must be 0-dim and have a graph; returns the weight as `check_weight` does."""
    if not isinstance(loss, Tensor):
        fail_type(op, "loss", "be a tensor", type_name(loss))
    if loss.numel() != 1:
        advice = "Take its mean() or sum()"
        fail_value(op, "loss", "be 0-dim", f"shape {list(loss.shape)}", advice)
    if not loss.requires_grad:
        advice = "Compute it from the parameters with gradients enabled"
        fail_value(op, "loss", "have a graph", "a tensor without one", advice)
    return weight if weight is UNWEIGHTED else check_weight(op, weight)


class BackwardPass(NamedTuple):
    """A backward pass as the user asks for it: a loss that counts `weight`, and torch's options."""

    loss: Tensor
    weight: Scalar
    retain_graph: bool | None = None
    create_graph: bool = False
    inputs: tuple[Tensor | GradientEdge, ...] | None = None  # which alone get a gradient

    def check_options(self, op: str) -> None:
        """Raise for options that autograd would refuse, before it has written any gradient."""
        for name, kinds, contract in _OPTIONS:
            if not isinstance(getattr(self, name), kinds):
                fail_type(op, name, contract, type_name(getattr(self, name)))
        if self.inputs == ():
            fail_value(op, "inputs", "hold a tensor", "none", "Pass None for all of the graph")
        for i, tensor in enumerate(self.inputs or ()):
            if not isinstance(tensor, (Tensor, GradientEdge)):
                fail_type(op, f"inputs[{i}]", "be a tensor", type_name(tensor))
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                got = "one with requires_grad=False"
                fail_value(op, f"inputs[{i}]", "be a tensor that requires a gradient", got)

    def run(
        self, box: Box, factor: Scalar, lookup: Callable[[Tensor], Tensor | None] | None = None
    ) -> None:
        """Differentiate the loss times a factor, which needs no product in its graph. Operators may
        add to the sums that `lookup` tells them of."""
        loss, seed = self.loss, None
        if isinstance(factor, Tensor):
            seed = torch.ones_like(loss) * factor.to(loss.device, loss.dtype)
        elif factor != 1.0:
            seed = torch.full_like(loss, factor)
        if self.inputs is not None and lookup is not None:
            lookup = partial(self._look_up, lookup)
        options = seed, self.retain_graph, self.create_graph, self.inputs
        try:
            box.main_grads.lookup = lookup
            if len(ALIVE) == 1:
                loss.backward(*options)
            else:
                run_beside_others(box, loss, self.weight, factor, lambda: loss.backward(*options))
        finally:
            box.main_grads.lookup = None

    def _look_up(
        self, lookup: Callable[[Tensor], Tensor | None], parameter: Tensor
    ) -> Tensor | None:
        """What `lookup` says, of the inputs alone."""
        asked = any(tensor is parameter for tensor in self.inputs or ())
        return lookup(parameter) if asked else None


# Options of a backward pass of which the type alone is asked.
_OPTIONS = (
    ("retain_graph", (NoneType, bool), "be a bool or None"),
    ("create_graph", bool, "be a bool"),
)


def run_backward(
    box: Box,
    proxy: Optimizer,  # the AccumulatingOptimizer, by which the user's scaler may know it
    op: str,
    call: BackwardPass,
) -> None:
    """Scale the loss, run its backward pass and add its gradients to the open window."""
    loss, weight = call.loss, call.weight
    settings, state, sharded = box.settings, box.state, box.sharded
    window, inside = state.window, state.micro_batch
    if settings.needs_closure or state.all_reduce is not None or window.world is not None:
        box.refuse_backward(op)
    scale = _ONE
    if settings.scaler is not None:
        scale = scale_for(op, settings.scaler, loss, proxy, box.optimizer)
    if sharded is not None:
        if settings.synchronize == "window" and not sharded.is_open:
            sharded.refuse_synchronised(op)
        agree_on_shards(op, box)
        sharded.idle = False
    if inside is not None:
        _check_weight_inside(op, inside, weight)
    stays = settings.window == 1 and inside is None and box.keeps_in_grad
    if call.create_graph and not stays:
        contract = "be False unless gradients stay in `.grad`, with window=1 and one backward pass"
        advice = "For a loss of gradients: torch.autograd.grad(loss, inputs, create_graph=True)"
        fail_value(op, "create_graph", contract, True, advice)
    if box.watch is not None:
        box.watch.see_loss(box, loss)
    if window.micro_batches >= settings.window and (inside is None or inside.weight is None):
        warn_of_a_full_window(box)
    if state.last is not None:
        state.last.evidence = None
    if state.other_pass is not None:
        box.state = state._replace(other_pass=None)
    parameters = list(chain.from_iterable(map(params_of, box.optimizer.param_groups)))
    if not box.target.is_parameters:
        parameters = box.target.parameters()
    if (GONE or len(LEAVING) > box.leaves) and not window.in_grad:
        part_from_others(op, box, parameters)
    pending: Sequence[Tensor | None] = ()
    if not window.in_grad and not all(map(is_none, map(grad_of, parameters))):
        pending = _let_go(op, box, parameters, inside is not None)
    if stays:
        _backward_into_grad(box, op, call, scale, parameters, pending)
        return
    known = window.parameters
    if len(known) != len(parameters) or not all(map(is_, known, parameters)):
        take_out(box, parameters)
    watch = box.watch if window.micro_batches == 0 and sharded is None else None
    before = () if watch is None else versions(parameters)
    if inside is not None and inside.weight is not None:  # as the first part of the micro-batch
        apart = inside.part is not None
    else:
        special = loss.dtype in HALF_DTYPES or weight is not window.unit
        apart = settings.looks_first or (special and _cannot_carry(box, loss, weight))
    backward = _backward_apart if apart else _backward_into_sums
    backward(box, op, call, scale, parameters, pending)
    if watch is not None:
        watch.see_backward(box, parameters, before)


def _let_go(
    op: str, box: Box, parameters: Sequence[Tensor], inside: bool
) -> Sequence[Tensor | None]:
    """Empty `.grad` of what steps have used, but inside a micro-batch; what stays counts as part of
    the micro-batch to come, since autograd adds to it."""
    grads = grads_of(parameters)
    pending = fresh(parameters, box.state.used, new=not inside)
    if not inside:
        for parameter, grad, mine in zip(parameters, grads, pending, strict=True):
            if mine is not grad:
                parameter.grad = None
    if box.state.earlier_scale is not None:
        scale_of_pending(op, box)
    return () if all(map(is_none, pending)) else pending


def _check_weight_inside(op: str, micro_batch: OpenMicroBatch, weight: Scalar) -> None:
    """Raise unless all calls in a micro-batch have one weight, as far as the host can see."""
    first = weight if micro_batch.weight is None else micro_batch.weight
    if not isinstance(first, Tensor) and not isinstance(weight, Tensor) and first != weight:
        fail_value(op, "weight", f"be that of the whole micro-batch, {first:g}", weight)


def _cannot_carry(box: Box, loss: Tensor, weight: Scalar) -> bool:
    """Tell whether the loss cannot be multiplied by its weight: 0 must make 0 of NaN, and a loss
    of half precision would round the weight."""
    if box.sharded is not None:  # where weights differ between processes there is no other way
        return False
    if not isinstance(weight, Tensor) and weight == 0.0:
        return True
    unit = box.state.window.unit
    if loss.dtype not in HALF_DTYPES or unit is None or unit is weight:
        return False
    return isinstance(unit, Tensor) or isinstance(weight, Tensor) or unit != weight


# `.grad` is the window


def _backward_into_grad(
    box: Box,
    op: str,
    call: BackwardPass,
    scale: Scalar,
    parameters: list[Tensor],
    pending: Sequence[Tensor | None],
) -> None:
    """The only micro-batch of a window of one: autograd leaves its gradients in `.grad`."""
    fixed = None if box.sharded is None else box.sharded.unit
    window, ratio = count_in(NO_WINDOW, call.weight, scale, fixed)
    nothing = not isinstance(ratio, Tensor) and ratio == 0.0
    policy = box.settings.on_nonfinite
    try:
        if pending and not nothing:
            scale_(present(pending), ratio)
        call.run(box, scale if nothing else scale * ratio, _plain_grad)
        grads = list(map(grad_of, parameters))
        if nothing:  # also where they hold NaN
            grads = [None if g is None else torch.zeros_like(g).detach() for g in grads]
            put(parameters, grads)
        if policy == "raise":
            raise_nonfinite(box, op, grads, call.weight)
        unchecked = policy == "skip_micro_batch"
        window = window._replace(in_grad=True, sums=grads, unchecked=unchecked)
        if not box.leaves:
            LEAVING[id(box)], box.leaves = box, True
        box.state = box.state._replace(window=window, accumulated=True, through_backward=True)
    except BaseException:
        box.drop()
        clear(parameters)
        raise


def _plain_grad(parameter: Tensor) -> Tensor | None:
    """Return the gradient in `.grad`, if an operator can add to it; else None."""
    grad = parameter.grad
    return grad if grad is not None and grad.dtype == parameter.dtype and _is_plain(grad) else None


def _is_plain(main: Tensor) -> bool:
    return fit_one_call([main]) and not main.requires_grad


# Autograd adds


def _backward_into_sums(
    box: Box,
    op: str,
    call: BackwardPass,
    scale: Scalar,
    parameters: list[Tensor],
    pending: Sequence[Tensor | None],
) -> None:
    """The loss carries weight and loss scale. A pass that fails drops the window, and says so."""
    before, all_reduce, weight = box.state, None, call.weight
    window, inside = before.window, before.micro_batch
    if box.settings.reduce_in_backward:
        all_reduce = _overlapping_all_reduce(op, box, window, weight)
        box.state = before._replace(all_reduce=all_reduce)
    try:
        if inside is not None and inside.weight is not None:
            ratio = inside.ratio
        else:
            fixed = None if box.sharded is None else box.sharded.unit
            if weight is not window.unit and fixed is None:
                window = enlarge_unit(window, weight)
            window, ratio = count_in(window, weight, scale, fixed)
            if inside is not None:
                inside = inside._replace(weight=weight, ratio=ratio)
        window = _run_pass(box, op, window, call, ratio, pending, all_reduce)
        box.state = before._replace(
            window=window, micro_batch=inside, all_reduce=all_reduce, accumulated=True,
            through_backward=True,
        )  # fmt: skip
    except BaseException as error:
        box.drop()
        clear(parameters)
        if inside is not None:  # whoever catches this is told at its end
            box.state = box.state._replace(micro_batch=OpenMicroBatch(failed=True))
        if before.window.micro_batches:
            explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
        raise


def _run_pass(
    box: Box,
    op: str,
    window: Window,
    call: BackwardPass,
    ratio: Scalar,
    pending: Sequence[Tensor | None],  # of a backward pass of the user's: of this micro-batch
    all_reduce: WindowAllReduce | None = None,
) -> Window:
    """The window with what a backward pass makes of a loss, times the ratio. Autograd adds to the
    sums themselves, which lie in `.grad` meanwhile; what it makes in half precision is added."""
    parameters = window.parameters
    if pending:
        factor = ratio * divide(window.scale, current_scale(op, box.settings.scaler))
        here = box.target.send(list(pending))()
        window = adding(window, here, factor).run([])._replace(norm=None)
    factor = ratio * window.scale
    if all_reduce is not None or window.mixed:
        return _Adder(box, op, window, all_reduce).run(call, factor)
    for parameter, main in zip(parameters, window.sums):
        parameter.grad = main
    call.run(box, factor, _plain_grad)
    grads = list(map(grad_of, parameters))
    if window.norm is not None or not all(map(is_, grads, window.sums)):
        window = adopt(window, grads)
    for parameter in parameters:
        parameter.grad = None
    return window


def _overlapping_all_reduce(
    op: str, box: Box, window: Window, weight: Scalar
) -> WindowAllReduce | None:
    """Return the all-reduce of the window that runs during its last backward pass; None if there is
    to be none, or not yet.

    All processes are told the numbers of the window before anything is done.
    """
    group, count = box.group, window.micro_batches + 1
    if group is None or count < box.settings.window:
        return None
    all_reduce = WindowAllReduce(box, window, group)
    all_reduce.agree(op, window, window.weight + weight, count, flushing=False)
    return all_reduce


class _Adder:
    """Takes in what one backward pass makes: after it, or bundle by bundle while it runs."""

    def __init__(
        self,
        box: Box,
        op: str,
        window: Window,
        all_reduce: WindowAllReduce | None,
    ) -> None:
        self._box, self._op, self._window = box, op, window
        self._parameters, self._all_reduce = window.parameters, all_reduce
        self._arriving: Callable[[], list[Tensor | None]] | None = None

    def run(self, call: BackwardPass, factor: Scalar) -> Window:
        """The window with what a backward pass makes of a loss times a factor."""
        pairs = list(zip(self._parameters, self._window.sums, strict=True))
        lent = [m if m is not None and m.dtype == p.dtype else None for p, m in pairs]
        put(self._parameters, lent)
        with GradCollector(self._op, self._parameters, self._take).watching(self._watched()):
            call.run(self._box, factor, self._main_grad)
        grads = grads_of(self._parameters)
        if self._all_reduce is not None:
            self._take([i for i, grad in enumerate(grads) if grad is not None])
        else:
            self._arrive()
            self._arriving = self._box.target.send(grads)
        with record_function("accumext::accumulate"), torch.no_grad():
            self._arrive()
        clear(self._parameters)
        return self._window

    def _watched(self) -> list[int]:
        """Parameters whose gradients are taken while the pass runs."""
        box, parameters = self._box, self._parameters
        if self._all_reduce is not None:
            return list(range(len(parameters)))
        if box.settings.accumulate_in_backward and self._window.mixed:
            return [i for i, p in enumerate(parameters) if p.dtype in HALF_DTYPES]
        return [i for i, far in enumerate(box.target.goes_to_host()) if far]

    def _main_grad(self, parameter: Tensor) -> Tensor | None:
        """The sum of a parameter for an operator to add to; None where it cannot."""
        index = next((i for i, p in enumerate(self._parameters) if p is parameter), None)
        if index is None:
            return None
        main = self._window.sums[index]
        if main is None:
            if not (self._box.settings.accumulate_in_backward and parameter.dtype in HALF_DTYPES):
                return None
            self._window, main = made(self._window, index)
        return main if _is_plain(main) and main.device == parameter.device else None

    def _take(self, indices: list[int]) -> None:
        """Add the gradients of some parameters, which are complete, and free them."""
        with record_function("accumext::accumulate"), torch.no_grad():
            grads: list[Tensor | None] = [None] * len(self._parameters)
            for i in indices:
                grads[i] = self._parameters[i].grad
            self._arrive()  # while one bundle is added on the host, the next is on its way
            self._arriving = self._box.target.send(grads)
            if self._box.target.is_parameters:
                self._arrive()
            for i in indices:
                self._parameters[i].grad = None
            if self._all_reduce is not None:
                sums, factor = list(self._window.sums), normaliser(self._window, "sum").value()
                self._window = self._window._replace(sums=sums)
                self._all_reduce.send_complete(self._op, sums, factor, indices)

    def _arrive(self) -> None:
        if self._arriving is not None:
            self._add(self._arriving())
            self._arriving = None

    def _add(self, grads: list[Tensor | None]) -> None:
        """Take the sums to which autograd has added, and add gradients of half precision."""
        window, parameters = self._window, self._parameters
        if not window.mixed:
            self._window = adopt(window, grads)
            return
        halves: list[Tensor | None] = [None] * len(grads)
        for i, parameter in enumerate(parameters):
            if parameter.dtype in HALF_DTYPES:
                halves[i], grads[i] = grads[i], None
        if not all(map(is_none, grads)):
            window = adopt(window, grads)
        self._window = adding(window, halves, 1.0).run([])


class GradCollector:
    """Hands over every gradient of a backward pass once it is complete, in bundles.

    The hooks are there for the length of the pass alone. So a backward pass of the user's own finds
    none, parameters may come and thaw at any time, and copies and pickles have nothing to carry.
    """

    def __init__(
        self, op: str, parameters: Sequence[Tensor], take: Callable[[list[int]], None]
    ) -> None:
        self._op = op
        self._parameters = parameters
        self._take = take
        # Parameters whose gradient waits in `.grad`, and the bytes of those gradients. A backward
        # pass runs on one thread per device.
        self._waiting: defaultdict[torch.device, list[int]] = defaultdict(list)
        self._bytes: defaultdict[torch.device, int] = defaultdict(int)
        self._taken: set[int] = set()
        self._lock = Lock()

    @contextmanager
    def watching(self, indices: Iterable[int]) -> Iterator[None]:
        """A context for the backward pass. Gradients of the last bundles are left in `.grad`."""
        handles = []
        try:
            for i in indices:
                if self._parameters[i].requires_grad:
                    hook = self._hook_of(i)
                    handles.append(self._parameters[i].register_post_accumulate_grad_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._refuse_late_gradients()

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        collector_of = ref(self)  # a hook that an interrupt leaves behind does nothing

        def hook(parameter: Tensor) -> None:
            collector = collector_of()
            if collector is not None and parameter.grad is not None:  # no hook was faster
                collector._collect(index, parameter.grad)

        return hook

    def _collect(self, index: int, grad: Tensor) -> None:
        """A gradient is complete."""
        device = grad.device
        self._waiting[device].append(index)
        self._bytes[device] += grad.numel() * grad.element_size()
        if self._bytes[device] >= BUNDLE_BYTES:
            self._bytes[device] = 0
            bundle = self._waiting.pop(device)
            with self._lock:
                self._take(bundle)
                self._taken.update(bundle)

    def _refuse_late_gradients(self) -> None:
        """Raise if a gradient was written after it was taken, as DistributedDataParallel does."""
        waiting = set(chain.from_iterable(self._waiting.values()))
        if any(self._parameters[i].grad is not None for i in self._taken - waiting):
            contract = "be complete when autograd has accumulated it"
            got = "one that was written again, as DistributedDataParallel does"
            advice = "Use `with opt.micro_batch(model):`, or accumulate_in_backward=False"
            raise RuntimeError(message(self._op, ".grad", contract, got, advice))


# A micro-batch apart


def _backward_apart(
    box: Box,
    op: str,
    call: BackwardPass,
    scale: Scalar,
    parameters: list[Tensor],
    pending: Sequence[Tensor | None],
) -> None:
    """Gradients that are looked at before they are added with their weight: in `.grad` alone, or,
    inside a micro-batch, in sums of its own."""
    carried, micro_batch, sharded = _ONE, box.state.micro_batch, box.sharded
    weight = call.weight
    if sharded is not None:
        _, carried = count_in(box.state.window, weight, scale, sharded.unit)
    try:
        if micro_batch is None:
            scale_(present(pending), carried)
            call.run(box, scale * carried)
            grads = fresh(parameters, box.state.used)
            with torch.no_grad():
                add_micro_batch(
                    box, op, parameters, grads, weight, scale,
                    accumulated=True, carried=sharded is not None,
                )  # fmt: skip
            return
        part = micro_batch.part or Window(scale=scale)
        part = _run_pass(box, op, part.of(parameters), call, carried, pending)
        after = micro_batch._replace(weight=weight, part=part)
        box.state = box.state._replace(micro_batch=after)
    except BaseException:
        clear(parameters)
        if micro_batch is not None:
            box.state = box.state._replace(micro_batch=micro_batch._replace(failed=True))
        raise


# micro_batch()


@contextmanager
def open_micro_batch(op: str, box: Box, model: nn.Module | None) -> Iterator[None]:
    """Open a micro-batch. An exception drops what it brought; where that was added to the window
    already, it drops the window, and says so."""
    held, group = hold_back(op, model, box.settings.process_group)
    box.state = box.state._replace(model_group=group or box.state.model_group)
    with _holding_shards(op, box, model):
        parameters = box.target.parameters()
        if not box.state.window.in_grad:
            part_from_others(op, box, parameters)
            _let_go(op, box, parameters, inside=False)
        take_out(box, parameters)
        before = box.state.window
        opened = OpenMicroBatch(base=before.micro_batches, key=object())
        try:
            box.state = box.state._replace(micro_batch=opened)
            with held:
                yield
            _close_micro_batch(op, box, held_back=model is not None)
        except BaseException as error:
            clear(parameters)
            forget_parts(opened.key)
            state, mine = box.state, box.state.micro_batch
            added = mine is not None and state.window.micro_batches != mine.base
            if added and state.all_reduce is None:
                box.drop()
                if before.micro_batches:
                    explain(error, f"{op}: the open window was dropped: it had been added to")
            box.state = box.state._replace(micro_batch=None)
            raise


@torch.no_grad()
def _close_micro_batch(op: str, box: Box, held_back: bool) -> None:
    """Add what was summed apart, and what lies in `.grad`."""
    micro_batch, parameters = box.state.micro_batch, box.target.parameters()
    if micro_batch is None or micro_batch.failed:
        got = "one that ended in an exception, and the micro-batch is dropped"
        advice = "Let the exception leave micro_batch()"
        raise RuntimeError(message(op, "a backward pass", "come to its end", got, advice))
    if held_back and box.group is not None:
        box.state = box.state._replace(window=box.state.window._replace(held_back=True))
    part_from_others(op, box, parameters)
    weight, part = micro_batch.weight, micro_batch.part
    grads = fresh(parameters, box.state.used)  # of passes that were not the wrapper's
    left, scale = not all(map(is_none, grads)), _ONE
    if left or part is not None:
        box.refuse_while_reducing(op)
    if left:
        scale = scale_of_pending(op, box)
    window = box.state.window if part is None else part.of(parameters)
    if left and weight is not None:
        factor = micro_batch.ratio * divide(window.scale, scale)
        window = adding(window, box.target.send(grads)(), factor).run([])
        clear_these(parameters, grads)
    if part is not None:
        grads, scale = list(window.sums), window.scale
    elif weight is not None or not left:
        box.state = box.state._replace(window=window, micro_batch=None)
        return
    carried = box.sharded is not None and weight is not None
    count = 1.0 if weight is None else weight
    add_micro_batch(box, op, parameters, grads, count, scale, accumulated=True, carried=carried)


@contextmanager
def _holding_shards(op: str, box: Box, model: nn.Module | None) -> Iterator[None]:
    """With synchronize="window": `fully_shard` modules keep their gradients to themselves.

    An exception drops the window, of which FSDP holds all gradients in one sum.
    """
    sharded, settings = box.sharded, box.settings
    if settings.synchronize == "backward" or sharded is None or model is None:
        yield
        return
    roots = sharded.roots_to_hold(op, model, settings.reduction)
    before = box.state.window.micro_batches
    try:
        with sharded.holding(roots, model, last=before + 1 >= settings.window):
            yield
        if box.state.window.micro_batches == before:
            contract = "have an opt.backward where synchronize='window'"
            raise RuntimeError(message(op, "the micro-batch", contract, "none"))
    except BaseException as error:
        box.drop()
        if before:
            explain(error, f"{op}: the open window was dropped: FSDP holds it in one sum")
        raise
