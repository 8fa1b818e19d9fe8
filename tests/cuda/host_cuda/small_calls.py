"""Every kernel on small tensors on a GPU, against the reference: a program for compute-sanitizer.

Each tensor, or the memory of which it is a slice, ends where its elements end.
"""

from __future__ import annotations

import itertools

import torch
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
    ops = torch.ops.accumext
    for size, rows, temperature in itertools.product(SIZES, (1, 3, 9), (1.0, 0.5)):
        values, uniforms = torch.randn(size, rows), torch.rand(rows, dtype=torch.float64)
        tokens, stats = torch.zeros(rows, dtype=torch.int64), torch.zeros(3, rows)
        targets, exps = torch.full([rows], size - 1), torch.zeros(size, rows, dtype=torch.bfloat16)
        on_gpu = [t.to("cuda") for t in (values, targets, uniforms, exps, tokens, stats)]
        for some in ((values, targets, uniforms, exps, tokens, stats), on_gpu):
            z, goal, share, e, token, stat = some
            ops.softmax_stats(z.t().clone(), goal, None, 1.0, None, token, stat)
            ops.softmax_stats(z.clone().t(), goal, share, temperature, e.t(), token, stat)
        torch.testing.assert_close(on_gpu[5].cpu(), stats, rtol=NORM_RTOL, atol=0.0)
        torch.testing.assert_close(on_gpu[3].cpu(), exps, rtol=2.0**-7, atol=0.0)
    for kind, gates in enumerate((3, 4, 1, 1)):
        inputs = [torch.randn(3, n) for n in (gates * 70, gates * 70, 70, 70)]
        pre, live = torch.randn(3, 4 * 70), torch.tensor([True, False, True])
        results = []
        for device in ("cpu", "cuda"):
            x, y, h, c = (t.to(device) for t in inputs)
            mask, new, new_c = live.to(device), torch.zeros_like(h), torch.zeros_like(h)
            ops.rnn_advance(kind, x, y, mask, h, c, new, new_c)
            d_x, d_h, dh, dc = torch.zeros_like(x), torch.zeros_like(x), h.clone(), c.clone()
            ops.rnn_gradient(kind, h, pre.to(device), new, c, new_c, mask, dh, dc, d_x, d_h)
            results.append([t.cpu() for t in (new, new_c, dh, dc, d_x, d_h)])
        torch.testing.assert_close(results[1], results[0], rtol=NORM_RTOL, atol=NORM_RTOL)


def main() -> None:
    torch.manual_seed(0)
    decoder_calls()
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
    for norm_type in NORM_TYPES:
        norm = accumext.total_norm(main_grads, norm_type=norm_type).cpu()
        want = reference.total_norm(expected, norm_type=norm_type)
        torch.testing.assert_close(norm, want, rtol=NORM_RTOL, atol=0.0)
    print("all results are right")


if __name__ == "__main__":
    main()
