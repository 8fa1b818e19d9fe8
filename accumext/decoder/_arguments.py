"""The arguments of `decode_loss`: checked before anything has changed, time-major from here on."""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from accumext._checks import (
    FLOAT_DTYPES,
    fail_type,
    fail_value,
    integer,
    number,
    one_of,
    positive_int,
    type_name,
)
from accumext.decoder._cells import Cell, adapt
from accumext.decoder._embedding import Table, check_plain, table
from accumext.decoder._feedback import Feedback, feedback_plan
from accumext.decoder._fused_cross_entropy import Criterion, accumulation_dtype
from accumext.decoder._recurrent_state import State, own_generator, tensors
from accumext.decoder._state_gradient import Carry, random_cuts

OP = "decode_loss"


@dataclass(frozen=True)
class Job:
    """One call of `decode_loss`, checked; every [T, B] tensor is time-major."""

    table: Table
    cell: Cell
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # int64 [T, B]
    counted: Tensor  # bool [T, B]: within its length and not ignored
    within: Tensor | None  # bool [T, B]: within its length; None without `lengths`
    state: State
    context: tuple[Tensor, ...]
    feedback: Feedback
    criterion: Criterion
    reduction: str
    num_items: float | Tensor | None
    k1: int | None
    k2: int | None
    truncated: bool  # does anything cut the gradient, and with it the last state
    carry: Carry
    eos: int | None
    memory_budget: int | None
    cuda_graph: bool
    batch_first: bool

    @property
    def steps(self) -> int:
        return self.targets.shape[0]

    @property
    def batch(self) -> int:
        return self.targets.shape[1]

    def windows(self) -> list[tuple[int, int, int]]:
        """(begin, counting, end): the losses of steps [counting, end) flow back to step `begin`.

        One for all steps, unless windows overlap. Where k1 = k2 the state is cut on the way.
        """
        if self.k1 is None or self.k2 is None or self.k1 == self.k2:
            return [(0, 0, self.steps)]
        ends = [*range(self.k1, self.steps, self.k1), self.steps]
        return [(max(0, e - self.k2), b, e) for b, e in zip([0, *ends], ends, strict=False)]


def check_arguments(
    embedding: Any,
    cell: Any,
    head: Any,
    targets: Any,
    state: State,
    *,
    feedback: Any,
    start: Any,
    inputs: Any,
    teacher_forcing: Any,
    k1: Any,
    k2: Any,
    truncation: Any,
    state_grad_clip: Any,
    lengths: Any,
    eos: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    class_weight: Any,
    reduction: Any,
    num_items: Any,
    temperature: Any,
    generator: Any,
    context: Any,
    memory_budget: Any,
    cuda_graph: Any,
    batch_first: Any,
) -> Job:
    """The call as a `Job`, or the error that says what is wrong with it."""
    lookup = table(OP, embedding)
    adapted = adapt(OP, cell)
    weight, bias = _head(head)
    _fit(lookup, adapted, weight)
    vocabulary = weight.shape[0]
    device = weight.device

    targets = _tokens("targets", targets, None, device)
    if batch_first:
        targets = targets.t()
        inputs = inputs.t() if isinstance(inputs, Tensor) and inputs.dim() == 2 else inputs
        if isinstance(feedback, Tensor) and feedback.dim() == 2:
            feedback = feedback.t()
    steps, batch = targets.shape
    doubts = _layout_doubts(cell, targets, batch_first, [state, lengths, start])
    ignore_index = integer(OP, "ignore_index", ignore_index)
    within = _within(lengths, steps, batch, device)
    counted = targets != ignore_index
    if within is not None:
        counted = counted & within
    _in_range("targets", targets, vocabulary, where=counted)

    if state is not None:
        adapted.check_state(OP, state, batch)
    _same_device("state", tensors(state), device)
    k1, k2 = _truncation(k1, k2, truncation)
    if k1 is not None and k2 is None:
        doubts.append(
            f"k1={k1} has no effect without k2: the gradient flows all the way back. "
            f"Pass k2={k1} to truncate it, or leave k1 out"
        )
    if state_grad_clip is not None and number(OP, "state_grad_clip", state_grad_clip) <= 0:
        fail_value(OP, "state_grad_clip", "be greater than 0", state_grad_clip)
    if eos is not None:
        eos = _token("eos", eos, vocabulary)
    one_of(OP, "reduction", reduction, ("mean", "sum", "none"))
    if number(OP, "label_smoothing", label_smoothing, 0) > 1:
        fail_value(OP, "label_smoothing", "be at most 1", label_smoothing)
    criterion = Criterion(
        float(label_smoothing),
        number(OP, "z_loss", z_loss, 0),
        _class_weight(class_weight, vocabulary, device),
    )
    context = _context(context, adapted, device)
    num_items = _num_items(num_items, reduction)
    if not isinstance(cuda_graph, bool):
        fail_type(OP, "cuda_graph", "be a bool", type_name(cuda_graph))
    if cuda_graph and device.type != "cuda":
        fail_value(OP, "cuda_graph", "be False where the head is not on a GPU", device)
    row_bytes = vocabulary * accumulation_dtype(weight.dtype).itemsize
    if memory_budget is not None:
        memory_budget = positive_int(OP, "memory_budget", memory_budget)
        if memory_budget < row_bytes:
            contract = f"hold one row of logits, {row_bytes} bytes"
            fail_value(OP, "memory_budget", contract, memory_budget)
    rows = lookup.weight.shape[0]
    if rows < vocabulary and not (isinstance(feedback, str) and feedback == "teacher"):
        contract = f"have a row for each of the {vocabulary} words that can be fed back"
        fail_value(OP, "embedding", contract, f"{rows} rows")
    for doubt in doubts:
        warnings.warn(f"{OP}: {doubt}", stacklevel=3)  # where the user called
    # last, because random numbers are drawn
    plan = feedback_plan(
        OP,
        feedback,
        targets,
        # pad also past a row's length, where targets may be anything
        fed=torch.where(counted, targets, lookup.pad),
        start=start,
        inputs=inputs,
        teacher_forcing=teacher_forcing,
        temperature=temperature,
        generator=generator,
        rows=rows,
    )
    factors = None
    if truncation == "random":
        assert k2 is not None
        mean, k2 = k2, None
        factors = random_cuts(steps, batch, mean, weight, own_generator(generator, device))

    return Job(
        table=lookup,
        cell=adapted,
        weight=weight,
        bias=bias,
        targets=targets,
        counted=counted,
        within=within,
        state=state,
        context=context,
        feedback=plan,
        criterion=criterion,
        reduction=reduction,
        num_items=num_items,
        k1=k1,
        k2=k2,
        truncated=k2 is not None or factors is not None,
        carry=Carry(factors, state_grad_clip),
        eos=eos,
        memory_budget=memory_budget,
        cuda_graph=cuda_graph,
        batch_first=batch_first,
    )


