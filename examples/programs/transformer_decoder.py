"""A small Transformer decoder that reads its own predictions, with a cache of keys and values.

Where all inputs are known, a Transformer runs over a sequence at once. Fed its own predictions, it
goes step by step, and each step attends to the keys and values of the steps before, which it keeps.
In plain PyTorch that is a loop. In accumext the cache is the state: it grows by one entry in each
step, and sentences of different lengths may end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from comparison import compare, wants_quick
from torch import Tensor, nn

import accumext

START, FIRST_WORD, LAYERS, HEADS = 0, 1, 2, 4

Cache = tuple[Tensor, Tensor]  # keys and values of a layer, [B, steps so far, H]


class Batch(NamedTuple):
    prompt: Tensor  # [B, H], such as an encoding of an image
    targets: Tensor  # int64 [T, B]
    lengths: Tensor  # int64 [B]


class Layer(nn.Module):
    """Attention to the steps so far, then a perceptron, each of a normalised input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.project, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.perceptron = nn.Sequential(
            nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)
        )

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        query, *new = self.project(self.norms[0](x))[:, None].chunk(3, dim=2)
        keys, values = (torch.cat(pair, dim=1) for pair in zip(cache, new))
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (query, keys, values))
        attended = F.scaled_dot_product_attention(q, k, v)  # [B, heads, 1, H / heads]
        x = x + self.out(attended.flatten(1))
        return x + self.perceptron(self.norms[1](x)), (keys, values)


class Step(nn.Module):
    """All layers for the next word."""

    def __init__(self, size: int, longest: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(longest, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor, caches: list[Cache]) -> tuple[Tensor, list[Cache]]:
        x = x + self.positions.weight[caches[0][0].shape[1]]
        grown = []
        for layer, cache in zip(self.layers, caches):
            x, cache = layer(x, cache)
            grown.append(cache)
        return self.norm(x), grown


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, size: int, longest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.step = Step(size, longest + 1)
        self.head = nn.Linear(size, vocabulary)

    def begin(self, prompt: Tensor) -> list[Cache]:
        """The caches behind the prompt, which is read before the first word."""
        empty = prompt.new_zeros(len(prompt), 0, prompt.shape[1])
        return self.step(prompt, [(empty, empty)] * LAYERS)[1]


def plain_loss(model: Decoder, batch: Batch) -> Tensor:
    caches, total = model.begin(batch.prompt), 0.0
    token = torch.full_like(batch.targets[0], START)
    for t, target in enumerate(batch.targets):
        output, caches = model.step(model.embedding(token), caches)
        logits = model.head(output)
        wanted = target.where(t < batch.lengths, -100)
        total = total + F.cross_entropy(logits, wanted, reduction="sum")
        token = logits.detach().argmax(1)
    return total / batch.lengths.sum()


def accumext_loss(model: Decoder, batch: Batch) -> Tensor:
    return accumext.decode_loss(
        model.embedding,
        model.step,
        model.head,
        batch.targets,
        model.begin(batch.prompt),
        feedback="greedy",
        start=START,
        lengths=batch.lengths,
    ).loss


def make(
    vocabulary: int, size: int, steps: int, batch: int, dtype: torch.dtype = torch.float32
) -> tuple[Decoder, Batch]:
    torch.manual_seed(0)
    model = Decoder(vocabulary, size, steps).to(dtype)
    lengths = torch.randint(1, steps + 1, (batch,))
    lengths[0] = steps
    targets = torch.randint(FIRST_WORD, vocabulary, (steps, batch))
    return model, Batch(torch.randn(batch, size, dtype=dtype), targets, lengths)


def main() -> None:
    quick = wants_quick(__doc__)
    exact = make(vocabulary=50, size=8, steps=7, batch=3, dtype=torch.float64)
    timed = make(50, 8, 7, 3) if quick else make(vocabulary=20_000, size=256, steps=40, batch=32)
    compare(plain_loss, accumext_loss, exact=exact, timed=timed)
    model, batch = timed
    modules = (model.embedding, model.step, model.head)
    with torch.no_grad():
        found = accumext.generate(
            *modules, model.begin(batch.prompt), max_length=5, start=START, search="beam", beams=3
        )
    print(f"the best of 3 hypotheses: {found.tokens[:, 0, 0].tolist()}")


if __name__ == "__main__":
    main()
