"""A caption decoder that is trained on the reward of its own captions (self-critical training).

For each image a caption is sampled, and one is taken greedily; the difference of their rewards is
the advantage, which multiplies the loss of every sampled token (Rennie et al. 2017). The reward
here is the share of the reference's words that a caption has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from comparison import compare, wants_quick
from torch import Tensor, nn

import accumext

END, START, FIRST_WORD = 0, 1, 2


class Images(NamedTuple):
    features: Tensor  # [B, F]
    references: Tensor  # int64 [R, B]
    steps: int  # T, of a caption at most
    seed: int = 0  # of what accumext samples
    captions: Tensor | None = None  # int64 [T, B], instead of those that plain PyTorch samples


class Captioner(nn.Module):
    def __init__(self, vocabulary: int, size: int, features: int) -> None:
        super().__init__()
        self.first_state = nn.Linear(features, size)
        self.embedding = nn.Embedding(vocabulary, size)
        self.cell = nn.GRUCell(size, size)
        self.head = nn.Linear(size, vocabulary)

    def look(self, images: Images) -> Tensor:
        """The decoder's first state."""
        return torch.tanh(self.first_state(images.features))


def reward(captions: Tensor, references: Tensor) -> Tensor:
    """The share [B] of the reference's words that each caption [T, B] has."""
    return (captions[:, None] == references).any(0).double().mean(0)


def plain_loop(model: Captioner, images: Images, *, greedy: bool) -> tuple[Tensor, Tensor]:
    """Captions [T, B], END behind their ends, and log-probabilities [T, B], 0 there."""
    hidden = model.look(images)
    token = torch.full_like(images.references[0], START)
    ended = torch.zeros_like(token, dtype=torch.bool)
    captions, log_probs = [], []
    for step in range(images.steps):
        hidden = model.cell(model.embedding(token), hidden)
        scores = F.log_softmax(model.head(hidden), dim=1)
        if greedy:
            token = scores.argmax(1)
        elif images.captions is None:
            token = torch.multinomial(scores.detach().exp(), 1).squeeze(1)
        else:
            token = images.captions[step]
        log_prob = scores.gather(1, token[:, None]).squeeze(1)
        captions.append(token.masked_fill(ended, END))
        log_probs.append(log_prob.masked_fill(ended, 0))
        ended = ended | (token == END)
    return torch.stack(captions), torch.stack(log_probs)


def plain_loss(model: Captioner, images: Images) -> Tensor:
    """The self-critical loss, a mean over the images."""
    captions, log_probs = plain_loop(model, images, greedy=False)
    with torch.no_grad():
        baseline, _ = plain_loop(model, images, greedy=True)
    advantage = reward(captions, images.references) - reward(baseline, images.references)
    return (-log_probs * advantage).sum(0).mean()


def speak(
    model: Captioner, images: Images, feedback: str, reduction: str = "mean"
) -> accumext.DecodeOutput:
    """Captions `out.tokens` [T, B], END behind their ends, and the loss of their tokens."""
    return accumext.decode_loss(
        model.embedding,
        model.cell,
        model.head,
        None,
        model.look(images),
        feedback=feedback,
        steps=images.steps,
        start=START,
        eos=END,
        reduction=reduction,
        generator=torch.Generator().manual_seed(images.seed),
    )


def accumext_loss(model: Captioner, images: Images) -> Tensor:
    """The same."""
    sampled = speak(model, images, "sample", reduction="none")
    with torch.no_grad():
        baseline = speak(model, images, "greedy")
    advantage = reward(sampled.tokens, images.references)
    advantage -= reward(baseline.tokens, images.references)
    return (sampled.loss * advantage).sum(0).mean()


def make(
    vocabulary: int, size: int, steps: int, batch: int, dtype: torch.dtype = torch.float32
) -> tuple[Captioner, Images]:
    """A model, and images of ten subjects; the reference is eight words of the subject."""
    torch.manual_seed(0)
    model = Captioner(vocabulary, size, features=32).to(dtype)
    subjects, words = torch.randn(10, 32), torch.randint(FIRST_WORD, vocabulary, (8, 10))
    subject = torch.randint(10, (batch,))
    features = subjects[subject] + 0.1 * torch.randn(batch, 32)
    return model, Images(features.to(dtype), words[:, subject], steps)


def train(model: Captioner, images: Images, updates: int) -> None:
    """On the reward of samples; prints that of greedy captions before and after."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rewards = []
    for update in range(updates + 1):
        with torch.no_grad():
            captions = speak(model, images, "greedy").tokens
        rewards.append(reward(captions, images.references).mean())
        optimizer.zero_grad()
        accumext_loss(model, images._replace(seed=update)).backward()
        optimizer.step()
    print(f"reward {rewards[0]:.3f} before, {rewards[-1]:.3f} after {updates} updates")


def main() -> None:
    quick = wants_quick(__doc__)
    model, images = make(vocabulary=20, size=8, steps=9, batch=6, dtype=torch.float64)
    with torch.no_grad():  # plain PyTorch is given accumext's samples, to compare gradients
        captions = speak(model, images, "sample").tokens
    exact = model, images._replace(captions=captions)
    timed = make(20, 8, 9, 6) if quick else make(vocabulary=10_000, size=512, steps=20, batch=64)
    compare(plain_loss, accumext_loss, exact=exact, timed=timed)
    train(*make(vocabulary=100, size=64, steps=12, batch=64), updates=20 if quick else 200)


if __name__ == "__main__":
    main()
