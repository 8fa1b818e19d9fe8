"""Modules of `fully_shard` that a call gathers once, in one process; tests/conformance has more."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import accumext


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_inputs_are_cast_as_the_policy_says(one_process):
    """By FSDP itself, also where a slice runs again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    head = fully_shard(nn.Linear(3, 5), mp_policy=policy)
    if not hasattr(head._get_fsdp_state(), "_cast_forward_inputs"):
        pytest.skip("torch 2.10 casts nothing where a forward runs again")
    hidden, dtypes = torch.randn(8, 3, requires_grad=True), set()

    def loss_of(rows):
        logits = head(rows)
        dtypes.add(logits.dtype)
        return logits.float().square().mean()

    accumext.chunked_loss(loss_of, hidden, chunk_size=4).backward()
    assert dtypes == {torch.bfloat16}
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.float32
    assert hidden.grad.any()
    assert head.weight.grad.to_local().any()
