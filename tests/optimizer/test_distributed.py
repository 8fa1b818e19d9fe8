"""Process groups, models whose synchronisation is held back, and weights of sharded parameters."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.device import cpu_as_device
from support.optimizer_oracle import make_model, says
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumext.optimizer._distributed import (
    check_group,
    hold_back,
    packed_group,
    shared_weight,
    unpacked_group,
)

pytestmark = pytest.mark.usefixtures("alone")


def test_a_group_is_a_process_group_or_none():
    assert check_group("op", None) is None
    assert check_group("op", dist.group.WORLD) is dist.group.WORLD
    text = "op: process_group must be a torch.distributed process group or None, got list"
    with pytest.raises(TypeError, match=says(text)):
        check_group("op", [0])


def test_the_default_group_is_packed_by_name_and_no_other_can_be():
    for group in (None, dist.group.WORLD):
        packed = packed_group("op", group)
        assert packed is None or isinstance(packed, str)
        assert unpacked_group(packed) is group
    text = "op: process_group must be the default group to be copied or pickled, got another"
    with pytest.raises(RuntimeError, match=says(text)):
        packed_group("op", dist.new_group([0]))


def test_a_plain_model_holds_nothing_back():
    for model in (None, make_model()):
        for group in (None, dist.group.WORLD):
            context, needed = hold_back("op", model, group)
            assert needed is group
            with context:
                pass


@pytest.mark.parametrize("given", [False, True])
def test_every_replica_in_a_model_is_held_back_inside_alone(given):
    own, other = dist.new_group([0]), dist.new_group([0])
    parts = [DistributedDataParallel(make_model(), process_group=own) for _ in range(2)]
    context, needed = hold_back("op", nn.Sequential(*parts), other if given else None)
    assert needed is (other if given else own)
    assert [part.require_backward_grad_sync for part in parts] == [True, True]
    with context:
        assert [part.require_backward_grad_sync for part in parts] == [False, False]
    assert [part.require_backward_grad_sync for part in parts] == [True, True]


def test_replicas_of_two_groups_need_one_that_is_given():
    groups = [dist.new_group([0]), dist.new_group([0])]
    model = nn.Sequential(*(DistributedDataParallel(make_model(), process_group=g) for g in groups))
    text = "op: model must have DistributedDataParallel parts of one process group, got several"
    with pytest.raises(ValueError, match=says(text)):
        hold_back("op", model, None)
    assert hold_back("op", model, groups[1])[1] is groups[1]


def test_what_is_no_model_is_refused_by_name():
    with pytest.raises(TypeError, match=re.escape("op: model must be a torch.nn.Module or None")):
        hold_back("op", 3, None)


def sharded():
    """A parameter of two processes, as far as a weight has to know it."""
    mesh = SimpleNamespace(ndim=1, size=lambda: 2, get_group=lambda dimension: "group")
    return SimpleNamespace(device_mesh=mesh, device=torch.device("cpu"))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("mine", "theirs", "factor", "mean"),
    [(1.0, 3.0, 0.5, 2.0), (3.0, 1.0, 1.5, 2.0), (0.0, 4.0, 0.0, 2.0), (0.0, 0.0, 0.0, 0.0)],
)
def test_processes_count_their_average_alike(monkeypatch, mine, theirs, factor, mean, on_device):
    """Half of `factor * gradient` from each is the weighted mean: (1 * g + 3 * h) / 4."""

    def all_reduce(total, group):
        assert group == "group"
        total += theirs

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    if on_device:
        weight = torch.tensor(mine, dtype=torch.float64)
        with cpu_as_device():
            got = shared_weight(weight, [torch.zeros(2), sharded()])
        assert weight.item() == mine
        assert [number.item() for number in got] == [factor, mean]
    else:
        assert shared_weight(mine, [torch.zeros(2), sharded()]) == (factor, mean)


def test_a_weight_of_parameters_that_are_not_sharded_is_its_own():
    assert shared_weight(3.0, [torch.zeros(2)]) == (1.0, 3.0)
