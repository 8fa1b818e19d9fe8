"""The tokens of a call of `decode_loss`: their shape, which of them count, and which are fed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accumext.decoder._model import OP, Arguments, Model
from accumext.recurrence import (
    Cell,
    Feedback,
    Resets,
    State,
    check_batch_dim,
    feedback_from,
    feedback_word,
    first_outside,
    resets_of,
    tensors,
    within_length_of,
)
from accumext.tensors.checks import (
    fail_value,
    integer,
    same_device,
    token_tensor,
    type_name,
    users_level,
)
from accumext.tensors.memory_overlap import share_memory

IGNORED = -100  # the default of `ignore_index`


@dataclass(frozen=True)
class Tokens:
    """T steps of B rows, and the state that the rows begin in."""

    shape: tuple[int, int]  # (T, B)
    steps: int  # T
    batch: int  # B
    targets: Tensor | None  # int64 [T, B], in [0, V), 0 if not counted; None: the predictions
    counted: Tensor  # bool [T, B]: within the row's length and not ignored
    within_length: Tensor | None  # bool [T, B]; None without `lengths`
    eos: int | None
    feedback: Feedback
    free_running: bool  # the tokens of a step must be known before the next step
    state: State
    resets: Resets | None

    @property
    def rows_may_end(self) -> bool:
        """Tell whether a row may end before the last step."""
        return self.eos is not None or self.within_length is not None


def tokens_from(model: Model, args: Arguments) -> Tokens:
    """Check the steps, rows, targets, feedback and initial state of a call, and return them."""
    cell, table, device = model.cell, model.table, model.device
    words, rows = len(model.head_weight), len(table.weight)
    state, lengths, eos, resets = args["state"], args["lengths"], args["eos"], args["resets"]
    targets = None
    if args["targets"] is None:
        size = _free_steps(args)
        batch = batch_size(cell, state, args["start"], lengths, model.context)
        counted = torch.ones(size, batch, dtype=torch.bool, device=device)
    else:
        targets, counted = _targets(args["targets"], args["ignore_index"], device)
        if args["steps"] is not None:
            fail_value(OP, "steps", "be None if there are targets", args["steps"])
        size, batch = targets.shape
        _check_layout(cell, targets, args)
        if size > 2 and batch > 1 and device.type == "cpu":
            if getattr(args["embedding"], "padding_idx", None) is not None:
                _warn_of_padding(targets, args)
            if args["start"].__class__ is int and bool((targets[0] == args["start"]).all()):
                _warn_of_start(targets, args)
    shape, within_length = (size, batch), None
    if lengths is not None:
        within_length = within_length_of(OP, lengths, shape, device, "the head's device")
        counted = counted & within_length
    # Past a row's length, where targets may be anything, padding is fed.
    padding = table.padding_token
    if targets is None:
        fed = torch.full(shape, padding, device=device)
    else:
        targets = torch.where(counted, targets, 0).contiguous()
        if (wrong := first_outside(targets, words)) is not None:
            advice = f"Pass ignore_index={wrong} if it marks ignored targets" if wrong < 0 else None
            fail_value(OP, "targets", f"be in [0, {words})", wrong, advice)
        fed = targets if padding == 0 else torch.where(counted, targets, padding)
    if state is None:
        state = cell.initial_state(batch, table.weight)
    else:
        cell.check_state(OP, state, batch)
        same_device(OP, "state", tensors(state), device)
    if resets is not None:
        resets = resets_of(OP, resets, shape, state, device, "the head's device")
    by_rows = resets is not None or lengths is not None or eos is not None
    by_rows = by_rows or args["truncation"] == "random"
    if cell.state_shapes is None and by_rows:
        check_batch_dim(OP, state, batch, args["batch_dim"])
    if eos is not None and not 0 <= (eos := integer(OP, "eos", eos)) < words:
        fail_value(OP, "eos", f"be in [0, {words})", eos)
    if eos is not None and targets is not None and eos == args["ignore_index"]:
        _warn_of_ignored_end(eos)
    source = feedback_from(
        OP, args["feedback"], fed, start=args["start"], inputs=args["inputs"],
        teacher_forcing=args["teacher_forcing"], temperature=args["temperature"],
        generator=args["generator"], rows=rows, draw=args["draw"],
    )  # fmt: skip
    if table.max_norm is not None and source.word != "teacher":
        _check_renormalised(model)
    waits = source.word != "teacher" or eos is not None
    return Tokens(
        shape, size, batch, targets, counted, within_length, eos, source, waits, state, resets
    )


def _warn_of_ignored_end(eos: int) -> None:
    """Warn that the loss teaches no row to end. That may be meant, such as with rows that a trained
    model ends, so it is no error."""
    text = (
        f"eos={eos} is ignore_index, too: no target {eos} has a loss, so to end is not learnt. Pad "
        "targets with -100 behind their eos, or pass lengths, and leave ignore_index out"
    )
    warnings.warn(f"{OP}: {text}", stacklevel=users_level())


def _warn_of_padding(targets: Tensor, args: Arguments) -> None:
    """Warn if padding behind the rows counts in the loss: it is `embedding.padding_idx`, and found
    only at the ends of rows. One at the end of a row may be an end token that is meant to count;
    and weights, or losses of single tokens, may leave padding out."""
    padding = args["embedding"].padding_idx
    if args["ignore_index"] != IGNORED or args["reduction"] == "none":
        return
    others = ("lengths", "eos", "token_weight", "class_weight", "num_items")
    if any(args[name] is not None for name in others):
        return
    pads = targets == padding
    if bool(pads[-2:].all(0).any()) and bool((pads[1:] >= pads[:-1]).all()):
        text = f"targets end with padding_idx={padding}, which counts in the loss. Pass "
        text += f"ignore_index={padding}, or lengths"
        warnings.warn(f"{OP}: {text}", stacklevel=users_level())


def _warn_of_start(targets: Tensor, args: Arguments) -> None:
    """Warn of targets that all begin with the start token, if they have it nowhere else."""
    start = args["start"]
    if args["inputs"] is None and not bool((targets[1:] == start).any()):
        text = f"targets begin with start={start}, which is fed before them: its prediction would "
        text += "be learnt. Pass targets without their first step"
        warnings.warn(f"{OP}: {text}", stacklevel=users_level())


def _check_renormalised(model: Model) -> None:
    """Raise if lookups of predictions would write into the head's weight."""
    table = model.table
    if share_memory(model.head_weight, table.weight):
        contract = "have no max_norm if the head shares its weight and predictions are fed"
        advice = "Renormalise the weight before the call: weight.renorm_(2, 0, max_norm)"
        fail_value(OP, "embedding", contract, table.max_norm, advice)


