"""Question 5: the tutorial loop, right also for the last window.

The usual loop divides every loss by n and steps when `(i + 1) % n == 0` or at the last batch, so a
last window of fewer batches is divided by too much. `window=n` and `flush()` divide by what the
window really held, and a zero_grad in every iteration does no harm.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import accumext


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="batches")
    parser.add_argument("--window", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(args.steps)]

    model = nn.Linear(3, 1)
    opt = accumext.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), window=args.window
    )
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()  # harmless inside a window
    opt.flush()  # the last, partial window; nothing if there is none
    print(f"window={args.window} and flush: {model.weight.tolist()}")

    # The same by hand, dividing each window by what it holds.
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(args.steps)]
    by_hand = nn.Linear(3, 1)
    plain = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for begin in range(0, args.steps, args.window):
        window = batches[begin : begin + args.window]
        for x, y in window:
            (F.mse_loss(by_hand(x), y) / len(window)).backward()
        plain.step()
        plain.zero_grad()
    print(f"by hand:          {by_hand.weight.tolist()}")
    torch.testing.assert_close(model.weight, by_hand.weight)


if __name__ == "__main__":
    main()
