"""Decoders whose parts `fully_shard` wraps one by one, and what their processes see of them."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import accumext

WINDOW = 2
STEPS, ROWS, VOCABULARY, SIZE = 5, 12, 11, 6  # rows of a micro-batch of all ranks together


class CallableCell(nn.Module):
    """A cell of the user's own: its forward is called at every step."""

    def __init__(self):
        super().__init__()
        self.inner = nn.GRUCell(SIZE, SIZE)
        self.scale = nn.Parameter(torch.full((SIZE,), 0.9))

    def forward(self, x, state):
        state = self.inner(x, state) * self.scale
        return state, state


CELLS = {
    "gru": lambda: nn.GRU(SIZE, SIZE, num_layers=2),
    "lstm_cell": lambda: nn.LSTMCell(SIZE, SIZE),
    "module": CallableCell,
    "function": lambda: nn.GRUCell(SIZE, SIZE),
}
FEEDBACK = ("teacher", "greedy")


class Decoder(nn.Module):
    """An encoder of the initial state, and a decoder whose forward is its loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.encoder = nn.Linear(3, SIZE)
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.cell = CELLS[kind]()
        self.head = nn.Linear(SIZE, VOCABULARY)
        self.double()

    def note_shards(self, gradient):
        """Note whether the decoder was reduced and sharded before the encoder's backward pass."""
        decoder = self.parts()[1:]
        if all(is_sharded(part) for part in decoder):
            reduced = all(p.grad is not None for part in decoder for p in part.parameters())
            self.reduced_early = reduced and is_resharded(*decoder)

    def parts(self):
        return [self.encoder, self.embedding, self.cell, self.head]

    def state(self, features):
        state = self.encoder(features).tanh()
        if state.requires_grad:
            state.register_hook(self.note_shards)
        if self.kind == "gru":
            return state.expand(2, -1, -1).contiguous()
        return (state, state * 0.5) if self.kind == "lstm_cell" else state

    def called(self):
        """The argument `cell`."""

        def cell(x, state):
            state = self.cell(x, state)
            return state, state

        return cell if self.kind == "function" else self.cell

    def forward(self, features, targets, feedback, **options):
        parts, state = (self.embedding, self.called(), self.head), self.state(features)
        return accumext.decode_loss(*parts, targets, state, feedback=feedback, **options).loss

    def step(self, x, state):
        if self.kind == "gru":
            output, state = self.cell(x[None], state)
            return output[0], state
        state = self.cell(x, state)
        return (state[0] if self.kind in ("lstm_cell", "module") else state), (
            state[1] if self.kind == "module" else state
        )

    def by_the_book(self, features, targets, feedback):
        """The loss that all others are, by plain autograd."""
        state, losses = self.state(features), []
        token = torch.zeros(targets.shape[1], dtype=torch.int64)
        for target in targets:
            hidden, state = self.step(self.embedding(token), state)
            logits = self.head(hidden)
            losses.append(F.cross_entropy(logits, target))
            token = target if feedback == "teacher" else logits.detach().argmax(1)
        return torch.stack(losses).mean()


def make(kind):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Decoder(kind)


def tied():
    model = make("gru")
    model.head.weight = model.embedding.weight
    return model


def sharded(kind, **options):
    """Every part by itself: each is a root of its own."""
    model = make(kind)
    for part in model.parts():
        fully_shard(part, **options)
    return model


def micro_batches():
    generator = torch.Generator().manual_seed(4)
    for _ in range(2 * WINDOW):
        features = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
        yield features, torch.randint(VOCABULARY, (STEPS, ROWS), generator=generator)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def is_resharded(*modules):
    """Tell whether all parameters are shards and the memory of the whole ones is freed."""
    states = [m._get_fsdp_state() for part in modules for m in part.modules() if is_sharded(m)]
    wholes = [
        p._unsharded_param for s in states for g in s._fsdp_param_groups for p in g.fsdp_params
    ]
    freed = all(p.untyped_storage().size() == 0 for p in wholes)
    return freed and all(isinstance(p, DTensor) for part in modules for p in part.parameters())


def is_sharded(module):
    return isinstance(module, FSDPModule)


@contextmanager
def collectives():
    """Count the collectives of each kind that are begun meanwhile."""
    seen = Counter()
    with torch.profiler.profile(acc_events=True) as profile:
        yield seen
    for event in profile.events():
        for kind in ("allgather", "reduce_scatter"):
            if event.name.startswith(f"c10d::_{kind}"):
                seen[kind] += 1


def full(tensors):
    return [t.full_tensor().detach() for t in tensors]


@functools.cache
def gradients(kind, feedback, batches=1, dtype=torch.float64):
    """The loss and the gradients of one process, added over micro-batches."""
    model = make(kind).to(dtype)
    for features, targets in list(micro_batches())[:batches]:
        loss = model.by_the_book(features.to(dtype), targets, feedback)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@functools.cache
def trained(kind, feedback):
    """The parameters of one process after all windows."""
    model = make(kind)
    optimizer = sgd(model)
    joined = list(micro_batches())
    for start in range(0, len(joined), WINDOW):
        optimizer.zero_grad()
        for features, targets in joined[start : start + WINDOW]:
            (model.by_the_book(features, targets, feedback) / WINDOW).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def mean_loss(seen, scenario, case):
    return torch.stack([rank[scenario]["cases"][case]["loss"] for rank in seen]).mean()
