"""Sums of numbers over processes, and errors if numbers differ that must be equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accumext.distributed._sharded_window import closing_groups
from accumext.tensors import checks, scalars
from accumext.tensors.kinds import Group, is_dtensor
from accumext.tensors.scalars import Scalar, as_tensor, sent, to_host_if_free
from accumext.tensors.torch_private import assert_on_device


class Alike(NamedTuple):
    """A number that must be equal on every process, and how an error shows it."""

    name: str
    contract: str
    show: Callable[[float], str] = "{:.0f}".format
    unit: str = ""
    advice: str | None = None


class Agreement(NamedTuple):
    """The numbers of a window, summed over all processes."""

    weight: Scalar  # over processes that hold shards, the mean
    counted: Scalar  # micro-batches that count
    found_inf: Scalar  # 1 if any process has found an inf or NaN
    any_open: bool  # whether any process has something in the window


def agree(
    op: str,
    parameters: Sequence[Tensor],
    group: Group | None,
    sums: Sequence[Scalar],  # weight, counted, found_inf of this process
    alike: Sequence[Alike],
    values: Sequence[float],  # of the first entries of `alike`
    terms: Tensor,  # [len(alike) - len(values)], values of the other entries
    *,
    looks: bool,
    advice: str,
) -> Agreement:
    """Sum numbers over the processes, and raise if one that must be equal differs.

    Args:
        group: processes to sum over, in addition to the mesh of sharded parameters.
        looks: whether to wait for a device to compare there; else an assertion on it does.
        advice: what to do if a process does not answer.
    """
    groups, shards = closing_groups(parameters, group)
    world, rank = math.prod(each.size() for each in groups), 0
    for each in groups:
        rank = rank * each.size() + each.rank()
    # The device on which the groups can communicate; other parameters may be on the host.
    device = next(filter(is_dtensor, parameters), parameters[0]).device
    mine = torch.zeros(len(alike), world, dtype=torch.float64, device=device)
    for i, value in enumerate(values):
        mine[i, rank] = value
    mine[len(values) :, rank] = sent(terms, device)
    first = torch.stack([as_tensor(number, torch.float64, device) for number in sums])
    numbers = torch.cat([first, mine.flatten()])
    try:
        for each in groups:
            dist.all_reduce(numbers, group=each)
    except RuntimeError as error:
        got = f"no answer from some ({str(error).splitlines()[0]})"
        text = checks.message(op, "the window", "be closed by every process", got, advice)
        raise RuntimeError(text) from error
    weight, counted = map(to_host_if_free, numbers[:2] / shards)
    found_inf = to_host_if_free((numbers[2] != 0).double())
    rows = numbers[3:].view(-1, world)
    if not looks and not scalars.on_host(numbers):
        text = f"{op}: windows, settings and parameters must be the same on every process"
        assert_on_device((rows == rows[:, :1]).all(), text)
        return Agreement(weight, counted, found_inf, True)
    by_rank = rows.tolist()
    for each_alike, told in zip(alike, by_rank, strict=True):
        if len(set(told)) > 1:
            got = f"{', '.join(map(each_alike.show, told))}{each_alike.unit} by rank"
            contract = f"{each_alike.contract} on every process"
            raise RuntimeError(
                checks.message(op, each_alike.name, contract, got, each_alike.advice)
            )
    return Agreement(weight, counted, found_inf, any(by_rank[0]))
