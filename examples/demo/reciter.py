"""The demo's model, and how it learns docstrings by heart."""

from __future__ import annotations

import argparse
from typing import Literal

import torch
from torch import Tensor, nn

from accumext import AccumulatingOptimizer, DecodeOutput, decode_loss

from .report import Record, Step
from .text import OPENING, Text

LEARNING_RATE, MAX_NORM = 0.03, 1.0
TEACHER_SHARE = 0.75  # of the words that "scheduled" feeds; the others are the model's own
RECITE_EVERY = 5  # steps
TRAINING_SECONDS = 60.0  # without --steps; the comparison takes another minute


class Reciter(nn.Module):
    """One GRU reads the opening, another continues; one [V, H] matrix embeds and scores words."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.GRU(hidden, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def encode(self, texts: Tensor) -> Tensor:
        """Return the decoder's first state, [B, H]: the opening, without its last word."""
        _, state = self.encoder(self.embedding(texts[: OPENING - 1]))
        first: Tensor = state[0]
        return first

    def decode(
        self,
        texts: Tensor,  # int64 [OPENING + T, B]
        feedback: Literal["scheduled", "greedy", "teacher"],
        memory_budget: int | None = None,
        generator: torch.Generator | None = None,
    ) -> DecodeOutput:
        """Return the loss of the words after the opening; its gradients reach the encoder, too."""
        return decode_loss(
            self.embedding,
            self.cell,
            self.head,
            texts[OPENING:],
            self.encode(texts),
            feedback=feedback,
            start=texts[OPENING - 1],
            teacher_forcing=TEACHER_SHARE if feedback == "scheduled" else 1.0,
            memory_budget=memory_budget,
            generator=generator,
        )

    @torch.no_grad()
    def recite(self, texts: Tensor) -> tuple[Tensor, float]:
        """Return the words [T, B] that the model says after each opening, fed its own words, and
        the share of words that are right."""
        said = self.decode(texts, "greedy").tokens
        return said, float((said == texts[OPENING:]).double().mean())


def train(model: Reciter, text: Text, args: argparse.Namespace, record: Record) -> None:
    """Learn the first half of the docstrings; record each step as soon as it is done."""
    learned, unseen = text.docstrings.to(args.device).split(args.batch, dim=1)
    on_gpu = args.device == "cuda"
    generator = torch.Generator(args.device).manual_seed(args.seed)
    optimizer = AccumulatingOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99)),
        max_norm=MAX_NORM,
        scaler=torch.amp.GradScaler() if on_gpu else None,
    )
    begin, last = record.elapsed(), False
    while not last:
        with torch.autocast(args.device, torch.float16, enabled=on_gpu):
            out = model.decode(learned, args.feedback, generator=generator)
        optimizer.backward(out.loss)
        optimizer.step()
        step = Step(loss=float(out.loss.detach()), gradient_norm=optimizer.stats()["total_norm"])
        record.training.append(step)
        number = len(record.training)
        last = (
            record.elapsed() - begin >= TRAINING_SECONDS
            if args.steps is None
            else number == args.steps
        )
        if last or number == 1 or number % RECITE_EVERY == 0:
            said, step.right = model.recite(learned)
            _, step.right_unseen = model.recite(unseen)
            record.say(
                f"step {number:3}: loss {step.loss:6.3f}, {step.right:4.0%} of the words right "
                f"({step.right_unseen:.0%} in unseen text)"
            )
            record.recitals = [
                (text.show(texts[:OPENING]), text.show(words))
                for texts, words in zip(learned.T.tolist(), said.T.tolist(), strict=True)
            ]
