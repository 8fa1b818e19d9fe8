"""What the auditor reads of torch: a release that changes it fails here, by name."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from accumext.auditing import _torch_private as private


def test_what_a_node_has_saved():
    """Nothing under a name that it does not have"""
    weight = nn.Parameter(torch.zeros(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda pair: pair[1]):
        node = weight.exp().grad_fn
    assert private.saved_by(node, "result").tolist() == [1.0] * 3
    assert private.packed_by(node, "result")[0] == "packed"
    plain = weight.exp()
    assert private.packed_by(plain.grad_fn, "result").data_ptr() == plain.data_ptr()
    assert private.saved_by(node, "none") is private.packed_by(node, "none") is None


def test_nodes():
    """In the order in which they were made; leaves; metadata that stays with a node"""
    weight = nn.Parameter(torch.zeros(3))
    first = weight.exp()
    second = first.sum()
    assert private.order_of(first.grad_fn) < private.order_of(second.grad_fn)
    (inner, _), *_ = second.grad_fn.next_functions
    (leaf, _), *_ = inner.next_functions
    assert private.leaf_of(leaf) is weight
    assert private.leaf_of(inner) is None
    inner.metadata["of a test"] = 1
    assert first.grad_fn.metadata["of a test"] == 1


def test_writes_scales_and_schedules():
    weight = nn.Parameter(torch.zeros(3))
    before = private.write_count(weight)
    with torch.no_grad():
        weight.add_(1)
    assert private.write_count(weight) == before + 1
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert private.scale_tensor(scaler) is None
    scaler.scale(torch.ones(()))
    assert float(private.scale_tensor(scaler)) == 8.0
    optimizer, seen = torch.optim.SGD([weight], lr=0.1), []

    class Seen(ExponentialLR):
        def step(self, *args):
            seen.append(private.is_being_made(self))
            super().step(*args)

    schedule = Seen(optimizer, 0.9)
    optimizer.step()
    schedule.step()
    assert seen == [True, False]
    assert private.runs_hooks(optimizer)
    assert not private.runs_hooks(type("Own", (), {"step": lambda self: None})())


def test_clips_go_through_what_is_patched():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    for owner, name in private.CLIPS:
        assert callable(vars(owner)[name])
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad.norm() <= 1.0
