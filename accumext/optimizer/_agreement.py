"""Several processes: the numbers of a window of all, and errors where the processes differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from accumext.distributed import closing_groups
from accumext.optimizer._window import Box, Window
from accumext.tensors import checks, scalars
from accumext.tensors.kinds import Group, is_dtensor
from accumext.tensors.scalars import Scalar, as_tensor, sent, to_host_if_free
from accumext.tensors.torch_private import assert_on_device

_SAME_COUNT = (
    "Give every process the same number, where a micro-batch with weight=0 counts for nothing, and "
    "call step and flush on all of them"
)


class _Alike(NamedTuple):
    """A number that has to be the same on every process, and how an error shows it."""

    name: str
    contract: str
    show: Callable[[float], str]
    unit: str = ""
    advice: str | None = None


def _one_of(choices: Sequence[str]) -> Callable[[float], str]:
    return lambda index: repr(choices[int(index)])


_DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64
]  # fmt: skip


def _dtypes(bits: float) -> str:
    there = [checks.dtype_name(dtype) for i, dtype in enumerate(_DTYPES) if int(bits) >> i & 1]
    return " and ".join(there)


_ALIKE = (
    _Alike(
        "the window",
        "hold the same number of micro-batches",
        lambda n: f"{n:.0f}" if n >= 0 else f"full with {-n:.0f}",
        advice=_SAME_COUNT,
    ),
    _Alike("the window", "be of the same trainable parameters", "{:.0f}".format, " elements"),
    # The numbers of `_terms`
    _Alike("max_norm", "be the same", lambda n: "None" if n < 0 else str(n)),
    _Alike("norm_type", "be the same", str),
    _Alike("reduction", "be the same", _one_of(checks.REDUCTIONS)),
    _Alike("on_nonfinite", "be the same", _one_of(checks.ON_NONFINITE)),
    _Alike("synchronize", "be the same", _one_of(checks.SYNCHRONIZE)),
    _Alike("masters", "be of as many parameters", "{:.0f}".format),
    _Alike("parameters", "have the same dtypes", _dtypes),
    _Alike(
        "parameters",
        "have the same shapes and dtypes in the same order",
        lambda n: f"{int(n):08x}",
        " (checksums)",
    ),
)


def _terms(box: Box) -> Tensor:
    """Return, as numbers, all that processes have to have alike beside a window."""
    settings, parameters = box.settings, box.target.parameters()
    kinds = [(list(p.shape), p.dtype) for p in parameters]
    numbers = (
        -1.0 if settings.max_norm is None else settings.max_norm,
        settings.norm_type,
        checks.REDUCTIONS.index(settings.reduction),
        checks.ON_NONFINITE.index(settings.on_nonfinite),
        checks.SYNCHRONIZE.index(settings.synchronize),
        len(box.target.links),
        sum(1 << i for i, dtype in enumerate(_DTYPES) if any(p.dtype == dtype for p in parameters)),
        crc32(repr(kinds).encode()),
    )
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


class Agreement(NamedTuple):
    """The numbers of a window, of all processes."""

    weight: Scalar  # of shards the mean
    kept: Scalar  # micro-batches
    found_inf: Scalar
    any_held: bool  # whether any process has something in the window


def agree(op: str, box: Box, window: Window, group: Group | None, flushing: bool) -> Agreement:
    """Sum the numbers of the window, and raise where processes do not close the same one, or were
    not told the same.

    The group is beside the mesh of the shards. If only a device knows the sums, a flush alone looks
    at them, and the first window after settings were made or assigned.
    """
    parameters = box.target.parameters()
    groups, shards = closing_groups(parameters, group)
    world, rank = math.prod(each.size() for each in groups), 0
    for each in groups:
        rank = rank * each.size() + each.rank()
    # The device that the groups serve; other parameters may be on the host.
    device = next(filter(is_dtensor, parameters), parameters[0]).device
    count, settings = window.micro_batches, box.settings
    known, terms = box.agreed or (None, torch.empty(0, device="cpu"))
    if known != settings:
        terms = sent(_terms(box), device)
    closing = torch.zeros(len(_ALIKE), world, dtype=torch.float64, device=device)
    closing[0, rank] = count if flushing else -settings.window  # of a full one its size
    closing[1, rank] = sum(parameters[i].numel() for i in trained(parameters, window))
    closing[2:, rank] = terms
    kept = count if window.finite is None else window.finite
    mine = [as_tensor(n, torch.float64, device) for n in (window.weight, kept, window.found_inf)]
    numbers = torch.cat([torch.stack(mine), closing.flatten()])
    try:
        for each in groups:
            dist.all_reduce(numbers, group=each)
    except RuntimeError as error:
        got = f"no answer from some ({str(error).splitlines()[0]})"
        text = checks.message(op, "the window", "be closed by every process", got, _SAME_COUNT)
        raise RuntimeError(text) from error
    total, finite = map(to_host_if_free, numbers[:2] / shards)
    found_inf = to_host_if_free((numbers[2] != 0).double())
    rows = numbers[3:].view(-1, world)
    if known == settings and not flushing and not scalars.on_host(numbers):
        text = f"{op}: windows, settings and parameters must be the same on every process"
        assert_on_device((rows == rows[:, :1]).all(), text)
        return Agreement(total, finite, found_inf, True)
    counts, *_ = by_rank = rows.tolist()
    for alike, values in zip(_ALIKE, by_rank, strict=True):
        if len(set(values)) > 1:
            got = f"{', '.join(map(alike.show, values))}{alike.unit} by rank"
            contract = f"{alike.contract} on every process"
            raise RuntimeError(checks.message(op, alike.name, contract, got, alike.advice))
    box.agreed = settings, terms
    return Agreement(total, finite, found_inf, any(counts))


def agree_on_shards(op: str, box: Box) -> None:
    """Compare processes before the first micro-batch of an optimizer of shards: where windows are
    not of one size, one would wait for the others to close it while those wait for it in FSDP."""
    if box.sharded is not None and box.agreed is None:
        agree(op, box, box.state.window, box.group, flushing=False)


def trained(parameters: Sequence[Tensor], window: Window) -> list[int]:
    """Return the indices of the parameters that are trained or have a gradient."""
    sums = window.of(parameters).sums or [None] * len(parameters)
    rows = enumerate(zip(parameters, sums, strict=True))
    return [i for i, (p, m) in rows if p.requires_grad or m is not None or p.grad is not None]
