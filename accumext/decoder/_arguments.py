"""The arguments of `decode_loss`, checked before anything has changed."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from accumext._checks import (
    FLOAT_DTYPES,
    TOKEN_REDUCTIONS,
    fail_type,
    fail_value,
    integer,
    number,
    one_of,
    positive_int,
    token_tensor,
    type_name,
    users_level,
)
from accumext._memory_overlap import share_memory
from accumext._wgrad_fusion import may_fuse
from accumext.decoder._modules import check_vector, modules_of, same_device
from accumext.recurrence import (
    Cell,
    Dtypes,
    EmbeddingTable,
    Feedback,
    Resets,
    RnnWeights,
    State,
    StateGradientGate,
    check_batch_dim,
    feedback_of,
    own_generator,
    random_cuts,
    resets_of,
    rnn_weights_of,
    tensors,
    truncation_of,
    unused_k1,
    windows,
    within_length_of,
)

OP = "decode_loss"


@dataclass(frozen=True)
class Criterion:
    """The loss of a token, as in `F.cross_entropy`, and its reduction."""

    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None  # [V]
    reduction: str  # a TokenReduction
    num_items: float | Tensor | None  # divisor of "mean"; None: what the call counts


@dataclass(frozen=True)
class DecodeArguments:
    """One call of `decode_loss`; every [T, B] tensor is time-major."""

    steps: int  # T
    batch: int  # B
    table: EmbeddingTable
    cell: Cell
    rnn_weights: RnnWeights | None  # None: the cell is called, and autograd differentiates it
    head_weight: Tensor  # [V, H]
    head_bias: Tensor | None  # [V]
    dtypes: Dtypes
    targets: Tensor | None  # int64 [T, B], in [0, V): 0 where not counted; None: the tokens
    counted: Tensor  # bool [T, B]: within its length and not ignored
    token_weight: Tensor | None  # [T, B], in the accumulation dtype
    within_length: Tensor | None  # bool [T, B]; None without `lengths`
    state: State
    context: tuple[Tensor, ...]
    feedback: Feedback
    embedding_dropout: float  # of what the cell reads; 0 in eval mode
    output_dropout: float  # of what the head reads
    resets: Resets | None
    return_outputs: bool
    criterion: Criterion
    k1: int | None
    k2: int | None
    truncated: bool  # whether anything cuts the gradient, and with it that of the last state
    gate: StateGradientGate
    eos: int | None
    memory_budget: int | None
    free_running: bool  # whether the tokens of a step must be known before the next step
    # Whether the forward pass forms the head's gradients. They wait for the backward pass where the
    # upstream gradient is per token, and where they are added to a main gradient, which an
    # optimizer offers in the backward pass.
    head_gradients_in_forward: bool

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def draws(self) -> bool:
        """Whether a step may draw random numbers, so that a replay restores the generators."""
        return self.cell.draws or self.embedding_dropout > 0 or self.output_dropout > 0

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return self.head_weight is self.table.weight

    def windows(self) -> list[tuple[int, int, int]]:
        """(begin, counting, end): the losses of steps [counting, end) flow back to step `begin`.

        One for all steps, unless windows overlap. Where k1 = k2 the state is detached on the way.
        """
        if self.k1 is None or self.k2 is None or self.k1 == self.k2:
            return [(0, 0, self.steps)]
        return windows(self.steps, self.k1, self.k2)


def check_arguments(call: Mapping[str, Any]) -> DecodeArguments:
    """The arguments of a call of `decode_loss`, by their names in its signature, as one object."""
    table, cell, weight, bias, dtypes = modules_of(OP, call)
    vocabulary, device = weight.shape[0], weight.device

    call = _time_major(call)
    targets, notices = call["targets"], []
    if targets is None:
        steps, batch = _free_shape(call, cell)
        counted = torch.ones(steps, batch, dtype=torch.bool, device=device)
    else:
        targets, counted = _targets(call, device)
        steps, batch = targets.shape
        notices += _check_layout(call, cell, targets)
    within_length: Tensor | None = None
    if call["lengths"] is not None:
        shape = (steps, batch)
        within_length = within_length_of(OP, call["lengths"], shape, device, "the head's device")
        counted = counted & within_length
    if targets is not None:
        _check_range(targets, vocabulary, counted)
    token_weight = _token_weight(call["token_weight"], (steps, batch), weight)

    state = call["state"]
    if state is None:
        state = cell.initial_state(batch, table.weight)
    else:
        cell.check_state(OP, state, batch)
        same_device(OP, "state", tensors(state), device)
    resets = _resets(call["resets"], (steps, batch), cell, state, device)
    of_rows = any(call[name] is not None for name in ("resets", "lengths", "eos"))
    if cell.state_shapes is None and (of_rows or call["truncation"] == "random"):
        check_batch_dim(OP, state, batch, call["batch_dim"])
    context = context_of(OP, call["context"], cell, device)
    dropout = _dropout(call)
    criterion = _criterion(call, vocabulary, device)
    k1, k2 = truncation_of(OP, call["k1"], call["k2"], call["truncation"])
    if k1 is not None and k2 is None:
        notices.append(unused_k1(k1))
    clip = call["state_grad_clip"]
    if clip is not None and number(OP, "state_grad_clip", clip) <= 0:
        fail_value(OP, "state_grad_clip", "be greater than 0", clip)
    eos = call["eos"]
    if eos is not None and not 0 <= (eos := integer(OP, "eos", eos)) < vocabulary:
        fail_value(OP, "eos", f"be in [0, {vocabulary})", eos)
    memory_budget = call["memory_budget"]
    if memory_budget is not None:
        memory_budget = positive_int(OP, "memory_budget", memory_budget)
        row_bytes = vocabulary * dtypes.accumulation.itemsize
        if memory_budget < row_bytes:
            contract = f"hold one row of logits, {row_bytes} bytes"
            fail_value(OP, "memory_budget", contract, memory_budget)
    rows, feedback = table.weight.shape[0], call["feedback"]
    feeds_back = not isinstance(feedback, str) or feedback != "teacher"
    if rows < vocabulary and feeds_back:
        contract = f"have a row for each of the {vocabulary} words that can be fed back"
        fail_value(OP, "embedding", contract, f"{rows} rows")
    if table.max_norm is not None and feeds_back and share_memory(weight, table.weight):
        contract = "have no max_norm where the head shares its weight and predictions are fed"
        advice = "Renormalise the weight before the call: weight.renorm_(2, 0, max_norm)"
        fail_value(OP, "embedding", contract, table.max_norm, advice)
    for text in notices:
        warnings.warn(f"{OP}: {text}", stacklevel=users_level())
    # Random numbers are drawn from here on: a call that fails a check draws none.
    generator = call["generator"]
    # Padding also past a row's length, where targets may be anything.
    if targets is None:
        fed = torch.full((steps, batch), table.padding_token, device=device)
    else:
        fed = torch.where(counted, targets, table.padding_token)
    source = feedback_of(
        OP, feedback, fed, fed=fed, start=call["start"], inputs=call["inputs"],
        teacher_forcing=call["teacher_forcing"], temperature=call["temperature"],
        generator=generator, rows=rows, draw=call["draw"],
    )  # fmt: skip
    factors = None
    if call["truncation"] == "random":
        assert k2 is not None
        generator = own_generator(generator, device)
        factors, k2 = random_cuts(steps, batch, k2, weight, generator), None
        if resets is not None:  # a row that is reset is cut off from nothing
            factors = factors.masked_fill(resets.rows, 1)
    # The operators look rows up without renormalising them to `max_norm`.
    rnn_weights = None
    if table.max_norm is None or source.mask is None:
        rnn_weights = rnn_weights_of(cell.module, {table.weight.dtype, weight.dtype})

    return DecodeArguments(
        steps=steps, batch=batch, table=table, cell=cell, rnn_weights=rnn_weights,
        head_weight=weight, head_bias=bias, dtypes=dtypes,
        targets=None if targets is None else torch.where(counted, targets, 0).contiguous(),
        counted=counted, token_weight=token_weight, within_length=within_length, state=state,
        context=context, feedback=source, embedding_dropout=dropout[0], output_dropout=dropout[1],
        resets=resets, return_outputs=call["return_outputs"], criterion=criterion, k1=k1, k2=k2,
        truncated=k2 is not None or factors is not None,
        gate=StateGradientGate(factors, clip), eos=eos, memory_budget=memory_budget,
        free_running=source.mask is not None or eos is not None,
        head_gradients_in_forward=criterion.reduction != "none" and not may_fuse(weight),
    )  # fmt: skip


def _time_major(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same call with every [B, T] argument as [T, B]."""
    if not call["batch_first"]:
        return call
    changed = dict(call)
    for name in ("targets", "inputs", "feedback", "token_weight", "resets"):
        if isinstance(call[name], Tensor) and call[name].dim() == 2:
            changed[name] = call[name].t()
    return changed


