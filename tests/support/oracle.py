"""References of gradient operations: exact data, float64 truth, bounds on errors."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Around every edge: blocks of 16 lanes in float64 and 32 in float32, partial sums of 2048 elements,
# chunks of 65536.
EDGE_SIZES = (
    *(0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 65),
    *(2047, 2048, 2049, 4096, 65535, 65536, 65537, 131073),
)

# Relative errors of a norm. float32: terms and lanes are rounded to 2**-24, and no more than 256 of
# them are added up before the sum goes on elsewhere; errors of either sign. float64: alike.
NORM_RTOL = {torch.float32: 1e-6, torch.float64: 1e-14}

# The norm's error goes into the factor; float32 results are rounded a few times more. Half results
# are compared after rounding, where that error may decide one unit in the last place.
CLIP_RTOL = {
    torch.float64: 1e-5,  # with float32 gradients the norm is float32
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def dyadic(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw multiples of 1/8 up to 8: sums of two, and halves, are exact even in bfloat16."""
    return torch.randint(-64, 65, tuple(shape)).div(8).to(dtype)


def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw normal values times 3, rounded to dtype."""
    return torch.randn(tuple(shape), dtype=torch.float64).mul(3).to(dtype)


def accumulated(
    main_grad: Tensor, grad: Tensor, factor: float = 1.0, overwrite: bool = False
) -> Tensor:
    """Add in float64, then round as main_grad is stored: exact for dyadic data."""
    start = torch.zeros_like(main_grad) if overwrite else main_grad
    return (start.double() + grad.double() * factor).to(main_grad.dtype)


def norm(tensors: Sequence[Tensor], norm_type: float = 2.0, inv_scale: float = 1.0) -> float:
    """Return the norm of all elements as one float64 vector, by definition; 0 if there are none."""
    elements = torch.cat([t.double().reshape(-1) for t in tensors] or [torch.empty(0).double()])
    magnitudes = (elements * inv_scale).abs()
    if magnitudes.numel() == 0:
        return 0.0
    if norm_type == float("inf"):
        return magnitudes.max().item()
    if norm_type == -float("inf"):
        return magnitudes.min().item()
    return magnitudes.pow(norm_type).sum().pow(1 / norm_type).item()


def clipped(
    grads: Sequence[Tensor], *, inv_scale: float = 1.0, max_norm: float, norm_type: float = 2.0
) -> list[Tensor]:
    """Return the clipped gradients in float64, by definition."""
    coef = min(1.0, max_norm / (norm(grads, norm_type, inv_scale) + 1e-6))
    return [g.double() * (inv_scale * coef) for g in grads]


def norm_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def assert_norm(
    got: Tensor, tensors: Sequence[Tensor], *, rtol: float | None = None, **kwargs
) -> None:
    """Check that `got` is 0-dim, of the right dtype, near the float64 norm of `tensors`."""
    assert got.shape == ()
    assert got.dtype == norm_dtype(tensors)
    truth = norm(tensors, **kwargs)
    wide = all(t.dtype == torch.float64 for t in tensors) and len(tensors) > 0
    rtol = rtol or NORM_RTOL[torch.float64 if wide else torch.float32]
    assert abs(got.item() - truth) <= rtol * abs(truth), f"{got.item()!r}, truth {truth!r}"


def assert_no_worse(got: Tensor, reference: Tensor, truth: float, rtol: float) -> None:
    """Check that a kernel's error is at most that of the reference, give or take `rtol`."""
    error, allowed = abs(got.item() - truth), abs(reference.item() - truth) + rtol * abs(truth)
    assert error <= allowed, f"{got.item()!r}, reference {reference.item()!r}, truth {truth!r}"
