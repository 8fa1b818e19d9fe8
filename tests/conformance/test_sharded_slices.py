"""Losses in slices and step by step over modules of `fully_shard` (FSDP2), 2 and 3 processes."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.nn.functional as F
from sharded_modules import (
    SIZE,
    STEPS,
    VOCABULARY,
    collectives,
    full,
    gradients,
    is_resharded,
    mean_loss,
    micro_batches,
    sharded,
)
from support.optimizer_oracle import assert_close
from torch import nn
from torch.distributed.fsdp import fully_shard

import accumext

pytestmark = pytest.mark.process

CHUNKS = 16


def chunked(rank, world):
    """A sharded head in slices, with the graph of a trunk before it and without."""
    seen = {}
    for name, options in (("default", {}), ("reshards", {"reshard_after_forward": True})):
        for detached in (False, True):
            trunk, head = trunk_and_head()
            fully_shard(trunk)
            fully_shard(head, **options)
            x, y = rows_of(rank)
            features, early = trunk(x).tanh(), []
            if detached:
                features = features.detach()
            else:
                features.register_hook(
                    lambda g, head=head, early=early: early.append(is_resharded(head))
                )

            def head_loss(h, t, head=head):
                return F.cross_entropy(head(h), t)

            with collectives() as begun:
                loss = accumext.chunked_loss(head_loss, features, y, chunks=CHUNKS)
                after_forward = is_resharded(head)
                loss.backward()
            parameters = [*head.parameters(), *([] if detached else trunk.parameters())]
            seen[name, detached] = {
                "loss": loss.detach(),
                "collectives": dict(begun),
                "resharded": [after_forward, *early, is_resharded(head)],
                "grads": full(p.grad for p in parameters),
            }
    return {"cases": seen}


def trunk_and_head():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(4, SIZE).double(), nn.Linear(SIZE, VOCABULARY).double()


def rows_of(rank):
    generator = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(4 * CHUNKS, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(VOCABULARY, (len(x),), generator=generator)


def whole_call(model, how, features, targets):
    """The loss by `rollout`, or the gradients by `tbptt`, of a step whose modules are sharded."""

    def step(token, state):
        hidden, state = model.step(model.embedding(token), state)
        return model.head(hidden), state

    state, start = model.state(features), torch.zeros(targets.shape[1], dtype=torch.int64)
    if how == "rollout":
        accumext.rollout(
            step,
            state,
            STEPS,
            loss=lambda logits, t: F.cross_entropy(logits, targets[t]),
            start=start,
            feed=lambda logits, t: logits.detach().argmax(1),
            checkpoint=2,
        ).loss.backward()
    else:
        accumext.tbptt(step, targets, state, criterion=F.cross_entropy, k1=STEPS, feedback="greedy")


def any_step(rank, world):
    seen = {}
    for how in ("rollout", "tbptt"):
        for kind in ("gru", "lstm_cell", "module"):
            model, mine = sharded(kind), slice(rank, None, world)
            features, targets = next(micro_batches())
            with collectives() as begun:
                whole_call(model, how, features[mine], targets[:, mine])
            grads = full(p.grad for p in model.parameters())
            resharded = is_resharded(*model.parts())
            seen[how, kind] = {
                "grads": grads,
                "collectives": dict(begun),
                "resharded": resharded,
            }
    return {"cases": seen}


def nested(rank, world):
    """`decode_loss` inside slices of `chunked_loss`, of which each is run again."""
    model, mine = sharded("module"), slice(rank, None, world)
    features, targets = next(micro_batches())

    def part(features, targets):
        return model(features, targets.t(), "greedy")

    with collectives() as begun:
        accumext.chunked_loss(part, features[mine], targets[:, mine].t(), chunks=2).backward()
    grads = full(p.grad for p in model.parameters())
    return {"grads": grads, "collectives": dict(begun), "resharded": is_resharded(*model.parts())}


SCENARIOS = (chunked, nested, any_step)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}-processes")
def seen(request, tmp_path_factory):
    return ranks.run_on(request.param, SCENARIOS, "sharded-slices", tmp_path_factory)


@pytest.mark.parametrize("detached", [False, True], ids=["behind_a_trunk", "alone"])
@pytest.mark.parametrize("name", ["default", "reshards"])
def test_chunked_loss_of_a_sharded_head(seen, name, detached):
    """`chunked_loss` gathers a sharded head once forward and once backward, and reduces it once"""
    trunk, head = trunk_and_head()
    x, y = (torch.cat(parts) for parts in zip(*map(rows_of, range(len(seen))), strict=True))
    loss = F.cross_entropy(head(trunk(x).tanh()), y)
    loss.backward()
    parameters = [*head.parameters(), *([] if detached else trunk.parameters())]
    assert_close([mean_loss(seen, "chunked", (name, detached))], [loss.detach()])
    for rank in seen:
        case = rank["chunked"]["cases"][name, detached]
        assert_close(case["grads"], [p.grad for p in parameters])
        reduced = 1 if detached else 2  # the trunk's, too, which is gathered before
        assert case["collectives"] == {"allgather": 2, "reduce_scatter": reduced}
        assert all(case["resharded"])


@pytest.mark.parametrize("kind", ["gru", "lstm_cell", "module"])
@pytest.mark.parametrize("how", ["rollout", "tbptt"])
def test_any_step_with_sharded_modules(seen, how, kind):
    """`rollout` and `tbptt` of a step whose modules are sharded equal one process"""
    _, grads = gradients(kind, "greedy")
    for rank in seen:
        case = rank["any_step"]["cases"][how, kind]
        assert_close(case["grads"], grads)
        assert case["collectives"] == {"allgather": 3 * 2 + 1, "reduce_scatter": 4}
        assert case["resharded"]


def test_calls_inside_of_a_call(seen):
    """`decode_loss` of sharded modules inside `chunked_loss` gathers and reduces once in all"""
    for rank in seen:
        assert_close(rank["nested"]["grads"], gradients("module", "greedy")[1])
        assert rank["nested"]["collectives"]["reduce_scatter"] == 4
        assert rank["nested"]["resharded"]
