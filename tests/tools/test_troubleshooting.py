"""Headings of docs/troubleshooting.md: what people have goes wrong, and the page cures it.

The faulty code is here, the cure in the page, which test_pages.py runs as a whole.
"""

import copy
import gc
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import ROOT
from support.decode_oracle import plain_losses
from support.optimizer_oracle import ByHand, assert_close, parameters_of
from support.recorded_warnings import warnings_as
from test_pages import blocks_of, names_before
from torch import Tensor

import accumext

PAGE = "troubleshooting"
HEADINGS = re.findall(r"^## (.+)$", (ROOT / f"docs/{PAGE}.md").read_text(), re.MULTILINE)
EXACT = 1e-5  # relative: float32 sums in another order, against float64
BFLOAT16 = 0.01  # of autocast

# Headings whose message is not raised here, with the reason.
NOT_RAISED = {
    "torch.OutOfMemoryError: CUDA out of memory": "needs a GPU",
    "Gradients are None or 0.0 after backward": "no message; tests/optimizer/test_backward.py",
    "The window must hold": "several processes; tests/conformance/test_uneven_ranks.py raises it",
    "CPU tensors are served": "compilers that fail; tests/backends/test_compilers.py has the words",
    "must be the same on every": "several processes; tests/optimizer/test_agreement.py raises it",
}


def losses(page: SimpleNamespace) -> Iterator[Tensor]:
    return (F.cross_entropy(page.model(inputs), labels) for inputs, labels in page.loader)


