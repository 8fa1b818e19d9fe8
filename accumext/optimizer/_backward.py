"""`AccumulatingOptimizer.backward`: autograd leaves gradients in `.grad`, or adds to the sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import NoneType
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from accumext.master_weights import params_of
from accumext.ops.any_tensors import scale_
from accumext.optimizer._collecting import Collecting, Lookup
from accumext.optimizer._engine import ALIVE, LEAVING, Engine, explain
from accumext.optimizer._grads import (
    GONE,
    clear_grads,
    fresh,
    grad_of,
    is_none,
    present,
    set_grads,
)
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._other_passes import part_from_others, run_beside_others
from accumext.optimizer._pending import clear_consumed
from accumext.optimizer._reducer import Sending, send_in_backward
from accumext.optimizer._scaler import current_scale, scale_for
from accumext.optimizer._settings import OP, check_weight
from accumext.optimizer._sums import (
    add_micro_batch,
    adding,
    adopt,
    enlarge_base,
    is_plain,
    move_out_of_grad,
)  # fmt: skip
from accumext.optimizer._warnings import warn_of_a_full_window
from accumext.optimizer._window import OpenMicroBatch, Phase, Window
from accumext.tensors.checks import (
    dtype_name,
    fail_type,
    fail_value,
    message,
    type_name,
    where_the_loss_is,
)
from accumext.tensors.kinds import HALF_DTYPES
from accumext.tensors.scalars import Scalar, divide, equals, on_device

_BACKWARD = f"{OP}.backward"
# The default weight: this object, which needs no check. Not a literal, which modules may share.
UNWEIGHTED: Final = float("1")
_ONE: Scalar = 1.0
_DETACHED = (
    "Compute it from the parameters with gradients enabled. tbptt has run backward already: call "
    "tbptt(..., backward=opt.backward) inside `with opt.micro_batch():`"
)


def check_loss_and_weight(loss: object, weight: object) -> Scalar:
    """Raise unless the loss has one element and a graph; return the checked weight."""
    op = _BACKWARD
    if not isinstance(loss, Tensor):
        inner = getattr(loss, "loss", None)
        detached = isinstance(inner, Tensor) and not inner.requires_grad
        advice = _DETACHED if detached else where_the_loss_is(loss)
        fail_type(op, "loss", "be a tensor", type_name(loss), advice)
    if loss.numel() != 1:
        advice = "Take its mean() or sum()"
        fail_value(op, "loss", "be 0-dim", f"shape {list(loss.shape)}", advice)
    if not loss.requires_grad:
        fail_value(op, "loss", "have a graph", "a tensor without one", _DETACHED)
    return weight if weight is UNWEIGHTED else check_weight(op, weight)


class BackwardPass(NamedTuple):
    """A backward pass as the user asks for it: a loss that counts `weight`, and torch's options."""

    loss: Tensor
    weight: Scalar
    retain_graph: bool | None = None
    create_graph: bool = False
    inputs: tuple[Tensor | GradientEdge, ...] | None = None  # if given, only these get a gradient
    scale: Scalar = 1.0  # the loss scale
    pending: Sequence[Tensor | None] = ()  # gradients of a pass of the user's, for this micro-batch

    def check_options(self) -> None:
        """Raise for options that autograd would refuse, before it has written any gradient."""
        op = _BACKWARD
        for name, kinds, contract in _OPTIONS:
            if not isinstance(getattr(self, name), kinds):
                fail_type(op, name, contract, type_name(getattr(self, name)))
        if self.inputs == ():
            fail_value(op, "inputs", "hold a tensor", "none", "Pass None for all of the graph")
        for i, tensor in enumerate(self.inputs or ()):
            if not isinstance(tensor, (Tensor, GradientEdge)):
                fail_type(op, f"inputs[{i}]", "be a tensor", type_name(tensor))
            if not getattr(tensor, "requires_grad", True):
                got = "one with requires_grad=False"
                fail_value(op, f"inputs[{i}]", "be a tensor that requires a gradient", got)

    def run(self, engine: Engine, factor: Scalar, lookup: Lookup | None = None) -> None:
        """Differentiate the loss times a factor, which is passed as the gradient of the loss.
        Operators may add to the sums that `lookup` returns."""
        loss, seed = self.loss, None
        if isinstance(factor, Tensor):
            seed = torch.ones_like(loss) * factor.to(loss.device, loss.dtype)
        elif factor != 1.0:
            seed = torch.full_like(loss, factor)
        if self.inputs is not None and lookup is not None:
            lookup = partial(self._look_up, lookup)
        options = seed, self.retain_graph, self.create_graph, self.inputs
        try:
            engine.main_grads.lookup = lookup
            if len(ALIVE) == 1:
                loss.backward(*options)
            else:
                backward = partial(loss.backward, *options)
                run_beside_others(engine, loss, self.weight, factor, backward)
        finally:
            engine.main_grads.lookup = None

    def _look_up(self, lookup: Lookup, parameter: Tensor) -> Tensor | None:
        """Ask `lookup` for a parameter that is one of the inputs."""
        asked = any(tensor is parameter for tensor in self.inputs or ())
        return lookup(parameter) if asked else None


