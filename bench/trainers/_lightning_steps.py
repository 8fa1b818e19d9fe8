"""For trainers that train a LightningModule of their own: what its `training_step` returns."""

from contextlib import contextmanager
from unittest import mock

from _factors import Seen


@contextmanager
def watched(seen: Seen, module_class):
    """Tells `seen` the model, and the loss of each micro-batch before anything divides it."""
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
