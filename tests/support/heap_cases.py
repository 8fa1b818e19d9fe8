"""Calls of the decoder in every precision, in a process whose heap the caller has filled: prints
what came out, as JSON. `--digests`: without a comparison with float64."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import accumext
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance

STEPS, BATCH, WORDS, SIZE = 21, 9, 500, 33  # none fills a vector, or blocks of rows
MODES = ("float64", "float32", "bfloat16", "float16", "autocast")
KINDS = ("gru_cell", "lstm", "callable")
LENGTHS = torch.tensor([21, 3, 17, 1, 11, 0, 14, 9, 20])
IGNORED = {"hole": True, "label_smoothing": 0.1, "z_loss": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": LENGTHS},
    "lengths, greedy": {"lengths": LENGTHS, "feedback": "greedy"},
    "eos": {"eos": True, "feedback": "greedy"},
    "eos, sample": {"eos": True, "feedback": "sample", "lengths": LENGTHS},
    "k1, k2": {"k1": 3, "k2": 7, "lengths": LENGTHS, "feedback": "greedy"},
    "k1 = k2": {"k2": 4, "eos": True, "feedback": "greedy"},
    "none": {"reduction": "none", "lengths": LENGTHS},
    "sum": {"reduction": "sum", "eos": True, "feedback": "greedy", **IGNORED},
    "mean": IGNORED,
    "few columns": {"memory_budget": 16 * WORDS, "lengths": LENGTHS, "feedback": "greedy"},
    "few rows": {"memory_budget": 160 * WORDS, "lengths": LENGTHS},
    "main gradients": {"main": True, "lengths": LENGTHS, "feedback": "greedy"},
}


def run(kind: str, mode: str, case: dict[str, Any], compare: bool) -> tuple[str, float]:
    """A digest of all that came out, and the gradients' distance from plain autograd in float64."""
    torch.manual_seed(3)
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    shape = {"vocabulary": WORDS, "size": SIZE, "batch": BATCH}
    torch_kind = "gru_cell" if kind == "callable" else kind
    decoder = make_decoder(torch_kind, dtype=dtype, **shape)
    targets = torch.randint(WORDS, (STEPS, BATCH))
    call = {"feedback": "teacher", **case}
    if call.pop("hole", False):
        targets[torch.rand(STEPS, BATCH) < 0.3] = -100
    main = call.pop("main", False)
    cell = decoder.step if kind == "callable" else decoder.cell
    operands = (decoder.embedding, cell, decoder.head, targets, decoder.state)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        if call.pop("eos", False):
            ends = accumext.decode_loss(*operands, feedback="greedy").tokens
            call["eos"] = int(ends[STEPS // 2].mode().values)
        if main:
            gradients, out = main_gradients(decoder, operands, call)
        else:
            out = accumext.decode_loss(*operands, **call)
            gradients = decoder.gradients(out.loss.sum())
    state = out.state if isinstance(out.state, tuple) else (out.state,)
    results = [*gradients, *state, out.loss, out.tokens, out.inputs, out.token_losses, out.lengths]
    distance = 0.0
    if compare:
        truth = true_gradients(torch_kind, decoder, targets, out, call)
        distance = relative_distance(gradients, truth[: len(gradients)])
    return digest(results), distance


def main_gradients(
    decoder: Decoder, operands: tuple[Any, ...], call: dict[str, Any]
) -> tuple[list[Tensor], accumext.decoder.DecodeOutput]:
    """Those of the parameters, as the wrapper took them in during the backward pass."""
    parameters = [leaf for leaf in decoder.leaves if isinstance(leaf, torch.nn.Parameter)]
    opt = accumext.AccumulatingOptimizer(
        torch.optim.SGD(parameters), window=2, accumulate_in_backward=True
    )
    out = accumext.decode_loss(*operands, **call)
    opt.backward(out.loss)
    found = [opt.main_grad(parameter) for parameter in parameters]
    return [gradient for gradient in found if gradient is not None], out


def true_gradients(
    kind: str, decoder: Decoder, targets: Tensor, out: Any, call: dict[str, Any]
) -> list[Tensor]:
    truth = make_decoder(kind, vocabulary=WORDS, size=SIZE, batch=BATCH)
    with torch.no_grad():
        for exact, leaf in zip(truth.leaves, decoder.leaves, strict=True):
            exact.copy_(leaf)
    live = torch.arange(STEPS)[:, None] < out.lengths
    criterion = {name: call[name] for name in ("label_smoothing", "z_loss") if name in call}
    windows = (call.get("k1", call["k2"]), call["k2"]) if "k2" in call else None
    losses, divisor, _ = decode(truth, targets, out.inputs, live, windows=windows, **criterion)
    mean = call.get("reduction", "mean") == "mean"
    return truth.gradients(losses.sum() / divisor if mean else losses.sum())


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {
                f"{mode} {kind}: {name}": run(kind, mode, case, sys.argv[1:] != ["--digests"])
                for mode in MODES
                for kind in KINDS
                for name, case in CASES.items()
            }
        )
    )