# Options of a backward pass of which only the type is checked.
_OPTIONS = (
    ("retain_graph", (NoneType, bool), "be a bool or None"),
    ("create_graph", bool, "be a bool"),
)


def run_backward(
    engine: Engine,
    proxy: Optimizer,  # the AccumulatingOptimizer, by which the user's scaler may know it
    call: BackwardPass,
) -> None:
    """Scale the loss, run its backward pass and add its gradients to the open window.

    In one of three ways: `_into_grad` for a window of one, whose gradients stay in `.grad`;
    `_into_sums`, the main road, where autograd adds to the sums; `_apart` where it must not.
    """
    loss, settings, state = call.loss, engine.settings, engine.state
    window, inside = state.window, state.micro_batch
    # `refuse` raises for a backward pass in these cases alone.
    if settings.needs_closure or state.sending is not None or window.phase is Phase.SUMMED:
        engine.refuse(_BACKWARD)
    if settings.scaler is not None:
        scale = scale_for(_BACKWARD, settings.scaler, loss, proxy, engine.optimizer)
        call = call._replace(scale=scale)
    if engine.reducer.sharded:
        engine.reducer.begin(_BACKWARD, engine)
    if inside is not None:
        _check_weight_inside(inside, call.weight)
    stays = settings.window == 1 and inside is None and engine.keeps_in_grad
    if call.create_graph and not stays:
        _refuse_graph()
    if engine.watch is not None:
        engine.watch.see_loss(engine, loss, call.weight, call.retain_graph is True)
    first = inside is None or inside.weight is None  # pass of its micro-batch
    if first and window.ledger.micro_batches >= settings.window:
        warn_of_a_full_window(engine)
    if state.last is not None:
        state.last.evidence = None
    if state.other_pass is not None:
        engine.update(other_pass=None)
    parameters = list(chain.from_iterable(map(params_of, engine.optimizer.param_groups)))
    if not engine.tensors.is_parameters:
        parameters = engine.tensors.parameters()
    if window.phase is not Phase.IN_GRAD:
        if GONE or len(LEAVING) > engine.leaves:
            part_from_others(_BACKWARD, engine, parameters)
        if not all(map(is_none, map(grad_of, parameters))) and (
            pending := clear_consumed(_BACKWARD, engine, parameters, inside is not None)
        ):
            call = call._replace(pending=pending)
    if stays:
        _into_grad(engine, call, parameters)
        return
    known = window.parameters
    if len(known) != len(parameters) or not all(map(is_, known, parameters)):
        move_out_of_grad(engine, parameters)
    looks = window.ledger.micro_batches == 0 and not engine.reducer.sharded
    watch = engine.watch if looks else None
    if watch is not None:
        watch.before_backward(parameters, call.pending)
    if not first:  # as the first part of the micro-batch
        apart = inside is not None and inside.part is not None
    else:
        # Usually false, which spares the call: full precision, and the same weight each time.
        may_not = loss.dtype in HALF_DTYPES or call.weight is not window.ledger.base_weight
        cannot = may_not and _cannot_carry(engine, loss, call.weight)
        apart = cannot or engine.policy.apart
    backward = _apart if apart else _into_sums
    backward(engine, call, parameters)
    if watch is not None:
        watch.see_backward(engine, parameters)


