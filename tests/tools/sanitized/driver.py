"""Runs in a Python with a sanitizer: `driver.py FOLDER fault NAME` or `driver.py FOLDER operators`.

The latter runs tests of what is hard on memory and threads, with the compiled operators:
temporaries of the dispatcher, odd strides, shared memory, broken contracts, and decoders.
"""

import ctypes
import itertools
import sys
from pathlib import Path

import pytest
import torch

import accumext

TESTS = Path(__file__).parents[2]
FILES = [
    *(TESTS / "tensors" / f"test_{name}.py" for name in ("kinds", "memory_overlap", "checks")),
    *(TESTS / "ops" / f"test_{name}.py" for name in ("accumulate", "norm", "scale")),
]


def decoder() -> None:
    for cell, dtype, (feedback, options) in itertools.product(
        ("GRU", "LSTM", "RNN"),
        (torch.float32, torch.float64, torch.bfloat16),
        (
            ("teacher", {}),
            ("greedy", {"k1": 3, "k2": 5, "eos": 2}),
            ("sample", {"lengths": torch.tensor([7, 3, 1]), "temperature": 0.7}),
        ),
    ):
        torch.manual_seed(0)
        table = torch._neg_view(torch.randn(37, 5)).to(dtype).requires_grad_()
        weight = torch.randn(37, 6).to(dtype).requires_grad_()
        layers = getattr(torch.nn, cell)(5, 6, num_layers=2, dropout=0.5, dtype=dtype)
        targets = torch.randint(37, (7, 3))
        out = accumext.decode_loss(
            table, layers, (weight, None), targets, feedback=feedback, **options
        )
        out.loss.backward()
        assert all(p.grad.isfinite().all() for p in (table, weight, *layers.parameters()))


def main() -> int:
    folder, what, *names = sys.argv[1:]
    if what == "fault":
        getattr(ctypes.CDLL(f"{folder}/faults.so"), names[0])()
        return 0
    torch.ops.load_library(f"{folder}/library.so")
    for operator in ("accumulate_", "total_norm", "scale_", "decode_steps", "rnn_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"accumext::{operator}", "CPU")
    decoder()
    # -s, because captured output is lost where a fault ends the process.
    return pytest.main(["-q", "-n0", "-s", "-p", "no:cacheprovider", *map(str, FILES)])


if __name__ == "__main__":
    sys.exit(main())
