"""Question 4: a step on a whole batch."""

import torch
from torch.nn.functional import mse_loss


def train(w, x):
    optimizer = torch.optim.SGD([w], lr=0.01)
    loss = mse_loss(w * x, 2 * x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
