"""For trainers that are a Trainer of transformers, with TrainingArguments."""

from tempfile import TemporaryDirectory

import torch
from _factors import EPOCHS, ROWS, WINDOW, optimizer_of, schedule_of


class InOrder:
    """Before a Trainer in the bases of a class: the samples are not shuffled."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def fit(trainer, arguments, model, data, max_norm=0.0, given=None, **options):
    """Trains with the classes of a trainer and its arguments.

    `given` goes to the trainer, other options to the arguments.
    """
    optimizer = optimizer_of(model)
    usual = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": WINDOW,
        "max_grad_norm": max_norm,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    with TemporaryDirectory() as folder:
        trainer(
            model,
            arguments(folder, **usual, **options),
            train_dataset=data,
            optimizers=(optimizer, schedule_of(optimizer)),
            **given or {},
        ).train()
