"""SpeechBrain: `Brain.fit` with `grad_accumulation_factor=4`."""

from functools import partial

import _cpu_build  # noqa: F401
import speechbrain
import torch
from _factors import (
    EPOCHS,
    MAX_NORM,
    WINDOW,
    Seen,
    Weights,
    loader,
    loss_of,
    main,
    micro_batches,
    optimizer_of,
)
from _wrapped import wrapped


class Brain(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        outputs = self.modules.model(batch)
        return outputs + self.modules.second(batch) if "second" in self.modules else outputs

    def compute_objectives(self, predictions, batch, stage):
        return loss_of(predictions)


class Flushed(Brain):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.optimizer.flush()


def train(seen: Seen, unequal=False, max_norm=5.0, batches=None, groups=False, wrap=False):
    """`groups`: a model in two parameter groups, of which the second is watched."""
    modules = {"model": Weights()} | ({"second": Weights()} if groups else {})
    model = torch.nn.ModuleDict(modules)
    seen.watch(modules["second" if groups else "model"])

    def make(parameters):
        if wrap:
            return wrapped(model)
        if not groups:
            return optimizer_of(model)
        return torch.optim.SGD([{"params": m.parameters()} for m in modules.values()], lr=1e-9)

    brain = (Flushed if wrap else Brain)(
        modules,
        make,
        run_opts={
            "device": "cpu",
            "grad_accumulation_factor": 1 if wrap else WINDOW,
            "max_grad_norm": max_norm,
            "noprogressbar": True,
        },
    )
    data = torch.utils.data.DataLoader(batches, batch_size=None) if batches else loader(unequal)
    brain.fit(range(EPOCHS), data)


RUNS = {
    "plain": train,
    "clip": partial(train, max_norm=MAX_NORM),
    "unequal": partial(train, unequal=True),
    "cure: `AccumulatingOptimizer` in `opt_class`, `grad_accumulation_factor=1`": partial(
        train, wrap=True
    ),
}
SHORT = partial(train, batches=micro_batches()[:3])

if __name__ == "__main__":
    rows = {
        "SpeechBrain": RUNS,
        "SpeechBrain, epochs of 3 batches": {"plain": SHORT},
        "SpeechBrain, the second parameter group": {
            "plain": partial(train, groups=True),
            "clip": partial(train, groups=True, max_norm=MAX_NORM),
        },
    }
    main("speechbrain", rows)