def _head(head: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, nn.Linear):
        check_plain(OP, "head", head, nn.Linear, "(weight, bias)")
        weight, bias = head.weight, head.bias
    elif isinstance(head, (tuple, list)) and len(head) == 2:
        weight, bias = head
    else:
        fail_type(OP, "head", "be an nn.Linear or a pair (weight, bias)", type_name(head))
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_DTYPES:
        fail_type(OP, "head weight", "be a floating-point tensor [V, H]", type_name(weight))
    if weight.dim() != 2 or weight.shape[0] == 0:
        fail_value(OP, "head weight", "have shape [V, H] with V >= 1", list(weight.shape))
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dtype not in FLOAT_DTYPES:
            fail_type(OP, "head bias", "be a floating-point tensor [V] or None", type_name(bias))
        if list(bias.shape) != [weight.shape[0]]:
            fail_value(OP, "head bias", f"have shape {[weight.shape[0]]}", list(bias.shape))
        _same_device("head bias", [bias], weight.device)
    return weight, bias


def _fit(lookup: Table, cell: Cell, weight: Tensor) -> None:
    """Embedding, cell and head must fit together."""
    _same_device("embedding", [lookup.weight], weight.device)
    width = lookup.weight.shape[1]
    if cell.input_size is not None and cell.input_size != width:
        fail_value(OP, "embedding", f"have the cell's input size, {cell.input_size}", width)
    if cell.output_size is not None and cell.output_size != weight.shape[1]:
        contract = f"take the cell's output, {cell.output_size} wide"
        fail_value(OP, "head", contract, list(weight.shape))
    if cell.module is not None:
        _same_device("cell", list(cell.module.parameters()), weight.device)


def _same_device(name: str, given: list[Tensor], device: torch.device) -> None:
    for tensor in given:
        if tensor.device != device:
            fail_value(OP, name, f"be on the head's device, {device}", tensor.device)


