"""`rollout`: the loss of any recurrence on its own output, with exact gradients, in the memory that
is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext.distributed import gathered_once
from accumext.loops._checkpoint_plan import Plan, Sizes, choose_plan, least_budget
from accumext.loops._kept_graph import KeptGraph
from accumext.loops._recomputed_steps import RecomputedSteps
from accumext.recurrence import (
    OPEN_GATE,
    KeptState,
    Resets,
    State,
    StateGradientGate,
    Truncation,
    batch_dim_of,
    check_batch_dim,
    check_nesting,
    check_unwritten,
    copy_nesting,
    detach,
    resets_of,
    tensors,
    truncation_from,
    with_shapes,
    write_counts,
    zero_dependency,
)
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import (
    REDUCTIONS,
    Reduction,
    TruncationWord,
    fail_type,
    fail_value,
    integer,
    message,
    one_of,
    positive_int,
    type_name,
    zero_dim_loss,
)
from accumext.tensors.torch_private import saved_tensors_are_hooked

OP = "rollout"

_inside: ContextVar[bool] = ContextVar("a rollout calls its step", default=False)


class RolloutOutput(NamedTuple):
    """The results of `rollout`.

    Attributes:
        loss: 0-dim, differentiable.
        state: after the last step; detached if k2 is given.
        output: of the last step; detached if k2 is given; None if there are no steps.
        recomputed: whether the backward pass runs steps again. If not, their graph is kept.
    """

    loss: Tensor
    state: State
    output: State
    recomputed: bool

    def __repr__(self) -> str:
        return with_shapes(self)


@explained
def rollout(
    step: Callable[[State, State], tuple[State, State]],
    state: State,
    steps: int,
    *,
    loss: Callable[[State, int], Tensor],
    start: State = None,
    feed: Callable[[State, int], State] | None = None,
    resets: Tensor | None = None,  # bool [T, B]
    k1: int | None = None,
    k2: int | None = None,
    truncation: TruncationWord = "fixed",
    checkpoint: int | None = None,
    memory_budget: int | None = None,
    reduction: Reduction = "mean",
    batch_dim: int | None = None,
) -> RolloutOutput:
    """Run a model on its own output for some steps, for a loss with exact gradients.

    For forecasters, world models, simulators and recurrent policies: `output, state = step(input,
    state)`, and the next input is `feed(output, t)`. The gradient is that of the plain loop, back
    through states and fed outputs. The graph is kept if it takes at most a quarter of the free
    memory. Otherwise it keeps only the tensors of its last segment, and the others are computed
    again in the backward pass, a segment of steps at a time, from the states and inputs between
    segments; `out.recomputed` says so. `out.loss.backward()` gives all parameters that `step` uses,
    the state and `start` their gradients as usual: hooks run once, and DistributedDataParallel
    communicates once.

    Args:
        step: `(input, state) -> (output, state)`; each a tensor or any nesting of tuples, lists,
            dicts and dataclasses. If steps run again, it is called in the backward pass, with the
            same random numbers and under the same autocast. It must not write into its arguments.
            State that it, `loss` and `feed` keep between calls is restored for that
            (docs/decoder.md, "Cells that keep state of their own"). Other values that they read
            must not change until the backward pass has run.
        state: the initial state. Gradients reach it.
        steps: the number of steps, T.
        loss: `(output, t) -> 0-dim loss` of step t = 0 .. T - 1.
        start: the input of step 0, of any nesting. Gradients reach it.
        feed: `(output, t) -> input of step t + 1`; by default the output itself.
        resets: bool [T, B], best on the CPU: the rows whose state is set back to their initial
            state before step t. Gradients of the initial state come from there, too, with any k1
            and k2. Inputs are not changed, and no tensor of the state may grow.
        k1: steps between the ends of two windows of truncated backpropagation; by default k2. If k2
            is None, it has no effect, and there is a warning.
        k2: steps a gradient flows back from the end of a window (docs/decoder.md, "k1 and k2"); the
            state and the fed input are cut there. None: all the way, exact.
        truncation: "fixed" by k1 and k2; "random" cuts the gradient between any two steps, for the
            whole batch, with probability 1 / k2, and otherwise weights it by 1 / (1 - 1 / k2), so
            that its expectation is the exact gradient (ARTBP).
        checkpoint: steps of a segment; all segments but the last run again. None chooses by
            `memory_budget`.
        memory_budget: bytes for the checkpoints between segments and the graph of one segment. If
            it is small, fewer checkpoints are kept, and steps run again more than once (binomial
            checkpointing). None: a quarter of the free memory for the graph of all steps. If that
            does not fit, or hooks for saved tensors are active, such as those of
            torch.utils.checkpoint, or a step of another rollout makes the call, it is twice the
            memory of the states of all steps, and the graph of sqrt(T) steps. With k1 < k2 the
            states at which windows begin are kept in addition.
        reduction: "mean" over the steps, or "sum".
        batch_dim: dimension of the batch in the state's tensors, if there are `resets`, as in
            `decode_loss`; 0-dim tensors belong to all rows.

    Returns:
        A `RolloutOutput`. Under `torch.no_grad` the steps just run.

    Raises:
        ValueError: a value is wrong, such as k2 < k1 or a budget that not even a segment fits into.
        TypeError: a type is wrong.
        RuntimeError: in the backward pass, if a parameter, an input or a state that it reads has
            changed since the call. (A change of another tensor is detected only if autograd would
            save it.)

    Example:
        >>> cell, head, start = nn.GRUCell(3, 16), nn.Linear(16, 3), torch.zeros(8, 3)
        >>> def step(x, h):
        ...     h = cell(x, h)
        ...     return x + head(h), h
        >>> series = torch.randn(200, 8, 3)
        >>> error = lambda x, t: F.mse_loss(x, series[t])
        >>> out = accumext.rollout(step, torch.zeros(8, 16), 200, loss=error, start=start)
        >>> out.loss.backward()

    Sources: Williams & Peng 1990 (k1, k2); Tallec & Ollivier 2017 (ARTBP); Griewank & Walther 2000
    (binomial checkpointing).
    """
    steps, truncated = _check(locals())
    reset = None if resets is None else _reset_rows(resets, steps, state, batch_dim)
    if steps == 0:
        return _no_steps(state, start)
    like = torch.empty((), dtype=torch.float64, device="cpu")
    gate = truncated.gate(steps, 1, like)  # one factor for the whole batch
    builds_graph = torch.is_grad_enabled()
    spans = truncated.spans(steps) if builds_graph else [(0, 0, steps)]

    def choose(sizes: Sizes) -> Plan:
        plan = choose_plan(steps, sizes, checkpoint, memory_budget)
        if plan is None:
            contract = f"hold {least_budget(steps, sizes, checkpoint)} bytes: a segment's graph, "
            fail_value(OP, "memory_budget", contract + "and what it starts from", memory_budget)
        return plan

    plan = None if builds_graph else Plan(steps, None)
    if builds_graph and memory_budget is None and checkpoint is not None:
        plan = Plan(checkpoint, None)
    one_step = _OneStep(step, loss, feed, steps, gate, reset)
    starts = {begin for begin, _, _ in spans[1:]}
    kept = KeptState(OP, "step", (step, loss, feed))
    may_keep = plan is None and memory_budget is None and not _is_measured()
    graph = KeptGraph(sum(end - begin for begin, _, end in spans)) if may_keep else None
    device = _device(state, start)
    running = RecomputedSteps(kept, one_step, steps, device, plan, choose, starts, graph)
    carry: State = None
    total: Tensor | None = None
    with gathered_once(OP, step, loss, feed) as gathered, _calling_steps():
        for begin, counting, end in spans:
            if counting > 0:
                carry = running.rewind(begin)
            if begin == 0:  # not detached: gradients reach the initial state and `start`
                carry = copy_nesting((start, state))
            carry, total = running.run(begin, counting, end, carry, total)
        output, last = carry
        if truncated.cuts:
            output, last = detach(output), detach(last)
        assert total is not None
        if gathered is not None:
            total = gathered.finish(total, tensors((output, last)))
    total = total / steps if reduction == "mean" else total
    return RolloutOutput(total, last, output, running.recomputed)


def _is_measured() -> bool:
    """Tell whether another graph of which this one is a part may be measured, or counted."""
    return _inside.get() or saved_tensors_are_hooked()


@contextmanager
def _calling_steps() -> Iterator[None]:
    """Let rollouts that the steps call keep no graph. Under the hooks of a step whose graph is
    measured they keep none, so those of other steps must not either, or the graph would be larger
    than was measured."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


