"""What bench/trainers records of a loop by hand, and the words that its tables have for it."""

import _factors
import _trainers
import pytest
import torch
from _factors import BATCHES, EPOCHS, MAX_NORM, WINDOW, Weights, loader, loss_of, optimizer_of


def loop(seen, last="step", divisor=WINDOW, unequal=False, clip="", schedule=""):
    """Train as the tutorials do; `last` is what is done with what an epoch leaves."""
    model = Weights()
    seen.watch(model)
    optimizer = optimizer_of(model)
    rates = _factors.schedule_of(optimizer)
    for _ in range(EPOCHS):
        for i, batch in enumerate(loader(unequal), 1):
            (loss_of(model(batch)) / divisor).backward()
            complete = i % WINDOW == 0 or (last == "step" and i == BATCHES)
            if clip == "each" or (clip and complete):
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            if complete:
                optimizer.step()
                optimizer.zero_grad()
            if schedule == "each" or (schedule and complete):
                rates.step()
        if last == "drop":
            optimizer.zero_grad()


def words(of, name="plain", **options):
    found = _factors.outcome(lambda seen: loop(seen, **options))
    assert "error" not in found
    plain = _factors.outcome(loop)
    return of(_trainers.Row("", {"plain": plain, name: found}))


@pytest.mark.parametrize(
    ("options", "window", "end", "never_used"),
    [
        ({}, "4 x 1/4", "**2 x 1/4: 1/2 times the mean**", ""),
        ({"divisor": 1}, "**4 x 1: 4 times the mean**", "**2 x 1: 2 times the mean**", ""),
        (
            {"last": "join"},
            "4 x 1/4",
            "2 join the next epoch: **6 x 1/4: 3/2 times the mean**",
            "**2 dropped** at the end",
        ),
        ({"last": "drop"}, "4 x 1/4", "**2 dropped**", "**2 dropped** at the end"),
    ],
)
def test_windows(options, window, end, never_used):
    assert words(_trainers.full_window, **options) == window
    assert words(_trainers.epoch_end, **options) == end
    assert words(_trainers.training_end, **options) == never_used


def test_clip():
    assert words(_trainers.clip, "clip", clip="window") == "once"
    assert words(_trainers.clip, "clip") == "**none**"
    assert words(_trainers.clip, "clip", clip="each").startswith("**of each micro-batch: ")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedule():
    assert words(_trainers.schedule, schedule="window") == "per step"
    assert words(_trainers.schedule, schedule="each") == "**per micro-batch**"


def test_unequal():
    assert words(_trainers.unequal, "unequal", unequal=True) == "**mean of means**"


def test_factors_are_found_from_losses_alone():
    """Of a model whose gradients are not known before; one micro-batch is left out of the step."""

    def run(seen):
        model = torch.nn.Linear(3, 2).double()
        seen.watch_losses(model)
        optimizer = optimizer_of(model)
        for k in range(WINDOW):
            if k == 1:
                optimizer.zero_grad()
            loss = seen.learn(model(torch.randn(5, 3).double()).square().mean())
            (loss / 3).backward()
        optimizer.step()

    (step,) = _factors.outcome(run)["steps"]
    assert step["passes"] == [0, 1, 2, 3]
    assert step["micro_batches"] == [1, 2, 3]
    assert step["factors"] == [0.33333] * 3
    assert _trainers.in_words(step) == "**3 x 1/3; 1 lost**"


def test_a_gradient_of_no_micro_batch_is_noted():
    def run(seen):
        model = torch.nn.Linear(3, 2).double()
        seen.watch_losses(model)
        seen.learn(model(torch.randn(5, 3).double()).square().mean()).backward()
        model.weight.grad.sign_()
        optimizer_of(model).step()

    (step,) = _factors.outcome(run)["steps"]
    assert step["error"].endswith(" is of no micro-batch")


def test_a_run_that_fails_is_an_entry_in_words():
    def run(seen):
        raise ValueError("no such trainer")

    assert _factors.outcome(run) == {"error": "ValueError: no such trainer"}
