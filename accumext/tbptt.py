"""`tbptt`: truncated backpropagation through time over any user module, a window of steps alive at
a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext._checks import fail_type, fail_value, one_of, positive_int, type_name
from accumext._torch_private import tree_map
from accumext.decoder._feedback import Feedback, feedback_of
from accumext.decoder._recurrent_state import (
    State,
    check_nesting,
    detach,
    rng_state,
    set_rng_state,
    zero_gradient_tie,
)

OP = "tbptt"


class TBPTTResult(NamedTuple):
    """What `tbptt` returns."""

    loss: Tensor  # 0-dim, detached, on the device
    tokens: Tensor  # int64 [T, B]: the argmax (or sample) of each step
    state: State  # after the last step, detached


def tbptt(
    step: Callable[[Tensor, State], tuple[Tensor, State]],
    targets: Tensor,  # int64 [T, B]
    state: State,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor],
    feedback: str | Tensor = "greedy",
    start: int | Tensor = 0,
    inputs: Tensor | None = None,  # int64 [T, B]
    k1: int = 1,
    k2: int | None = None,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    reduction: str = "mean",
    teacher_forcing: float = 1.0,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> TBPTTResult:
    """Truncated BPTT(k1, k2) over any module: a backward pass every k1 steps, through k2 steps.

    The loss is `sum_t criterion(logits_t, targets[t])`, divided by T under "mean". After every k1
    steps (and at the end) the loss of those steps flows back k2 steps, the graph is freed and the
    state detached, so memory is that of k2 steps. With k1 = k2 every step runs once. With k1 < k2 a
    window starts again from the state k2 steps back, replaying tokens and dropout, so that each
    step runs k2 / k1 times; `decode_loss` does the same for known cells without running the head
    again.

    Args:
        step: `(token [B], state) -> (logits [B, V], state)`; parameters get their gradients
            wherever `step` has them.
        targets: int64 [T, B].
        state: initial state, any nesting of tuples, lists and dicts; gradients reach it from the
            windows that start at step 0.
        criterion: `(logits [B, V], target [B]) -> 0-dim loss` of one step, such as
            `F.cross_entropy`; its mean is NaN in a step that is ignored everywhere, a sum is not.
        feedback, start, inputs, teacher_forcing, temperature, generator: as in `decode_loss`, but
            for ignored targets: a negative one is fed as 0, any other as it is.
        k1: steps between two backward passes.
        k2: steps a gradient flows back, at least k1; None means k1.
        backward: called with each window's loss: `opt.backward`, or `lambda loss:
            scaler.scale(loss).backward()`. Under an `AccumulatingOptimizer` put the call inside
            `with opt.micro_batch():`, so that the windows count as one micro-batch.
        reduction: "mean" over the steps, or "sum".

    Returns:
        A `TBPTTResult`. Nothing in it is read from the device.

    Raises:
        ValueError: a value or shape is wrong, such as k2 < k1.
        TypeError: a type is wrong.
        RuntimeError: from torch, "a second time", if `step` uses a tensor with a graph of its own
            (attention memory) and there are several windows. Detach it, or use `decode_loss`, which
            takes it as `context`.

    Example:
        >>> result = accumext.tbptt(model, targets, hidden, criterion=F.cross_entropy, k1=1)

    Source: Williams & Peng 1990.
    """
    source, k1, k2 = _check(
        step, targets, state, criterion, feedback, start, inputs, k1, k2, backward, reduction,
        teacher_forcing, temperature, generator,
    )  # fmt: skip
    steps = targets.shape[0]
    loss_factor = 1 / steps if reduction == "mean" and steps else 1.0
    windows = _Windows(step, targets, criterion, source, loss_factor)
    history = _StateHistory(k2, targets.device) if k1 < k2 else None
    initial = _InitialState(state)
    losses = []
    for begin in range(0, steps, k1):
        end = min(begin + k1, steps)
        first = max(0, end - k2) if history is not None else begin
        if history is not None:
            state = history.restore(first, state)
        if first == 0:
            state = initial.state(last=end == steps or min(end + k1, steps) > k2)
        loss, state = windows.run(first, begin, end, state, history)
        if first == 0 and (tie := initial.tie()) is not None:
            loss = loss + tie.to(loss.dtype)
        losses.append(loss.detach())
        backward(loss)
        state = detach(state)
    if not losses:
        return TBPTTResult(torch.zeros((), device=targets.device), targets.clone(), detach(state))
    return TBPTTResult(torch.stack(losses).sum(), torch.stack(windows.tokens), detach(state))


class _Windows:
    """Runs steps, keeping the tokens that were fed and predicted."""

    def __init__(
        self,
        step: Callable[[Tensor, State], tuple[Tensor, State]],
        targets: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor],
        source: Feedback,
        loss_factor: float,
    ) -> None:
        self.step, self.targets, self.criterion = step, targets, criterion
        self.source, self.loss_factor = source, loss_factor
        # [B] per step: separate tensors, as the graph of a lookup saves what it was given.
        self.tokens: list[Tensor] = []
        self.inputs = [source.teacher[0]] if len(targets) else []

    def run(
        self, first: int, begin: int, end: int, state: State, history: _StateHistory | None
    ) -> tuple[Tensor, State]:
        """The loss of the steps [begin, end) with a graph from `first` on, and the state after
        them."""
        losses = []
        for t in range(first, end):
            if history is not None:
                history.save(t, state)
            result = self.step(self.inputs[t], state)
            if not isinstance(result, tuple) or len(result) != 2:
                fail_type(OP, "step", "return (logits, state)", type_name(result))
            logits, state = result
            check_nesting(OP, "state", state)
            if t < begin:
                continue  # replayed for its graph; its loss belonged to an earlier window
            loss = self.criterion(logits, self.targets[t])
            if not isinstance(loss, Tensor):
                fail_type(OP, "criterion", "return a tensor", type_name(loss))
            if loss.dim() != 0:
                fail_value(OP, "criterion", "return a 0-dim loss", f"shape {list(loss.shape)}")
            losses.append(loss)
            with torch.no_grad():
                self.tokens.append(self.source.choose(t, logits))
                if t + 1 < len(self.targets):
                    self.inputs.append(self.source.next(t + 1, self.tokens[t]))
        return torch.stack(losses).sum() * self.loss_factor, state


class _StateHistory:
    """The detached states and generators of the last k2 steps, where windows overlap."""

    def __init__(self, k2: int, device: torch.device) -> None:
        self._device = device
        self._saved: deque[tuple[int, State, tuple[Tensor, ...]]] = deque(maxlen=k2)

    def save(self, step: int, state: State) -> None:
        """Save the state before `step`, once."""
        if not self._saved or self._saved[-1][0] < step:
            self._saved.append((step, detach(state), rng_state(self._device)))

    def restore(self, step: int, current: State) -> State:
        """The state before `step`, with the generators put back so that dropout replays; `current`
        if the step has not been run yet."""
        for saved_step, state, rng in self._saved:
            if saved_step == step:
                set_rng_state(rng, self._device)
                return state
        return current


class _InitialState:
    """The initial state of every window that begins at step 0.

    A backward pass frees the graph it went through, so only the last of these windows may reach the
    user's graph. Earlier ones start from detached leaves, whose gradients are added to those of the
    last one (loss-scaled, as its own are).
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._leaves: dict[int, Tensor] = {}  # by id of the tensor each stands for
        self._hooked: list[Tensor] = []

    def state(self, last: bool) -> State:
        """The state for one of these windows."""
        return tree_map(self._with_leaf_gradient if last else self._leaf, self._state)

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        return self._leaves.setdefault(id(value), value.detach().requires_grad_())

    def _with_leaf_gradient(self, value: Any) -> Any:
        leaf = self._leaves.get(id(value))
        if leaf is None or leaf.grad is None:
            return value
        earlier, hooked = leaf.grad, value.view_as(value)
        hooked.register_hook(lambda gradient: gradient + earlier)
        self._hooked.append(hooked)
        return hooked

    def tie(self) -> Tensor | None:
        """A 0 that makes backward reach every tensor that earlier windows have a gradient for."""
        return zero_gradient_tie(self._hooked)


def _check(
    step: Any, targets: Any, state: State, criterion: Any, feedback: Any, start: Any, inputs: Any,
    k1: Any, k2: Any, backward: Any, reduction: Any, teacher_forcing: Any, temperature: Any,
    generator: Any,
) -> tuple[Feedback, int, int]:  # fmt: skip
    for name, function in (("step", step), ("criterion", criterion), ("backward", backward)):
        if not callable(function):
            fail_type(OP, name, "be callable", type_name(function))
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        fail_type(OP, "targets", "be an int64 tensor [T, B]", type_name(targets))
    if targets.dim() != 2:
        fail_value(OP, "targets", "have shape [T, B]", list(targets.shape))
    check_nesting(OP, "state", state)
    k1 = positive_int(OP, "k1", k1)
    k2 = k1 if k2 is None else positive_int(OP, "k2", k2)
    if k2 < k1:
        fail_value(OP, "k2", "be at least k1", f"k1={k1}, k2={k2}")
    one_of(OP, "reduction", reduction, ("mean", "sum"))
    source = feedback_of(
        OP, feedback, targets, fed=targets.clamp(min=0), start=start, inputs=inputs,
        teacher_forcing=teacher_forcing, temperature=temperature, generator=generator, rows=None,
    )  # fmt: skip
    return source, k1, k2
