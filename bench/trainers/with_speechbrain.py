"""SpeechBrain: `Brain.fit` with `grad_accumulation_factor=4`."""

from functools import partial

import _cpu_build  # noqa: F401
import speechbrain
import torch
from _factors import (
    EPOCHS,
    LR,
    WINDOW,
    Seen,
    Weights,
    loader,
    loss_of,
    main,
    optimizer_of,
    runs,
    wrapped,
)


class Brain(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        outputs = self.modules.model(batch)
        return outputs + self.modules.second(batch) if "second" in self.modules else outputs

    def compute_objectives(self, predictions, batch, stage):
        return loss_of(predictions)


class Flushed(Brain):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.optimizer.flush()


def train(seen: Seen, unequal=False, max_norm=5.0, count=None, groups=False, wrap=False):
    """`groups`: two parameter groups, of which the second is watched. `count`: of batches."""
    modules = {"model": Weights()} | ({"second": Weights()} if groups else {})
    model = torch.nn.ModuleDict(modules)
    seen.watch(modules["second" if groups else "model"])

    def make(parameters):
        if wrap:
            return wrapped(model)
        if not groups:
            return optimizer_of(model)
        return torch.optim.SGD([{"params": m.parameters()} for m in modules.values()], lr=LR)

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
    brain.fit(range(EPOCHS), loader(unequal, count))


if __name__ == "__main__":
    cure = "cure: `AccumulatingOptimizer` in `opt_class`, `grad_accumulation_factor=1`"
    rows = {
        "SpeechBrain": runs(train, "clip", "unequal") | {cure: partial(train, wrap=True)},
        "SpeechBrain, epochs of 3 batches": runs(train, count=3),
        "SpeechBrain, the second parameter group": runs(train, "clip", groups=True),
    }
    main("speechbrain", rows)
