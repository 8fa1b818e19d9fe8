"""Jobs on lists of gradients, without an optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import _peers
import torch
from _timing import Contender, Job, Shape, Traffic
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import accumext

SCALE = 2.0  # loss scale, so small that the norm of the scaled gradients fits into float16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Gradients:
    """Normal gradients times the loss scale, and a copy to restore them from."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        sizes = shape.sizes()
        self.start = [torch.randn(size, device=device).mul_(SCALE).to(dtype) for size in sizes]
        self.tensors = [tensor.clone() for tensor in self.start]
        self.max_norm = 0.5 * math.sqrt(shape.elements)  # half of their norm, once unscaled
        self.inv_scale = torch.tensor(1 / SCALE, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.holders = [torch.empty_like(tensor, requires_grad=True) for tensor in self.start]
        for holder, tensor in zip(self.holders, self.tensors):  # for what wants parameters
            holder.grad = tensor

    def restore(self) -> None:
        torch._foreach_copy_(self.tensors, self.start)


@functools.lru_cache(maxsize=1)
def gradients(shape: Shape, dtype: str, device: torch.device) -> Gradients:
    return Gradients(shape, DTYPES[dtype], device)


def norm_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield jobs of the norm, in one read."""
    for dtype in ("fp32", "bf16", "fp16"):
        yield _norm(shape, device, dtype)


def _norm(shape: Shape, device: torch.device, dtype: str) -> Job:
    grads = gradients(shape, dtype, device).tensors
    runs: dict[str, Callable[[], Tensor]] = {
        "torch foreach": lambda: get_total_norm(grads, foreach=True),
        "torch loop": lambda: looped_norm(grads),
        "accumext": lambda: accumext.total_norm(grads),
        **_peers.norms(grads),
    }
    once = Traffic(DTYPES[dtype].itemsize, 0)
    contenders = {name: Contender(run, once, lambda norm: [norm]) for name, run in runs.items()}
    return Job(f"total_norm {dtype}", shape, contenders)


def unscale_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield the job to unscale, check, norm and clip gradients that need clipping."""
    data = gradients(shape, "fp32", device)
    grads, inv_scale, found_inf = data.tensors, data.inv_scale, data.found_inf

    def foreach() -> Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        return clip_grad_norm_(data.holders, data.max_norm, foreach=True)

    def loop() -> Tensor:
        for grad in grads:
            grad.mul_(inv_scale)
        norm = looped_norm(grads)
        found_inf.copy_(~norm.isfinite())
        coef = clip_coef(norm, data.max_norm)
        for grad in grads:
            grad.mul_(coef)
        return norm

    def folded(measure: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the norm, and the divisor that an optimizer applies in its own read."""
        norm = measure()
        return norm, (inv_scale * clip_coef(norm, data.max_norm)).reciprocal()

    def unscaled_norm() -> Tensor:
        return accumext.total_norm(grads, inv_scale=inv_scale, found_inf=found_inf)

    def materialised() -> Tensor:
        norm = unscaled_norm()
        accumext.scale_(grads, inv_scale * clip_coef(norm, data.max_norm))
        return norm

    def written(norm: Tensor) -> list[Tensor]:
        return [norm, *grads]

    def divided(result: tuple[Tensor, Tensor]) -> list[Tensor]:
        norm, grad_scale = result
        return [norm, *(grad / grad_scale for grad in grads)]

    contenders = {
        "torch foreach": Contender(foreach, Traffic(4, 16), written),
        "torch loop": Contender(loop, Traffic(4, 16), written),
        "accumext, materialised": Contender(materialised, Traffic(4, 8), written),
        "accumext, folded": Contender(lambda: folded(unscaled_norm), Traffic(4, 0), divided),
    }
    for name, norm in _peers.unscaled_norms(grads, inv_scale).items():
        run = functools.partial(folded, norm)
        contenders[f"{name}, folded, unchecked"] = Contender(run, Traffic(4, 0), divided)
    yield Job("unscale, check, norm, clip", shape, contenders, data.restore)


def clip_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield jobs of clip_grad_norm_, which must write only if the norm is too large."""
    data = gradients(shape, "fp32", device)

    def job(name: str, max_norm: float, written: int, prepare: Callable[[], Any]) -> Job:
        def contender(clip: Callable[..., Tensor], update: int, **options: Any) -> Contender:
            def outcome(norm: Tensor) -> list[Tensor]:
                return [norm, *data.tensors]

            run = functools.partial(clip, data.holders, max_norm, **options)
            return Contender(run, Traffic(4, update), outcome)

        contenders = {
            "torch foreach": contender(clip_grad_norm_, 8, foreach=True),
            "torch loop": contender(clip_grad_norm_, 8, foreach=False),
            "accumext": contender(accumext.clip_grad_norm_, written),
            **{name: contender(clip, 8) for name, clip in _peers.clips(data.tensors).items()},
        }
        return Job(f"clip_grad_norm_, {name}", shape, contenders, prepare)

    data.restore()
    yield job("nothing to clip", 3 * SCALE * data.max_norm, 0, lambda: None)
    yield job("clipping", SCALE * data.max_norm, 8, data.restore)


def accumulate_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield jobs that add one micro-batch to float32 main gradients."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield _accumulate(shape, device, dtype)
    yield _clip_accumulate(shape, device)
    yield _overwrite(shape, device)


def _accumulate(shape: Shape, device: torch.device, dtype: str) -> Job:
    data, size = gradients(shape, dtype, device), DTYPES[dtype].itemsize
    grads, mains = data.tensors, _mains(data)

    def stock() -> Tensor:
        torch._foreach_add_(mains, _unscaled(data))
        return get_total_norm(mains, foreach=True)

    def fused() -> Tensor:
        return accumext.accumulate_(
            mains, grads, inv_scale=data.inv_scale, found_inf=data.found_inf
        )

    def add(alpha: float) -> None:
        for main, grad in zip(mains, grads):
            main.add_(grad, alpha=alpha)

    def loop() -> Tensor:
        add(1 / SCALE)
        norm = looped_norm(mains)
        data.found_inf.copy_(~norm.isfinite())
        return norm

    def accumulated(norm: Tensor) -> list[Tensor]:
        return [norm, *mains]

    cast = 0 if size == 4 else size + 4
    contenders = {
        "torch: cast, unscale, add, norm": Contender(stock, Traffic(4, cast + 8 + 12), accumulated),
        "torch loop": Contender(loop, Traffic(4, size + 8), accumulated),
        "torch add_ alone": Contender(lambda: add(1.0), Traffic(0, size + 8), None),
        "accumext": Contender(fused, Traffic(0, size + 8), accumulated),
    }
    for name, run in _peers.accumulations(mains, grads, 1 / SCALE).items():
        contenders[name] = Contender(run, Traffic(4, size + 8), accumulated)
    return Job(f"accumulate_ {dtype}", shape, contenders, lambda: _reset(data, mains))


def _clip_accumulate(shape: Shape, device: torch.device) -> Job:
    data = gradients(shape, "bf16", device)
    grads, mains = data.tensors, _mains(data)

    def stock() -> Tensor:
        unscaled = _unscaled(data)
        norm = get_total_norm(unscaled, foreach=True)
        torch._foreach_mul_(unscaled, clip_coef(norm, data.max_norm))
        torch._foreach_add_(mains, unscaled)
        return norm

    def fused() -> Tensor:
        return accumext.unscale_check_clip_accumulate_(
            mains,
            grads,
            inv_scale=data.inv_scale,
            max_norm=data.max_norm,
            found_inf=data.found_inf,
        )

    def accumulated(norm: Tensor) -> list[Tensor]:
        return [norm, *mains]

    contenders = {
        "torch: cast, unscale, clip, add": Contender(
            stock, Traffic(4, 6 + 8 + 8 + 12), accumulated
        ),
        "accumext": Contender(fused, Traffic(2, 2 + 8), accumulated),
    }
    name = "unscale_check_clip_accumulate_ bf16"
    return Job(name, shape, contenders, lambda: _reset(data, mains))


def _overwrite(shape: Shape, device: torch.device) -> Job:
    data = gradients(shape, "bf16", device)
    grads, mains = data.tensors, _mains(data)

    def copy() -> None:
        for main, grad in zip(mains, grads):
            main.copy_(grad)

    runs: dict[str, Callable[[], Any]] = {
        "torch copy_": copy,
        "accumext": lambda: accumext.accumulate_(mains, grads, overwrite=True),
    }
    once = Traffic(0, 0, 2, 4)
    contenders = {name: Contender(run, once, lambda _: mains) for name, run in runs.items()}
    return Job("accumulate_ overwrite bf16", shape, contenders, lambda: _reset(data, mains))


def scale_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield the job to multiply in place by a number on the device."""
    data = gradients(shape, "fp32", device)
    grads, factor = data.tensors, data.inv_scale

    def loop() -> None:
        for grad in grads:
            grad.mul_(factor)

    runs: dict[str, Callable[[], Any]] = {
        "torch foreach": lambda: torch._foreach_mul_(grads, factor),
        "torch loop": loop,
        "accumext": lambda: accumext.scale_(grads, factor),
    }
    contenders = {
        name: Contender(run, Traffic(0, 8), lambda _: grads) for name, run in runs.items()
    }
    yield Job("scale_", shape, contenders, data.restore)


def round_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield jobs that round float32 masters to half precision, to nearest or stochastically."""
    for dtype in ("bf16", "fp16"):
        yield _copy_rounded(shape, device, dtype)


def _copy_rounded(shape: Shape, device: torch.device, dtype: str) -> Job:
    masters = gradients(shape, "fp32", device).tensors
    parameters = [torch.empty_like(master, dtype=DTYPES[dtype]) for master in masters]
    seed = torch.zeros((), dtype=torch.int64, device=device)

    def copy() -> None:
        for parameter, master in zip(parameters, masters):
            parameter.copy_(master)

    def stochastic_copy() -> None:
        for parameter, master in zip(parameters, masters):
            bits = torch.empty_like(master, dtype=torch.int32).random_(2**16)
            bits.add_(master.view(torch.int32)).bitwise_and_(-(2**16))
            parameter.copy_(bits.view(torch.float32))

    def written(_: object) -> list[Tensor]:
        return parameters

    once = Traffic(0, 0, 4, 2)
    contenders = {
        "torch copy_": Contender(copy, once, written),
        "accumext": Contender(lambda: accumext.copy_rounded_(parameters, masters), once, written),
        "accumext, stochastic": Contender(
            lambda: accumext.copy_rounded_(parameters, masters, seed=seed), once, written
        ),
    }
    if dtype == "bf16":  # of which the dropped digits are always 16
        traffic = Traffic(0, 4 + 12 + 8, 4, 2)
        name = "torch: random bits, add, mask, copy"
        contenders[name] = Contender(stochastic_copy, traffic, written)
    return Job(f"copy_rounded_ {dtype}", shape, contenders)


def clip_coef(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def looped_norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def _mains(data: Gradients) -> list[Tensor]:
    return [torch.ones_like(tensor, dtype=torch.float32) for tensor in data.tensors]


def _reset(data: Gradients, mains: list[Tensor]) -> None:
    data.restore()
    torch._foreach_zero_(mains)
    torch._foreach_add_(mains, 1.0)


def _unscaled(data: Gradients) -> list[Tensor]:
    """Unscale as a GradScaler does; float32 gradients in place."""
    unscaled = [grad.float() for grad in data.tensors]
    torch._amp_foreach_non_finite_check_and_unscale_(unscaled, data.found_inf, data.inv_scale)
    return unscaled
