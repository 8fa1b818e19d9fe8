"""Trainers.

Each test runs the real framework on the CPU in float64, and compares parameters, learning rate and
number of steps with plain PyTorch that steps on each window's gradient.
"""

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import adam, assert_close, loss_of, make_model, parameters_of
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import DataLoader
from your_loops import LIGHTNING, TRAINER, frameworks

from accumext import AccumulatingOptimizer

BATCHES = oracle.make_batches(12)
MAX_NORM = 0.1  # clips some windows and not others, and some of the batches in those
GAMMA = 0.7

pytestmark = [
    *frameworks,
    pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. every gradient was added to"),
]


def build(window=1, max_norm=MAX_NORM):
    """Make a model, its wrapper, and a schedule that takes the wrapper for an optimizer."""
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=window, max_norm=max_norm)
    return model, opt, ExponentialLR(opt, GAMMA)


def assert_as_plain(model, opt, batches, window, weights=None):
    """Compare parameters, learning rate and number of steps with plain PyTorch, scheduled alike."""
    plain = []

    def make(parameters):
        plain.append(adam(parameters))
        schedule = ExponentialLR(plain[0], GAMMA)
        plain[0].register_step_post_hook(lambda *args: schedule.step())
        return plain[0]

    parameters = oracle.train_by_hand(make, batches, window, max_norm=MAX_NORM, weights=weights)
    assert_close(parameters_of(model), parameters)
    assert opt.optimizer.param_groups[0]["lr"] == plain[0].param_groups[0]["lr"]
    assert steps_of(opt.optimizer) == steps_of(plain[0]) == len(oracle.windows_of(batches, window))


def steps_of(optimizer):
    """Return how often Adam has really stepped, by its own count."""
    return int(next(iter(optimizer.state.values()))["step"])


# A run of each framework over the batches, with so many of them in a window of its own


def make_accelerator(**kwargs):
    return pytest.importorskip("accelerate").Accelerator(cpu=True, **kwargs)


def run_accelerate(folder, model, opt, schedule, accumulation, clip):
    """Train by Accelerate, whose prepared schedule steps with the optimizer."""
    accelerator = make_accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, scheduler = accelerator.prepare(model, opt, schedule)
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


class Rows(torch.nn.Module):
    """The interface that the Trainer calls: keyword arguments in, a dict with the loss out."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, rows):
        return {"loss": loss_of(self.net, rows)}


ROWS = [{"rows": row} for batch in BATCHES for row in batch]


def make_trainer(folder, model, opt, schedule, accumulation, clip=None, data=ROWS, **kwargs):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=len(BATCHES[0]),
        gradient_accumulation_steps=accumulation,
        max_grad_norm=clip or 0.0,
        **(TRAINER | kwargs),
    )
    model = model if isinstance(model, Rows) else Rows(model)
    return transformers.Trainer(model, args, train_dataset=data, optimizers=(opt, schedule))


def run_trainer(*args):
    make_trainer(*args).train()


def make_module(model, opt, schedule, loss_weights=None):
    """Make a module of automatic optimization, or of manual with a weight for each batch."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model
            self.automatic_optimization = loss_weights is None
            self.calls = 0

        def configure_optimizers(self):
            return [opt], [{"scheduler": schedule, "interval": "step"}]

        def training_step(self, batch, batch_idx):
            self.calls += 1
            loss = loss_of(self.net, batch)
            if loss_weights is not None:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.accumulate(loss_weights[batch_idx])
                optimizer.step()
                self.lr_scheduler_step(self.lr_schedulers(), None)
            return loss

        def lr_scheduler_step(self, scheduler, metric):
            if self.optimizers().stepped:
                scheduler.step()

        def on_train_epoch_end(self):
            self.optimizers().flush()
            self.lr_scheduler_step(self.lr_schedulers(), None)

    return Module()


