"""The path for torch's recurrent modules if every input is known and torch is faster: its function
of the whole module, on a GPU that of cuDNN, runs all steps, and autograd differentiates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder._callable_heads import fused_head
from accumext.decoder._precision import no_autocast
from accumext.decoder._rnn_weights import KINDS, RnnWeights
from accumext.decoder._saved_for_backward import HeadLoss, SavedForBackward
from accumext.decoder._transcript import Decoded, Transcript
from accumext.recurrence import State, cuts
from accumext.tensors import scalars
from accumext.tensors.torch_private import flatten_for_cudnn

# In the order of KINDS.
FUNCTIONS: tuple[Callable[..., Any], ...] = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)


def decode_at_once(transcript: Transcript, rnn: RnnWeights, return_outputs: bool) -> Decoded:
    """Run a call of `decode_loss` all of whose steps torch's function runs."""
    model, tokens = transcript.model, transcript.tokens
    with no_autocast(model.device):
        anchor = model.table.anchor()
        x = model.table.lookups(anchor, transcript.inputs.view(1, -1), known=True)[0]
        outputs, state = run_module(transcript, rnn, x.view(*tokens.shape, -1))
        del x
        hidden = outputs
        if model.output_dropout > 0:
            hidden = F.dropout(outputs, model.output_dropout)
        with torch.no_grad():
            head = fused_head(transcript, hidden.requires_grad)
            for begin, end in cuts(0, tokens.steps, max(1, head.rows // tokens.batch)):
                transcript.predict(head, begin, end, hidden[begin:end].flatten(0, 1))
            gradients = head.finish()
            value, inverse_divisor, lengths = transcript.finish()
        returned = None
        if return_outputs:  # a copy, into which the caller may write
            returned = outputs.to(model.dtypes.accumulation, copy=True)
        if not torch.is_grad_enabled():
            return Decoded(value, state, lengths, returned)
        saved = SavedForBackward(transcript, inverse_divisor, gradients)
        loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
            saved, value, model.head_weight, model.head_bias, anchor, hidden
        )
    return Decoded(loss, state, lengths, returned)


def run_module(transcript: Transcript, rnn: RnnWeights, x: Tensor) -> tuple[Tensor, State]:
    """Return the outputs [T, B, H] for inputs [T, B, E], and the state after the last step."""
    model, given = transcript.model, transcript.tokens.state
    dtype = model.dtypes.product
    x = x.to(dtype)
    if model.embedding_dropout > 0:
        x = F.dropout(x, model.embedding_dropout)
    parts = given if rnn.state_parts == 2 else (given,)
    state = [(p if rnn.stacked else p[None]).to(dtype).contiguous() for p in parts]
    weights, dropout = chunk_of(rnn, dtype), rnn.dropout if rnn.layers > 1 else 0.0
    # cuDNN can go back only through a call in training mode. Without dropout that is all it means.
    trains = torch.is_grad_enabled() or dropout > 0
    outputs, *last = FUNCTIONS[rnn.kind](
        x, state if rnn.state_parts == 2 else state[0], weights,
        len(weights) == 4 * rnn.layers, rnn.layers, dropout, trains, False, False,
    )  # fmt: skip
    last = [(p if rnn.stacked else p[0]).to(of.dtype) for p, of in zip(last, parts, strict=True)]
    return outputs, tuple(last) if rnn.state_parts == 2 else last[0]


def chunk_of(rnn: RnnWeights, dtype: torch.dtype) -> list[Tensor]:
    """Return the weights in the dtype of products, for cuDNN as one chunk of memory.

    Those of `nn.GRU` and others are one already. Of others, such as those of a cell, torch would
    make a chunk in every call, with a warning.
    """
    first, chunks = rnn.given[0], {w.untyped_storage().data_ptr() for w in rnn.given}
    if first.dtype == dtype and (len(chunks) == 1 or scalars.on_host(first)):
        return rnn.given
    copies = [weight.to(dtype, copy=True) for weight in rnn.given]
    if not scalars.on_host(first):
        flatten_for_cudnn(copies, KINDS[rnn.kind], rnn.layers, rnn.units)
    return copies
