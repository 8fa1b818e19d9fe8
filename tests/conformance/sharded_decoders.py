"""What the ranks of test_sharded_decoders.py do: each scenario takes a rank and their number."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import accumext

WORDS, SIZE, STEPS, BATCH = 23, 6, 5, 3
COLLECTIVES = {
    "c10d::_allgather_base_": "all-gathers",
    "c10d::_reduce_scatter_base_": "reduce-scatters",
}


class Attention(nn.Module):
    """A cell of a user, in float64, with layers of its own."""

    def __init__(self):
        super().__init__()
        self.gate, self.mix = nn.Linear(SIZE, SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x, state, memory):
        mixed = self.mix(torch.cat([x, state], 1)).tanh()
        state = mixed * self.gate(x).sigmoid() + memory.mean(0)
        return state, state


CELLS = {
    "gru": lambda: nn.GRU(SIZE, SIZE, 2),
    "lstm cell": lambda: nn.LSTMCell(SIZE, SIZE),
    "module": Attention,
}


class Parts(nn.Module):
    """A decoder in parts; the same parameters at every call."""

    def __init__(self, kind):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.embedding, self.cell = nn.Embedding(WORDS, SIZE), CELLS[kind]()
            self.head = nn.Linear(SIZE, WORDS)
        self.double()
        self.kind = kind

    def shard(self):
        """Each part by itself; of a user's module also what it is made of."""
        if self.kind == "module":
            fully_shard(self.cell.gate)
        for part in (self.embedding, self.cell, self.head):
            fully_shard(part)
        return self

    def forward(self, targets, memory):
        return self.loss(targets, memory, feedback="greedy")

    def loss(self, targets, memory, **options):
        cell, context = self.cell, ()
        if self.kind == "module":
            context = (memory,)
        return accumext.decode_loss(
            self.embedding, cell, self.head, targets, self.state(memory), context=context, **options
        )

    def state(self, memory):
        if self.kind == "gru":
            return torch.stack([memory[0]] * 2)
        return (memory[0], memory[1]) if self.kind == "lstm cell" else memory[0]


def data(rank, number=0):
    generator = torch.Generator().manual_seed(100 * number + rank)
    targets = torch.randint(WORDS, (STEPS, BATCH), generator=generator)
    memory = torch.randn(2, BATCH, SIZE, generator=generator, dtype=torch.float64)
    return targets, memory


def whole(tensors):
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [t.detach() for t in full]


def gathered(module):
    """Parameters that are not given up."""
    return [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]


def counted(call):
    with torch.profiler.profile() as profile:
        result = call()
    counts = Counter()
    for event in profile.key_averages():
        if event.key in COLLECTIVES:
            counts[COLLECTIVES[event.key]] += event.count
    return result, dict(counts)


def decode(rank, world):
    """Every cell and feedback: loss, gradients of all, collectives."""
    seen = {}
    for kind in CELLS:
        for feedback in ("teacher", "greedy"):
            parts = Parts(kind).shard()
            targets, memory = data(rank)
            memory.requires_grad_()

            def run(parts=parts, targets=targets, memory=memory, feedback=feedback):
                out = parts.loss(targets, memory, feedback=feedback)
                out.loss.backward()
                return out

            out, counts = counted(run)
            seen[kind, feedback] = {
                "loss": out.loss.detach(),
                "tokens": out.tokens,
                "memory": memory.grad,
                "gradients": whole(p.grad for p in parts.parameters()),
                "gathered": gathered(parts),
                "counts": counts,
            }
    return {"seen": seen}


def train(rank, world):
    """Two windows under the wrapper."""
    parts = Parts("gru").shard()
    sgd = torch.optim.SGD(parts.parameters(), lr=0.5)
    opt = accumext.AccumulatingOptimizer(sgd, window=2, max_norm=0.7)
    for number in range(4):
        targets, memory = data(rank, number)
        opt.backward(parts.loss(targets, memory, feedback="greedy").loss)
        opt.step()
    return {"parameters": whole(parts.parameters())}


def train_once_per_window(rank, world):
    parts = Parts("gru").shard()
    sgd = torch.optim.SGD(parts.parameters(), lr=0.5)
    opt = accumext.AccumulatingOptimizer(sgd, window=2, max_norm=0.7, synchronize="window")
    for number in range(4):
        targets, memory = data(rank, number)
        with opt.micro_batch(parts):
            opt.backward(parts.loss(targets, memory, feedback="greedy").loss)
        opt.step()
    return {"parameters": whole(parts.parameters())}


class Whole(nn.Module):
    """A decoder whose forward pass is decode_loss: sharded as one, or also its parts."""

    def __init__(self, kind):
        super().__init__()
        self.parts = Parts(kind)

    def forward(self, targets, memory):
        return self.parts.loss(targets, memory, feedback="greedy").loss


