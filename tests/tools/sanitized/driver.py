"""Runs in a Python with a sanitizer: `driver.py FOLDER fault NAME` or `driver.py FOLDER operators`.

Calls the compiled operators with what is hard on memory and threads, and compares them with
accumext.reference: temporaries of the dispatcher, odd strides, shared memory, broken contracts.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys

import torch

import accumext
from accumext import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (0, 1, 3, 100, 2049)
CHUNKS = [(70000, torch.float32), (70000, torch.bfloat16)]  # two each, for two threads

# A tensor -> one of the same values that is laid out or marked in another way.
KINDS = {
    "plain": torch.clone,
    "negated": lambda t: torch._neg_view(t.neg()),
    "imaginary": lambda t: (
        torch.complex(torch.zeros_like(t), t.neg()).conj().imag
        if t.dtype in (torch.float32, torch.float64)
        else t.clone()
    ),
    "slice": lambda t: torch.cat([t.new_ones(3), t, t.new_ones(1)])[3 : 3 + len(t)],
    "every other": lambda t: t.repeat_interleave(2)[::2],
    "transposed": lambda t: t.expand(3, -1).t().contiguous().t()[1],
    "parameter": torch.nn.Parameter,
    "subclass": lambda t: t.clone().as_subclass(Named),
}


class Named(torch.Tensor):
    """A subclass."""


def values(kind: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pairs = [*itertools.product(SIZES, DTYPES), *CHUNKS]
    return [KINDS[kind](torch.randn(n, generator=generator).to(d)) for n, d in pairs]


def close(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        a, b = (t.detach().as_subclass(torch.Tensor).double() for t in (a, b))
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-30, equal_nan=True)


def every_kind() -> None:
    for kind in KINDS:
        for p in (1.0, 2.0, 3.0, math.inf):
            expected = reference.total_norm(values("plain", 0), norm_type=p)
            close([accumext.total_norm(values(kind, 0), norm_type=p)], [expected])
        for mains_kind, grads_kind in ((kind, "plain"), ("plain", kind), ("negated", kind)):
            for call, oracle, options in (
                (accumext.accumulate_, reference.accumulate_, {}),
                (accumext.accumulate_, reference.accumulate_, {"overwrite": True}),
                (
                    accumext.unscale_check_clip_accumulate_,
                    reference.unscale_check_clip_accumulate_,
                    {"max_norm": 1.0, "if_finite": True},
                ),
            ):
                flags = [torch.zeros(()), torch.zeros(())]
                scale = KINDS[grads_kind](torch.tensor([0.5]))[0]
                mains, expected = values(mains_kind, 1), values("plain", 1)
                norm = call(
                    mains, values(grads_kind, 2), inv_scale=scale, found_inf=flags[0], **options
                )
                want = oracle(
                    expected, values("plain", 2), inv_scale=0.5, found_inf=flags[1], **options
                )
                close([norm, flags[0], *mains], [want, flags[1], *expected])
        for seed in (None, torch.tensor(7)):
            mains, expected = values(kind, 1), values("plain", 1)
            accumext.copy_rounded_(mains, values("plain", 2), seed=seed)
            reference.copy_rounded_(expected, values("plain", 2), seed=seed)
            close(mains, expected)
        mains, expected = values(kind, 1), values("plain", 1)
        accumext.scale_(mains, 0.5)
        reference.scale_(expected, 0.5)
        close(mains, expected)


def shared_memory() -> None:
    refused = (
        lambda b: ([b, b], [b.clone(), b.clone()]),
        lambda b: ([b[1:]], [b[:-1]]),
        lambda b: ([b[::2], b[4:9]], [b[::2].clone(), b[4:9].clone()]),
        lambda b: ([b[:5], b[5:10]], [b[5:10], b[:5]]),
    )
    for make in refused:
        buffer = torch.ones(200000)
        try:
            accumext.accumulate_(*make(buffer))
        except ValueError:
            close([buffer], [torch.ones(200000)])
        else:
            raise AssertionError("shared memory was not refused")
    for make in (
        lambda b: [b[::2], b[1::2]],
        lambda b: list(b.view(500, 400).split(70, dim=1)),
        lambda b: [torch.as_strided(b, (2, 3), (3, 2)), b[8:]],
        lambda b: [b],
    ):
        mains, expected = make(torch.ones(200000)), make(torch.ones(200000))
        accumext.accumulate_(mains, mains, inv_scale=0.5, overwrite=True)
        reference.accumulate_(expected, expected, inv_scale=0.5, overwrite=True)
        close(mains, expected)
        grads = [torch.randn(200000).as_strided(m.shape, m.stride()) for m in mains]
        close([accumext.accumulate_(mains, grads)], [reference.accumulate_(expected, grads)])
        close(mains, expected)
    buffer, expected = torch.ones(200000), torch.ones(200000)
    accumext.scale_([buffer, buffer, buffer[1:], buffer[:70000]], 0.5)
    for view in (expected, expected, expected[1:], expected[:70000]):
        view.mul_(0.5)
    close([buffer], [expected])
    grad = torch.randn(70000)
    mains = [torch.zeros(70000), torch.zeros(70000)]
    accumext.accumulate_(mains, [grad, grad.expand(1, -1)[0]])
    close(mains, [grad, grad])


def broken_contracts() -> None:
    """Arguments are given back whichever of them is at fault, negated ones too."""
    good, wrong = [torch._neg_view(torch.ones(9)) for _ in range(3)], torch.ones(4).int()
    for grads in ([*good, good[0]], [good[0], wrong, good[1]], [good[0], torch.ones(8), good[1]]):
        for call in (
            lambda grads: accumext.accumulate_([torch.ones(9) for _ in range(3)], grads),
            lambda grads: torch.ops.accumext.accumulate_(
                [torch.ones(9) for _ in range(3)],
                grads,
                found_inf=torch.zeros((), dtype=torch.half),
            ),
            lambda grads: accumext.total_norm(grads, norm_type=0.0),
        ):
            try:
                call(grads)
            except (ValueError, TypeError, RuntimeError):
                continue
            raise AssertionError("a broken contract was not found")
    close(good, [-torch.ones(9)] * 3)


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


def main() -> None:
    folder, what, *names = sys.argv[1:]
    if what == "fault":
        getattr(ctypes.CDLL(f"{folder}/faults.so"), names[0])()
        return
    torch.ops.load_library(f"{folder}/library.so")
    for operator in ("accumulate_", "total_norm", "scale_", "decode_steps", "rnn_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"accumext::{operator}", "CPU")
    for part in (every_kind, shared_memory, broken_contracts, decoder):
        part()
        print(part.__name__, "done", flush=True)


if __name__ == "__main__":
    main()
