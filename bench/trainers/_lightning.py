"""For packages that train a LightningModule of their own."""

from contextlib import contextmanager
from unittest import mock

from _factors import WINDOW, Seen

SETTINGS = {  # of Lightning's Trainer
    "accelerator": "cpu",
    "accumulate_grad_batches": WINDOW,
    "enable_progress_bar": False,
    "logger": False,
}


@contextmanager
def watched(seen: Seen, module_class):
    """Tells `seen` the model, and the loss of each micro-batch before anything divides it.

    The loss is what the `training_step` of the class returns.
    """
    before, models = module_class.training_step, []

    def training_step(self, *args, **kwargs):
        if self not in models:
            models.append(self)
            seen.watch_losses(self)
        found = before(self, *args, **kwargs)
        seen.learn(found["loss"] if isinstance(found, dict) else found)
        return found

    with mock.patch.object(module_class, "training_step", training_step):
        yield
