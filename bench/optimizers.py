"""Optimizers of other packages by hand and in AccumulatingOptimizer: the same bits?

    pip install -r bench/optimizers.txt
    python bench/optimizers.py [--json FILE] [--only TEXT]

Each trains a small model for six steps. By hand, gradients of n micro-batches are summed in `.grad`
and multiplied by 1/n; then come step and zero_grad. The wrapper does the same with windows of 1 and
3, and with a window of 3 under a GradScaler, with a clip, on masters of a bfloat16 model, and
loaded or copied inside a window; zero_grad is not called there. What is found:

    =        the same bits
    ulp      those of the loop by hand if one factor is rounded elsewhere: in a division by 3, as in
             fused kernels, or in one product with `clip_coef / 3`
    by hand  it raises, moves nothing, or goes on elsewhere from a checkpoint or a copy, as by hand
    refused  an error that says what to type

Anything else, and every warning of the wrapper's, is printed and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import copy
import io
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _facts import machine
from _foreign_optimizers import Kind, batches, evaluated, kinds, loss_of, made, optimizer_of
from _results import write
from torch import Tensor, nn

import accumext

OP = "AccumulatingOptimizer"
STEPS, MAX_NORM = 6, 0.05
INTERRUPTED = 10  # micro-batches: the first of the fourth window of three

Form = Callable[[list[nn.Parameter], int], None]  # makes the gradients of a window, by its number


class Job(NamedTuple):
    window: int = 3
    scaler: bool = False
    clip: bool = False
    masters: bool = False
    way: str = ""  # in which the run is interrupted


COLUMNS = {
    "window=1": Job(window=1),
    "window=3": Job(),
    "scaler": Job(scaler=True),
    "clip": Job(clip=True),
    "masters": Job(masters=True),
    "loaded": Job(way="loaded"),
    "copied": Job(way="copied"),
}


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def carried(kind: Kind, way: str, model: nn.Module, opt: Any, make: Callable[..., Any]) -> Any:
    """Return a copy of both, or others that were given their states."""
    if way == "copied":
        return copy.deepcopy((model, opt))
    states = through_a_file((model.state_dict(), opt.state_dict()))
    model = made(kind, masters=False)
    opt = make(dict(model.named_parameters()))
    for each, state in zip((model, opt), states, strict=True):
        each.load_state_dict(state)
    return model, opt


def by_hand(kind: Kind, job: Job, form: Form) -> list[Tensor]:
    """Train by hand and return the parameters; `form` makes a window's gradients of their sums."""
    model = made(kind, job.masters)
    stepped = dict(model.named_parameters())
    halves = [(name, p) for name, p in stepped.items() if job.masters]
    stepped |= {name: nn.Parameter(p.detach().float()) for name, p in halves}
    opt = optimizer_of(kind, stepped)
    for count, batch in enumerate(batches(STEPS * job.window), 1):
        evaluated(kind, model, batch)
        for name, p in halves:
            main, p.grad = p.grad.float(), None
            stepped[name].grad = main if stepped[name].grad is None else stepped[name].grad + main
        if count % job.window == 0:
            form(list(stepped.values()), count // job.window)
            opt.step(*[partial(evaluated, kind, model, batch)] * kind.closure)
            opt.zero_grad()
            for name, p in halves:
                p.data.copy_(stepped[name].data)
        if count == INTERRUPTED and job.way:
            grads = [p.grad for p in model.parameters()]
            model, opt = carried(kind, job.way, model, opt, partial(optimizer_of, kind))
            stepped = dict(model.named_parameters())
            for p, grad in zip(stepped.values(), grads, strict=True):
                p.grad = grad
    return [p.detach() for p in model.parameters()]


def wrapped(kind: Kind, job: Job) -> list[Tensor]:
    """Train in the wrapper and return the parameters."""

    def wrap(params: dict[str, nn.Parameter], **options: Any) -> accumext.AccumulatingOptimizer:
        scaler = torch.amp.GradScaler("cpu", growth_interval=2) if job.scaler else None
        options |= {"scaler": scaler, "max_norm": MAX_NORM if job.clip else None}
        optimizer = optimizer_of(kind, params)
        return accumext.AccumulatingOptimizer(optimizer, window=job.window, **options)

    model = made(kind, job.masters)
    params = dict(model.named_parameters())
    masters = accumext.masters(params.values()) if job.masters else None
    opt = wrap(dict(zip(params, masters or params.values(), strict=True)), masters=masters)
    try:
        for count, batch in enumerate(batches(STEPS * job.window), 1):
            if kind.closure or kind.graph:
                closure = partial(evaluated, kind, model, batch, opt.scaler)
                closure()
                opt.step(*[closure] * kind.closure)
                opt.zero_grad()
            else:
                opt.backward(loss_of(model, batch))
                opt.step()
            if count == INTERRUPTED and job.way:
                window = through_a_file(opt.accumulation_state_dict())
                model, opt = carried(kind, job.way, model, opt, wrap)
                if job.way == "loaded":
                    opt.load_accumulation_state_dict(window)
        return [p.detach() for p in model.parameters()]
    finally:
        opt.discard()


def times(factor: float, params: list[nn.Parameter], window: int = 0) -> None:
    for p in params:
        p.grad = p.grad * factor


def divided(factor: float, params: list[nn.Parameter], window: int = 0) -> None:
    """Divide as a fused kernel does, by a float32."""
    for p in params:
        p.grad = p.grad / torch.tensor(1 / factor, dtype=torch.float32)


def clipped(params: list[nn.Parameter], window: int) -> None:
    times(1 / 3, params)
    nn.utils.clip_grad_norm_(params, MAX_NORM)


def clipped_at_once(apply: Any, params: list[nn.Parameter], window: int) -> None:
    norm = float(accumext.total_norm([p.grad for p in params])) / 3
    apply(1 / 3 * min(1.0, MAX_NORM / (norm + 1e-6)), params)


def copied_fused(params: list[nn.Parameter], window: int) -> None:
    """Do without fusion after the copy: it no longer says that it takes a scale."""
    (divided if window <= INTERRUPTED // 3 else times)(1 / 3, params)


def forms(job: Job) -> list[Form]:
    """Return the loop by hand, and forms that differ from it in one rounding."""
    if job.clip:
        return [clipped, *(partial(clipped_at_once, apply) for apply in (times, divided))]
    ways = [partial(times, 1 / job.window), partial(divided, 1 / 3), copied_fused]
    return ways[: job.window]


def same(these: list[Tensor], those: list[Tensor]) -> bool:
    bits = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    return all(bits(a, b) for a, b in zip(these, those, strict=True))


def attempt(run: Callable[[], list[Tensor]], start: list[Tensor]) -> list[Tensor] | str:
    """Return the parameters after a run, or the words of its error."""
    try:
        with redirect_stdout(io.StringIO()):
            after = run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing moves" if same(after, start) else after


def verdict(kind: Kind, job: Job) -> tuple[str, str]:
    """Return a verdict, and words: of a refusal, or of what is wrong."""
    start = [p.detach() for p in made(kind, job.masters).parameters()]
    ours = attempt(partial(wrapped, kind, job), start)
    if isinstance(ours, str) and OP in ours:
        return "refused", ours
    ways = forms(job)
    theirs = attempt(partial(by_hand, kind, job, ways[0]), start)
    if isinstance(ours, str) or isinstance(theirs, str):
        alike = isinstance(ours, str) and isinstance(theirs, str)
        return ("by hand", "") if alike else ("WRONG", f"{ours!s:.200} / {theirs!s:.200}")
    if same(ours, theirs):
        unbroken = by_hand(kind, job._replace(way=""), ways[0]) if job.way else theirs
        return ("=" if same(theirs, unbroken) else "by hand"), ""
    if any(same(ours, by_hand(kind, job, way)) for way in ways[1:]):
        return "ulp", ""
    distances = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return "WRONG", f"differs by {max(distances):.1g}"


def judged(kind: Kind, words: dict[str, str]) -> list[str]:
    """Return the verdict of every column; note words, each with the first place where they come."""
    found = []
    for column, job in COLUMNS.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            word, text = verdict(kind, job)
        told = [str(w.message) for w in said if OP in str(w.message) and word != "refused"]
        for line in filter(None, (text, *told)):
            words.setdefault(line, f"{kind.package} {kind.name}, {column}")
        found.append("WRONG" if told else word)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="a part of package and name")
    args = parser.parse_args()
    rows, words = list[list[str]](), dict[str, str]()
    for kind in kinds():
        if args.only in f"{kind.package} {kind.name}":
            rows.append([kind.package, metadata.version(kind.package), kind.name])
            rows[-1] += judged(kind, words)
            print(*rows[-1][:3], ", ".join(rows[-1][3:]), flush=True)
    for text, where in words.items():
        print(f"{where}: {text}")
    content = {"columns": list(COLUMNS), "optimizers": rows, "words": words}
    write(args.json, {"machine": machine(torch.device("cpu")), **content})
    sys.exit(any("WRONG" in row for row in rows))


if __name__ == "__main__":
    main()
