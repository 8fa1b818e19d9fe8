"""Each gradient operation in plain PyTorch: fallback kernels, and the oracle of compiled ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accumext.ops import _contracts
from accumext.tensors.scalars import Scalar, divide

_CHUNK_SIZE = 2048  # elements; short sums in float32 are accurate, and torch does not split them


@torch.no_grad()
def accumulate_(
    main_grads: Sequence[Tensor],
    grads: Sequence[Tensor],  # shapes of main_grads
    *,
    inv_scale: float | Tensor = 1.0,  # float or []
    found_inf: Tensor | None = None,  # []
    overwrite: bool = False,
) -> Tensor:  # []
    """Add `grad * inv_scale` to each main gradient; return the 2-norm of the result."""
    scalars = {"inv_scale": inv_scale, "found_inf": found_inf}
    _contracts.check(_contracts.accumulate_, main_grads, grads, **scalars)
    _mark_nonfinite(found_inf, grads)
    for main_grad, grad in zip(main_grads, grads, strict=True):
        main_grad.copy_(_updated(main_grad, grad, inv_scale, overwrite))
    return _norm(main_grads, 2.0)


@torch.no_grad()
def unscale_check_clip_accumulate_(
    main_grads: Sequence[Tensor],
    grads: Sequence[Tensor],  # shapes of main_grads
    *,
    inv_scale: float | Tensor = 1.0,  # float or []
    max_norm: float,
    norm_type: float = 2.0,
    found_inf: Tensor | None = None,  # []
    overwrite: bool = False,
    if_finite: bool = False,
) -> Tensor:  # []
    """Add `grad * (inv_scale * clip_coef)` to each main gradient; return the unclipped norm."""
    options = {"inv_scale": inv_scale, "max_norm": max_norm, "norm_type": norm_type}
    contract = _contracts.unscale_check_clip_accumulate_
    _contracts.check(contract, main_grads, grads, **options, found_inf=found_inf)
    norm = _norm(grads, norm_type, inv_scale)
    coef = clip_coef(norm, max_norm)
    finite = _all_finite(grads)
    _mark_nonfinite(found_inf, grads)
    for main_grad, grad in zip(main_grads, grads, strict=True):
        dtype = accumulation_dtype(main_grad, grad)
        factor = _scaled(coef, inv_scale, dtype)
        updated = _updated(main_grad, grad, factor, overwrite).to(main_grad.dtype)
        main_grad.copy_(torch.where(finite, updated, main_grad) if if_finite else updated)
    return norm


@torch.no_grad()
def total_norm(
    grads: Sequence[Tensor],
    *,
    norm_type: float = 2.0,
    inv_scale: float | Tensor = 1.0,  # float or []
    found_inf: Tensor | None = None,  # []
) -> Tensor:  # []
    """Return the norm of `grads * inv_scale`, taken as one vector."""
    options = {"norm_type": norm_type, "inv_scale": inv_scale, "found_inf": found_inf}
    _contracts.check(_contracts.total_norm, grads, **options)
    _mark_nonfinite(found_inf, grads)
    return _norm(grads, norm_type, inv_scale)


@torch.no_grad()
def scale_(
    grads: Sequence[Tensor],
    factor: float | Tensor,  # float or []
) -> None:
    """Multiply each gradient by the factor, in place."""
    _contracts.check(_contracts.scale_, grads, factor)
    for grad in grads:
        dtype = accumulation_dtype(grad)
        if grad.dtype == dtype:  # the same result, without a temporary tensor
            grad.mul_(factor.to(dtype) if isinstance(factor, Tensor) else factor)
        else:
            grad.copy_(_scaled(grad, factor, dtype))


@torch.no_grad()
def copy_rounded_(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],  # shapes of targets
    *,
    seed: Tensor | None = None,  # [] int64
    found_inf: Tensor | None = None,  # []
) -> None:
    """Copy each source, rounded, with a seed stochastically, unless `found_inf` is not 0."""
    scalars = {"seed": seed, "found_inf": found_inf}
    _contracts.check(_contracts.copy_rounded_, targets, sources, **scalars)
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        rounded = source
        if seed is not None and target.element_size() < source.element_size():
            rounded = _stochastically_rounded(source, target.dtype, seed, i)
        if found_inf is not None:
            rounded = torch.where(found_inf != 0, target, rounded.to(target.dtype))
        target.copy_(rounded)


def window_factors(
    numbers: Tensor,  # [3] float64: norm, clip_coef, factor
    flags: Tensor,  # [3] float32: 1 / factor, skip, found_inf
    main_grads: Sequence[Tensor],  # the sums of a window, read if no norm is given
    ledger: Sequence[Tensor | None],  # [] each, see below
    base_weight: float,  # unless the ledger has one
    max_norm: float | None,  # None: no clip
    normalised: bool,  # the norm is that of the normalised gradient already
    checks_norm: bool,  # a norm that is not finite skips the step
) -> None:
    """Compute `factor = base_weight / weight / scale * clip_coef`, and whether to skip the step.

    | `ledger` | is | None |
    |---|---|---|
    | 0 norm | of the sums | compute their 2-norm, and whether they are finite |
    | 1 overflow | not 0 if a sum is not finite | 0 |
    | 2 base_weight | | the number that is given |
    | 3 weight | if it is 0, so is the factor | 1 |
    | 4 scale | | 1 |
    | 5 found_inf | not 0 if a gradient was not finite before it was added | 0 |
    | 6 counted | micro-batches that count, if others are left out | all do |
    """
    norm, overflow, device_base, weight, scale, found_inf, counted = ledger
    if norm is None:
        overflow = torch.zeros((), dtype=torch.float32, device=numbers.device)
        _mark_nonfinite(overflow, main_grads)
        norm = _norm(main_grads, 2.0)
    norm, one = norm.double(), torch.ones_like(numbers[0])
    # Tensors also for numbers of the host: torch divides a number by a tensor as a reciprocal times
    # the number, which rounds twice, as in torch's clip and `clip_coef`.
    numerator = one * base_weight if device_base is None else device_base
    factor = one * window_quotient(numerator, weight, one if scale is None else scale)
    broken = ~factor.isfinite()
    if checks_norm:
        broken |= ~norm.isfinite()
    if overflow is not None:
        broken |= overflow != 0
    if not normalised:
        norm = norm * factor
    coef = one
    if max_norm is not None:
        coef = (one * max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = factor * coef
    nonfinite = broken if found_inf is None else broken | (found_inf != 0)
    skip = nonfinite if counted is None else broken | (counted == 0)
    numbers.copy_(torch.stack([norm, coef, factor]))
    flags.copy_(torch.stack([1.0 / factor, skip, nonfinite]))


def window_quotient(
    base_weight: Scalar,
    weight: Tensor | None,  # [] float64; if it is 0, as if nothing counts, so is the quotient
    scale: Scalar,
) -> Scalar:
    """Return `base_weight / weight / scale`, the factor from sums to the window's gradient."""
    if weight is not None:
        positive = weight > 0
        base_weight = base_weight / torch.where(positive, weight, 1.0) * positive
    return divide(base_weight, scale)


