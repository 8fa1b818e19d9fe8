"""Trainers.

Each test runs the real framework on the CPU in float64, and compares parameters, learning rate and
number of steps with plain PyTorch that steps on each window's gradient.
"""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    adam,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
    windows_of,
)
from torch.utils.data import DataLoader

from accumext import AccumulatingOptimizer

BATCHES = make_batches(12)
MAX_NORM = 0.1  # clips some windows and not others, and some of the batches in those
GAMMA = 0.7

# Warnings of torch that Lightning causes, and its advice where there are more cores or a GPU.
pytestmark = [
    pytest.mark.usefixtures("forget_accelerate"),
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
        "ignore:.*does not have many workers",
        "ignore:GPU available but not used",
    ),
]


def build(window=1, max_norm=MAX_NORM):
    """A model, the wrapper, and a schedule that takes the wrapper for an optimizer."""
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=window, max_norm=max_norm)
    return model, opt, torch.optim.lr_scheduler.ExponentialLR(opt, GAMMA)


def assert_as_plain(model, opt, batches, window, weights=None):
    """The parameters, learning rate and number of steps of plain PyTorch with the same schedule."""
    plain = []

    def make(parameters):
        optimizer = adam(parameters)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
        optimizer.register_step_post_hook(lambda *args: schedule.step())
        plain.append(optimizer)
        return optimizer

    parameters = train_by_hand(make, batches, window, max_norm=MAX_NORM, weights=weights)
    assert_close([p.detach() for p in model.parameters()], parameters)
    assert opt.optimizer.param_groups[0]["lr"] == plain[0].param_groups[0]["lr"]
    assert steps_of(opt.optimizer) == steps_of(plain[0]) == len(windows_of(batches, window))


def steps_of(optimizer):
    """Return how often Adam has really stepped, by its own count."""
    return int(next(iter(optimizer.state.values()))["step"])


def make_accelerator(**kwargs):
    return pytest.importorskip("accelerate").Accelerator(cpu=True, **kwargs)


def test_accelerate():
    """Accelerate: `prepare`, `window=3`, `max_norm`, a prepared schedule once per window"""
    inner, opt, schedule = build(window=3)
    accelerator = make_accelerator()
    model, optimizer, scheduler = accelerator.prepare(inner, opt, schedule)
    for batch in BATCHES:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if opt.stepped:
            scheduler.step()
    assert_as_plain(inner, opt, BATCHES, 3)


@pytest.mark.parametrize("window", [1, 2])
def test_accelerate_with_a_scaler(window):
    """Accelerate with a GradScaler: a prepared schedule waits where no step was taken"""
    accelerator = make_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    parameter = torch.nn.Parameter(torch.ones(()))
    module = torch.nn.ParameterList([parameter])
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=window)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    _, optimizer, scheduler = accelerator.prepare(module, opt, schedule)
    taken = []
    for number in range(4 * window):
        factor = INF if number == window else 1.0  # the first micro-batch of the second window
        accelerator.backward(parameter * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        taken.append(not optimizer.step_was_skipped)
    closing = [False] * (window - 1) + [True]
    assert taken == closing + [False] * window + closing * 2
    assert scheduler.get_last_lr() == [0.5**3]


def test_accelerate_accumulates():
    """Accelerate: `accumulate` and `clip_grad_norm_` of its own around `window=1`"""
    inner, opt, schedule = build(max_norm=None)
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    model, optimizer, scheduler = accelerator.prepare(inner, opt, schedule)
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_as_plain(inner, opt, BATCHES, 3)


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
        "AccumulatingOptimizer.step: window must be 1 where Accelerate accumulates too, got "
        "window=2 and gradient_accumulation_steps=4. Pass gradient_accumulation_steps=1 to "
        "Accelerator, or window=1 to the optimizer"
    )
    assert_equal(list(model.parameters()), list(make_model().parameters()))
    assert_equal([p.grad for p in model.parameters()], grads)
    assert opt.accumulation_state_dict()["micro_batches"] == 0
    opt.window = 1
    scaler.step(opt)
    scaler.update()
    schedule.step()
    assert_as_plain(model, opt, BATCHES[:1], 1)


