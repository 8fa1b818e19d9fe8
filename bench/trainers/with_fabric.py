"""Lightning Fabric: `no_backward_sync` and a step every fourth batch, as its guide accumulates."""

from functools import partial

import lightning
from _factors import (
    EPOCHS,
    MAX_NORM,
    STOP,
    WINDOW,
    Seen,
    Weights,
    loader,
    loss_of,
    main,
    optimizer_of,
)
from _wrapped import wrapped


def train(seen: Seen, unequal=False, max_norm=None, stop=None):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = Weights()
    seen.watch(model)
    model, optimizer = fabric.setup(model, optimizer_of(model))
    batches = fabric.setup_dataloaders(loader(unequal))
    for _ in range(EPOCHS):
        for i, batch in enumerate(batches):
            is_accumulating = (i + 1) % WINDOW != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(loss_of(model(batch)))
            if not is_accumulating:
                if max_norm:
                    fabric.clip_gradients(model, optimizer, max_norm=max_norm)
                optimizer.step()
                optimizer.zero_grad()
            if i + 1 == stop:
                return


def wrapper(seen: Seen):
    """Every batch is a call of `step`; the wrapper makes every fourth one a step."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = Weights()
    seen.watch(model)
    opt = wrapped(model)
    model, optimizer = fabric.setup(model, opt)
    for _ in range(EPOCHS):
        for batch in loader():
            fabric.backward(loss_of(model(batch)))
            optimizer.step()
            optimizer.zero_grad()
        opt.flush()


RUNS = {
    "plain": train,
    "clip": partial(train, max_norm=MAX_NORM),
    "unequal": partial(train, unequal=True),
    "stopped": partial(train, stop=STOP),
    "cure: `AccumulatingOptimizer`, `flush` after each epoch": wrapper,
}

if __name__ == "__main__":
    main("lightning", {"Lightning Fabric, the loop of its guide": RUNS})