def _stochastically_rounded(source: Tensor, dtype: torch.dtype, seed: Tensor, i: int) -> Tensor:
    """Return each element rounded to one of its neighbours in a narrower dtype, chosen by random
    bits; beyond the largest finite number, rounded to nearest.

    The neighbour away from zero has as its probability the element's distance from the other one,
    divided by the distance of the two, rounded down to a multiple of 2 ** -31.
    """
    info = torch.finfo(dtype)
    magnitude = source.double().abs()
    least_exponent = round(math.log2(info.smallest_normal))
    exponent = (magnitude.view(torch.int64) >> 52).sub(1023).clamp(min=least_exponent)
    distance = _power_of_two(exponent + round(math.log2(info.eps)))  # between neighbours
    units = magnitude / distance
    lower = units.floor()
    away = ((units - lower) * 2**31).floor().to(torch.int64)
    upper = (random_bits(seed, i, source.shape) >> 1) + away >= 2**31
    rounded = ((lower + upper) * distance).copysign(source.double())
    return torch.where(magnitude <= info.max, rounded.to(dtype), source.to(dtype))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return `2.0 ** exponent` of int64 in float64, exactly."""
    return (exponent + 1023 << 52).view(torch.float64)


def random_bits(
    seed: Tensor,  # [] int64
    i: int,
    shape: Sequence[int],
) -> Tensor:  # [*shape] int64
    """Return 32 random bits for each element of the i-th tensor of a list.

    Elements are counted in row-major order, whatever their strides. Two streams give the 16 high
    and the 16 low bits; most elements need only the high ones. 128 bits serve 8 elements.
    """
    count = math.prod(shape)
    blocks = torch.arange(-(-count // 8), device=seed.device)
    halves = []
    for stream in range(2):
        words = _philox(blocks, i, stream, seed)
        halves.append(torch.stack([words & 0xFFFF, words >> 16], dim=-1))
    high, low = halves
    return (high << 16 | low).reshape(-1)[:count].reshape(shape)


def _philox(
    block: Tensor,  # [N] int64, from 0
    i: int,
    stream: int,
    seed: Tensor,  # [] int64
) -> Tensor:  # [N, 4] int64, of 32 bits each
    """Return Philox4x32-7 with the seed as its key and (block, i, stream) as its counter.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    low = 0xFFFFFFFF
    a, b = block & low, block >> 32
    c, d = torch.full_like(block, i), torch.full_like(block, stream)
    key_0, key_1 = seed & low, seed >> 32 & low
    for _ in range(7):
        # 64-bit products wrap into the sign bit, which shifts extend: mask after each shift.
        product_a, product_c = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (product_c >> 32 & low) ^ b ^ key_0, product_c & low
        c, d = (product_a >> 32 & low) ^ d ^ key_1, product_a & low
        key_0, key_1 = key_0 + 0x9E3779B9 & low, key_1 + 0xBB67AE85 & low
    return torch.stack([a, b, c, d], dim=1)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any of the tensors is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def clip_coef(
    norm: Tensor,  # []
    max_norm: float,
) -> Tensor:  # []
    """Return `min(1, max_norm / (norm + 1e-6))`; NaN if the norm is NaN, as in torch.

    If `max_norm` is beyond the largest number of the norm's dtype, such as inf, it is 1, also if
    the norm of finite gradients overflowed.
    """
    if max_norm > torch.finfo(norm.dtype).max:
        return torch.ones_like(norm)
    coef: Tensor = max_norm / (norm + 1e-6)
    return coef.clamp(max=1.0)


