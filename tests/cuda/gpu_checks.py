"""What a GPU is asked first: every operator once, and decode_loss beside plain autograd.

    python tests/cuda/gpu_checks.py operators|decoder [--device cuda|cpu] [--json FILE] [--quick]

`operators`: each one that the CUDA library registers, once, against the reference on the CPU.
`decoder`: loss and gradients of decode_loss in three precisions, against plain autograd in float64
on the tokens that it fed, and its time and memory beside plain autograd's. Needs torch alone.
Every row is printed and written as soon as it is there; exit status 1 if one of them is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import accumext
from accumext import reference
from accumext.backend import _build
from accumext.decoder import _operators_reference
from accumext.demo.memory import peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _decoders import Decoder, Shape, exact, ours, plain
from _decoding import distance
from support.decoder_calls import Call, backward_call, head_call, steps_call

Facts = dict[str, Any]

# Sums of some thousand float32 in two orders, powers, and what is clipped by such norms.
RTOL = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.int64: 0.0,
    torch.bool: 0.0,
}
# decode_loss sums in float32 or better: at most twice as far from float64 as plain autograd in the
# same precision, and a few units in the last place where that happens to be exact.
ALLOWED, LAST_PLACES = 2.0, {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
SMALL, QUICK = Shape(24, 8, 1009, 64), Shape(5, 3, 23, 8)
TIMED, QUICK_TIMED = Shape(64, 32, 50_257, 512), Shape(6, 3, 101, 16)
RUNS = 5  # of which the median is the time


# --- operators ------------------------------------------------------------------------------------


class Operator(NamedTuple):
    arguments: Callable[[], tuple[list[Any], dict[str, Any]]]  # on the CPU
    reference: Callable[..., Any]
    written: slice  # of the positional arguments, those that hold results


def gradients(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Lists of mixed dtypes and shapes, some transposed, around the edges of chunks."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    main_grads, grads = [], []
    for main, grad in itertools.product(dtypes, dtypes):
        for shape in ((), (0,), (9,), (33, 130), (4097,)):
            main_grads.append(torch.randn(shape).to(main))
            grads.append(torch.randn(shape).to(grad))
        grads[-2] = grads[-2].t().contiguous().t()
    return [main_grads, grads], options


def factor() -> Tensor:
    return torch.tensor(0.37)


def flag() -> Tensor:
    return torch.zeros(())


def one_list(*more: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    (_, grads), _ = gradients()
    return [grads, *more], options


CLIP = {"max_norm": 5.0, "if_finite": True}
MAIN_GRADS, NOTHING = slice(1), slice(0)


def of_the_decoder(call: Call) -> Operator:
    kernel = getattr(_operators_reference, call.op)
    return Operator(lambda: (call.arguments, {}), kernel, slice(call.first_written, None))


OPERATORS: dict[str, Operator] = {
    "accumulate_": Operator(
        lambda: gradients(inv_scale=factor(), found_inf=flag()), reference.accumulate_, MAIN_GRADS
    ),
    "accumulate_.scalar": Operator(
        lambda: gradients(inv_scale=0.37), reference.accumulate_, MAIN_GRADS
    ),
    "unscale_check_clip_accumulate_": Operator(
        lambda: gradients(inv_scale=factor(), found_inf=flag(), **CLIP),
        reference.unscale_check_clip_accumulate_,
        MAIN_GRADS,
    ),
    "unscale_check_clip_accumulate_.scalar": Operator(
        lambda: gradients(inv_scale=0.37, **CLIP),
        reference.unscale_check_clip_accumulate_,
        MAIN_GRADS,
    ),
    "total_norm": Operator(
        lambda: one_list(norm_type=3.0, inv_scale=factor(), found_inf=flag()),
        reference.total_norm,
        NOTHING,
    ),
    "total_norm.scalar": Operator(lambda: one_list(inv_scale=0.37), reference.total_norm, NOTHING),
    "scale_": Operator(lambda: one_list(factor()), reference.scale_, MAIN_GRADS),
    "scale_.scalar": Operator(lambda: one_list(0.37), reference.scale_, MAIN_GRADS),
    "head_forward": of_the_decoder(head_call()),
    "decode_steps": of_the_decoder(steps_call("lstm", layers=2)),
    "rnn_backward": of_the_decoder(backward_call("lstm")),
}


def check_operator(name: str, device: torch.device) -> Facts:
    operator = OPERATORS[name]
    arguments, options = operator.arguments()
    there = tree_map(
        lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf,
        (arguments, options),
    )
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.accumext, packet), overload or "default")
    got = [op(*there[0], **there[1]), there[0][operator.written], there[1].get("found_inf")]
    want = [
        operator.reference(*arguments, **options),
        arguments[operator.written],
        options.get("found_inf"),
    ]
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    tensors = [pair for pair in pairs if isinstance(pair[1], Tensor)]
    for mine, theirs in tensors:
        rtol = RTOL[theirs.dtype]
        torch.testing.assert_close(mine.cpu(), theirs, rtol=rtol, atol=rtol)
    return {"tensors compared": len(tensors)}


def operators(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], Facts]]]:
    for name in _build.registered_ops("cuda"):  # one that has no row here is an error
        yield name, lambda name=name: check_operator(name, device)


# --- decoder --------------------------------------------------------------------------------------


def check_decoder(decoder: Decoder, dtype: torch.dtype) -> Facts:
    """Errors of loss and gradients, relative to float64 on the same rounded parameters."""
    decoder = decoder.cast(dtype)
    outcome = ours(decoder)
    found = decoder.gradients()
    truth = exact(decoder.cast(torch.float64), outcome.inputs)
    usual = exact(decoder, outcome.inputs)
    errors = {
        "loss": (distance([outcome.loss], [truth.loss]), distance([usual.loss], [truth.loss])),
        "gradient": (
            distance(found, truth.gradients),
            distance(usual.gradients, truth.gradients),
        ),
    }
    for what, (mine, theirs) in errors.items():
        limit = ALLOWED * theirs + LAST_PLACES[dtype]
        if not mine <= limit:  # a NaN, too
            raise AssertionError(f"the {what} is off by {mine:.2e}, and at most {limit:.2e} is due")
    return {f"{what} off by": mine for what, (mine, _) in errors.items()} | {
        f"plain {what} off by": theirs for what, (_, theirs) in errors.items()
    }


def time_decoder(shape: Shape, dtype: torch.dtype, device: torch.device) -> Facts:
    """Forward and backward in turns with plain autograd, after one run that is not timed."""
    decoder = Decoder(shape, "gru", device).cast(dtype)
    facts: Facts = {"shape": str(shape)}
    seconds: dict[str, list[float]] = {"accumext": [], "plain autograd": []}
    for name, way in (("accumext", ours), ("plain autograd", plain)):
        decoder.forget()
        facts[f"{name}, peak bytes"] = peak_memory(lambda way=way: way(decoder), device)
    for _ in range(RUNS):
        for name, way in (("accumext", ours), ("plain autograd", plain)):
            decoder.forget()
            start = time.perf_counter()
            way(decoder).loss.item()  # waits for a GPU's forward
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    for name, taken in seconds.items():
        facts[f"{name}, seconds"] = statistics.median(taken)
    ratios = [theirs / mine for mine, theirs in zip(*seconds.values())]
    facts["times faster"] = statistics.median(ratios)
    return facts


def decoders(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], Facts]]]:
    for cell in ("gru", "lstm", "rnn"):
        decoder = Decoder(QUICK if quick else SMALL, cell, device)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            yield f"{cell}, {name}", lambda d=decoder, dtype=dtype: check_decoder(d, dtype)
    shape = QUICK_TIMED if quick else TIMED
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        yield f"time, {name}", lambda dtype=dtype: time_decoder(shape, dtype, device)


# --- the report -----------------------------------------------------------------------------------


def examine(name: str, check: Callable[[], Facts]) -> dict[str, Any]:
    """One row; a fault is a row, too."""
    start = time.perf_counter()
    try:
        row: dict[str, Any] = {"name": name, "passed": True, **check()}
    except Exception as error:
        row = {"name": name, "passed": False, "error": f"{type(error).__name__}: {error}"}
    return row | {"wall seconds": time.perf_counter() - start}


def write(path: Path | None, report: dict[str, Any]) -> None:
    """At once, and whole: a process that is cut off leaves what was there before."""
    if path is None:
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("operators", "decoder"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "backend": accumext.backend(),
        "reason": accumext.backend_reason(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "rows": [],
    }
    write(args.json, report)
    for name, check in (operators if args.what == "operators" else decoders)(device, args.quick):
        row = examine(name, check)
        report["rows"].append(row)
        write(args.json, report)
        print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
    return 0 if all(row["passed"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
