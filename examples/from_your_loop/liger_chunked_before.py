"""The loss of Liger's head."""

from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss


def loss_of(model, x, y):
    head_loss = LigerFusedLinearCrossEntropyLoss()
    head = model.head
    hidden = model.trunk(x).flatten(0, 1)
    y = y.flatten()
    return head_loss(head.weight, hidden, y, head.bias)
