"""timm: NativeScaler, called for every micro-batch, with `need_update` at the end of a window.

timm's own `train.py` is in no package and is not run: this is the loop that NativeScaler asks for,
in epochs of whole windows.
"""

import _cpu_build  # noqa: F401
from _factors import (
    WINDOW,
    Seen,
    Weights,
    epochs,
    loader,
    loss_of,
    main,
    optimizer_of,
    runs,
)
from timm.utils import NativeScaler


def train(seen: Seen, unequal=False, max_norm=None, stop=None):
    model = seen.watch(Weights())
    seen.facts["epoch"] = 2 * WINDOW
    optimizer, scaler = optimizer_of(model), NativeScaler("cpu")
    for i, batch in epochs(loader(unequal, 2 * WINDOW), stop):
        complete = (i + 1) % WINDOW == 0
        scaler(
            loss_of(model(batch)) / WINDOW,
            optimizer,
            clip_grad=max_norm,
            parameters=model.parameters(),
            need_update=complete,
        )
        if complete:
            optimizer.zero_grad()


if __name__ == "__main__":
    found = runs(train, "clip", "unequal", "stopped")
    main("timm", {"timm NativeScaler, a step every fourth batch": found})
