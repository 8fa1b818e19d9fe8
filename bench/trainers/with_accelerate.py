"""Accelerate: `accumulate`, with a loader that is prepared and one that is not; and two models."""

from functools import partial
from tempfile import TemporaryDirectory

import torch
from _factors import (
    EPOCHS,
    INF,
    MAX_NORM,
    STOP,
    WINDOW,
    Seen,
    Weights,
    loader,
    loss_of,
    main,
    optimizer_of,
    schedule_of,
)
from _wrapped import wrapped
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin


def train(
    seen: Seen, prepared=True, unequal=False, max_norm=None, scaler=False, stop=None, folder=None
):
    """The loop of the documentation; `folder` is where the state is saved at `stop`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    if scaler:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    model = Weights()
    seen.watch(model)
    optimizer = optimizer_of(model)
    schedule, batches = schedule_of(optimizer), loader(unequal)
    model, optimizer = accelerator.prepare(model, optimizer)
    if prepared:
        batches, schedule = accelerator.prepare(batches, schedule)
    if folder and not stop:
        accelerator.load_state(folder)
    for _ in range(EPOCHS):
        for i, batch in enumerate(batches):
            with accelerator.accumulate(model):
                loss = loss_of(model(batch))
                accelerator.backward(loss * float("inf") if scaler and i == INF else loss)
                if max_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if i + 1 == stop:
                if folder:
                    accelerator.save_state(folder)
                return


def clip_of_each(seen: Seen):
    """The clip is not asked whether the window is complete."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = Weights()
    seen.watch(model)
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(batch)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def zero_grad_first(seen: Seen):
    """`zero_grad` before the backward pass, as many loops have it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = Weights()
    seen.watch(model)
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model(batch)))
                optimizer.step()


def two_models(watched: int, together: bool, seen: Seen):
    """Two models that are trained in turn, each in a block of its own or both in one block."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    models = [Weights(), Weights()]
    seen.watch(models[watched])
    made = {k: optimizer_of(models[k]) for k in (watched, 1 - watched)}
    *models, batches = accelerator.prepare(*models, loader())
    optimizers = accelerator.prepare(made[0], made[1])

    def turn(model, optimizer, batch):
        accelerator.backward(loss_of(model(batch)))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(EPOCHS):
        for batch in batches:
            if together:
                with accelerator.accumulate(*models):
                    for model, optimizer in zip(models, optimizers):
                        turn(model, optimizer, batch)
            else:
                for model, optimizer in zip(models, optimizers):
                    with accelerator.accumulate(model):
                        turn(model, optimizer, batch)


def carried_over(seen: Seen):
    """The plugin's setting that lets windows cross the epoch's end."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = GradientAccumulationPlugin(num_steps=WINDOW, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loop(seen, accelerator, optimizer_of)


def wrapper(seen: Seen):
    """accumext's recipe: Accelerate does not accumulate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    loop(seen, Accelerator(cpu=True), wrapped)


def loop(seen, accelerator, make):
    model = Weights()
    seen.watch(model)
    opt = make(model)
    model, optimizer, batches = accelerator.prepare(model, opt, loader())
    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(batch)))
                optimizer.step()
                optimizer.zero_grad()
        if make is wrapped:
            opt.flush()


def resumed(seen: Seen):
    with TemporaryDirectory() as folder:
        train(seen, stop=STOP, folder=folder)
        seen.resume()
        train(seen, folder=folder)


def runs(**options):
    once = partial(train, **options)
    return {
        "plain": once,
        "clip": partial(once, max_norm=MAX_NORM),
        "skipped": partial(once, scaler=True),
        "unequal": partial(once, unequal=True),
        "stopped": partial(once, stop=STOP),
    }


ROWS = {
    "Accelerate, loader and schedule prepared": runs()
    | {
        "resumed": resumed,
        "cure: `sync_with_dataloader=False`": carried_over,
        "cure: `AccumulatingOptimizer`, `gradient_accumulation_steps=1`": wrapper,
    },
    "Accelerate, neither prepared": runs(prepared=False),
    "Accelerate, clip without asking `sync_gradients`": {"clip": clip_of_each},
    "Accelerate, `zero_grad` before `backward`": {"plain": zero_grad_first},
    "Accelerate, two models in two `accumulate` blocks: the first": {
        "plain": partial(two_models, 0, False)
    },
    "Accelerate, two models in two `accumulate` blocks: the second": {
        "plain": partial(two_models, 1, False)
    },
    "Accelerate, two models in one `accumulate` block": {"plain": partial(two_models, 1, True)},
}

if __name__ == "__main__":
    main("accelerate", ROWS)