def fed_its_argmax(page: SimpleNamespace, at_each_step: Callable[[Tensor], object]) -> None:
    """Train on tokens in the loop that people write."""

    def step(token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = page.cell(page.embedding(token), hidden)
        return page.head(hidden), hidden

    for loss in plain_losses(step, page.targets, page.hidden):
        at_each_step(loss)


# --- faults ---------------------------------------------------------------------------------------


def backward_at_each_token(page: SimpleNamespace) -> None:
    fed_its_argmax(page, lambda loss: loss.backward())


def unscale_every_micro_batch(page: SimpleNamespace) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for loss in losses(page):
        scaler.scale(loss).backward()
        scaler.unscale_(page.optimizer)


def update_left_over(page: SimpleNamespace) -> None:
    scaler = torch.amp.GradScaler("cpu")
    opt = accumext.AccumulatingOptimizer(page.optimizer, scaler=scaler)
    opt.backward(next(losses(page)))
    opt.step()
    scaler.update()


def step_at_each_token(page: SimpleNamespace) -> None:
    def step_on(loss):
        loss.backward(retain_graph=True)
        page.optimizer.step()

    fed_its_argmax(page, step_on)


def state_written_in_place(page: SimpleNamespace) -> None:
    state = page.hidden
    for token in page.targets:
        new = page.cell(page.embedding(token), state).tanh()
        new[0] = state[0]
        state = new
    page.head(state).sum().backward()


def schedule_before_optimizer(page: SimpleNamespace) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(page.optimizer, T_max=3)
    next(losses(page)).backward()
    schedule.step()


def step_of_a_loop_that_counts(page: SimpleNamespace) -> None:
    opt = accumext.AccumulatingOptimizer(page.optimizer, window=4)
    for number, loss in enumerate([*losses(page), *losses(page)], 1):
        (loss / 4).backward()
        if number % 4 == 0:
            opt.step()
    opt.discard()


def two_passes_before_each_step(page: SimpleNamespace) -> None:
    opt = accumext.AccumulatingOptimizer(page.optimizer, window=4)
    for first, second in zip(losses(page), losses(page)):
        opt.backward(first)
        opt.backward(second)
        opt.step()
    opt.discard()


def backward_of_what_has_run(page: SimpleNamespace) -> None:
    def step(token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = page.cell(page.embedding(token), hidden)
        return page.head(hidden), hidden

    result = accumext.tbptt(step, page.targets, page.hidden, criterion=F.cross_entropy)
    accumext.AccumulatingOptimizer(page.optimizer).backward(result.loss)


def end_inside_a_window(page: SimpleNamespace) -> None:
    opt = accumext.AccumulatingOptimizer(page.optimizer, window=4)
    opt.backward(next(losses(page)))


def sum_beyond_float32(page: SimpleNamespace) -> None:
    opt = accumext.AccumulatingOptimizer(page.optimizer, window=2, on_nonfinite="raise")
    try:
        for _ in range(2):
            opt.backward(page.model.bias.sum() * 3e38)
            opt.step()
    finally:
        opt.discard()


def decay_of_every_micro_batch(page: SimpleNamespace) -> None:
    opt = accumext.AccumulatingOptimizer(page.optimizer, window=4)
    for loss in losses(page):
        opt.backward(loss)
        opt.step()
        opt.param_groups[0]["weight_decay"] += 0.01
    opt.discard()


FAULTS = [
    ("RuntimeError: Trying to backward", backward_at_each_token),
    ("RuntimeError: unscale_()", unscale_every_micro_batch),
    ("AssertionError: No inf checks", update_left_over),
    ("RuntimeError: one of the variables", step_at_each_token),
    ("RuntimeError: one of the variables", state_written_in_place),
    ("Detected call", schedule_before_optimizer),
    ("window=4 counts", step_of_a_loop_that_counts),
    ("every call of step", two_passes_before_each_step),
    ("loss must have a graph", backward_of_what_has_run),
    ("ended with micro-batches", end_inside_a_window),
    ("the window's sum", sum_beyond_float32),
    ("put AccumulatingOptimizer", decay_of_every_micro_batch),
]


def heading_of(start: str) -> str:
    (heading,) = (heading for heading in HEADINGS if heading.startswith(start))
    return heading


@pytest.mark.parametrize(("start", "fault"), FAULTS, ids=[f.__name__ for _, f in FAULTS])
def test_the_message_is_that_of_the_heading(start, fault):
    words = []
    with warnings_as("always") as said:
        try:
            fault(SimpleNamespace(**names_before(PAGE)))
        except (RuntimeError, ValueError, AssertionError) as error:
            words.append(str(error))
        gc.collect()
    words += [str(one.message) for one in said]
    message = re.sub(r"^\w+Error: ", "", heading_of(start))
    assert any(message in text for text in words), words


# --- cures ----------------------------------------------------------------------------------------


def cured(start: str, number: int, names: dict) -> dict:
    """Run a block below a heading; return all names."""
    blocks = [block for block in blocks_of(PAGE) if block.heading == heading_of(start)]
    exec(blocks[number].compiled(), names)
    return names


# Blocks that train: how many windows of `loader` they step on, the clip, and the weights.
TRAINING = [
    ("RuntimeError: unscale_()", 0, 2, 1.0, False),
    ("AssertionError: No inf checks", 0, 2, None, False),
    ("The loss explodes", 0, 2, 1.0, False),
    ("The last window", 0, 2, None, True),
    ("Detected call", 0, 1, None, False),  # the rate of the second window is 0
    ("NaN after some steps", 1, 2, None, True),
    ("window=4 counts", 0, 1, None, False),
    ("every call of step", 0, 2, None, False),
    ("ended with micro-batches", 0, 2, None, False),
    ("put AccumulatingOptimizer", 0, 2, None, False),  # the decay begins at 0
]


@pytest.mark.parametrize(("start", "number", "windows", "max_norm", "weighted"), TRAINING)
def test_a_cure_steps_on_the_mean_of_each_window(start, number, windows, max_norm, weighted):
    names = names_before(PAGE)
    loader, model = names["loader"], copy.deepcopy(names["model"]).double()
    if start.startswith("NaN"):
        loader[0] = loader[0][0], torch.full((2,), -100)
    by_hand = ByHand(model.parameters(), partial(torch.optim.SGD, lr=0.1), max_norm=max_norm)
    for window in (loader[:4], loader[4:])[:windows]:
        for inputs, labels in window:
            if (labels >= 0).any():
                loss = F.cross_entropy(model(inputs.double()), labels)
                by_hand.add(loss, len(labels) if weighted else 1.0)
        by_hand.step()
    with warnings_as("error"):
        trained = cured(start, number, names)["model"]
    tolerance = BFLOAT16 if "unscale_" in start else EXACT
    assert_close(parameters_of(trained.double()), parameters_of(model), tolerance)


def test_perplexity():
    names = names_before(PAGE)
    names["head"].weight.data.mul_(8)  # tokens of different probabilities
    embedding, cell, head = copy.deepcopy(names["decoder"]).double()
    losses = []
    for targets, lengths in names["sentences"]:
        hidden = torch.zeros(len(lengths), 8, dtype=torch.float64)
        token = torch.zeros_like(targets[0])
        for t, target in enumerate(targets):
            hidden = cell(embedding(token), hidden)
            each = F.cross_entropy(head(hidden), target, reduction="none").tolist()
            losses += [e for e, length in zip(each, lengths) if t < length]
            token = target
    right = math.exp(sum(losses) / len(losses))
    assert cured("Perplexity", 0, names)["perplexity"] == pytest.approx(right, rel=EXACT)


def test_no_heading_is_left_out():
    starts = ("Perplexity", *NOT_RAISED, *(start for start, *_ in [*FAULTS, *TRAINING]))
    assert [heading for heading in HEADINGS if not heading.startswith(starts)] == []
    assert all(map(heading_of, starts))
