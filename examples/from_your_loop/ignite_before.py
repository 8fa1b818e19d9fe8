"""ignite: accumulation in the update function."""

import torch
from ignite.engine import Engine
from torch.nn.functional import cross_entropy


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(engine, batch):
        x, y = batch
        loss = cross_entropy(model(x), y)
        loss = loss / n
        loss.backward()
        if engine.state.iteration % n == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    trainer = Engine(update)
    trainer.run(loader, max_epochs=1)
