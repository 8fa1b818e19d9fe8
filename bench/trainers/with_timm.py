"""timm: NativeScaler, called for every micro-batch, with `need_update` at the end of a window.

timm's own `train.py` is in no package and is not run: this is the loop that NativeScaler asks for,
in epochs of whole windows.
"""

from functools import partial
from itertools import islice

import _cpu_build  # noqa: F401
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
from timm.utils import NativeScaler


def train(seen: Seen, unequal=False, max_norm=None, stop=None):
    model = Weights()
    seen.watch(model)
    seen.facts["epoch"] = 2 * WINDOW
    optimizer, scaler = optimizer_of(model), NativeScaler("cpu")
    for _ in range(EPOCHS):
        for i, batch in enumerate(islice(loader(unequal), 2 * WINDOW)):
            loss = loss_of(model(batch)) / WINDOW
            complete = (i + 1) % WINDOW == 0
            scaler(
                loss,
                optimizer,
                clip_grad=max_norm,
                parameters=model.parameters(),
                need_update=complete,
            )
            if complete:
                optimizer.zero_grad()
            if i + 1 == stop:
                return


RUNS = {
    "plain": train,
    "clip": partial(train, max_norm=MAX_NORM),
    "unequal": partial(train, unequal=True),
    "stopped": partial(train, stop=STOP),
}

if __name__ == "__main__":
    main("timm", {"timm NativeScaler, a step every fourth batch": RUNS})