def inside_a_sharded_parent(rank, world):
    seen = {}
    for kind in CELLS:
        for both in (False, True):
            model = Whole(kind)
            if both:
                model.parts.shard()
            fully_shard(model)
            targets, memory = data(rank)
            loss = model(targets, memory)
            loss.backward()
            gradients = whole(p.grad for p in model.parameters())
            seen[kind, both] = {"loss": loss.detach(), "gradients": gradients}
    return {"seen": seen}


def generated(rank, world):
    """Tokens of every kind, and what stays gathered then."""
    seen = {}
    for kind in CELLS:
        parts = Parts(kind).shard()
        _, memory = data(0)
        context = (memory,) if kind == "module" else ()
        for search in ("greedy", "beam"):
            out, counts = counted(
                lambda parts=parts, memory=memory, context=context, search=search: (
                    accumext.generate(
                        parts.embedding, parts.cell, parts.head, parts.state(memory),
                        max_length=6, search=search, context=context, eos=3,
                    )
                )
            )  # fmt: skip
            seen[kind, search] = {
                "tokens": out.tokens,
                "gathered": gathered(parts),
                "counts": counts,
            }
    return {"seen": seen}


def failing(rank, world):
    """A cell that raises; then all goes on."""
    parts = Parts("gru").shard()
    targets, memory = data(rank)
    calls = []

    def cell(x, state):
        calls.append(1)
        output, state = parts.cell(x[None], state)
        if len(calls) == 3:
            raise KeyError
        return output[0], state

    with_function = {}
    try:
        accumext.decode_loss(
            parts.embedding, cell, parts.head, targets, parts.state(memory), feedback="teacher",
            batch_dim=1,
        )  # fmt: skip
    except KeyError:
        with_function["gathered"] = gathered(parts)
    errors = []
    try:
        parts.loss(targets, memory, feedback="wrong")
    except ValueError as error:
        errors.append(str(error))
    still = gathered(parts)
    out = accumext.decode_loss(
        parts.embedding, cell, parts.head, targets, parts.state(memory), feedback="teacher",
        batch_dim=1,
    )  # fmt: skip
    out.loss.backward()
    gradients = whole(p.grad for p in parts.parameters())
    return {**with_function, "still": still, "errors": errors, "gradients": gradients}


def tied(rank, world):
    """One weight for embedding and head, which `fully_shard` is given together."""
    parts = Parts("gru")
    parts.head.weight = parts.embedding.weight
    fully_shard(parts.cell)
    fully_shard([parts.embedding, parts.head])
    fully_shard(parts)
    targets, memory = data(rank)
    out = parts(targets, memory)
    out.loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in parts.named_parameters()}
    return {"loss": out.loss.detach(), "gradients": gradients}


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.body, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, WORDS)
        self.double()

    def forward(self, x):
        return self.body(x).tanh()


def sliced(rank, world, together):
    """chunked_loss over a head: by itself, or in a sharded model whose forward it is not in."""
    model = Trunk()
    fully_shard(model.head)
    if together:
        fully_shard(model)
    else:
        fully_shard(model.body)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(32, SIZE, generator=generator, dtype=torch.float64)
    targets = torch.randint(WORDS, (32,), generator=generator)

    def loss_of(hidden, target):
        return F.cross_entropy(model.head(hidden), target)

    hidden = model(x)

    def run():
        loss = accumext.chunked_loss(loss_of, hidden, targets, chunks=16, reduction="sum")
        loss.backward()
        return loss

    loss, counts = counted(run)
    gradients = whole(p.grad for p in model.parameters())
    return {"loss": loss.detach(), "gradients": gradients, "counts": counts}


def sliced_head(rank, world):
    return sliced(rank, world, together=False)


def sliced_head_of_a_model(rank, world):
    return sliced(rank, world, together=True)


def rolled_out(rank, world):
    """`rollout` with a sharded cell and head, which its steps call."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        cell, head = nn.GRUCell(2, SIZE).double(), nn.Linear(SIZE, 2).double()
    fully_shard(cell)
    fully_shard(head)
    generator = torch.Generator().manual_seed(rank)
    series = torch.randn(9, BATCH, 2, generator=generator, dtype=torch.float64)

    def step(x, h):
        h = cell(x, h)
        return x + head(h), h

    def run():
        out = accumext.rollout(
            step, series.new_zeros(BATCH, SIZE), 9, start=series[0],
            loss=lambda x, t: F.mse_loss(x, series[t]),
        )  # fmt: skip
        out.loss.backward()
        return out.loss

    loss, counts = counted(run)
    gradients = whole(p.grad for p in [*cell.parameters(), *head.parameters()])
    return {"loss": loss.detach(), "gradients": gradients, "counts": counts}


SCENARIOS = (
    decode,
    train,
    train_once_per_window,
    inside_a_sharded_parent,
    generated,
    failing,
    tied,
    sliced_head,
    sliced_head_of_a_model,
    rolled_out,
)
