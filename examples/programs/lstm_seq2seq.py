"""Sequence to sequence with two-layer LSTMs, padding, and a coin per token for what is fed next.

Sentences differ in length. The encoder reads them packed, the decoder starts from its last state,
and padding counts nowhere. Half of the tokens that the decoder reads are targets, by a mask that is
drawn beforehand, so that both ways feed the same; `feedback="scheduled", teacher_forcing=0.5` would
draw it in the call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from comparison import compare, wants_quick
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import accumext

PADDING, START, FIRST_WORD = 0, 1, 2
DROPOUT = 0.3  # of the embedded words, and between the layers
TEACHER_FORCING = 0.5

State = tuple[Tensor, Tensor]  # h and c: [2, B, H]


class Sentences(NamedTuple):
    source: Tensor  # int64 [B, S], padded
    source_lengths: Tensor  # int64 [B]
    target: Tensor  # int64 [B, T], padded
    target_lengths: Tensor  # int64 [B]
    forced: Tensor  # bool [B, T]: whether the target is fed, or the prediction


class Translator(nn.Module):
    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, size, padding_idx=PADDING)
        self.encoder = nn.LSTM(size, size, 2, batch_first=True, dropout=DROPOUT)
        self.embedding = nn.Embedding(vocabulary, size, padding_idx=PADDING)
        self.decoder = nn.LSTM(size, size, 2, dropout=DROPOUT)
        self.head = nn.Linear(size, vocabulary)

    def encode(self, batch: Sentences) -> State:
        """The last state of each sentence."""
        x = F.dropout(self.source_embedding(batch.source), DROPOUT, self.training)
        packed = pack_padded_sequence(
            x, batch.source_lengths, batch_first=True, enforce_sorted=False
        )
        return self.encoder(packed)[1]


def plain_loss(model: Translator, batch: Sentences) -> Tensor:
    """The mean over all words that are not padding."""
    state = model.encode(batch)
    token = torch.full_like(batch.target[:, 0], START)
    logits = []
    for step in range(batch.target.shape[1]):
        x = F.dropout(model.embedding(token), DROPOUT, model.training)
        output, state = model.decoder(x[None], state)
        logits.append(model.head(output[0]))
        predicted = logits[-1].detach().argmax(1)
        if step + 1 < batch.target.shape[1]:
            token = torch.where(batch.forced[:, step + 1], batch.target[:, step], predicted)
    joined = torch.stack(logits, dim=1).flatten(0, 1)
    return F.cross_entropy(joined, batch.target.flatten(), ignore_index=PADDING)


def accumext_loss(model: Translator, batch: Sentences) -> Tensor:
    """The same."""
    out = accumext.decode_loss(
        model.embedding,
        model.decoder,
        model.head,
        batch.target,
        model.encode(batch),
        feedback=batch.forced,
        start=START,
        lengths=batch.target_lengths,
        ignore_index=PADDING,
        embedding_dropout=DROPOUT,
        batch_first=True,
    )
    return out.loss


def make(
    vocabulary: int, size: int, longest: int, batch: int, dtype: torch.dtype = torch.float32
) -> tuple[Translator, Sentences]:
    """A model, and sentences whose translation is each word's partner."""
    torch.manual_seed(0)
    model = Translator(vocabulary, size).to(dtype)
    lengths = torch.randint(longest // 2, longest + 1, (batch,))
    lengths[0] = longest
    words = torch.randint(FIRST_WORD, vocabulary, (batch, longest))
    padding = torch.arange(longest) >= lengths[:, None]
    source = words.masked_fill(padding, PADDING)
    target = (vocabulary + 1 - words).masked_fill(padding, PADDING)
    forced = torch.rand(batch, longest) < TEACHER_FORCING
    return model, Sentences(source, lengths, target, lengths, forced)


def main() -> None:
    quick = wants_quick(__doc__)
    exact = make(vocabulary=50, size=8, longest=9, batch=4, dtype=torch.float64)
    timed = make(50, 8, 9, 4) if quick else make(vocabulary=20_000, size=256, longest=40, batch=32)
    compare(plain_loss, accumext_loss, exact=exact, timed=timed)


if __name__ == "__main__":
    main()
