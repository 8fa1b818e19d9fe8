"""Question 4: the same step, in the memory of one sample."""

import torch
from torch.nn.functional import mse_loss

import accumext


def train(w, x):
    optimizer = torch.optim.SGD([w], lr=0.01)
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=len(x))
    for sample in x:
        loss = mse_loss(w * sample, 2 * sample)
        optimizer.backward(loss)
        optimizer.step()