@dataclass(frozen=True)
class _ResetRows:
    """The rows that are reset, and the initial state to which they are reset."""

    resets: Resets
    initial: State
    writes: list[int]  # numbers of writes into the tensors of `initial` so far
    batch_dim: int

    def apply(self, t: int, state: State) -> State:
        """Return the state before step t, with its rows reset."""
        if t not in self.resets.steps:
            return state
        what = "no tensor of the initial state, to which rows are reset"
        check_unwritten(OP, "step", what, tensors(self.initial), self.writes)
        return self.resets.apply(OP, t, None, state, self.initial, self.batch_dim)


def _reset_rows(value: Any, steps: int, state: State, batch_dim: int | None) -> _ResetRows:
    """Check the argument `resets`, for the batch of the state, and return it."""
    dim, given = batch_dim or 0, tensors(state)
    batch = next((tensor.shape[dim] for tensor in given if tensor.dim() > dim), 0)
    device = given[0].device if given else torch.device("cpu")
    resets = resets_of(OP, value, (steps, batch), state, device, "the device of the state")
    check_batch_dim(OP, state, batch, batch_dim)
    return _ResetRows(resets, copy_nesting(state), write_counts(given), dim)


@dataclass(frozen=True)
class _OneStep:
    """A step, its loss and its feedback: from (input, state) to the next (input, state)."""

    step: Callable[[State, State], tuple[State, State]]
    loss: Callable[[State, int], Tensor]
    feed: Callable[[State, int], State] | None
    steps: int
    gate: StateGradientGate
    reset: _ResetRows | None

    def __call__(self, t: int, carry: State, counted: bool) -> tuple[State, Tensor]:
        """Return the next (input, state), and the loss; after the last step (output, state)."""
        if self.gate is not OPEN_GATE:
            carry = self.gate.attach(t, self.gate.cut(t, carry))
        given, state = carry
        if self.reset is not None:
            state = self.reset.apply(t, state)
        try:
            result = self.step(given, state)
        except (AttributeError, TypeError) as error:
            if t > 0 or given is not None or "NoneType" not in str(error):
                raise
            text = message(OP, "start", "be given, the input of step 0, if step reads it", None)
            raise TypeError(text) from error
        if not isinstance(result, tuple) or len(result) != 2:
            fail_type(OP, "step", "return (output, state)", type_name(result))
        output, state = result
        with nullcontext() if counted else torch.no_grad():
            loss = self.loss(output, t)
        loss = zero_dim_loss(OP, "loss", loss)
        following = output
        if self.feed is not None and t + 1 < self.steps:
            following = self.feed(output, t)
        if t == 0:  # other steps return the same nesting
            check_nesting(OP, "state", state)
            check_nesting(OP, "output" if self.feed is None else "what feed returns", following)
        return (following, state), loss


