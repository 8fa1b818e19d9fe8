"""DeepSpeed on a CPU: `gradient_accumulation_steps` of 4, ZeRO stages 0, 1 and 2."""

import os

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29571",
}

import deepspeed
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
    schedule_of,
)


def train(seen: Seen, stage, unequal=False, max_norm=0.0, stop=None):
    model = Weights()
    optimizer = optimizer_of(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule_of(optimizer),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": WINDOW,
            "gradient_clipping": max_norm,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    seen.watch(model)
    seen.copies = optimizer
    for _, batch in epochs(loader(unequal), stop):
        engine.backward(loss_of(engine(batch)))
        engine.step()


if __name__ == "__main__":
    rows = {
        f"DeepSpeed, ZeRO stage {stage}": runs(train, "clip", "unequal", "stopped", stage=stage)
        for stage in (0, 1, 2)
    }
    main("deepspeed", rows)
