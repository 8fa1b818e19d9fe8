"""skorch: `optimizer` is a function that wraps one, and a callback flushes after each epoch."""

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback

import accumext


def optimizer(params, lr):
    sgd = torch.optim.SGD(params, lr=lr, momentum=0.9)
    return accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.5)


class Flush(Callback):
    def on_epoch_end(self, net, **kwargs):
        net.optimizer_.flush()


torch.manual_seed(0)
rows = torch.randn(160, 8)
net = NeuralNet(
    torch.nn.Linear(8, 4),
    torch.nn.CrossEntropyLoss,
    optimizer=optimizer,
    lr=0.5,
    callbacks=[Flush()],
    batch_size=16,
    max_epochs=3,
    train_split=None,
    verbose=0,
)
net.fit(rows, rows[:, :4].argmax(1))

model = net.module_
print(f"last window: {net.optimizer_.stats()}")
