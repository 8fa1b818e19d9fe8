"""Updates that bfloat16 parameters lose and float32 masters keep: one decoder, trained four ways.

Adam moves a number by about the learning rate in a step. A bfloat16 number above 1/32 has its
neighbours at least 2^-12 away, so that a step of 1e-4 is rounded off: training stalls, without an
error.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import accumext

VOCABULARY, SIZE, STEPS, BATCH = 60, 64, 24, 32
RATE = 1e-4

WAYS = ("float32", "bfloat16", "bfloat16, masters", "bfloat16, masters, stochastic")


def phrases(generator: torch.Generator, count: int) -> Tensor:
    """Tokens [STEPS, count] that count up by 1 to 5, each row by its own number."""
    start = torch.randint(VOCABULARY, (count,), generator=generator)
    stride = torch.randint(1, 6, (count,), generator=generator)
    return (start + stride * torch.arange(STEPS)[:, None]) % VOCABULARY


def train(way: str, steps: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    embedding, cell = nn.Embedding(VOCABULARY, SIZE), nn.GRUCell(SIZE, SIZE)
    head = nn.Linear(SIZE, VOCABULARY)
    model = nn.ModuleList([embedding, cell, head])
    if way.startswith("bfloat16"):
        model.to(torch.bfloat16)
    parameters, masters = list(model.parameters()), None
    if "masters" in way:
        masters = parameters = accumext.masters(parameters, stochastic_rounding="stoch" in way)
    adam = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    opt = accumext.AccumulatingOptimizer(adam, masters=masters, window=2, max_norm=1.0)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(2 * steps):
        tokens = phrases(generator, BATCH)
        out = accumext.decode_loss(embedding, cell, head, tokens, feedback="teacher")
        opt.backward(out.loss)
        opt.step()
        losses.append(out.loss.item())
    return [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]


def plot(path: Path, losses: dict[str, list[float]]) -> None:
    """Loss against steps of the optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Of Okabe and Ito's palette, told apart with any colour vision.
    colours = ("#999999", "#D55E00", "#0072B2", "#F0E442")
    widths = (7, 2, 3.5, 1)  # three of the lines lie on one another
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (way, values), colour, width in zip(losses.items(), colours, widths, strict=True):
        smooth = torch.tensor(values).unfold(0, 20, 20).mean(1)
        steps = range(10, 20 * len(smooth), 20)
        axes.plot(steps, smooth, label=way, color=colour, linewidth=width)
    axes.set(xlabel="steps of AdamW, learning rate 1e-4", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments, _ = parser.parse_known_args()
    losses = {way: train(way, arguments.steps) for way in WAYS}
    for way, values in losses.items():
        last = values[-20:]
        print(f"{way:31} first loss {values[0]:.3f}, last {sum(last) / len(last):.3f}")
    if arguments.plot is not None:
        plot(arguments.plot, losses)


if __name__ == "__main__":
    main()
