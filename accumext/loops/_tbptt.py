"""`tbptt`: truncated backpropagation through time over any user module, a window of steps at a
time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext.distributed import gathered_once
from accumext.recurrence import (
    ALL_TARGETS,
    Inputs,
    KeptState,
    NoBatchAsSequence,
    ReadAsSequence,
    Replay,
    Resets,
    State,
    WindowStarts,
    batch_dim_of,
    check_batch_dim,
    check_nesting,
    check_options,
    check_unwritten,
    context_of,
    detach,
    feedback_from,
    feedback_word,
    freeze,
    hook_beyond,
    map_tensors,
    may_be_unbatched,
    observing,
    resets_of,
    tensors,
    truncation_from,
    windows,
    with_shapes,
    within_length_of,
    write_counts,
    zero_dependency,
)
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import (
    FLOAT_DTYPES,
    REDUCTIONS,
    FeedbackWord,
    Reduction,
    fail_type,
    fail_value,
    message,
    one_of,
    positive_int,
    type_name,
    zero_dim_loss,
)

OP = "tbptt"
_SEQUENCES = (
    "A module of sequences reads a step of them: token[None], or token[:, None] with batch_first; "
    "return the output of that step"
)
IGNORED = -100  # `ignore_index` of `F.cross_entropy`


class TBPTTResult(NamedTuple):
    """The results of `tbptt`.

    Attributes:
        loss: 0-dim, detached, on the device.
        tokens: int64 [T, B], the argmax (or sample) of each step. With floating-point targets, the
            outputs [T, B, ...], detached.
        state: after the last step, detached.
    """

    loss: Tensor
    tokens: Tensor
    state: State

    def __repr__(self) -> str:
        return with_shapes(self)


@explained
def tbptt(
    step: Callable[..., tuple[Tensor, State]],
    targets: Tensor,  # int64 [T, B], or floating-point [T, B, ...]
    state: State,
    *,
    criterion: Callable[..., Tensor],
    feedback: FeedbackWord | Tensor = "greedy",
    start: float | Tensor = 0,
    inputs: Tensor | None = None,  # int64 [T, B], or floating-point [T, B, ...]
    resets: Tensor | None = None,  # bool [T, B]
    k1: int = 1,
    k2: int | None = None,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    reduction: Reduction = "mean",
    teacher_forcing: float = ALL_TARGETS,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    lengths: Tensor | None = None,  # int64 [B]
    context: tuple[Tensor, ...] = (),
    batch_dim: int | None = None,
) -> TBPTTResult:
    """Run truncated BPTT(k1, k2) over a module: a backward pass every k1 steps, through k2 steps.

    The loss is `sum_t criterion(logits_t, targets[t])`, divided by T under "mean". After every k1
    steps (and at the end) the loss of those steps flows back (docs/decoder.md, "k1 and k2"), the
    graph is freed and the state detached: memory is needed for k2 steps only. With k1 = k2 every
    step runs once. With k1 < k2 a window starts again from the state k2 steps back, with the same
    tokens and dropout, so that each step runs k2 / k1 times; `decode_loss` does the same for known
    cells without running the head again.

    Args:
        step: `(token [B], state, *context) -> (logits [B, V], state)`; all parameters that it uses
            get gradients. With floating-point inputs or targets, `(input [B, ...], state, *context)
            -> (output [B, ...], state)`. It must not write into its arguments if windows overlap,
            nor into its state if there are `lengths` or `resets`.
        targets: int64 [T, B]; or, for regression, floating-point [T, B, ...].
        state: initial state, any nesting of tuples, lists, dicts and dataclasses; gradients reach
            it from the windows that start at step 0, and from every reset.
        criterion: `(logits [B, V], target [B]) -> 0-dim loss` of one step, such as
            `F.cross_entropy`. In a step whose targets are all ignored its mean is NaN, and so is
            the loss of the call; a sum is 0, and `lengths` leaves such steps out.
        feedback, start, inputs, teacher_forcing, temperature, generator: as in `decode_loss`, but
            for ignored targets: a negative one is fed as 0, any other as it is. With floating-point
            inputs or targets, feedback must be "teacher", which feeds `inputs`, by default `start`
            followed by `targets[:-1]`; `accumext.rollout` feeds a model its own output.
        resets: bool [T, B], best on the CPU: the rows whose state is set back to their initial
            state before step t. Gradients of the initial state come from there, too, with any k1
            and k2. Inputs are not changed, and no tensor of the state may grow.
        k1: steps between the ends of two windows.
        k2: steps a gradient flows back from the end of a window, at least k1; None means k1.
        backward: called with each window's loss: `opt.backward`, or `lambda loss:
            scaler.scale(loss).backward()`. Under an `AccumulatingOptimizer` put the call inside
            `with opt.micro_batch():`, so that the windows count as one micro-batch.
        reduction: "mean" over the steps, or "sum".
        lengths: int64 [B]. A row past its length keeps its state; its target is -100, which
            `F.cross_entropy` ignores. With floating-point targets the criterion gets a third
            argument, bool [B]: the rows within their length. A step past all lengths has loss 0.
            In it the targets are 0 and all rows count, for a mean over none would be NaN.
        context: tensors handed to `step` at every step, such as attention memory. Gradients reach
            them from every window, in the last backward pass.
        batch_dim: dimension of the batch in the state's tensors, if there are `lengths` or
            `resets`, as in `decode_loss`; 0-dim tensors belong to all rows. With `lengths` alone
            other tensors may grow in one dimension.

    Returns:
        A `TBPTTResult`. Its loss is 0 if T or B is 0. The host does not wait for a GPU.

    Raises:
        ValueError: a value or shape is wrong, such as k2 < k1.
        TypeError: a type is wrong.
        RuntimeError: `step` writes into arguments that are read again, or uses a tensor with a
            graph in several windows that is not passed in `context`.

    Example:
        >>> result = accumext.tbptt(model, targets, hidden, criterion=F.cross_entropy, k1=1)

    Source: Williams & Peng 1990.
    """
    args = dict(locals())
    if observing.observers:
        observing.tell(tbptt, args)
    source, k1, k2, active, reset = _check(args)
    steps = targets.shape[0]
    loss_factor = 1 / steps if reduction == "mean" and steps else 1.0
    rows = None if active is None else _Rows(active)
    running = _Steps(step, _Losses(criterion, targets, rows), source, rows, reset, batch_dim or 0)
    initial, memory = _SharedGraph(state), _SharedGraph(tuple(context))
    # State and context may come from one graph, such as an encoder, which a backward pass frees. So
    # if there is a context with gradients, the last window sends those of the state back as well.
    together = any(tensor.requires_grad for tensor in context)
    losses: list[Tensor] = []
    spans = windows(steps, k1, k2) if targets.shape[:2].numel() else []
    if len(spans) > 1:
        _announce_passes(backward)
    starts = None
    if k1 < k2:
        replay = Replay(KeptState(OP, "step", step), targets.device)
        starts = WindowStarts(replay, {begin for begin, _, _ in spans})
    last_from_initial = spans[-1] if together and spans else _last_from_initial(spans, reset)
    for span in spans:
        first, begin, end = span
        if starts is not None and (checkpoint := starts.at(first)) is not None:
            what = "no state of an earlier step"
            check_unwritten(OP, "step", what, checkpoint.read, checkpoint.writes)
            starts.replay.go_back(checkpoint)
            state = checkpoint.state
        ends, reaches_initial = end == steps, span == last_from_initial
        running.initial = initial.tensors(last=reaches_initial)
        if first == 0:
            state = running.initial
        running.context = memory.tensors(last=ends)
        with gathered_once(OP, step, criterion) as gathered:
            loss, state = running.run(first, begin, end, state, starts)
            loss = loss * loss_factor
            for shared in [initial, memory] if reaches_initial else [memory]:
                if (zero := shared.zero_dependency()) is not None:
                    loss = loss + zero.to(loss.dtype)
            if gathered is not None:
                loss = gathered.finish(loss)
        _call_backward(backward, loss, bool(losses))
        losses.append(loss.detach())
        state = detach(state)
    if not losses:  # no steps, or no rows: the criterion's mean would be NaN
        return TBPTTResult(torch.zeros((), device=targets.device), targets.clone(), detach(state))
    return TBPTTResult(torch.stack(losses).sum(), torch.stack(running.outputs), detach(state))


def _last_from_initial(
    spans: list[tuple[int, int, int]], resets: Resets | None
) -> tuple[int, int, int] | None:
    """Return the last window in which a step may read the initial state."""
    steps = {0} if resets is None else {0, *resets.steps}
    from_initial = [span for span in spans if any(span[0] <= step < span[2] for step in steps)]
    return from_initial[-1] if from_initial else None


def _announce_passes(backward: Callable[..., Any]) -> None:
    """Tell an optimizer whose method `backward` is that it will be called several times."""
    announce = getattr(getattr(backward, "__self__", None), "_expect_passes", None)
    if announce is not None:
        announce()


def _call_backward(backward: Callable[[Tensor], Any], loss: Tensor, later: bool) -> None:
    """Call `backward` with the loss of a window; explain its error if the window is a later one."""
    try:
        backward(loss)
    except RuntimeError as error:
        if not later or "backward through the graph a second time" not in str(error):
            raise
        contract = "keep no tensor with a graph from one window to the next"
        got = "one whose graph the backward pass of an earlier window has freed"
        advice = "Pass it as context, hand it on in the state, or detach it"
        raise RuntimeError(message(OP, "step", contract, got, advice)) from error


class _Rows:
    """Rows of different lengths: which have ended, and what their targets are then."""

    def __init__(self, active: Tensor) -> None:  # bool [T, B]
        self.active, self.any = active, active.any(1)  # [T]
        # In a step past all ends every row counts, or the mean would be NaN. The loss is dropped.
        self.counted = active | ~self.any[:, None]

    def targets(self, targets: Tensor) -> Tensor:
        """Return int64 targets [T, B]: ignored past the ends of rows, 0 in steps past all ends."""
        past = torch.where(self.any[:, None], IGNORED, 0)
        return torch.where(self.active, targets, past)


class _Losses:
    """Computes the loss of each step."""

    def __init__(
        self, criterion: Callable[..., Tensor], targets: Tensor, rows: _Rows | None
    ) -> None:
        self.criterion, self.rows = criterion, rows
        self.masks = rows is not None and targets.is_floating_point()
        self.targets = targets if rows is None or self.masks else rows.targets(targets)

    def at(self, t: int, output: Tensor) -> Tensor:
        rows = self.rows
        given = (rows.counted[t],) if rows is not None and self.masks else ()
        try:
            loss = self.criterion(output, self.targets[t], *given)
        except (IndexError, RuntimeError, ValueError) as error:
            advice = _as_logits(output, len(self.targets[t]))
            if self.targets.is_floating_point() or advice is None:
                raise
            got = list(output.shape) if output.is_floating_point() else type_name(output)
            raise ValueError(message(OP, "step", "return logits [B, V]", got, advice)) from error
        loss = zero_dim_loss(OP, "criterion", loss)
        return loss if rows is None else torch.where(rows.any[t], loss, 0)


class _Steps:
    """Runs steps, and keeps their inputs and their tokens or outputs."""

    def __init__(
        self, step: Callable[..., tuple[Tensor, State]], losses: _Losses, source: Inputs,
        rows: _Rows | None, resets: Resets | None, batch_dim: int,
    ) -> None:  # fmt: skip
        self.step, self.losses, self.source, self.rows = step, losses, source, rows
        self.resets, self.batch_dim = resets, batch_dim
        self.initial: State = None
        self.context: tuple[Tensor, ...] = ()
        self.count = len(losses.targets)
        self.predicts = not losses.targets.is_floating_point()
        # [B] per step: separate tensors, which graphs save. Writes into a common one would clash.
        self.outputs: list[Tensor] = []  # tokens; or outputs, if targets are floating-point
        self.inputs = [source.teacher[0]] if self.count else []

    def run(
        self, first: int, begin: int, end: int, state: State, starts: WindowStarts | None
    ) -> tuple[Tensor, State]:
        """Return the loss of steps [begin, end), with a graph from `first` on, and the state after
        them."""
        losses = []
        for t in range(first, end):
            if starts is not None:
                starts.save(t, state)
            if self.resets is not None:
                active = None if self.rows is None else self.rows.active
                state = self.resets.apply(OP, t, active, state, self.initial, self.batch_dim)
            given = self._read_again(t, state, overlap=starts is not None)
            counts = write_counts(given)
            looks = t == 0 and may_be_unbatched(state, len(self.inputs[t]))
            try:
                with NoBatchAsSequence(len(self.inputs[t])) if looks else nullcontext():
                    result = self.step(self.inputs[t], state, *self.context)
            except ReadAsSequence as error:
                text = message(OP, "step", "take tokens [B]", error, _SEQUENCES)
                raise TypeError(text) from error
            except RuntimeError as error:
                if "hx should also be" not in str(error):
                    raise
                text = message(OP, "step", "take tokens [B]", "a RuntimeError", _SEQUENCES)
                raise TypeError(text) from error
            what = "no tensor of its input, state or context"
            check_unwritten(OP, "step", what, given, counts)
            if not isinstance(result, tuple) or len(result) != 2:
                advice = "Return both: return logits, state"
                fail_type(OP, "step", "return (logits, state)", type_name(result), advice)
            output, new_state = result
            check_nesting(OP, "state", new_state)
            if t == 0:
                _check_order(output, state, new_state)
            if self.rows is not None:
                new_state = freeze(OP, self.rows.active[t], new_state, state, self.batch_dim)
            state = new_state
            if starts is not None:
                starts.replay.compare(t, (output, state))
                if t + 1 == end:
                    starts.replay.note(t, (output, state))
            if t < begin:
                continue  # run again for its graph only: its loss was in an earlier window
            losses.append(self.losses.at(t, output))
            self._feed_back(t, output)
        return torch.stack(losses).sum(), state

    def _read_again(self, t: int, state: State, overlap: bool) -> list[Tensor]:
        """Return tensors that a step must not write into: all arguments if windows overlap, and the
        state if rows that have ended keep it, or may be reset to it."""
        if not overlap:
            by_row = self.rows is not None or self.resets is not None
            return tensors(state) if by_row else []
        return tensors((self.inputs[t], state, self.context))

    @torch.no_grad()
    def _feed_back(self, t: int, output: Tensor) -> None:
        chosen = self.source.choose(t, output) if self.predicts else output.detach().clone()
        self.outputs.append(chosen)
        if t + 1 < self.count:
            self.inputs.append(self.source.next(t + 1, self.outputs[t]))


def _as_logits(output: Tensor, batch: int) -> str | None:
    """Return what to type instead of a step's output that a criterion refused; None if unknown."""
    shape = [*output.shape]
    if not output.is_floating_point():
        return "Return the scores of all words, not the word"
    for wrong, right in (
        (len(shape) == 3 and shape[:2] == [1, batch], "output[0]"),
        (len(shape) == 3 and shape[:2] == [batch, 1], "output[:, 0]"),
        (len(shape) == 3 and shape[::2] == [batch, 1], "output.squeeze(-1)"),
        (len(shape) == 2 and shape[0] != batch == shape[1], "output.t()"),
    ):
        if wrong:
            return f"Return {right}"
    if len(shape) == 3 and batch in shape[:2]:
        return "Return those of one step"
    return None


def _check_order(output: Any, state: State, new_state: State) -> None:
    """Raise if a step returns (state, logits), or an LSTM's state as (h, c)."""
    swapped = not isinstance(output, Tensor)
    if not swapped and isinstance(state, Tensor) and isinstance(new_state, Tensor):
        swapped = output.shape == state.shape != new_state.shape
    got, advice = f"({_shape(output)}, {_shape(new_state)})", "Return them in this order"
    if not swapped and isinstance(state, tuple) and isinstance(new_state, Tensor):
        swapped = len(parts := tensors(state)) > 1
        swapped = swapped and all(p.shape == output.shape == new_state.shape for p in parts)
        got, advice = f"{got}, the parts of the state", "Return logits, (h, c)"
    if swapped:
        fail_type(OP, "step", "return (logits, state)", got, advice)


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type_name(value)


class _SharedGraph:
    """Tensors that several windows read: the initial state, or the context.

    A backward pass frees the graph it goes through. So only the last of these windows may reach the
    user's graph. Earlier ones read detached leaves, whose gradients are added to those of the last
    one. (A loss scale is in all of them.)
    """

    def __init__(self, nesting: State) -> None:
        self._nesting = nesting
        # By the id of the user's tensor, which may occur several times in the nesting.
        self._leaves: dict[int, Tensor] = {}
        self._hooked: dict[int, Tensor] = {}

    def tensors(self, last: bool) -> State:
        """Return the tensors that a window reads: the user's own for the last, else leaves."""
        return map_tensors(self._with_leaf_gradient if last else self._leaf, self._nesting)

    def _leaf(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        return self._leaves.setdefault(id(value), value.detach().requires_grad_())

    def _with_leaf_gradient(self, value: Tensor) -> Tensor:
        if id(value) in self._hooked:
            return self._hooked[id(value)]
        leaf = self._leaves.get(id(value))
        if leaf is None or leaf.grad is None:
            return value
        earlier, hooked = leaf.grad, value.view_as(value)
        hook_beyond(hooked, lambda gradient: gradient + earlier)
        self._hooked[id(value)] = hooked
        return hooked

    def zero_dependency(self) -> Tensor | None:
        """Return a 0 that makes backward reach every tensor with a gradient of earlier windows."""
        return zero_dependency([*self._hooked.values()])


def _check(args: dict[str, Any]) -> tuple[Inputs, int, int, Tensor | None, Resets | None]:
    """Check the arguments of a call. Return the inputs with random numbers drawn, k1, k2, which
    steps are within the lengths of their rows, and the resets."""
    for name in ("step", "criterion", "backward"):
        function = args[name]
        if not callable(function):
            advice = "Pass its method: opt.backward" if hasattr(function, "backward") else None
            fail_type(OP, name, "be callable", type_name(function), advice)
        if isinstance(function, type) and issubclass(function, torch.nn.Module):
            name_of = function.__name__
            advice = f"Pass an instance, {name_of}()"
            fail_type(OP, name, "be a function or module", f"the class {name_of}", advice)
    targets, state, lengths, resets = (
        args[name] for name in ("targets", "state", "lengths", "resets")
    )
    _check_targets(targets, state)
    check_nesting(OP, "state", state)
    context_of(OP, args["context"])
    k1 = positive_int(OP, "k1", args["k1"])
    k2 = k1 if args["k2"] is None else positive_int(OP, "k2", args["k2"])
    truncation_from(OP, k1, k2, "fixed")  # raises if k2 < k1
    one_of(OP, "reduction", args["reduction"], REDUCTIONS)
    batch_dim_of(OP, args["batch_dim"])
    shape, whose, active = targets.shape[:2], "the device of targets", None
    _check_layout(targets, state)
    if lengths is not None:
        active = within_length_of(OP, lengths, shape, targets.device, whose)
    if resets is not None:
        resets = resets_of(OP, resets, shape, state, targets.device, whose)
    if lengths is not None or resets is not None:
        check_batch_dim(OP, state, shape[1], args["batch_dim"])
    feedback, start, inputs = args["feedback"], args["start"], args["inputs"]
    of_words = {name: args[name] for name in ("teacher_forcing", "temperature", "generator")}
    observed = isinstance(inputs, Tensor) and inputs.is_floating_point()
    if targets.is_floating_point() or observed:
        source = Inputs(_known_inputs(targets, feedback, start, inputs))
        check_options(OP, "teacher", **of_words)
        return source, k1, k2, active, resets
    fed = targets.clamp(min=0)
    fed = fed if active is None else torch.where(active, fed, 0)
    chosen = feedback_from(OP, feedback, fed, start=start, inputs=inputs, rows=None, **of_words)
    return chosen.drawn(), k1, k2, active, resets


def _check_targets(targets: Any, state: Any) -> None:
    """Raise unless these are valid targets; advise if targets and state were exchanged."""
    advice = None
    if isinstance(state, Tensor) and state.dtype == torch.int64 and state.dim() == 2:
        advice = "Did you mean tbptt(step, targets, state)?"
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, *FLOAT_DTYPES):
        contract = "be an int64 tensor [T, B] or a floating-point tensor [T, B, ...]"
        fail_type(OP, "targets", contract, type_name(targets), advice)
    if targets.is_floating_point():
        if targets.dim() < 2:
            fail_value(OP, "targets", "have shape [T, B, ...]", list(targets.shape), advice)
        if advice is not None:
            contract = "be int64 tokens if the state is an int64 matrix"
            fail_type(OP, "targets", contract, type_name(targets), advice)
    elif targets.dim() != 2:
        fail_value(OP, "targets", "have shape [T, B]", list(targets.shape), advice)


def _check_layout(targets: Tensor, state: State) -> None:
    """Raise if B, by all matrices in the state, is the other dimension of the targets."""
    steps, batch = targets.shape[:2]
    if steps != batch and {len(t) for t in tensors(state) if t.dim() == 2} == {steps}:
        advice = "Did you mean targets.transpose(0, 1)?"
        fail_value(OP, "targets", f"be [T, B] with B = {steps}", list(targets.shape), advice)


def _known_inputs(targets: Tensor, feedback: Any, start: Any, inputs: Any) -> Tensor:
    """Return the inputs of all steps, [T, B, ...], if inputs or targets are floating-point."""
    contract = "be 'teacher' if inputs or targets are floating-point"
    advice = "accumext.rollout feeds a model its own output"
    feedback_word(OP, feedback, ("teacher",), contract, advice)
    shape = list(targets.shape[:2])
    if inputs is not None:
        if not isinstance(inputs, Tensor):
            fail_type(OP, "inputs", "be a tensor [T, B, ...]", type_name(inputs))
        if list(inputs.shape[:2]) != shape:
            fail_value(OP, "inputs", f"have shape {shape} in front", list(inputs.shape))
        if inputs.device != targets.device:
            contract = f"be on the device of targets, {targets.device}"
            fail_value(OP, "inputs", contract, inputs.device)
        return inputs
    if not isinstance(start, (Tensor, int, float)) or isinstance(start, bool):
        fail_type(OP, "start", "be a number or a tensor [B, ...]", type_name(start))
    first = torch.as_tensor(start, dtype=targets.dtype, device=targets.device)
    row = targets.shape[1:]
    if first.dim() > 0 and first.shape != row:
        fail_value(OP, "start", f"have shape {list(row)}", list(first.shape))
    return torch.cat([first.expand(1, *row), targets[:-1]])[: len(targets)]
