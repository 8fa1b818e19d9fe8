"""What a GPU is asked first: every operator once, and decode_loss beside plain autograd.

    python tests/cuda/gpu_checks.py operators|decoder [--device cuda|cpu] [--json FILE] [--quick]

`operators`: each one that the CUDA library registers, once, against the reference on the CPU.
`decoder`: decode_loss in every mode and precision, against plain autograd (gpu_decoder.py). Needs
torch alone. Every row is printed and written as soon as it is there; exit status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_decoder
import torch
from gpu_rows import Checks, Facts, collect
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from accumext import reference
from accumext.backend import _build
from accumext.decoder import _operators_reference

PATIENCE = 20.0  # s, that a row may take

# Sums of some thousand float32 in two orders, powers, and what is clipped by such norms.
RTOL = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.int64: 0.0,
}


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


def statistics_of_logits() -> tuple[list[Any], dict[str, Any]]:
    rows, columns = 9, 4099
    logits, targets = torch.randn(rows, columns), torch.randint(columns, [rows])
    exps = torch.zeros(columns, rows, dtype=torch.bfloat16).t()
    tokens, stats = torch.zeros(rows, dtype=torch.int64), torch.zeros(3, rows)
    return [logits, targets, None, 1.0, exps, tokens, stats], {}


LSTM, GATES, ROWS, UNITS = 1, 4, 3, 70


def lstm_advance() -> tuple[list[Any], dict[str, Any]]:
    live = torch.tensor([True, False, True])
    from_x, from_h = (torch.randn(ROWS, GATES * UNITS) for _ in range(2))
    h, c, h_next, c_next = (torch.randn(ROWS, UNITS) for _ in range(4))
    return [LSTM, from_x, from_h, live, h, c, h_next, c_next], {}


def lstm_gradient() -> tuple[list[Any], dict[str, Any]]:
    live = torch.tensor([True, False, True])
    d_out, h, c, c_next, dh, dc = (torch.randn(ROWS, UNITS) for _ in range(6))
    pre, d_x = torch.randn(ROWS, GATES * UNITS), torch.zeros(ROWS, GATES * UNITS)
    return [LSTM, d_out, pre, h, c, c_next, live, dh, dc, d_x, None], {}


CLIP = {"max_norm": 5.0, "if_finite": True}
MAIN_GRADS, AFTER_SIX, AFTER_SEVEN, NOTHING = slice(1), slice(6, None), slice(7, None), slice(0)
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
    # The logits are used up.
    "softmax_stats": Operator(
        statistics_of_logits, _operators_reference.softmax_stats, slice(4, None)
    ),
    "rnn_advance": Operator(lstm_advance, _operators_reference.rnn_advance, AFTER_SIX),
    "rnn_gradient": Operator(lstm_gradient, _operators_reference.rnn_gradient, AFTER_SEVEN),
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
    for mine, theirs in pairs:
        if theirs is not None:
            rtol = RTOL[theirs.dtype]
            torch.testing.assert_close(mine.cpu(), theirs, rtol=rtol, atol=rtol)
    return {"tensors compared": sum(theirs is not None for _, theirs in pairs)}


def operators(device: torch.device, quick: bool) -> Checks:
    for name in _build.registered_ops("cuda"):  # one that has no row here is an error
        yield name, lambda name=name: check_operator(name, device)


PARTS = {"operators": operators, "decoder": gpu_decoder.checks}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=tuple(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    args = parser.parse_args()
    passed = collect(PARTS[args.what], args.device, args.quick, args.json, PATIENCE)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
