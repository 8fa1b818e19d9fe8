"""Self-critical training: a small decoder that is only told how good what it said was."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import accumext

WORDS, SIZE, STEPS, BATCH = 7, 24, 5, 64


def reward(tokens: Tensor, wanted: Tensor) -> Tensor:
    """Return the share of the tokens [T, B] that are the wanted one of their row [B]."""
    return (tokens == wanted).double().mean(0)


def test_the_reward_of_a_captioner_improves() -> None:
    """Each image is a number that the caption is to repeat; the baseline is the greedy caption."""
    image, embedding = nn.Embedding(WORDS, SIZE), nn.Embedding(WORDS, SIZE)
    cell, head = nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, WORDS)
    parameters = [p for m in (image, embedding, cell, head) for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)

    def caption(wanted: Tensor, feedback: str, **options: object) -> accumext.DecodeOutput:
        return accumext.decode_loss(
            embedding, cell, head, None, image(wanted), steps=STEPS, feedback=feedback, **options
        )

    def greedy_reward(wanted: Tensor) -> Tensor:
        with torch.no_grad():
            return reward(caption(wanted, "greedy").tokens, wanted)

    everything = torch.arange(WORDS)
    before = greedy_reward(everything).mean()
    for _ in range(60):
        wanted = torch.randint(WORDS, (BATCH,))
        said = caption(wanted, "sample", reduction="none")
        advantage = reward(said.tokens, wanted) - greedy_reward(wanted)
        optimizer.zero_grad()
        (said.loss * advantage).sum(0).mean().backward()
        optimizer.step()
    after = greedy_reward(everything).mean()
    assert before < 0.4  # one in seven by chance
    assert after > 0.9
