"""Question 5: the tutorial loop, whose last window is wrong, beside the right result.

The tutorial divides every loss by n and steps when `(i + 1) % n == 0` or at the last batch. A last
window of fewer batches is divided by too much, so its step is too short. `window=n` and `flush()`
divide by the batches that the window holds. `opt.zero_grad()` may stay in every iteration, after
`opt.step()`; before it, it clears the gradients of a `loss.backward()`, as in plain PyTorch.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accumext

Batches = list[tuple[Tensor, Tensor]]


def make() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def tutorial(batches: Batches, n: int) -> Tensor:
    model, optimizer = make()
    for i, (x, y) in enumerate(batches):
        loss = F.mse_loss(model(x), y) / n
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


def by_definition(batches: Batches, n: int) -> Tensor:
    """Each step is on the mean of its window's losses."""
    model, optimizer = make()
    for begin in range(0, len(batches), n):
        window = batches[begin : begin + n]
        torch.stack([F.mse_loss(model(x), y) for x, y in window]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def with_accumext(batches: Batches, n: int) -> Tensor:
    model, optimizer = make()
    opt = accumext.AccumulatingOptimizer(optimizer, window=n)
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()  # after step: an open window is not in .grad
    opt.flush()  # the last, partial window; nothing if there is none
    return model.weight.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="batches")
    parser.add_argument("--window", type=int, default=4)
    args = parser.parse_args()
    n, last = args.window, args.steps % args.window or args.window
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(args.steps)]

    right = by_definition(batches, n)
    print(f"the last window holds {last} of {n} batches; weights after it:")
    for name, train in (
        (f"tutorial, divided by {n}", tutorial),
        (f"mean, divided by {last}", by_definition),
        (f"window={n} and flush()", with_accumext),
    ):
        weight = train(batches, n)
        shown = ", ".join(f"{w:7.4f}" for w in weight.flatten())
        print(f"{name:<22} {shown}   error {(weight - right).norm():.0e}")
    torch.testing.assert_close(with_accumext(batches, n), right)


if __name__ == "__main__":
    main()
