"""ignite: `create_supervised_trainer(gradient_accumulation_steps=4)`."""

import torch
from _factors import (
    EPOCHS,
    INF,
    WINDOW,
    Seen,
    Weights,
    loader,
    loss_of,
    main,
    optimizer_of,
    runs,
    schedule_of,
)
from ignite.engine import Events, create_supervised_trainer


def train(seen: Seen, unequal=False, infinite=False, stop=None):
    model = seen.watch(Weights())
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)

    def loss(outputs, targets):
        overflows = infinite and bool((targets == INF).any())
        return loss_of(outputs) * (float("inf") if overflows else 1.0)

    trainer = create_supervised_trainer(
        model,
        optimizer,
        loss,
        gradient_accumulation_steps=WINDOW,
        amp_mode="amp" if infinite else None,
        scaler=torch.amp.GradScaler("cpu") if infinite else False,
        prepare_batch=lambda batch, device, non_blocking: (batch, batch),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: schedule.step())
    if stop:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), trainer.terminate)
    trainer.run(loader(unequal), max_epochs=EPOCHS)


if __name__ == "__main__":
    found = runs(train, "skipped", "unequal", "stopped")
    main("pytorch-ignite", {"ignite, schedule on ITERATION_COMPLETED": found})