def _scaled(tensor: Tensor, factor: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor * factor`, with both cast to `dtype` first: only the product is rounded."""
    return tensor.to(dtype) * (factor.to(dtype) if isinstance(factor, Tensor) else factor)


def _updated(main_grad: Tensor, grad: Tensor, factor: float | Tensor, overwrite: bool) -> Tensor:
    """Return the new main gradient, in the accumulation dtype of the pair."""
    dtype = accumulation_dtype(main_grad, grad)
    scaled = _scaled(grad, factor, dtype)
    return scaled if overwrite else main_grad.to(dtype) + scaled


def _norm(tensors: Sequence[Tensor], norm_type: float, inv_scale: float | Tensor = 1.0) -> Tensor:
    """Return the norm of the tensors' norms, each in its accumulation dtype; 0 if no element is."""
    dtype = accumulation_dtype(*tensors)
    norms = [
        _vector_norm(_scaled(t, inv_scale, accumulation_dtype(t)).reshape(-1), norm_type).to(dtype)
        for t in tensors
        if t.numel() > 0
    ]
    if not norms:
        return torch.zeros((), dtype=dtype, device=tensors[0].device if tensors else None)
    return _vector_norm(torch.stack(norms), norm_type)


def _vector_norm(
    elements: Tensor,  # [N]
    norm_type: float,
) -> Tensor:  # []
    """Return the norm of the norms of chunks. One long sum would depend on torch's threads."""
    chunks = elements.numel() // _CHUNK_SIZE
    if chunks == 0:
        norm: Tensor = torch.linalg.vector_norm(elements, norm_type)
        return norm
    full, tail = elements.tensor_split([chunks * _CHUNK_SIZE])
    norms = torch.linalg.vector_norm(full.view(chunks, _CHUNK_SIZE), norm_type, dim=1)
    return _vector_norm(torch.cat([norms, tail]), norm_type)


def _all_finite(tensors: Sequence[Tensor]) -> Tensor:  # [] bool
    """Tell whether every element is finite, as a tensor on their device."""
    if not tensors:
        return torch.tensor(True, device="cpu")
    return torch.stack([t.isfinite().all() for t in tensors]).all()


def _mark_nonfinite(found_inf: Tensor | None, grads: Sequence[Tensor]) -> None:
    """Set `found_inf` to 1.0 if a gradient is not finite; otherwise leave it as it was."""
    if found_inf is not None and grads:
        found_inf.masked_fill_(~_all_finite(grads), 1.0)
