"""Observations: floating-point inputs [T, B, E] in place of tokens.

They become an embedding with a row for each step and batch row, which is looked up once. So all
code that reads an embedding can read observations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accumext.decoder._embedding import EmbeddingTable
from accumext.decoder._model import OP, Arguments
from accumext.recurrence import feedback_word, within_length_of
from accumext.tensors.checks import FLOAT_DTYPES, dtype_name, fail_type, fail_value, type_name


def rows_of(args: Arguments) -> tuple[EmbeddingTable, Tensor]:
    """Return the observations as a table [T B, E], and the row, int64 [T, B], that each step reads.

    A row of the batch that has ended reads the first observation, which may itself be padding. So
    all padding is set to 0 in a copy of the table: a NaN there would reach a product.
    """
    inputs, targets = args["inputs"], args["targets"]
    feedback, start = args["feedback"], args["start"]
    contract = "be an nn.Embedding or a floating-point tensor [V, E]"
    if inputs is None:
        advice = "None is for observations: pass them as floating-point inputs [T, B, E]"
        fail_type(OP, "embedding", contract, "NoneType", advice)
    if not isinstance(inputs, Tensor) or inputs.dtype not in FLOAT_DTYPES:
        contract = "be a floating-point tensor [T, B, E] if embedding is None"
        fail_type(OP, "inputs", contract, type_name(inputs))
    observed = "if inputs are observations"
    contract = f"be 'teacher' {observed}, which are all that is fed"
    feedback_word(OP, feedback, ("teacher",), contract, None)
    if isinstance(start, Tensor) or start != 0:
        got = type_name(start) if isinstance(start, Tensor) else start
        fail_value(OP, "start", f"be left at 0 {observed}", got, "The first one is inputs[0]")
    if targets is None:
        fail_type(OP, "targets", f"be an integer tensor [T, B] {observed}", "NoneType")
    _check_shape(inputs, targets)
    observations = _as_read_by(args["cell"], inputs)
    steps, batch = observations.shape[:2]
    if args["lengths"] is not None:
        whose, device = "the device of inputs", inputs.device
        within = within_length_of(OP, args["lengths"], (steps, batch), device, whose)
        observations = torch.where(within[:, :, None], observations, 0)
    rows = torch.arange(steps * batch, device=inputs.device).view(steps, batch)
    return EmbeddingTable(observations.flatten(0, 1), argument="inputs"), rows


def _check_shape(inputs: Tensor, targets: Any) -> None:
    """Raise unless the inputs have a vector for every target."""
    known = isinstance(targets, Tensor) and targets.dim() == 2  # if not, targets raise later
    shape = list(targets.shape) if known else list(inputs.shape[:2])
    if inputs.dim() == 3 and list(inputs.shape[:2]) == shape:
        return
    advice = None
    if inputs.dim() > 3:
        advice = "Pass inputs.flatten(2), which a cell of yours may unflatten"
    elif inputs.dim() == 3 and list(inputs.shape[1::-1]) == shape:
        advice = "Did you mean inputs.transpose(0, 1)?"
    size = ", ".join(map(str, shape)) if known else "T, B"
    fail_value(OP, "inputs", f"have shape [{size}, E]", list(inputs.shape), advice)


def _as_read_by(cell: Any, inputs: Tensor) -> Tensor:
    """Return the inputs in the dtype of one of torch's cells. Raise if that needs a conversion but
    autocast is off. Inputs on the meta device are converted: `decode_memory` has them."""
    if not isinstance(cell, (nn.RNNBase, nn.RNNCellBase)):
        return inputs
    dtype = next(cell.parameters()).dtype
    converts = inputs.dtype == dtype or inputs.is_meta
    if not converts and not torch.is_autocast_enabled(inputs.device.type):
        name = dtype_name(dtype)
        advice = f"Pass inputs.to(torch.{name}), or call it under torch.autocast"
        contract = f"have the cell's dtype, {name}"
        fail_type(OP, "inputs", contract, dtype_name(inputs.dtype), advice)
    return inputs.to(dtype)
