"""One interface for every cell: `(x [B, E], state, *context) -> (output [B, H], state, extras)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accumext.recurrence._arguments import batch_dim_of
from accumext.recurrence._states import State, check_nesting, copy_nesting, tensors
from accumext.recurrence._unbatched import NoBatchAsSequence, ReadAsSequence, may_be_unbatched
from accumext.tensors.checks import fail_type, fail_value, forward_of, message, type_name
from accumext.tensors.torch_private import translated_from

Step = Callable[..., tuple[Tensor, State, State]]


@dataclass(frozen=True)
class Cell:
    """A cell with the interface that the decoder calls."""

    step: Step
    module: nn.Module | None  # the owner of the parameters; None if the cell is no module
    input_size: int | None  # E, if the cell fixes it
    output_size: int | None  # H of the output, if the cell fixes it
    # Shapes of all state tensors, without the batch; None for a callable, which may have any state.
    state_shapes: tuple[tuple[int, ...], ...] | None
    batch_dim: int  # of every state tensor
    draws: bool  # may draw random numbers (dropout), so that a replay must restore the generators

    def initial_state(self, batch: int, like: Tensor) -> State:
        """Return zeros, with which torch's own modules start; None for a callable, which makes its
        own initial state."""
        if self.state_shapes is None:
            return None
        zeros = []
        for shape in self.state_shapes:
            size = (*shape[: self.batch_dim], batch, *shape[self.batch_dim :])
            zeros.append(like.new_zeros(size))
        return tuple(zeros) if len(zeros) > 1 else zeros[0]

    def check_state(self, op: str, state: State, batch: int) -> None:
        """Raise if the state has a wrong container or layout, or does not fit a module of torch."""
        check_nesting(op, "state", state)
        for part in tensors(state):
            if part.layout != torch.strided:
                layout = str(part.layout).removeprefix("torch.")
                fail_type(op, "state", "be dense", f"a {layout} tensor", "Pass state.to_dense()")
        if self.state_shapes is None:
            return
        pair = len(self.state_shapes) == 2
        parts = state if pair and isinstance(state, (tuple, list)) else (state,)
        if len(parts) != len(self.state_shapes) or not all(isinstance(p, Tensor) for p in parts):
            what = "a pair of tensors (h, c)" if pair else "a tensor"
            fail_type(op, "state", f"be {what} for this cell", type_name(state))
        for index, (part, shape) in enumerate(zip(parts, self.state_shapes, strict=True)):
            expected = [*shape[: self.batch_dim], batch, *shape[self.batch_dim :]]
            name = "state" if len(parts) == 1 else f"state[{index}]"
            if list(part.shape) != expected:
                fail_value(op, name, f"have shape {expected}", list(part.shape))
            if not part.is_floating_point():
                fail_type(op, name, "be floating-point", type_name(part))


# Pieces of torch's error messages when a callable fails, and advice for each.
_SEQUENCE = "A module of sequences reads one step of them: y, s = rnn(x[None], s); return y[0], s"
_CURES = (
    (
        "argument #1 'indices'",
        "x is what the embedding has looked up, [B, E], and no tokens: leave its nn.Embedding out, "
        "or use tbptt, which feeds tokens",
    ),
    (
        "argument 'hx' (position 2) must be tuple",
        "An LSTMCell returns (h, c): h, c = cell(x, s); return h, (h, c)",
    ),
    ("hx should also be", _SEQUENCE),
    ("input must have 3 dimensions", _SEQUENCE),  # of quantised modules
)
_STEP = "take (x [B, E], state) and return (output [B, H], state)"
_LAYERS = (
    "Pass nn.GRU, LSTM or RNN with num_layers, or one function whose state is a tuple: "
    "def cell(x, s): a = first(x, s[0]); b = second(a, s[1]); return b, (a, b)"
)


def parts_of(model: Any) -> str | None:
    """Return advice on which parts of a whole model to pass; None if it has no embedding."""
    names = []
    for kind in (nn.Embedding, (nn.RNNBase, nn.RNNCellBase), nn.Linear):
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        names.append(
            next((name for name, part in modules if name and isinstance(part, kind)), None)
        )
    if names[0] is None:
        return None
    parts = ", ".join(f"model.{name}" for name in names if name is not None)
    return f"Pass the parts of the model, {parts}, or use tbptt, which takes it whole"


def cell_of(op: str, cell: Any, batch_dim: Any = None) -> Cell:
    """Return the cell of a cell argument, checked: one of torch's recurrent modules (one direction)
    or a callable, whose states have the batch in `batch_dim`."""
    if batch_dim is not None:
        batch_dim_of(op, batch_dim)
    if isinstance(cell, nn.RNNCellBase):
        return _from_rnn_cell(cell)
    if isinstance(cell, nn.RNNBase):
        return _from_rnn(op, cell)
    no_cell = forward_of(cell) in (nn.Sequential.forward, nn.ModuleList.forward)
    if no_cell or not callable(cell):
        advice = _LAYERS if no_cell or isinstance(cell, (list, tuple)) else None
        fail_type(op, "cell", "be a recurrent module or callable", type_name(cell), advice)
    _check_translation(op, cell)
    module = cell if isinstance(cell, nn.Module) else None
    called = _StepsOfSequences(op, cell)

    def step(x: Tensor, state: State, *context: Tensor) -> tuple[Tensor, State, State]:
        try:
            result = called(x, copy_nesting(state), *context)
        except (RuntimeError, TypeError) as error:
            for piece, cure in _CURES:
                if piece in str(error):
                    text = message(op, "cell", _STEP, type_name(error), parts_of(cell) or cure)
                    raise TypeError(text) from error
            raise
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type_name(result)
            both = "Return both: h = cell(x, s); return h, h"
            advice = both if isinstance(result, Tensor) else None
            fail_type(op, "cell", "return (output, state)", got, advice)
        output, state, *more = result
        extras = more[0] if more else None
        check_nesting(op, "state", state)
        check_nesting(op, "extras", extras)
        return output, state, extras

    return Cell(step, module, None, None, None, batch_dim_of(op, batch_dim), draws=True)


class _StepsOfSequences:
    """Calls a callable. If it passes x on to nn.GRU, LSTM or RNN, x is a sequence of one step."""

    def __init__(self, op: str, cell: Callable[..., Any]) -> None:
        self._op, self._cell = op, cell
        self._time_dim: int | None = None  # of the sequences; None if the cell reads none
        self._looks = True

    def __call__(self, x: Tensor, state: State, *context: Tensor) -> Any:
        looks, self._looks = self._looks, False
        # If the first step found a sequence, later calls watch, too: one may be a replay of it.
        if (looks or self._time_dim is not None) and may_be_unbatched(state, len(x)):
            try:
                with NoBatchAsSequence(len(x)):
                    return self._cell(x, state, *context)
            except ReadAsSequence as call:
                self._time_dim = call.time_dim
        if self._time_dim is None:
            return self._cell(x, state, *context)
        try:
            output, *rest = self._cell(x.unsqueeze(self._time_dim), state, *context)
            if output.shape[self._time_dim] != 1 or output.dim() != 3:
                raise ValueError(f"an output of shape {list(output.shape)}")
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            got = "one that has nn.GRU, LSTM or RNN read x [B, E] as a sequence"
            text = message(self._op, "cell", _STEP, got, _SEQUENCE)
            raise TypeError(text) from error
        return output.squeeze(self._time_dim), *rest


def _check_translation(op: str, cell: Any) -> None:
    """Raise if the cell is a recurrent module of torch behind torch.compile or torch.jit. A call of
    it with x [B, E] does not return (output, state), or reads the batch as a sequence."""
    how, name = translated_from(cell) or ("", "")
    word = how.removeprefix("a ")
    contract, wrapped = "return (output, state)", f"{word}(x, s)"
    if name in ("GRUCell", "RNNCell"):
        returned, body = "returns h", f"h = {wrapped}; return h, h"
    elif name == "LSTMCell":
        returned, body = "returns (h, c)", f"h, c = {wrapped}; return h, (h, c)"
    elif name in ("GRU", "LSTM", "RNN"):
        contract = f"{contract} of one step"
        returned = "reads [B, E] as a sequence"
        body = f"y, s = {word}(x[None], s); return y[0], s"
    else:
        return
    advice = "Pass the module itself, which the kernels run, or wrap it: def cell(x, s): "
    fail_type(op, "cell", contract, f"{how} {name}, which {returned}", advice + body)


def _from_rnn_cell(cell: nn.RNNCellBase) -> Cell:
    pair = isinstance(cell, nn.LSTMCell)

    def step(x: Tensor, state: State) -> tuple[Tensor, State, None]:
        state = cell(x, tuple(state) if pair else state)
        return (state[0] if pair else state), state, None

    shapes = ((cell.hidden_size,),) * (2 if pair else 1)
    return Cell(step, cell, cell.input_size, cell.hidden_size, shapes, batch_dim=0, draws=False)


def _from_rnn(op: str, cell: nn.RNNBase) -> Cell:
    if cell.bidirectional:
        fail_value(op, "cell", "have one direction", "bidirectional=True")
    pair = isinstance(cell, nn.LSTM)
    time_dim = 1 if cell.batch_first else 0
    output_size = cell.proj_size or cell.hidden_size

    def step(x: Tensor, state: State) -> tuple[Tensor, State, None]:
        output, state = cell(x.unsqueeze(time_dim), tuple(state) if pair else state)
        return output.squeeze(time_dim), state, None

    hidden: tuple[tuple[int, ...], ...] = ((cell.num_layers, output_size),)
    shapes = (*hidden, (cell.num_layers, cell.hidden_size)) if pair else hidden
    draws = cell.dropout > 0 and cell.training
    return Cell(step, cell, cell.input_size, output_size, shapes, batch_dim=1, draws=draws)


def check_output(op: str, output: Any, batch: int, hidden: int) -> None:
    """Raise if a callable's output is not [B, H]: the head's error would be harder to read."""
    if not isinstance(output, Tensor):
        fail_type(op, "cell", "return (output, state) with a tensor output", type_name(output))
    if list(output.shape) != [batch, hidden]:
        shape = list(output.shape)
        fail_value(op, "cell", f"return an output of shape {[batch, hidden]}", shape)


def parameter_tensors(cell: Cell) -> list[Tensor]:
    """Return the trained parameters of the cell if it is a module."""
    if cell.module is None:
        return []
    return [p for p in cell.module.parameters() if p.requires_grad]