def _targets(call: Mapping[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """The targets, int64 [T, B], and which of them are not ignored, bool [T, B]."""
    ignore_index = integer(OP, "ignore_index", call["ignore_index"])
    targets = token_tensor(OP, "targets", call["targets"], "be an integer tensor [T, B]")
    if targets.dim() != 2:
        fail_value(OP, "targets", "have shape [T, B]", list(targets.shape))
    same_device(OP, "targets", [targets], device)
    if call["steps"] is not None:
        fail_value(OP, "steps", "be None where there are targets", call["steps"])
    return targets, targets != ignore_index


def _free_shape(call: Mapping[str, Any], cell: Cell) -> tuple[int, int]:
    """T and B where the decoder's own tokens are its targets."""
    feedback = call["feedback"]
    if not isinstance(feedback, str) or feedback not in ("sample", "greedy"):
        contract = "be 'sample' or 'greedy' where targets are None"
        got = repr(feedback) if isinstance(feedback, str) else type_name(feedback)
        fail_value(OP, "feedback", contract, got)
    if call["inputs"] is not None:
        fail_value(OP, "inputs", "be None where targets are None", type_name(call["inputs"]))
    if call["steps"] is None:
        fail_value(OP, "steps", "be given where targets are None", None)
    steps = integer(OP, "steps", call["steps"])
    if steps < 0:
        fail_value(OP, "steps", "be at least 0", steps)
    return steps, batch_size(cell, call)


def batch_size(cell: Cell, call: Mapping[str, Any]) -> int:
    """B, from what is given for each row, or the context; 1 if nothing tells."""
    for name in ("start", "lengths"):
        given = call[name]
        if isinstance(given, (tuple, list)) or (isinstance(given, Tensor) and given.dim() == 1):
            return len(given)
    for leaf in tensors(call["state"]):
        if leaf.dim() > cell.batch_dim:
            return leaf.shape[cell.batch_dim]
    return next((leaf.shape[0] for leaf in tensors(call["context"]) if leaf.dim() > 0), 1)


def _token_weight(value: Any, shape: tuple[int, int], weight: Tensor) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
        fail_type(OP, "token_weight", "be a floating-point tensor [T, B]", type_name(value))
    if value.shape != shape:
        fail_value(OP, "token_weight", f"have shape {list(shape)}", list(value.shape))
    same_device(OP, "token_weight", [value], weight.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return value.detach().to(dtype, copy=True)  # the pass back may read it again


def _resets(
    value: Any, shape: tuple[int, int], cell: Cell, state: State, device: torch.device
) -> Resets | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        fail_type(OP, "resets", "be a bool tensor [T, B]", type_name(value))
    if value.shape != shape:
        fail_value(OP, "resets", f"have shape {list(shape)}", list(value.shape))
    if value.device.type != "cpu":
        same_device(OP, "resets", [value], device)
    if state is None:
        fail_value(OP, "state", "be given where rows are reset to it", None)
    return resets_of(value, device)


def _dropout(call: Mapping[str, Any]) -> tuple[float, float]:
    """Rates of the embedding's and the output's dropout: 0 in the eval mode of the cell."""
    rates = []
    for name in ("embedding_dropout", "output_dropout"):
        if call[name] == 0:
            rates.append(0.0)
            continue
        rate = number(OP, name, call[name], 0)
        if rate > 1:
            fail_value(OP, name, "be at most 1", call[name])
        rates.append(rate)
    cell = call["cell"]
    module = cell if isinstance(cell, nn.Module) else getattr(cell, "__self__", None)
    trains = not isinstance(module, nn.Module) or module.training
    return (rates[0], rates[1]) if trains else (0.0, 0.0)


def _check_range(targets: Tensor, vocabulary: int, counted: Tensor) -> None:
    """Raise on a CPU for a token outside [0, V); on a GPU the lookups themselves assert."""
    if targets.device.type != "cpu":
        return
    wrong = counted & ((targets < 0) | (targets >= vocabulary))
    if wrong.any():
        token = int(targets[wrong][0])
        advice = f"Pass ignore_index={token} if it marks ignored targets" if token < 0 else None
        fail_value(OP, "targets", f"be in [0, {vocabulary})", token, advice)


def _check_layout(call: Mapping[str, Any], cell: Cell, targets: Tensor) -> list[str]:
    """Raise where the state, the lengths or the start tokens say that B is the targets' other
    dimension. Returns warnings about a module with `batch_first`, which orders nothing here."""
    steps, batch = targets.shape
    module = cell.module
    unclear = not call["batch_first"] and isinstance(module, nn.RNNBase) and module.batch_first
    sizes = set()
    for given in (call["lengths"], call["start"]):
        if isinstance(given, (tuple, list)) or (isinstance(given, Tensor) and given.dim() > 0):
            sizes.add(len(given))
    if call["state"] is not None:
        batch_dim = cell.batch_dim
        known = cell.state_shapes is not None or call["batch_dim"] is not None
        for part in tensors(call["state"]):  # a callable's may begin with layers
            if part.dim() > max(1, batch_dim) and (known or part.dim() == 2):
                sizes.add(part.shape[batch_dim])
    if sizes == {steps} and steps != batch:
        batch_first = bool(call["batch_first"])
        order, shape = ("[B, T]", [batch, steps]) if batch_first else ("[T, B]", [steps, batch])
        advice = f"Did you mean targets.t() or batch_first={not batch_first}?"
        if unclear:
            advice = "Pass batch_first=True if they are [B, T]: that of the cell does not say so"
        fail_value(OP, "targets", f"be {order} with B = {steps}", shape, advice)
    if unclear and (steps == batch or not sizes):
        return [
            f"targets {[steps, batch]} are read as [T, B], though the cell has batch_first=True. "
            "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"
        ]
    return []


def _criterion(call: Mapping[str, Any], vocabulary: int, device: torch.device) -> Criterion:
    num_items = _num_items(call["num_items"], call["reduction"])
    reduction = one_of(OP, "reduction", call["reduction"], TOKEN_REDUCTIONS)
    smoothing = number(OP, "label_smoothing", call["label_smoothing"], 0)
    if smoothing > 1:
        fail_value(OP, "label_smoothing", "be at most 1", call["label_smoothing"])
    z_loss, weight = number(OP, "z_loss", call["z_loss"], 0), call["class_weight"]
    if weight is not None:
        contract = "be a floating-point tensor [V] or a list of numbers"
        if isinstance(weight, (tuple, list)):
            values = [number(OP, f"class_weight[{i}]", value) for i, value in enumerate(weight)]
            weight = torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
        check_vector(OP, "class_weight", weight, FLOAT_DTYPES, contract, vocabulary, device)
        weight = weight.detach().clone()  # the pass back may read it again
    return Criterion(smoothing, z_loss, weight, reduction, num_items)


def _num_items(value: Any, reduction: Any) -> float | Tensor | None:
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


def context_of(op: str, value: Any, cell: Cell, device: torch.device) -> tuple[Tensor, ...]:
    """The argument `context`, checked."""
    if isinstance(value, Tensor) or not isinstance(value, (tuple, list)):
        fail_type(op, "context", "be a tuple of tensors", type_name(value))
    for index, tensor in enumerate(value):
        if not isinstance(tensor, Tensor):
            fail_type(op, f"context[{index}]", "be a tensor", type_name(tensor))
    if value and cell.state_shapes is not None:
        advice = "Wrap the cell: lambda x, state, memory: ..."
        got = f"{len(value)} tensors"
        fail_value(op, "context", "be empty for one of torch's cells", got, advice)
    if value:
        same_device(op, "context", list(value), device)
    return tuple(value)
