"""Weights of sharded parameters, and which processes close a window together."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.device import DeviceReads, cpu_as_device
from torch import nn

import accumext
from accumext.distributed import ShardedWindow
from accumext.distributed._sharded_window import closing_groups
from accumext.optimizer._ledger import Ledger


def shard_of(*groups):
    """A parameter of a mesh with these groups, as far as it has to be known."""
    size = 1
    for group in groups:
        size *= group.size()
    mesh = SimpleNamespace(ndim=len(groups), size=lambda: size, get_group=lambda i: groups[i])
    return SimpleNamespace(device_mesh=mesh)


def group_of(count):
    return SimpleNamespace(size=lambda: count)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("mean", "unit"), [(1.0, 1.0), (3000.0, 4096.0), (2500.0, 2048.0), (0.3, 0.25), (0.0, 8.0)]
)
def test_weights_are_multiplied_in_over_a_power_of_two(mean, unit, on_device):
    """About the mean weight of the window before; where nothing counted, what it was."""
    sharded = ShardedWindow()
    assert sharded.unit == 1.0
    sharded.note_weight(8.0)
    weight = torch.tensor(12.0, dtype=torch.float64) if on_device else 12.0
    with cpu_as_device(), DeviceReads() as reads:
        sharded.note_weight(torch.tensor(mean, dtype=torch.float64) if on_device else mean)
        ledger, ratio = Ledger().with_micro_batch(weight, 1.0, sharded.unit)
    assert reads.count == 0
    assert float(ledger.base_weight) == unit
    assert float(ratio) == 12.0 / unit
    # The unit of an open window stays, whatever the last one's weights were.
    sharded.note_weight(64.0)
    ledger, ratio = ledger.with_micro_batch(5.0, 1.0, sharded.unit)
    assert float(ratio) == 5.0 / unit
    assert float(ledger.weight) == 17.0


def test_a_weight_of_zero_is_not_zero_on_other_processes():
    """So a micro-batch that counts nothing here sets the unit that it has there."""
    ledger, ratio = Ledger().with_micro_batch(0.0, 1.0, ShardedWindow().unit)
    assert (ledger.base_weight, ratio) == (1.0, 0.0)


def test_one_group_closes_a_window_where_there_is_one(monkeypatch):
    two, three, everybody = group_of(2), group_of(3), group_of(6)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=everybody))
    plain = nn.Parameter(torch.zeros(1))
    assert closing_groups([plain, shard_of(two)], None) == ([two], 2)
    assert closing_groups([plain], three) == ([three], 1)
    assert closing_groups([shard_of(two, three)], None) == ([everybody], 6)
    assert closing_groups([shard_of(two)], three) == ([everybody], 2)
    assert closing_groups([shard_of(two), shard_of(two, two)], None) == ([two, two], 4)
    assert closing_groups([plain], None) == ([], 1)


def test_memory_of_a_model_that_is_not_sharded():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16()).requires_grad_(True)
    model[0].bias.requires_grad_(False)
    expected = 4 * (15 + 12)  # main gradients are of float32
    for synchronize in ("backward", "window"):
        assert accumext.window_memory(model, synchronize) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1], "window"), TypeError, "window_memory: model must be a torch.nn.Module, got list"),
        ((nn.Linear(1, 1), "step"), ValueError, "window_memory: synchronize must be one of"),
    ],
)
def test_what_window_memory_must_be_given(arguments, error, text):
    with pytest.raises(error, match=f"^{text}"):
        accumext.window_memory(*arguments)
