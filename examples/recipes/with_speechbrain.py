"""SpeechBrain: `opt_class` is a function that wraps an optimizer."""

import torch
from speechbrain.core import Brain, Stage
from torch.nn.functional import cross_entropy

import accumext


def optimizer(parameters):
    sgd = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    return accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.5)


class Recogniser(Brain):
    def on_stage_end(self, stage, loss, epoch):
        if stage == Stage.TRAIN:
            self.optimizer.flush()

    def compute_forward(self, batch, stage):
        return self.modules.head(batch)

    def compute_objectives(self, predictions, batch, stage):
        return cross_entropy(predictions, batch[:, :4].argmax(1))


torch.manual_seed(0)
rows = torch.randn(160, 8)
brain = Recogniser(
    {"head": torch.nn.Linear(8, 4)},
    optimizer,
    run_opts={"device": "cpu", "max_grad_norm": float("inf"), "noprogressbar": True},
)
brain.fit(range(3), torch.utils.data.DataLoader(rows, batch_size=16))

model = brain.modules
print(f"last window: {brain.optimizer.stats()}")
