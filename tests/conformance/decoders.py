"""Decoders for several processes, their uses, and what processes see of their shards."""

import functools
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shares import whole
from support.decode_oracle import plain_losses
from support.optimizer_oracle import ByHand, assert_close, parameters_of, sgd
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import accumext
from accumext.tensors import torch_private_distributed as private

STEPS, ROWS, VOCABULARY, SIZE = 5, 12, 11, 6  # rows of a micro-batch of all ranks together
# Embedding, cell and head: a call gathers each once forward and once backward, and reduces it once.
# The encoder, which FSDP takes for a root, is gathered forward only.
ONCE = {"allgather": 3 * 2 + 1, "reduce_scatter": 3 + 1}


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
        """Return the argument `cell`."""

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
        if self.kind == "module":
            return state
        return (state[0] if self.kind == "lstm_cell" else state), state

    def by_the_book(self, features, targets, feedback):
        """Return the loss by plain autograd, with which all others are compared."""
        losses = plain_losses(step_of(self), targets, self.state(features), feedback == "greedy")
        return torch.stack([*losses]).mean()


# Uses of a decoder: each returns a loss, and reads the argmax of the step before


def by_decode_loss(model, features, targets):
    return model(features, targets, "greedy")


def in_slices(model, features, targets):
    """Return the loss by `chunked_loss`, which runs each slice again."""

    def part(features, targets):
        return model(features, targets.t(), "greedy")

    return accumext.chunked_loss(part, features, targets.t(), chunks=2)


def step_of(model):
    def step(token, state):
        hidden, state = model.step(model.embedding(token), state)
        return model.head(hidden), state

    return step


def by_rollout(model, features, targets, **options):
    return accumext.rollout(
        step_of(model),
        model.state(features),
        STEPS,
        loss=lambda logits, t: F.cross_entropy(logits, targets[t]),
        start=torch.zeros(targets.shape[1], dtype=torch.int64),
        feed=lambda logits, t: logits.detach().argmax(1),
        checkpoint=2,
        **options,
    ).loss


def make(kind):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Decoder(kind)


def one_by_one(model, parts=None, **options):
    """Shard every part by itself: each is a root of its own."""
    for part in model.parts() if parts is None else parts:
        fully_shard(part, **options)
    return model


def sharded(kind):
    return one_by_one(make(kind))


def micro_batches(rank=0, world=1):
    """Make four micro-batches: those of all ranks together, or the rows of one rank."""
    generator, mine = torch.Generator().manual_seed(4), slice(rank, None, world)
    for _ in range(4):
        features = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
        targets = torch.randint(VOCABULARY, (STEPS, ROWS), generator=generator)
        yield features[mine], targets[:, mine]


def records(*modules):
    """Return what `fully_shard` keeps of the parameters of modules."""
    return [record for module in modules for record, _ in private._fsdp_parameters(module)]


def is_resharded(*modules):
    """Tell whether all parameters are shards and the memory of the whole ones is freed."""
    wholes = [record._unsharded_param for record in records(*modules)]
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


@functools.cache
def gradients(kind, feedback, batches=1, dtype=torch.float64):
    """Return the loss and the gradients of one process, added over micro-batches."""
    model = make(kind).to(dtype)
    for features, targets in list(micro_batches())[:batches]:
        loss = model.by_the_book(features.to(dtype), targets, feedback)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def momentum(parameters):
    return sgd(parameters, lr=0.5, momentum=0.9)


def by_hand(kind, window, **options):
    """Return the parameters of one process after windows of these micro-batches."""
    model = make(kind)
    plain = ByHand(model.parameters(), momentum, **options)
    for number, batch in enumerate(micro_batches(), 1):
        plain.add(model.by_the_book(*batch, "greedy"))
        if number % window == 0:
            plain.step()
    return parameters_of(model)


def mean_over_ranks(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def assert_gradients(model, expected):
    """Compare the gradients, whole ones of shards, and return them."""
    grads = whole(p.grad for p in model.parameters())
    assert_close(grads, expected)
    return grads
