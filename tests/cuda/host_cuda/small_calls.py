"""Every kernel on small tensors on a GPU, against the reference: a program for compute-sanitizer.

    python tests/cuda/host_cuda/small_calls.py [decoder]    those of the decoder alone

Each tensor, or the memory of which it is a slice, ends where its elements end.
"""

from __future__ import annotations

import itertools
import sys

import torch
from support.decoder_calls import KINDS, backward_call, head_call, steps_call
from torch import Tensor

import accumext
from accumext import reference

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 9, 300, 4100, 9000)  # a warp takes chunks of 4096
SHIFTS = (0, 1)  # elements before the slice
NORM_TYPES = (1.0, 2.0, 3.0, float("inf"), float("-inf"))
NORM_RTOL = 1e-5  # sums of float32 in two orders


def drawn(size: int, shift: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/8 up to 8: sums of two of them are exact in every dtype."""
    return torch.randint(-64, 65, (size + shift,)).div(8).to(dtype)


def decoder_calls() -> None:
    """The decoder's operators, whose reference answers for tensors of the CPU."""
    calls = [
        head_call(rows=rows, words=size, sampled=sampled, temperature=temperature)
        for size, rows, temperature in itertools.product(SIZES, (1, 3, 9), (1.0, 0.5))
        for sampled in (False, True)
    ]
    for kind, narrow in itertools.product(KINDS, (False, True)):
        calls += [backward_call(kind, narrow=narrow, batch=batch) for batch in (5, 17, 33)]
        for head in (False, True):
            calls.append(steps_call(kind, layers=2, head=head, narrow=narrow))
    for call in calls:
        there = call.to("cuda")
        call()
        there()
        narrow = any(t.dtype == torch.bfloat16 for t in call.tensors)
        rtol = 2.0**-7 if narrow else NORM_RTOL
        for got, want in zip(there.written, call.written):
            torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=rtol)


def gradient_calls() -> None:
    """The operations on lists of gradients."""
    cases = list(itertools.product(DTYPES, DTYPES, SIZES, SHIFTS))
    main_bases = [drawn(size, shift, main) for main, _, size, shift in cases]
    grad_bases = [drawn(size, shift, grad) for _, grad, size, shift in cases]
    lists = []
    for device in ("cpu", "cuda"):
        bases = [[base.to(device) for base in bases] for bases in (main_bases, grad_bases)]
        slices = [[base[case[3] :] for base, case in zip(some, cases)] for some in bases]
        slices[0].append(torch.ones(70, 90, device=device).t())
        slices[1].append(torch.ones(90, 70, device=device))
        lists.append(slices)
    (expected, grads), (main_grads, grads_on_gpu) = lists

    for overwrite in (False, True):
        reference.accumulate_(expected, grads, overwrite=overwrite)
        accumext.accumulate_(main_grads, grads_on_gpu, overwrite=overwrite)
    options = {"max_norm": 1e9, "if_finite": True}
    reference.unscale_check_clip_accumulate_(expected, grads, **options)
    accumext.unscale_check_clip_accumulate_(main_grads, grads_on_gpu, **options)
    reference.scale_(expected, 0.5)
    accumext.scale_(main_grads, 0.5)
    for want, got in zip(expected, main_grads):
        assert torch.equal(got.cpu(), want), (want.dtype, want.shape)
    for seed in (None, torch.tensor(7)):
        there = None if seed is None else seed.to("cuda")
        reference.copy_rounded_(expected, grads, seed=seed)
        accumext.copy_rounded_(main_grads, grads_on_gpu, seed=there)
        for want, got in zip(expected, main_grads):
            assert torch.equal(got.cpu(), want), (want.dtype, want.shape)
    for norm_type in NORM_TYPES:
        norm = accumext.total_norm(main_grads, norm_type=norm_type).cpu()
        want = reference.total_norm(expected, norm_type=norm_type)
        torch.testing.assert_close(norm, want, rtol=NORM_RTOL, atol=0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    decoder_calls()
    if sys.argv[1:] != ["decoder"]:
        gradient_calls()
    print("all results are right")
