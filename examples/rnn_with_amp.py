"""Question 1: a decoder fed its own argmax for 200 steps, with AMP, GradScaler and accumulation.

Summing the step losses and calling backward once keeps the logits of every step; calling backward
inside the time loop needs a detach, and it is unclear what to divide by and what the detach costs.
`decode_loss` keeps no logits and gives the exact gradient; `tbptt(k1=1)` is the loop with the
detach, and its error is printed. Same module in both, same optimizer around both.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accumext


class Decoder(nn.Module):
    """The usual `model(decoder_input, decoder_hidden)`."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.cell = nn.GRUCell(size, size)
        self.head = nn.Linear(size, vocabulary)

    def forward(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.embedding(token), hidden)
        return self.head(hidden), hidden


def gradient(model: nn.Module) -> Tensor:
    """All gradients as one vector, and none left behind."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def in_short(stats: dict[str, float]) -> str:
    """Every figure, in few digits."""
    return ", ".join(f"{name} {value:.4g}" for name, value in stats.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=200, help="decoder steps T")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.float16 if device == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    batch, size, window = 4, 64, 2
    model = Decoder(args.vocabulary, size).to(device)

    def data() -> tuple[Tensor, Tensor]:
        targets = torch.randint(args.vocabulary, (args.length, batch), device=device)
        return targets, torch.randn(batch, size, device=device)

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:4.0f} s  {text}", flush=True)

    begin = time.perf_counter()
    say(f"V={args.vocabulary:,}, T={args.length}, B={batch}; less than a minute on two cores")

    # 1. The cost of the detach in correctness, in full precision and on the same tokens.
    targets, hidden = data()
    loss = accumext.decode_loss(
        model.embedding, model.cell, model.head, targets, hidden, feedback="greedy"
    ).loss
    loss.backward()
    exact = gradient(model)
    say(f"decode_loss: loss {float(loss.detach()):.3f}, exact gradient")
    for k1, k2 in ((1, 1), (10, 10), (args.length, args.length)):
        accumext.tbptt(model, targets, hidden, criterion=F.cross_entropy, k1=k1, k2=k2)
        distance = (gradient(model) - exact).norm() / exact.norm()
        say(f"tbptt(k1={k1}, k2={k2}): relative distance to the exact gradient {distance:.1e}")
    peak = accumext.decode_memory(
        model.embedding, model.cell, model.head, targets, hidden, feedback="greedy"
    )
    logits = args.length * batch * args.vocabulary * 4
    say(f"decode_loss adds at most {peak / 1e6:.0f} MB; the logits alone are {logits / 1e6:.0f} MB")

    # 2. The training loop: scale, unscale, clip to 2.0, step, update and zero are the wrapper's.
    opt = accumext.AccumulatingOptimizer(
        torch.optim.AdamW(model.parameters()),
        window=window,
        max_norm=2.0,
        scaler=torch.amp.GradScaler(device),
    )
    for step in range(args.steps):
        for _ in range(window):
            targets, hidden = data()
            with torch.autocast(device, half):
                out = accumext.decode_loss(
                    model.embedding, model.cell, model.head, targets, hidden, feedback="greedy"
                )
            opt.backward(out.loss)
            opt.step()
        say(f"decode_loss step {step}: {in_short(opt.stats())}")

    # 3. The same loop with a backward pass per token: all of them are one micro-batch.
    for step in range(args.steps):
        for _ in range(window):
            targets, hidden = data()
            with opt.micro_batch(), torch.autocast(device, half):
                accumext.tbptt(
                    model,
                    targets,
                    hidden,
                    criterion=F.cross_entropy,
                    k1=1,
                    backward=opt.backward,
                )
            opt.step()
        say(f"tbptt step {step}: {in_short(opt.stats())}")


if __name__ == "__main__":
    main()