def _device(state: State, start: State) -> torch.device:
    """Return the device whose generator dropout draws from, in addition to the CPU's."""
    for tensor in tensors((state, start)):
        if tensor.device.type != "cpu":
            return tensor.device
    if torch.cuda.is_initialized():  # `step` may make tensors there
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _no_steps(state: State, start: State) -> RolloutOutput:
    """Return the result of a call without steps: a loss of 0, with zero gradients."""
    given = tensors((state, start))
    device = given[0].device if given else None
    zero = zero_dependency(given) if torch.is_grad_enabled() else None
    if zero is None:
        zero = torch.zeros((), device=device)
    return RolloutOutput(zero, copy_nesting(state), None, False)


def _check(args: Mapping[str, Any]) -> tuple[int, Truncation]:
    """Check the arguments of a call. Return the number of steps, and how gradients are cut."""
    for name, contract in (("step", ""), ("loss", ""), ("feed", " or None")):
        if not callable(args[name]) and not (name == "feed" and args[name] is None):
            fail_type(OP, name, f"be callable{contract}", type_name(args[name]))
    check_nesting(OP, "state", args["state"])
    check_nesting(OP, "start", args["start"])
    steps = integer(OP, "steps", args["steps"], 0)
    truncation = truncation_from(OP, args["k1"], args["k2"], args["truncation"])
    for name in ("checkpoint", "memory_budget"):
        if args[name] is not None:
            positive_int(OP, name, args[name])
    one_of(OP, "reduction", args["reduction"], REDUCTIONS)
    batch_dim_of(OP, args["batch_dim"])
    return steps, truncation
