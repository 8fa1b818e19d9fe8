"""The work that calls of the decoder's operators put on the device, and the calls that have other
bits in another order of the threads: a program that prints them as JSON."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from support.decoder_calls import (
    KINDS,
    Call,
    backward_call,
    head_call,
    objective_call,
    steps_call,
)
from torch.profiler import ProfilerActivity, profile

from host_cuda import ORDERS
from host_cuda.launchers import CROWDED, H100, NOT_COOPERATIVE, SLICE, SMALLER, loaded

# Rounded operands with sums of some dozens of float32 in two orders; exponentials in bfloat16.
CLOSE = 2.0**-7
# Of torch's operators those that put nothing on a device.
FREE = ("aten::empty", "aten::narrow", "aten::select", "aten::transpose")


def enqueued(call: Call) -> dict[str, int]:
    """Kernels, products and other operators of torch that run on the device."""
    before = loaded.launches()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        call()
    found = Counter(
        event.name
        for event in record.events()
        if event.cpu_parent is not None and event.cpu_parent.name.startswith("accumext::")
    )
    counts = {name: count for name, count in found.items() if name not in FREE}
    return {"kernels": loaded.launches() - before, **counts}


def calls(steps: int) -> Iterator[tuple[str, Call]]:
    """Step by step: every kind of cell, and each dtype with one layer and with several."""
    for kind, dtype, layers in (
        ("gru", "wide", 3), ("gru", "narrow", 1), ("lstm", "wide", 1), ("lstm", "narrow", 3),
        ("rnn_tanh", "wide", 1), ("rnn_relu", "narrow", 1),
    ):  # fmt: skip
        options: dict[str, Any] = {"steps": steps, "narrow": dtype == "narrow"}
        predicted = steps_call(kind, ends=True, layers=layers, **options)
        yield f"{kind} {dtype} {layers} predicted {steps}", predicted
        known = steps_call(kind, head=False, layers=layers, **options)
        yield f"{kind} {dtype} {layers} known {steps}", known
        yield f"{kind} {dtype} 1 backward {steps}", backward_call(kind, **options)


def windows(steps: int) -> Iterator[tuple[str, Call]]:
    """Those that one kernel takes whole: forward with a head, and backward."""
    options: dict[str, Any] = {"steps": steps, "narrow": True}
    for kind, layers in zip(KINDS, (1, 3, 1, 1), strict=True):
        predicted = steps_call(kind, ends=True, layers=layers, **options)
        yield f"{kind} narrow {layers} predicted {steps}", predicted
        yield f"{kind} narrow 1 backward {steps}", backward_call(kind, **options)
    for batch in (9, 17, 33):
        below = steps_call("gru", bias=-50.0, batch=batch, sampled=False, **options)
        yield f"gru, B={batch}, all logits below 0, {steps}", below
        yield f"lstm, B={batch}, backward, {steps}", backward_call("lstm", batch=batch, **options)


def apart(call: Call, device: int) -> bool:
    """Tell whether one kernel finds other tokens, or numbers far from those of a loop over
    steps."""
    results = []
    for used in (NOT_COOPERATIVE, device):
        loaded.use_device(used)
        copy = call.to("cpu")
        copy()
        results.append(copy.written)
    loaded.use_device(NOT_COOPERATIVE)
    return not all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE) for a, b in zip(*results))


def others() -> Iterator[tuple[str, Call]]:
    """Rows of logits in several pieces, no exponentials, the argmax, dropout around the layers,
    tokens that are their own targets."""
    yield "a loss alone", steps_call("gru", exps=False, ends=True)
    yield "pieces", steps_call("lstm", logit_rows=2, ends=True)
    yield "head", head_call(rows=20, words=900, logit_rows=9)
    yield "own targets", head_call(rows=20, words=900, logit_rows=9, own=True)
    yield "objective", objective_call(rows=20, words=900, logit_rows=9)
    yield "objective, all words", objective_call(rows=20, words=900, narrow=True, soft="all words")
    yield "own, predicted", steps_call("gru", own=True, around=True, ends=True)
    yield "around, known", steps_call("lstm", layers=2, around=True, head=False)
    yield "argmax", head_call(rows=20, words=900, logit_rows=20, sampled=False, narrow=True)


def differs(call: Call) -> bool:
    """Tell whether another order of the threads leaves other bits."""
    results = []
    for order in ORDERS:
        loaded.set_order(order)
        copy = call.to("cpu")
        copy()
        results.append(copy.written)
    return not all(all(map(torch.equal, results[0], other)) for other in results[1:])


def main() -> None:
    torch.manual_seed(0)
    counts = {name: enqueued(call) for steps in (2, 5) for name, call in calls(steps)}
    loaded.use_device(SLICE)
    whole = {name: enqueued(call) for steps in (2, 5) for name, call in windows(steps)}
    far = [name for name, call in windows(steps=4) if apart(call, SLICE)]
    some = {name: call for name, call in windows(steps=2) if name.startswith("gru narrow 1")}
    for device, (name, call) in itertools.product((H100, SMALLER), some.items()):
        loaded.use_device(device)
        whole[f"{name} on {device}"] = enqueued(call)
        if apart(call, device):
            far.append(f"{name} on {device}")
    loaded.use_device(CROWDED)
    crowded = {name: enqueued(call) for name, call in some.items()}
    loaded.use_device(NOT_COOPERATIVE)
    differing = [name for name, call in [*calls(steps=3), *others()] if differs(call)]
    found = {"counts": counts, "whole": whole, "crowded": crowded}
    print(json.dumps({**found, "apart": far, "differing": differing}))


if __name__ == "__main__":
    main()