def _targets(targets: Any, ignore_index: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the targets, int64 [T, B], checked, and which are not ignored, bool [T, B]."""
    if ignore_index.__class__ is not int:
        ignore_index = integer(OP, "ignore_index", ignore_index)
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        targets = token_tensor(OP, "targets", targets, "be an integer tensor [T, B]")
    if targets.dim() != 2:
        fail_value(OP, "targets", "have shape [T, B]", list(targets.shape))
    if targets.device != device:
        same_device(OP, "targets", [targets], device)
    return targets, targets != ignore_index


def _free_steps(args: Arguments) -> int:
    """Return the number of steps of a call without targets, which predicts its own, checked."""
    inputs, steps, words = args["inputs"], args["steps"], ("sample", "greedy")
    contract = "be 'sample' or 'greedy' if targets are None"
    feedback_word(OP, args["feedback"], words, contract, None)
    if inputs is not None:
        fail_value(OP, "inputs", "be None if targets are None", type_name(inputs))
    if steps is None:
        fail_value(OP, "steps", "be given if targets are None", None)
    return integer(OP, "steps", steps, 0)


def batch_size(
    cell: Cell, state: State, start: Any, lengths: Any, context: tuple[Tensor, ...]
) -> int:
    """Return B, from the size of an argument that has rows; 1 if there is none."""
    for given in (start, lengths):
        if isinstance(given, (tuple, list)) or (isinstance(given, Tensor) and given.dim() == 1):
            return len(given)
    for leaf in tensors(state):
        if leaf.dim() > cell.batch_dim:
            return leaf.shape[cell.batch_dim]
    return next((leaf.shape[0] for leaf in context if leaf.dim() > 0), 1)


def _check_layout(cell: Cell, targets: Tensor, args: Arguments) -> None:
    """Raise if B, by the state, lengths or start tokens, is the other dimension of the targets.
    Warn if the module has `batch_first`, which has no effect here, and the layout is unclear."""
    steps, batch = targets.shape
    module, batch_first = cell.module, args["batch_first"]
    unclear = not batch_first and isinstance(module, nn.RNNBase) and module.batch_first
    sizes = set()
    for value in (args["lengths"], args["start"]):
        if isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.dim() > 0):
            sizes.add(len(value))
    if args["state"] is not None:
        dim = cell.batch_dim
        known = cell.state_shapes is not None or args["batch_dim"] is not None
        for part in tensors(args["state"]):  # a callable's may begin with layers
            if part.dim() > max(1, dim) and (known or part.dim() == 2):
                sizes.add(part.shape[dim])
    if sizes == {steps} and steps != batch:
        order, shape = ("[B, T]", [batch, steps]) if batch_first else ("[T, B]", [steps, batch])
        advice = f"Did you mean targets.t() or batch_first={not batch_first}?"
        if unclear:
            advice = "Pass batch_first=True if they are [B, T]: that of the cell does not say so"
        fail_value(OP, "targets", f"be {order} with B = {steps}", shape, advice)
    if unclear and (steps == batch or not sizes):
        text = (
            f"targets {[steps, batch]} are read as [T, B], though the cell has batch_first=True. "
            "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"
        )
        warnings.warn(f"{OP}: {text}", stacklevel=users_level())
