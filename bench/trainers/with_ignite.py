"""ignite: `create_supervised_trainer(gradient_accumulation_steps=4)`."""

from functools import partial

import torch
from _factors import (
    EPOCHS,
    INF,
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
from ignite.engine import Events, create_supervised_trainer


def train(seen: Seen, unequal=False, scaler=False, stop=None):
    model = Weights()
    seen.watch(model)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)

    def loss(outputs, targets):
        infinite = scaler and bool((targets == INF).any())
        return loss_of(outputs) * (float("inf") if infinite else 1.0)

    trainer = create_supervised_trainer(
        model,
        optimizer,
        loss,
        gradient_accumulation_steps=WINDOW,
        amp_mode="amp" if scaler else None,
        scaler=torch.amp.GradScaler("cpu") if scaler else False,
        prepare_batch=lambda batch, device, non_blocking: (batch, batch),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: schedule.step())
    if stop:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), trainer.terminate)
    trainer.run(loader(unequal), max_epochs=EPOCHS)


RUNS = {
    "plain": train,
    "skipped": partial(train, scaler=True),
    "unequal": partial(train, unequal=True),
    "stopped": partial(train, stop=STOP),
}

if __name__ == "__main__":
    main("pytorch-ignite", {"ignite, schedule on ITERATION_COMPLETED": RUNS})