def _refuse_graph() -> NoReturn:
    """Raise for `create_graph`, if the gradients do not stay in `.grad`."""
    contract = "be False unless gradients stay in `.grad`, with window=1 and one backward pass"
    advice = "For a loss of gradients: torch.autograd.grad(loss, inputs, create_graph=True)"
    fail_value(_BACKWARD, "create_graph", contract, True, advice)


def _check_weight_inside(micro_batch: OpenMicroBatch, weight: Scalar) -> None:
    """Raise unless all calls in a micro-batch have one weight, as far as the host can see."""
    first = weight if micro_batch.weight is None else micro_batch.weight
    if not (on_device(first) or on_device(weight) or first == weight):
        fail_value(_BACKWARD, "weight", f"be that of the whole micro-batch, {first:g}", weight)


def _cannot_carry(engine: Engine, loss: Tensor, weight: Scalar) -> bool:
    """Tell whether the loss cannot be multiplied by its weight. Weight 0 must give 0 even for a NaN
    gradient, and a loss of half precision would round the weight."""
    if engine.reducer.sharded:  # losses of shards must be multiplied
        return False
    if equals(weight, 0.0):
        return True
    base = engine.state.window.ledger.base_weight
    if loss.dtype not in HALF_DTYPES or base is None or base is weight:
        return False
    return on_device(base) or on_device(weight) or base != weight


def _into_grad(engine: Engine, call: BackwardPass, parameters: list[Tensor]) -> None:
    """Run the only pass of a window of one: autograd leaves its gradients in `.grad`."""
    scale, base = call.scale, engine.reducer.base_weight
    ledger, ratio = Ledger().with_micro_batch(call.weight, scale, base)
    nothing = equals(ratio, 0.0)
    try:
        if call.pending and not nothing:
            scale_(present(call.pending), ratio)
        call.run(engine, scale if nothing else scale * ratio, _plain_grad)
        grads = list(map(grad_of, parameters))
        if nothing:  # a product with 0 would keep NaN
            grads = [None if g is None else torch.zeros_like(g).detach() for g in grads]
            set_grads(parameters, grads)
        if engine.policy.check is not None:
            engine.policy.check(engine, _BACKWARD, grads, call.weight)
        if not engine.leaves:
            LEAVING[id(engine)], engine.leaves = engine, True
        window = Window((), grads, ledger, Phase.IN_GRAD)
        engine.update(window=window, accumulated=True, through_backward=True)
    except BaseException:
        engine.drop()
        clear_grads(parameters)
        raise


def _plain_grad(parameter: Tensor) -> Tensor | None:
    """Return the gradient in `.grad`, if an operator can add to it; else None."""
    grad = parameter.grad
    return grad if grad is not None and grad.dtype == parameter.dtype and is_plain(grad) else None


