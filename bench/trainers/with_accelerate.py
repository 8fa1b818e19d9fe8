"""Accelerate: `accumulate`, with a loader that is prepared and one that is not; and two models."""

from functools import partial
from tempfile import TemporaryDirectory

import torch
from _factors import (
    BATCHES,
    EPOCHS,
    INF,
    MAX_NORM,
    STOP,
    WINDOW,
    Seen,
    Weights,
    epochs,
    loader,
    loss_of,
    main,
    optimizer_of,
    runs,
    schedule_of,
    wrapped,
)
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin


def accelerator_of(**options):
    """A new one, in a process that has had others."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


def train(
    seen: Seen, prepared=True, unequal=False, max_norm=None, infinite=False, stop=None, folder=None
):
    """The loop of the documentation; `folder` is where the state is saved at `stop`."""
    accelerator = accelerator_of(gradient_accumulation_steps=WINDOW)
    if infinite:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    model = seen.watch(Weights())
    optimizer = optimizer_of(model)
    schedule, batches = schedule_of(optimizer), loader(unequal)
    model, optimizer = accelerator.prepare(model, optimizer)
    if prepared:
        batches, schedule = accelerator.prepare(batches, schedule)
    if folder and not stop:
        accelerator.load_state(folder)
    for i, batch in epochs(batches, stop):
        with accelerator.accumulate(model):
            loss = loss_of(model(batch))
            accelerator.backward(loss * float("inf") if infinite and i == INF else loss)
            if max_norm and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if folder and i + 1 == stop:
            accelerator.save_state(folder)


def resumed(seen: Seen):
    with TemporaryDirectory() as folder:
        train(seen, stop=STOP, folder=folder)
        seen.resume()
        train(seen, folder=folder)


def loop(seen: Seen, zero_grad_first=False, clip_of_each=False, **options):
    """`zero_grad` after the step or, as many loops have it, before `backward`.

    `clip_of_each`: in one epoch, a clip that does not ask whether the window is complete.
    """
    accelerator = accelerator_of(**options or {"gradient_accumulation_steps": WINDOW})
    model = seen.watch(Weights())
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
    for _, batch in epochs(batches, stop=BATCHES if clip_of_each else None):
        with accelerator.accumulate(model):
            if zero_grad_first:
                optimizer.zero_grad()
            accelerator.backward(loss_of(model(batch)))
            if clip_of_each:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if not zero_grad_first:
                optimizer.zero_grad()


def carried_over(seen: Seen):
    """The plugin's setting that lets windows cross the epoch's end."""
    plugin = GradientAccumulationPlugin(num_steps=WINDOW, sync_with_dataloader=False)
    loop(seen, gradient_accumulation_plugin=plugin)


def wrapper(seen: Seen):
    """accumext's recipe: Accelerate does not accumulate."""
    accelerator = accelerator_of()
    model = seen.watch(Weights())
    opt = wrapped(model)
    model, optimizer, batches = accelerator.prepare(model, opt, loader())
    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(batch)))
                optimizer.step()
                optimizer.zero_grad()
        opt.flush()


def two_models(watched: int, together: bool, seen: Seen):
    """Two models that are trained in turn, each in a block of its own or both in one block."""
    accelerator = accelerator_of(gradient_accumulation_steps=WINDOW)
    models = [Weights(), Weights()]
    seen.watch(models[watched])
    made = {k: optimizer_of(models[k]) for k in (watched, 1 - watched)}
    *models, batches = accelerator.prepare(*models, loader())
    optimizers = accelerator.prepare(made[0], made[1])

    def turn(model, optimizer, batch):
        accelerator.backward(loss_of(model(batch)))
        optimizer.step()
        optimizer.zero_grad()

    for _, batch in epochs(batches):
        if together:
            with accelerator.accumulate(*models):
                for model, optimizer in zip(models, optimizers):
                    turn(model, optimizer, batch)
        else:
            for model, optimizer in zip(models, optimizers):
                with accelerator.accumulate(model):
                    turn(model, optimizer, batch)


USUAL = "clip", "skipped", "unequal", "stopped"
APART = "Accelerate, two models in two `accumulate` blocks"
ROWS = {
    "Accelerate, loader and schedule prepared": runs(train, *USUAL)
    | {
        "resumed": resumed,
        "cure: `sync_with_dataloader=False`": carried_over,
        "cure: `AccumulatingOptimizer`, `gradient_accumulation_steps=1`": wrapper,
    },
    "Accelerate, neither prepared": runs(train, *USUAL, prepared=False),
    "Accelerate, clip without asking `sync_gradients`": {"clip": partial(loop, clip_of_each=True)},
    "Accelerate, `zero_grad` before `backward`": runs(loop, zero_grad_first=True),
    f"{APART}: the first": {"plain": partial(two_models, 0, False)},
    f"{APART}: the second": {"plain": partial(two_models, 1, False)},
    "Accelerate, two models in one `accumulate` block": {"plain": partial(two_models, 1, True)},
}

if __name__ == "__main__":
    main("accelerate", ROWS)
