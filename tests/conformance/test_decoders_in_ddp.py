"""Decoders inside DistributedDataParallel with `window` above 1, 2 and 3 processes."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.optimizer_oracle import assert_close
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 2
STEPS, ROWS, VOCABULARY, SIZE = 5, 12, 11, 6  # rows of a micro-batch of all ranks together
IGNORED = -100
MAX_NORM = 0.05  # clips every window


class Decoder(nn.Module):
    """A teacher-forced GRU. DDP's forward is its loss, or a step of it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.head = nn.Linear(SIZE, VOCABULARY)
        self.double()

    def forward(self, how, *args, **options):
        return getattr(self, how)(*args, **options)

    def step(self, token, state):
        state = self.cell(self.embedding(token), state)
        return self.head(state), state

    def native(self, targets, inputs):
        return accumext.decode_loss(
            self.embedding,
            self.cell,
            self.head,
            targets,
            feedback="teacher",
            inputs=inputs,
            ignore_index=IGNORED,
        ).loss

    def sliced(self, targets, inputs):
        def part(states, slice_targets):
            logits = self.head(states).flatten(0, 1)
            return F.cross_entropy(logits, slice_targets.flatten(), reduction="sum")

        state, states = torch.zeros(targets.shape[1], SIZE, dtype=torch.float64), []
        for tokens in inputs:
            state = self.cell(self.embedding(tokens), state)
            states.append(state)
        total = accumext.chunked_loss(part, torch.stack(states), targets, chunks=3, reduction="sum")
        return total / (targets != IGNORED).sum()

    def rolled(self, targets, inputs, **options):
        def loss(logits, t):
            return F.cross_entropy(logits, targets[t], reduction="sum")

        total = accumext.rollout(
            self.step,
            torch.zeros(targets.shape[1], SIZE, dtype=torch.float64),
            STEPS,
            loss=loss,
            start=inputs[0],
            feed=lambda logits, t: inputs[t + 1],
            checkpoint=2,
            reduction="sum",
            **options,
        ).loss
        return total / (targets != IGNORED).sum()

    def by_the_book(self, targets, inputs):
        """The loss that all others are."""
        state, losses = torch.zeros(targets.shape[1], SIZE, dtype=torch.float64), []
        for token, target in zip(inputs, targets, strict=True):
            logits, state = self.step(token, state)
            losses.append(F.cross_entropy(logits, target, reduction="sum"))
        return torch.stack(losses).sum() / (targets != IGNORED).sum()


def make():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Decoder()


def micro_batches():
    """Targets and inputs [T, B] of all ranks, with more tokens on some rows than on others."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(2 * WINDOW):
        targets = torch.randint(VOCABULARY, (STEPS, ROWS), generator=generator)
        inputs = torch.randint(VOCABULARY, (STEPS, ROWS), generator=generator)
        ends = torch.randint(1, STEPS + 1, (ROWS,), generator=generator)
        targets[torch.arange(STEPS)[:, None] >= ends] = IGNORED
        yield targets, inputs


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(rank, world, loss_of, **kwargs):
    """`loss_of(model, opt, targets, inputs)` runs the backward passes of a micro-batch."""
    model = DistributedDataParallel(make())
    opt = AccumulatingOptimizer(sgd(model), window=WINDOW, max_norm=MAX_NORM, **kwargs)
    for targets, inputs in micro_batches():
        mine = slice(rank, None, world)
        with opt.micro_batch(model):
            loss_of(model, opt, targets[:, mine], inputs[:, mine])
        opt.step()
    return {"parameters": [p.detach() for p in model.parameters()], "stats": opt.stats()}


def one_backward(how):
    def run(model, opt, targets, inputs):
        opt.backward(model(how, targets, inputs), weight=(targets != IGNORED).sum())

    return run


def backward_per_step(model, opt, targets, inputs):
    count = (targets != IGNORED).sum()
    accumext.tbptt(
        lambda token, state: model("step", token, state),
        targets,
        torch.zeros(targets.shape[1], SIZE, dtype=torch.float64),
        criterion=lambda logits, target: F.cross_entropy(logits, target, reduction="sum") / count,
        inputs=inputs,
        feedback="teacher",
        k1=2,
        k2=STEPS,
        reduction="sum",
        backward=lambda loss: opt.backward(loss, weight=count),
    )


def decode_loss(rank, world):
    return train(rank, world, one_backward("native"))


def decode_loss_while_backward_runs(rank, world):
    return train(rank, world, one_backward("native"), reduce_in_backward=True)


def decode_loss_straight_into_main_grads(rank, world):
    return train(rank, world, one_backward("native"), accumulate_in_backward=True)


def decode_loss_straight_while_backward_runs(rank, world):
    options = {"accumulate_in_backward": True, "reduce_in_backward": True}
    return train(rank, world, one_backward("native"), **options)


def chunked_loss(rank, world):
    return train(rank, world, one_backward("sliced"))


def chunked_loss_while_backward_runs(rank, world):
    return train(rank, world, one_backward("sliced"), reduce_in_backward=True)


def rollout(rank, world):
    return train(rank, world, one_backward("rolled"))


def rollout_while_backward_runs(rank, world):
    return train(rank, world, one_backward("rolled"), reduce_in_backward=True)


def all_reduces_of_a_rollout(rank, world):
    """Count the sends of each of DDP's buckets while the loss of one rollout flows back."""
    model = DistributedDataParallel(make())
    sent = []

    def hook(state, bucket):
        sent.append(bucket.index())
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    model.register_comm_hook(None, hook)
    targets, inputs = next(micro_batches())
    mine = slice(rank, None, world)
    counts = []
    for options in ({}, {"k1": 1, "k2": 3}):
        sent.clear()
        model("rolled", targets[:, mine], inputs[:, mine], **options).backward()
        counts.append(sorted(sent) == list(range(len(sent))) and len(sent))
    return {"counts": counts}


def tbptt(rank, world):
    return train(rank, world, backward_per_step)


SCENARIOS = (
    decode_loss,
    decode_loss_while_backward_runs,
    decode_loss_straight_into_main_grads,
    decode_loss_straight_while_backward_runs,
    chunked_loss,
    chunked_loss_while_backward_runs,
    rollout,
    rollout_while_backward_runs,
    tbptt,
)


@pytest.fixture(scope="module", params=[2, ranks.THREE], ids=lambda world: f"{world}-processes")
def seen(request, tmp_path_factory):
    return ranks.run_on(
        request.param, (*SCENARIOS, all_reduces_of_a_rollout), "decoders", tmp_path_factory
    )


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_decoders_in_ddp(seen, scenario):
    """the decoder's functions and `chunked_loss` in DDP equal plain autograd on the joined batch"""
    model = make()
    optimizer = sgd(model)
    joined = list(micro_batches())
    for start in range(0, len(joined), WINDOW):
        window = joined[start : start + WINDOW]
        optimizer.zero_grad()
        total = sum((targets != IGNORED).sum() for targets, _ in window)
        for targets, inputs in window:
            share = (targets != IGNORED).sum().double() / total
            (model.by_the_book(targets, inputs) * share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], [p.detach() for p in model.parameters()])
    assert first["stats"]["clip_coef"] < 1.0


def test_a_rollout_in_ddp_reduces_once(seen):
    """a `rollout` in DDP reduces every bucket of gradients once"""
    for rank in seen:
        assert rank["all_reduces_of_a_rollout"]["counts"] == [1, 1]
