"""A word-level language model over one long text, by truncated backpropagation through time.

The text is cut into chunks. The state after a chunk, detached, is the state before the next one,
and gradients flow back through one chunk. Dropout is before, between and behind the two LSTM
layers, and the output layer shares the weight of the embedding. Plain PyTorch has one call of the
LSTM and one of the output layer per chunk, and nothing waits for a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from comparison import compare, wants_quick
from torch import Tensor, nn

import accumext

MAX_NORM = 1.0  # of the gradient of a chunk
LEARNING_RATE = 3e-3

State = tuple[Tensor, Tensor]  # h and c: [2, B, H]


class Chunk(NamedTuple):
    inputs: Tensor  # int64 [T, B]
    targets: Tensor  # int64 [T, B]
    state: State | None = None  # after the chunk before


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, size: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.lstm = nn.LSTM(size, size, 2, dropout=dropout)
        self.head = nn.Linear(size, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.head.weight = self.embedding.weight
        nn.init.zeros_(self.head.bias)
        self.dropout = dropout


def plain_loss(model: LanguageModel, chunk: Chunk) -> tuple[Tensor, State]:
    """The mean over the words, and the last state."""
    x = F.dropout(model.embedding(chunk.inputs), model.dropout, model.training)
    outputs, state = model.lstm(x, chunk.state)
    logits = model.head(F.dropout(outputs, model.dropout, model.training))
    return F.cross_entropy(logits.flatten(0, 1), chunk.targets.flatten()), state


def accumext_loss(model: LanguageModel, chunk: Chunk) -> tuple[Tensor, State]:
    """The same."""
    out = accumext.decode_loss(
        model.embedding,
        model.lstm,
        model.head,
        chunk.targets,
        chunk.state,
        feedback="teacher",
        inputs=chunk.inputs,
        embedding_dropout=model.dropout,
        output_dropout=model.dropout,
    )
    return out.loss, out.state


Way = Callable[[LanguageModel, Chunk], tuple[Tensor, State]]


def train(model: LanguageModel, text: Tensor, length: int, way: Way) -> float:
    """One epoch; the perplexity over its last quarter."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    state, losses = None, []
    for chunk in chunks(text, length):
        loss, (h, c) = way(model, chunk._replace(state=state))
        state = h.detach(), c.detach()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, len(losses) // 4) :]
    return math.exp(sum(last) / len(last))


def chunks(text: Tensor, length: int) -> Iterator[Chunk]:
    """`length` words at a time, and the words that follow them."""
    for begin in range(0, len(text) - length, length):
        end = begin + length
        yield Chunk(text[begin:end], text[begin + 1 : end + 1])


def make_text(vocabulary: int, words: int, batch: int) -> Tensor:
    """Words of Zipf's frequencies in `batch` columns; each second one is what its predecessor asks
    for, so that there is something to learn."""
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    text = torch.multinomial(frequencies, words * batch, replacement=True).view(words, batch)
    follower = text.flatten()[torch.randint(text.numel(), (vocabulary,))]
    for step in range(1, words):
        asked = torch.rand(batch) < 0.5
        text[step] = torch.where(asked, follower[text[step - 1]], text[step])
    return text


def make(
    vocabulary: int, size: int, length: int, batch: int, dropout: float, dtype: torch.dtype
) -> tuple[LanguageModel, Chunk]:
    """A model and the second chunk of a text, with the state that the first one left."""
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, size, dropout).to(dtype)
    first, second = chunks(make_text(vocabulary, 2 * length + 1, batch), length)
    with torch.no_grad():
        return model, second._replace(state=plain_loss(model, first)[1])


def main() -> None:
    quick = wants_quick(__doc__)
    # The LSTM of plain PyTorch drops a layer at a time, that of accumext a step at a time: the
    # elements differ, so the gradients are compared without dropout.
    exact = make(50, 8, 9, 4, dropout=0.0, dtype=torch.float64)
    sizes = (50, 8, 9, 4) if quick else (10_000, 256, 35, 20)
    compare(plain_loss, accumext_loss, exact=exact, timed=make(*sizes, 0.2, torch.float32))

    vocabulary, size, length, batch = sizes
    text = make_text(vocabulary, (3 if quick else 16) * length + 1, batch)
    for name, way in (("plain PyTorch", plain_loss), ("accumext", accumext_loss)):
        torch.manual_seed(0)
        perplexity = train(LanguageModel(vocabulary, size, 0.2), text, length, way)
        print(f"{name}: perplexity {perplexity:.0f} after an epoch")


if __name__ == "__main__":
    main()