class Rows(torch.nn.Module):
    """The interface that the Trainer calls: keyword arguments in, a dict with the loss out."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, rows):
        return {"loss": loss_of(self.net, rows)}


class LabelledRows(Rows):
    """A loss over the rows with a label alone, divided by what the Trainer counts."""

    accepts_loss_kwargs = True

    def forward(self, rows, labels, num_items_in_batch):
        losses = self.net(rows).square().mean(1)
        return {"loss": losses[labels != -100].sum() / num_items_in_batch}


ROWS = [{"rows": row} for batch in BATCHES for row in batch]


def make_trainer(folder, opt, schedule, model, data, **kwargs):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=len(BATCHES[0]),
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **kwargs},
    )
    return transformers.Trainer(model, args, train_dataset=data, optimizers=(opt, schedule))


def test_trainer(tmp_path):
    """transformers Trainer: `optimizers=(opt, schedule)`, `window=3`, a schedule in batches"""
    model, opt, _ = build(window=3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda batch: GAMMA ** (batch // 3))
    trainer = make_trainer(tmp_path, opt, schedule, Rows(model), ROWS)
    trainer.train()
    assert trainer.state.global_step == len(BATCHES)
    assert_as_plain(model, opt, BATCHES, 3)


def test_trainer_accumulates(tmp_path):
    """transformers Trainer: `gradient_accumulation_steps=4`, a partial last step, `window=1`"""
    model, opt, schedule = build()
    options = {"data": ROWS[:50], "gradient_accumulation_steps": 4}
    make_trainer(tmp_path, opt, schedule, Rows(model), **options).train()
    assert_as_plain(model, opt, BATCHES[:10], 4)


def test_trainer_counts_items(tmp_path):
    """transformers Trainer: `num_items_in_batch` weighs its own accumulation, `window=1`"""
    model, opt, schedule = build()
    kept = [batch[: 1 + i % 5] for i, batch in enumerate(BATCHES)]
    data = [
        {"rows": row, "labels": 1 if i < len(some) else -100}
        for batch, some in zip(BATCHES, kept)
        for i, row in enumerate(batch)
    ]
    options = {"data": data, "gradient_accumulation_steps": 4}
    make_trainer(tmp_path, opt, schedule, LabelledRows(model), **options).train()
    assert_as_plain(model, opt, kept, 4, weights=[len(some) for some in kept])


def test_trainer_checkpoint(tmp_path):
    """transformers Trainer: `resume_from_checkpoint` goes on, and the bare optimizer loads it"""
    options = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2}
    folder = tmp_path / "checkpoint-2"
    for checkpoint in (None, str(folder)):
        model, opt, schedule = build()
        trainer = make_trainer(tmp_path, opt, schedule, Rows(model), ROWS, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 4
        assert_as_plain(model, opt, BATCHES, 3)
    bare = adam(make_model().parameters())
    bare.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    assert steps_of(bare) == 2
    assert bare.param_groups[0]["lr"] == pytest.approx(0.05 * GAMMA**2)


def make_module(model, opt, schedule, loss_weights=None):
    """Automatic optimization, or manual with a weight for each batch."""
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


def fit(folder, module, batches, ckpt_path=None, **kwargs):
    trainer = pytest.importorskip("lightning").Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **kwargs},
    )
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def test_lightning(tmp_path):
    """Lightning: automatic optimization, `window=5`, `flush()`, `training_step` once per batch"""
    model, opt, schedule = build(window=5)
    module = make_module(model, opt, schedule)
    fit(tmp_path, module, BATCHES)
    assert module.calls == len(BATCHES)
    assert_as_plain(model, opt, BATCHES, 5)


def test_lightning_accumulates(tmp_path):
    """Lightning: `accumulate_grad_batches=3` and `gradient_clip_val` around `window=1`"""
    model, opt, schedule = build(max_norm=None)
    module = make_module(model, opt, schedule)
    fit(tmp_path, module, BATCHES, accumulate_grad_batches=3, gradient_clip_val=MAX_NORM)
    assert_as_plain(model, opt, BATCHES, 3)


def test_lightning_manual(tmp_path):
    """Lightning: manual optimization, `accumulate(weight)`, `window=5`, `flush()` of the rest"""
    weights = [1.0 + i % 3 for i in range(len(BATCHES))]
    model, opt, schedule = build(window=5)
    module = make_module(model, opt, schedule, weights)
    fit(tmp_path, module, BATCHES)
    assert_as_plain(model, opt, BATCHES, 5, weights=weights)


def test_lightning_checkpoint(tmp_path):
    """Lightning: a checkpoint between two epochs is resumed from as if nothing had happened"""
    model, opt, schedule = build(window=4)
    first = fit(tmp_path, make_module(model, opt, schedule), BATCHES)
    first.save_checkpoint(tmp_path / "epoch.ckpt")

    model, opt, schedule = build(window=4)
    module = make_module(model, opt, schedule)
    fit(tmp_path, module, BATCHES, ckpt_path=tmp_path / "epoch.ckpt", max_epochs=2)
    assert module.calls == len(BATCHES)
    assert_as_plain(model, opt, BATCHES * 2, 4)


def run_ignite(model, opt, schedule, batches, accumulation=1):
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

    trainer.run([(batch, batch) for batch in batches], max_epochs=1)


def test_ignite():
    """ignite: `create_supervised_trainer`, `window=5`, `flush()` and the schedule in handlers"""
    model, opt, schedule = build(window=5)
    run_ignite(model, opt, schedule, BATCHES)
    assert_as_plain(model, opt, BATCHES, 5)


def test_ignite_accumulates():
    """ignite: `gradient_accumulation_steps=3` around `window=1`"""
    model, opt, schedule = build()
    run_ignite(model, opt, schedule, BATCHES, accumulation=3)
    assert_as_plain(model, opt, BATCHES, 3)


@pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. every gradient was added to")
@pytest.mark.parametrize("framework", ["trainer", "lightning", "ignite"])
def test_two_windows_multiply(tmp_path, framework):
    """Trainer, Lightning and ignite: 2 batches of theirs in `window=3` are one step of 6"""
    model, opt, schedule = build(window=3)
    if framework == "trainer":
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: GAMMA ** (step // 3))
        options = {"gradient_accumulation_steps": 2}
        make_trainer(tmp_path, opt, schedule, Rows(model), ROWS, **options).train()
    elif framework == "lightning":
        fit(tmp_path, make_module(model, opt, schedule), BATCHES, accumulate_grad_batches=2)
    else:
        run_ignite(model, opt, schedule, BATCHES, accumulation=2)
    assert_as_plain(model, opt, BATCHES, 6)


@pytest.mark.parametrize("prepared", [False, True], ids=["bare", "under-accelerate"])
def test_schedule_free(prepared):
    """schedule-free: `train()` and `eval()` reach it through the wrapper, also under Accelerate"""
    schedulefree = pytest.importorskip("schedulefree")
    plain = []

    def make(parameters):
        plain.append(schedulefree.AdamWScheduleFree(parameters, lr=0.05, foreach=False))
        plain[-1].train()
        return plain[-1]

    averaged = train_by_hand(make, BATCHES, 3, max_norm=MAX_NORM)
    training = [p.clone() for p in averaged]
    plain[0].eval()  # writes the averages into the parameters
    assert not torch.allclose(averaged[0], training[0], rtol=1e-2)

    model = make_model()
    opt = AccumulatingOptimizer(make(model.parameters()), window=3, max_norm=MAX_NORM)
    optimizer = make_accelerator().prepare(opt) if prepared else opt
    optimizer.eval()
    optimizer.train()
    for batch in BATCHES:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close([p.detach() for p in model.parameters()], training)
    optimizer.eval()
    assert_close([p.detach() for p in model.parameters()], averaged)
