"""The demo's model: an encoder of the preceding words, whose last state starts the decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from accumext._checks import FeedbackWord
from accumext.decoder import DecodeOutput, decode_loss
from accumext.generation import generate

TEMPERATURE, TOP_P = 0.8, 0.7  # of samples: neither the loops of argmax nor far-fetched words
_IMPOSSIBLE = -1e4  # a logit


class Batch(NamedTuple):
    """Stretches of text, as columns."""

    context: Tensor  # int64 [C, B]: all but the last word are encoded, the last is fed first
    targets: Tensor  # int64 [T, B]

    def to(self, device: torch.device) -> Batch:
        """The same words on another device."""
        return Batch(self.context.to(device), self.targets.to(device))


class WordModel(nn.Module):
    """A GRU encoder and a GRU decoder; one [V, H] matrix embeds the words and scores them.

    The output bias starts as the log of the unigram frequencies, so that training starts near the
    unigram loss.
    """

    def __init__(self, unigram: Tensor, hidden: int) -> None:  # [V]
        super().__init__()
        self.embedding = nn.Embedding(len(unigram), hidden)
        self.encoder = nn.GRU(hidden, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Linear(hidden, len(unigram))
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.head.bias.copy_(unigram.log())

    def encode(self, batch: Batch) -> Tensor:
        """The decoder's first state, [B, H]."""
        _, state = self.encoder(self.embedding(batch.context[:-1]))
        first: Tensor = state[0]
        return first

    def decode(
        self, batch: Batch, feedback: FeedbackWord, teacher_share: float, generator: torch.Generator
    ) -> DecodeOutput:
        """Loss of the targets; gradients reach the encoder through the state."""
        return decode_loss(
            self.embedding,
            self.cell,
            self.head,
            batch.targets,
            self.encode(batch),
            feedback=feedback,
            start=batch.context[-1],
            teacher_forcing=teacher_share,
            generator=generator,
        )

    @torch.no_grad()
    def continuation(
        self, context: Tensor, length: int, end: int, never: Tensor, generator: torch.Generator
    ) -> list[list[int]]:
        """Samples that follow each context, until `end` or for `length` words.

        Args:
            context: int64 [C, B], the words before.
            length: words at most.
            end: number of the word that ends a text; not part of the result.
            never: bool [V], words that are not to be drawn.
            generator: what the samples are drawn from, on the model's device.
        """
        bias = self.head.bias.masked_fill(never, _IMPOSSIBLE)
        out = generate(
            self.embedding,
            self.cell,
            (self.head.weight, bias),
            self.encode(Batch(context, context[:0])),
            start=context[-1],
            max_length=length,
            eos=end,
            search="sample",
            temperature=TEMPERATURE,
            top_p=TOP_P,
            generator=generator,
        )
        rows = zip(out.tokens.T.tolist(), out.lengths.tolist(), strict=True)
        return [[word for word in row[:count] if word != end] for row, count in rows]
