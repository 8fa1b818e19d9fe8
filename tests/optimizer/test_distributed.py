"""Process groups, models whose synchronisation is held back, and weights of sharded parameters."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist
from support.optimizer_oracle import make_model, says
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumext.optimizer._distributed import (
    check_group,
    hold_back,
    packed_group,
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
