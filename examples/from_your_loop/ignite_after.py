"""ignite, with accumext."""

import torch
from ignite.engine import Engine, Events
from torch.nn.functional import cross_entropy

import accumext


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=n, max_norm=1.0)

    def update(engine, batch):
        x, y = batch
        loss = cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        return loss.detach()

    trainer = Engine(update)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, optimizer.flush)
    trainer.run(loader, max_epochs=1)
