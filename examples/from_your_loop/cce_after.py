"""A recurrent decoder, teacher-forced, with accumext."""

import torch

import accumext


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=n)
    layers = (model.embedding, model.rnn, model.head)
    for targets, hidden in loader:
        out = accumext.decode_loss(*layers, targets, hidden, feedback="teacher")
        optimizer.backward(out.loss)
        optimizer.step()
    optimizer.flush()
