"""What calls of the decoder's operators put on the device, and their bits in every order of the
threads: a program that prints it as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from host_cuda import ORDERS
from host_cuda.launchers import loaded

ops = torch.ops.accumext
KINDS = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}  # gates
BATCH, UNITS, WIDTH, WORDS = 5, 6, 4, 11
# Of torch's operators those that put nothing on a device.
FREE = ("aten::empty", "aten::narrow", "aten::select", "aten::transpose")


def enqueued(call: Callable[[], object]) -> dict[str, int]:
    """Kernels, products and other operators of torch that run on the device, of one call."""
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


def steps_call(
    kind: str, layers: int, steps: int, *, head: bool, narrow: bool, exps: bool = True
) -> tuple[Callable[[], object], list[Tensor]]:
    """decode_steps that predicts, ends rows and drops units, and what it writes."""
    torch.manual_seed(0)
    weight_dtype = torch.bfloat16 if narrow else torch.float32
    rows, parts = KINDS[kind] * UNITS, 2 if kind == "lstm" else 1
    cell = []
    for layer in range(layers):
        for depth in (UNITS if layer else WIDTH, UNITS):
            cell.append(torch.randn(rows, depth).to(weight_dtype))
        cell += [torch.randn(rows), torch.randn(rows)]
    states = [torch.randn(steps + 1, BATCH, UNITS) for _ in range(layers * parts)]
    inputs, teacher, targets = torch.randint(WORDS, (3, steps, BATCH)).unbind()
    tokens = torch.zeros(steps, BATCH, dtype=torch.int64)
    mask, live = torch.rand(steps, BATCH) < 0.3, torch.ones(steps, BATCH, dtype=torch.bool)
    dropout = torch.rand(steps, layers - 1, BATCH, UNITS) < 0.5 if layers > 1 else None
    workspace = torch.zeros(WORDS, steps * BATCH, dtype=weight_dtype)
    stats, named = torch.zeros(3, steps * BATCH), torch.zeros(steps * BATCH, dtype=torch.int64)
    uniforms = torch.rand(steps, BATCH, dtype=torch.float64)
    arguments: list[Any] = [
        torch.randn(WORDS, WIDTH), cell, states, list(KINDS).index(kind), dropout, 2.0, inputs,
        teacher, mask, live, 3, 0, uniforms, 0.7, torch.randn(WORDS, UNITS).to(weight_dtype),
        torch.randn(WORDS), targets, tokens,
    ]  # fmt: skip
    arguments += [workspace.t() if exps else None, stats, named] if head else [None] * 3
    written = [*states, inputs, live, tokens, workspace, stats, named]
    return lambda: ops.decode_steps(*arguments, 32, 0, steps), written


def backward_call(kind: str, steps: int, *, narrow: bool) -> tuple[Callable[[], object], list[Any]]:
    torch.manual_seed(0)
    gates, lstm = KINDS[kind], kind == "lstm"
    h, c = torch.randn(2, steps + 1, BATCH, UNITS)
    dh, dc = torch.randn(2, BATCH, UNITS)
    d_x = torch.zeros(steps, BATCH, gates * UNITS)
    d_h = torch.zeros_like(d_x) if kind == "gru" else None
    weight = torch.randn(UNITS, gates * UNITS)
    arguments = [
        list(KINDS).index(kind), torch.randn(steps, BATCH, UNITS),
        torch.randn(steps, BATCH, 4 * UNITS) if gates > 1 else None, h, c if lstm else None,
        torch.rand(steps, BATCH) < 0.8, torch.rand(steps, BATCH), torch.tensor(0.5),
        weight.bfloat16() if narrow else weight, dh, dc if lstm else None, d_x, d_h,
    ]  # fmt: skip
    return lambda: ops.rnn_backward(*arguments), [dh, dc, d_x]


def calls(steps: int) -> dict[str, tuple[Callable[[], object], list[Any]]]:
    """By name."""
    found = {}
    for kind in KINDS:
        for narrow in (False, True):
            dtype = "narrow" if narrow else "wide"
            for layers in (1, 3):
                for head in (False, True):
                    name = f"{kind} {dtype} {layers} {'predicted' if head else 'known'}"
                    found[name] = steps_call(kind, layers, steps, head=head, narrow=narrow)
            found[f"{kind} {dtype} 1 backward"] = backward_call(kind, steps, narrow=narrow)
    found["gru wide 1 loss"] = steps_call("gru", 1, steps, head=True, narrow=False, exps=False)
    return found


def main() -> None:
    counts = {
        name: [enqueued(calls(steps)[name][0]) for steps in (2, 5)] for name in calls(steps=2)
    }
    differing = []
    for name in calls(steps=3):
        results = []
        for order in ORDERS:
            loaded.set_order(order)
            call, written = calls(steps=3)[name]
            call()
            results.append(written)
        for other in results[1:]:
            if not all(map(torch.equal, results[0], other)):
                differing.append(name)
    print(json.dumps({"counts": counts, "differing": differing}))


if __name__ == "__main__":
    main()
