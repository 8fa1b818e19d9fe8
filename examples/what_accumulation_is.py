"""Question 4: what gradient accumulation is, on y = w x with x = (4, 2), target 2 x and w = 1.

The gradient of the mean squared error is -20 and one SGD step of 0.01 makes w = 1.2: for the whole
batch, for the mean of both samples' losses, and for two micro-batches of one sample each. Only the
last needs the memory of one sample.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import accumext


def make(window: int) -> tuple[nn.Parameter, accumext.AccumulatingOptimizer]:
    w = nn.Parameter(torch.tensor(1.0))
    return w, accumext.AccumulatingOptimizer(torch.optim.SGD([w], lr=0.01), window=window)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    x = torch.tensor([4.0, 2.0])
    target = 2 * x

    w, opt = make(window=1)
    opt.backward(F.mse_loss(w * x, target))
    print(f"whole batch: gradient {w.grad}")
    opt.step()
    print(f"             w {w.item():.4f}")

    w, opt = make(window=1)
    opt.backward(sum(F.mse_loss(w * sample, 2 * sample) for sample in x) / 2)
    print(f"samples in one loss: gradient {w.grad}")
    opt.step()
    print(f"                     w {w.item():.4f}")

    w, opt = make(window=2)
    for i, sample in enumerate(x, start=1):
        opt.backward(F.mse_loss(w * sample, 2 * sample))
        so_far = opt.main_grad(w)
        print(f"after micro-batch {i}: sum {so_far}, divided by the window's 2 {so_far / 2}")
        opt.step()
        print(f"                     stepped: {opt.stepped}, w {w.item():.4f}")
    assert round(w.item(), 4) == 1.2


if __name__ == "__main__":
    main()
