"""fastai: `OptimWrapper` takes the wrapper, and a callback flushes after each epoch's training."""

from functools import partial

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

import accumext


def optimizer(params, lr):
    sgd = torch.optim.SGD(params, lr=lr, momentum=0.9)
    return accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.5)


class Flush(Callback):
    def after_train(self):
        self.learn.opt.opt.flush()


torch.manual_seed(0)
rows = torch.randn(160, 8)
data = list(zip(rows, rows[:, :4].argmax(1)))
model = torch.nn.Linear(8, 4)
learner = Learner(
    DataLoaders(DataLoader(data, bs=16), DataLoader(data, bs=16)),
    model,
    loss_func=torch.nn.functional.cross_entropy,
    opt_func=partial(OptimWrapper, opt=optimizer),
    lr=0.5,
    cbs=[Flush()],
)
with learner.no_logging():
    learner.fit(3)

print(f"last window: {learner.opt.opt.stats()}")
