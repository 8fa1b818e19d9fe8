"""Lightning Fabric: `no_backward_sync` and a step every fourth batch, as its guide accumulates."""

import lightning
from _factors import (
    EPOCHS,
    WINDOW,
    Seen,
    Weights,
    epochs,
    loader,
    loss_of,
    main,
    optimizer_of,
    runs,
    wrapped,
)


def train(seen: Seen, unequal=False, max_norm=None, stop=None):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = seen.watch(Weights())
    model, optimizer = fabric.setup(model, optimizer_of(model))
    for i, batch in epochs(fabric.setup_dataloaders(loader(unequal)), stop):
        is_accumulating = (i + 1) % WINDOW != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(loss_of(model(batch)))
        if not is_accumulating:
            if max_norm:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()


def wrapper(seen: Seen):
    """Every batch is a call of `step`; the wrapper makes every fourth one a step."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = seen.watch(Weights())
    opt = wrapped(model)
    model, optimizer = fabric.setup(model, opt)
    for _ in range(EPOCHS):
        for batch in loader():
            fabric.backward(loss_of(model(batch)))
            optimizer.step()
            optimizer.zero_grad()
        opt.flush()


if __name__ == "__main__":
    cure = {"cure: `AccumulatingOptimizer`, `flush` after each epoch": wrapper}
    found = runs(train, "clip", "unequal", "stopped") | cure
    main("lightning", {"Lightning Fabric, the loop of its guide": found})
