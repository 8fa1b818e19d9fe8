"""The same loss in slices, of any head, on any device."""

from torch.nn.functional import cross_entropy

import accumext


def loss_of(model, x, y):
    def head_loss(hidden, y):
        return cross_entropy(model.head(hidden), y)

    hidden = model.trunk(x).flatten(0, 1)
    y = y.flatten()
    return accumext.chunked_loss(head_loss, hidden, y, chunks=8)