def _into_sums(engine: Engine, call: BackwardPass, parameters: list[Tensor]) -> None:
    """Run a pass whose loss is multiplied by weight and loss scale, so that autograd can add to the
    sums. If it fails, the window is dropped, and the exception says so."""
    before, sending, weight = engine.state, None, call.weight
    window, inside = before.window, before.micro_batch
    if engine.settings.reduce_in_backward:
        sending = send_in_backward(_BACKWARD, engine, window, weight)
        engine.update(sending=sending)
    try:
        if inside is not None and inside.weight is not None:
            ratio = inside.ratio
        else:
            base = engine.reducer.base_weight
            if weight is not window.ledger.base_weight and base is None:
                window = enlarge_base(window, weight)
            ledger, ratio = window.ledger.with_micro_batch(weight, call.scale, base)
            window = window._replace(ledger=ledger, norm=None)
            if inside is not None:
                inside = inside._replace(weight=weight, ratio=ratio)
        window = _run_pass(engine, window, call, ratio, sending)
        engine.update(
            window=window, micro_batch=inside, sending=sending, accumulated=True,
            through_backward=True,
        )  # fmt: skip
    except BaseException as error:
        engine.drop()
        clear_grads(parameters)
        if inside is not None:  # a loop that catches this gets an error when the micro-batch ends
            engine.update(micro_batch=OpenMicroBatch(failed=True))
        if before.micro_batches:
            explain(error, _BACKWARD, "it had been added to")
        raise


def _run_pass(
    engine: Engine,
    window: Window,
    call: BackwardPass,
    ratio: Scalar,
    sending: Sending | None = None,
) -> Window:
    """Return the window with the gradients of a loss added, times the ratio. Autograd adds them to
    the sums, which are in `.grad` meanwhile, or `Collecting` does if autograd cannot."""
    parameters, base_scale = window.parameters, window.ledger.base_scale
    if call.pending:
        factor = ratio * divide(base_scale, current_scale(_BACKWARD, engine.settings.scaler))
        here = engine.tensors.send(list(call.pending))()
        window = adding(window, here, factor).run([])._replace(norm=None)
    factor = ratio * base_scale
    if sending is not None or not window.autograd_adds:
        collecting = Collecting(engine, _BACKWARD, window, sending)
        return collecting.run(partial(call.run, engine), factor)
    try:
        for parameter, main in zip(parameters, window.sums):
            parameter.grad = main
    except RuntimeError as error:  # torch's words are of an assignment that the user did not make
        _explain_converted(parameter, main, error)
    call.run(engine, factor, _plain_grad)
    grads = list(map(grad_of, parameters))
    if window.norm is not None or not all(map(is_, grads, window.sums)):
        window = adopt(window, grads)
    for parameter in parameters:
        parameter.grad = None
    return window


def _explain_converted(parameter: Tensor, main: Tensor | None, error: RuntimeError) -> NoReturn:
    """Raise for a parameter that was converted or moved since its sum was made."""
    kept, now = (
        "none" if t is None else f"{dtype_name(t.dtype)} {list(t.shape)} on {t.device}"
        for t in (main, parameter)
    )
    contract = "keep its dtype, shape and device inside a window"
    advice = "Convert or move the model between windows, after opt.flush() or opt.discard()"
    text = message(_BACKWARD, "a parameter", contract, f"{now}, with a sum of {kept}", advice)
    raise RuntimeError(text) from error


def _apart(engine: Engine, call: BackwardPass, parameters: list[Tensor]) -> None:
    """Run a pass whose gradients are not added to the sums by autograd, but checked first, or
    multiplied by their weight. Inside a micro-batch they are summed in its `part`."""
    micro_batch, base, ratio = engine.state.micro_batch, engine.reducer.base_weight, _ONE
    if base is not None:
        _, ratio = engine.state.window.ledger.with_micro_batch(call.weight, call.scale, base)
    try:
        if micro_batch is None:
            scale_(present(call.pending), ratio)
            call.run(engine, call.scale * ratio)
            grads = fresh(parameters, engine.state.consumed)
            with torch.no_grad():
                add_micro_batch(
                    engine, _BACKWARD, parameters, grads, call.weight, call.scale,
                    accumulated=True, base=base,
                )  # fmt: skip
            return
        part = micro_batch.part or Window(ledger=Ledger(base_scale=call.scale))
        part = _run_pass(engine, part.of(parameters), call, ratio)
        engine.update(micro_batch=micro_batch._replace(weight=call.weight, part=part))
    except BaseException:
        clear_grads(parameters)
        if micro_batch is not None:
            engine.update(micro_batch=micro_batch._replace(failed=True))
        raise
