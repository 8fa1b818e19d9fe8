"""Translation with attention: a GRU encoder, and a GRU decoder that looks at all its outputs.

At each step the decoder weighs the encoder's outputs by additive attention (Bahdanau et al. 2014),
and what it reads next is the target or its own prediction. In plain PyTorch that is a loop over the
steps. In accumext the step is a module `(x, state, *context) -> (output, state, extras)`, where the
context is what it attends to, and the attention weights come back as extras.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from comparison import compare, wants_quick
from torch import Tensor, nn

import accumext

START, FIRST_WORD = 0, 1
DROPOUT = 0.1  # of the embedded words


class Pairs(NamedTuple):
    source: Tensor  # int64 [S, B]
    target: Tensor  # int64 [T, B]


class AttentionStep(nn.Module):
    """One step of the decoder: attend with the last hidden state, then the GRU."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(size, size)
        self.score = nn.Linear(size, 1)
        self.gru = nn.GRUCell(2 * size, size)

    def forward(
        self,
        x: Tensor,  # [B, H]
        hidden: Tensor,  # [B, H]
        memory: Tensor,  # [B, S, H]
        keys: Tensor,  # [B, S, H]
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.score(torch.tanh(self.query(hidden)[:, None] + keys))
        weights = F.softmax(scores.squeeze(2), dim=1)  # [B, S]
        attended = torch.bmm(weights[:, None], memory).squeeze(1)
        hidden = self.gru(torch.cat([x, attended], dim=1), hidden)
        return hidden, hidden, weights


class Translator(nn.Module):
    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, size)
        self.encoder = nn.GRU(size, size)
        self.key = nn.Linear(size, size)
        self.embedding = nn.Embedding(vocabulary, size)
        self.step = AttentionStep(size)
        self.head = nn.Linear(size, vocabulary)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The decoder's first state, and what it attends to."""
        x = F.dropout(self.source_embedding(source), DROPOUT, self.training)
        outputs, last = self.encoder(x)
        memory = outputs.transpose(0, 1)  # [B, S, H]
        return last[0], memory, self.key(memory)


def plain_loss(model: Translator, pairs: Pairs, feedback: str) -> tuple[Tensor, Tensor]:
    """The loss, and the attention weights [T, B, S]."""
    hidden, memory, keys = model.encode(pairs.source)
    token = torch.full_like(pairs.target[0], START)
    losses, attention = [], []
    for target in pairs.target:
        x = F.dropout(model.embedding(token), DROPOUT, model.training)
        output, hidden, weights = model.step(x, hidden, memory, keys)
        logits = model.head(output)
        losses.append(F.cross_entropy(logits, target))
        attention.append(weights.detach())
        token = target if feedback == "teacher" else logits.detach().argmax(1)
    return torch.stack(losses).mean(), torch.stack(attention)


def accumext_loss(model: Translator, pairs: Pairs, feedback: str) -> tuple[Tensor, Tensor]:
    """The same."""
    hidden, memory, keys = model.encode(pairs.source)
    out = accumext.decode_loss(
        model.embedding,
        model.step,
        model.head,
        pairs.target,
        hidden,
        feedback=feedback,
        start=START,
        context=(memory, keys),
        embedding_dropout=DROPOUT,
    )
    return out.loss, out.extras


def make(
    vocabulary: int, size: int, steps: int, batch: int, dtype: torch.dtype = torch.float32
) -> tuple[Translator, Pairs]:
    """A model, and sentences whose translation is each word's partner, in reverse order."""
    torch.manual_seed(0)
    model = Translator(vocabulary, size).to(dtype)
    source = torch.randint(FIRST_WORD, vocabulary, (steps, batch))
    return model, Pairs(source, (vocabulary - source).flip(0))


def main() -> None:
    quick = wants_quick(__doc__)
    exact = make(vocabulary=50, size=8, steps=7, batch=3, dtype=torch.float64)
    timed = make(50, 8, 7, 3) if quick else make(vocabulary=20_000, size=256, steps=30, batch=32)
    for feedback in ("teacher", "greedy"):
        plain, ours = (partial(way, feedback=feedback) for way in (plain_loss, accumext_loss))
        compare(plain, ours, exact=exact, timed=timed, title=f"feedback: {feedback}")
    torch.manual_seed(0)
    _, attention = accumext_loss(*exact, feedback="greedy")
    print(f"attention weights [T, B, S]: {list(attention.shape)}, of the first word", end=" ")
    print([round(weight, 3) for weight in attention[0, 0].tolist()])


if __name__ == "__main__":
    main()