def fit(folder, module, ckpt_path=None, **kwargs):
    options = LIGHTNING | {"default_root_dir": folder, **kwargs}
    trainer = pytest.importorskip("lightning").Trainer(**options)
    trainer.fit(module, DataLoader(BATCHES, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def run_lightning(folder, model, opt, schedule, accumulation, clip):
    options = {"accumulate_grad_batches": accumulation, "gradient_clip_val": clip}
    fit(folder, make_module(model, opt, schedule), **options)


def run_ignite(folder, model, opt, schedule, accumulation, clip):
    """Train by ignite, which does not clip."""
    engine = pytest.importorskip("ignite.engine")
    options = {"gradient_accumulation_steps": accumulation}
    trainer = engine.create_supervised_trainer(
        model, opt, lambda y_pred, y: y_pred.square().mean(), **options
    )

    @trainer.on(engine.Events.ITERATION_COMPLETED(every=accumulation))
    def after_step():
        if opt.stepped:
            schedule.step()

    @trainer.on(engine.Events.EPOCH_COMPLETED)
    def after_epoch():
        opt.flush()
        if opt.stepped:
            schedule.step()

    trainer.run([(batch, batch) for batch in BATCHES], max_epochs=1)


FRAMEWORKS = {
    "accelerate": run_accelerate,
    "trainer": run_trainer,
    "lightning": run_lightning,
    "ignite": run_ignite,
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_their_own_accumulation(framework, tmp_path):
    """Accelerate, Trainer, Lightning and ignite accumulate 3 batches around `window=1`, and clip"""
    clips = framework != "ignite"
    training = build(max_norm=None if clips else MAX_NORM)
    FRAMEWORKS[framework](tmp_path, *training, 3, MAX_NORM if clips else None)
    assert_as_plain(*training[:2], BATCHES, 3)


@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name != "accelerate"])
def test_two_windows_multiply(framework, tmp_path):
    """Trainer, Lightning and ignite: 2 batches of theirs in `window=3` are one step of 6"""
    model, opt, schedule = build(window=3)
    if framework == "trainer":
        schedule = LambdaLR(opt, lambda step: GAMMA ** (step // 3))
    FRAMEWORKS[framework](tmp_path, model, opt, schedule, 2, None)
    assert_as_plain(model, opt, BATCHES, 6)


@pytest.mark.parametrize("window", [1, 2])
def test_accelerate_with_a_scaler(window):
    """Accelerate with a GradScaler: a prepared schedule waits where no step was taken"""
    accelerator = make_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    parameter = torch.nn.Parameter(torch.ones(()))
    module = torch.nn.ParameterList([parameter])
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=window)
    _, optimizer, scheduler = accelerator.prepare(module, opt, ExponentialLR(opt, 0.5))
    taken = []
    for number in range(4 * window):
        # the first micro-batch of the second window
        factor = oracle.INF if number == window else 1.0
        accelerator.backward(parameter * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        taken.append(not optimizer.step_was_skipped)
    closing = [False] * (window - 1) + [True]
    assert taken == closing + [False] * window + closing * 2
    assert scheduler.get_last_lr() == [0.5**3]


@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "outer-scaler"])
def test_accelerate_accumulates_too(scaled):
    """Accelerate: its own accumulation and `window=2` is an error, before anything has changed"""
    make_accelerator(gradient_accumulation_steps=4)
    model, opt, schedule = build(window=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as error:
        scaler.step(opt)
    assert str(error.value) == (
        "AccumulatingOptimizer.step: window must be 1 if Accelerate accumulates too, got "
        "window=2 and gradient_accumulation_steps=4. Pass gradient_accumulation_steps=1 to "
        "Accelerator, or window=1 to the optimizer"
    )
    oracle.assert_equal(parameters_of(model), parameters_of(make_model()))
    oracle.assert_equal([p.grad for p in model.parameters()], grads)
    assert opt.accumulation_state_dict()["micro_batches"] == 0
    opt.window = 1
    scaler.step(opt)
    scaler.update()
    schedule.step()
    assert_as_plain(model, opt, BATCHES[:1], 1)


class LabelledRows(Rows):
    """A loss over the rows with a label alone, divided by what the Trainer counts."""

    accepts_loss_kwargs = True

    def forward(self, rows, labels, num_items_in_batch):
        losses = self.net(rows).square().mean(1)
        return {"loss": losses[labels != -100].sum() / num_items_in_batch}


def test_trainer_counts_items(tmp_path):
    """transformers Trainer: `num_items_in_batch` weighs what it accumulates, also at the end"""
    model, opt, schedule = build()
    kept = [batch[: 1 + i % 5] for i, batch in enumerate(BATCHES[:10])]
    data = [
        {"rows": row, "labels": 1 if i < len(some) else -100}
        for batch, some in zip(BATCHES, kept)
        for i, row in enumerate(batch)
    ]
    make_trainer(tmp_path, LabelledRows(model), opt, schedule, 4, data=data).train()
    assert_as_plain(model, opt, kept, 4, weights=[len(some) for some in kept])


def test_trainer_checkpoint(tmp_path):
    """transformers Trainer: `resume_from_checkpoint` goes on, and the bare optimizer loads it"""
    folder = tmp_path / "checkpoint-2"
    for checkpoint in (None, str(folder)):
        training = build()
        options = {"save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(tmp_path, *training, 3, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 4
        assert_as_plain(*training[:2], BATCHES, 3)
    bare = adam(make_model().parameters())
    bare.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    assert steps_of(bare) == 2
    assert bare.param_groups[0]["lr"] == pytest.approx(0.05 * GAMMA**2)


def test_lightning_manual(tmp_path):
    """Lightning: manual optimization, `accumulate(weight)`, `window=5`, `flush()` of the rest"""
    weights = [1.0 + i % 3 for i in range(len(BATCHES))]
    training = build(window=5)
    fit(tmp_path, make_module(*training, weights))
    assert_as_plain(*training[:2], BATCHES, 5, weights=weights)


def test_lightning_checkpoint(tmp_path):
    """Lightning: a checkpoint between two epochs is resumed from as if nothing had happened"""
    first = fit(tmp_path, make_module(*build(window=4)))
    first.save_checkpoint(tmp_path / "epoch.ckpt")

    training = build(window=4)
    module = make_module(*training)
    fit(tmp_path, module, ckpt_path=tmp_path / "epoch.ckpt", max_epochs=2)
    assert module.calls == len(BATCHES)
    assert_as_plain(*training[:2], BATCHES * 2, 4)


@pytest.mark.parametrize("prepared", [False, True], ids=["bare", "under-accelerate"])
def test_schedule_free(prepared):
    """schedule-free: `train()` and `eval()` reach it through the wrapper, also under Accelerate"""
    schedulefree = pytest.importorskip("schedulefree")
    plain = []

    def make(parameters):
        plain.append(schedulefree.AdamWScheduleFree(parameters, lr=0.05, foreach=False))
        plain[-1].train()
        return plain[-1]

    averaged = oracle.train_by_hand(make, BATCHES, 3, max_norm=MAX_NORM)
    training = [p.clone() for p in averaged]
    plain[0].eval()  # writes the averages into the parameters
    assert not torch.allclose(averaged[0], training[0], rtol=1e-2)

    model = make_model()
    opt = AccumulatingOptimizer(make(model.parameters()), window=3, max_norm=MAX_NORM)
    optimizer = make_accelerator().prepare(opt) if prepared else opt
    for number, batch in enumerate(BATCHES):
        loss_of(model, batch).backward()
        if number == 2:  # a step of the window would not be one in train mode
            optimizer.eval()
            with pytest.raises(Exception, match="train mode"):
                optimizer.step()
            optimizer.train()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(parameters_of(model), training)
    optimizer.eval()
    assert_close(parameters_of(model), averaged)
    assert not hasattr(build()[1], "train")