def _tokens(name: str, value: Any, shape: tuple[int, int] | None, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        fail_type(OP, name, "be an int64 tensor [T, B]", type_name(value))
    if value.dim() != 2 or (shape is not None and value.shape != shape):
        expected = "[T, B]" if shape is None else list(shape)
        fail_value(OP, name, f"have shape {expected}", list(value.shape))
    _same_device(name, [value], device)
    return value


def _in_range(name: str, tokens: Tensor, size: int, where: Tensor | None = None) -> None:
    """Read on the CPU only; on a GPU the lookups themselves assert."""
    if tokens.device.type != "cpu":
        return
    wrong = (tokens < 0) | (tokens >= size)
    if where is not None:
        wrong &= where
    if wrong.any():
        fail_value(OP, name, f"be in [0, {size})", int(tokens[wrong][0]))


def _token(name: str, value: Any, size: int) -> int:
    token = integer(OP, name, value)
    if not 0 <= token < size:
        fail_value(OP, name, f"be in [0, {size})", token)
    return token


def _layout_doubts(cell: Any, targets: Tensor, batch_first: bool, rows: list[State]) -> list[str]:
    """What to say about a module with `batch_first`, which orders nothing here, where targets are
    taken to be [T, B]. State, lengths and start tokens in `rows` may tell what they are."""
    if batch_first or not isinstance(cell, nn.RNNBase) or not cell.batch_first:
        return []
    steps, batch = targets.shape
    sizes = {t.shape[max(0, t.dim() - 2)] for t in tensors(rows) if t.dim() > 0}  # [B], [L, B, H]
    if steps == batch or not sizes:
        return [
            f"targets {[steps, batch]} are read as [T, B], though the cell has batch_first=True. "
            "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"
        ]
    if sizes == {steps}:
        advice = "Pass batch_first=True if they are [B, T]: that of the cell does not say so"
        fail_value(OP, "targets", f"be [T, B] with B = {steps}", [steps, batch], advice)
    return []


def _within(lengths: Any, steps: int, batch: int, device: torch.device) -> Tensor | None:
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int64:
        fail_type(OP, "lengths", "be an int64 tensor [B]", type_name(lengths))
    if list(lengths.shape) != [batch]:
        fail_value(OP, "lengths", f"have shape {[batch]}", list(lengths.shape))
    _same_device("lengths", [lengths], device)
    if lengths.device.type == "cpu" and ((lengths < 0) | (lengths > steps)).any():
        fail_value(OP, "lengths", f"be in [0, {steps}]", lengths.tolist())
    return torch.arange(steps, device=device)[:, None] < lengths


def _truncation(k1: Any, k2: Any, truncation: Any) -> tuple[int | None, int | None]:
    one_of(OP, "truncation", truncation, ("fixed", "random"))
    k1 = None if k1 is None else positive_int(OP, "k1", k1)
    k2 = None if k2 is None else positive_int(OP, "k2", k2)
    if truncation == "random":
        if k1 is not None:
            fail_value(OP, "k1", "be None where cuts are random", k1)
        if k2 is None or k2 < 2:
            fail_value(OP, "k2", "be at least 2, the mean of steps between random cuts", k2)
        return None, k2
    if k2 is None:
        return k1, None
    k1 = k2 if k1 is None else k1
    if k2 < k1:
        fail_value(OP, "k2", "be at least k1", f"k1={k1}, k2={k2}")
    return k1, k2


def _class_weight(value: Any, vocabulary: int, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
        fail_type(OP, "class_weight", "be a floating-point tensor [V]", type_name(value))
    if list(value.shape) != [vocabulary]:
        fail_value(OP, "class_weight", f"have shape {[vocabulary]}", list(value.shape))
    _same_device("class_weight", [value], device)
    return value


def _num_items(value: Any, reduction: str) -> float | Tensor | None:
    if value is None:
        return None
    if reduction != "mean":
        fail_value(OP, "num_items", "be None unless reduction is 'mean'", value)
    if isinstance(value, Tensor):
        if value.dim() != 0:
            fail_value(OP, "num_items", "be a number or a 0-dim tensor", list(value.shape))
        if value.device.type == "cpu" and not bool(value >= 0):
            fail_value(OP, "num_items", "be at least 0", value.item())
        return value
    if isinstance(value, bool) or not isinstance(value, (float, SupportsIndex)):
        fail_type(OP, "num_items", "be a number or a 0-dim tensor", type_name(value))
    count = value if isinstance(value, float) else operator.index(value)
    if not count >= 0:
        fail_value(OP, "num_items", "be at least 0", count)
    return count


def _context(value: Any, cell: Cell, device: torch.device) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor) or not isinstance(value, (tuple, list)):
        fail_type(OP, "context", "be a tuple of tensors", type_name(value))
    for index, tensor in enumerate(value):
        if not isinstance(tensor, Tensor):
            fail_type(OP, f"context[{index}]", "be a tensor", type_name(tensor))
    if value and cell.state_shapes is not None:
        advice = "Wrap the cell: lambda x, state, memory: ..."
        fail_value(
            OP, "context", "be empty for one of torch's cells", f"{len(value)} tensors", advice
        )
    _same_device("context", list(value), device)
    return tuple(value)
