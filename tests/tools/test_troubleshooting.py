"""Every heading of docs/troubleshooting.md: what people have goes wrong, and the page cures it.

The faulty code is here, the cure in the page. The right result is computed in plain PyTorch, in
float64 where gradients are compared.
"""

from __future__ import annotations

import copy
import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ROOT
from support.recorded_warnings import warnings_as
from test_pages import blocks_of, names_before
from torch import nn

import accumext

PAGE = "troubleshooting"
BLOCKS = blocks_of(PAGE)
HEADINGS = re.findall(r"^## (.+)$", (ROOT / f"docs/{PAGE}.md").read_text(), re.MULTILINE)
EXACT = 1e-5  # relative: float32 sums in another order, against float64

# Headings whose message is not raised here, with the reason. Their cures run.
NOT_RAISED = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ...": "needs a GPU",
    "The window must hold the same number of micro-batches on every process": (
        "needs several processes; tests/conformance/test_uneven_ranks.py raises it"
    ),
    "must be the same on every process": (
        "needs several processes; tests/optimizer/test_agreement.py raises it"
    ),
}


class Section:
    """The cure of one heading, and the names it starts from."""

    def __init__(self, start: str) -> None:
        (self.heading,) = (heading for heading in HEADINGS if heading.startswith(start))
        self.names = names_before(PAGE)
        self.names["step"] = self._step
        self.before = copy.deepcopy((self.names["model"], self.names["decoder"]))

    def _step(self, token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As an earlier block of the page defines it."""
        embedding, cell, head = self.names["decoder"]
        state = cell(embedding(token), state)
        return head(state), state

    def _blocks(self) -> list[Any]:
        return [block for block in BLOCKS if block.heading == self.heading]

    def message(self) -> str:
        """Return the heading's claim of the error's words."""
        return self.heading.removeprefix("RuntimeError: ").removeprefix("AssertionError: ")

    def cure(self, number: int = 0) -> dict[str, Any]:
        """Run one of its blocks; all names afterwards."""
        exec(self._blocks()[number].compiled(), self.names)
        return self.names

    def plain_decoder_loss(self, tokens: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
        """A decoder in float64 and its loss, by a plain loop that is fed given tokens."""
        decoder = copy.deepcopy(self.before[1]).double()
        embedding, cell, head = decoder
        hidden, losses = self.names["hidden"].double(), []
        for token, target in zip(tokens, self.names["targets"]):
            hidden = cell(embedding(token), hidden)
            losses.append(F.cross_entropy(head(hidden), target))
        return decoder, torch.stack(losses).mean()


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in module.parameters()])


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found - right).norm() <= EXACT * right.norm())


def fed_own_argmax(names: dict[str, Any], at_each_step: Callable[[torch.Tensor], None]) -> None:
    """The loop over tokens that people write."""
    embedding, cell, head = names["decoder"]
    hidden, token = names["hidden"], torch.zeros(3, dtype=torch.long)
    for target in names["targets"]:
        hidden = cell(embedding(token), hidden)
        logits = head(hidden)
        token = logits.argmax(-1)
        at_each_step(F.cross_entropy(logits, target))


def each_batch(names: dict[str, Any], count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return names["loader"][:count]


@pytest.mark.slow
def test_out_of_memory_in_a_decoder() -> None:
    section = Section("torch.OutOfMemoryError")
    assert section.heading in NOT_RAISED
    names = section.cure()
    decoder, loss = section.plain_decoder_loss(names["out"].inputs)
    loss.backward()
    assert close(gradients(names["decoder"]), gradients(decoder))
    assert names["peak"] > 0


def test_backward_a_second_time() -> None:
    section = Section("RuntimeError: Trying to backward")
    with pytest.raises(RuntimeError) as raised:
        fed_own_argmax(section.names, lambda loss: loss.backward())
    assert section.message() in str(raised.value)

    section = Section("RuntimeError: Trying to backward")
    names = section.cure(0)
    decoder, loss = section.plain_decoder_loss(names["out"].inputs)
    loss.backward()
    assert close(gradients(names["decoder"]), gradients(decoder))

    names["decoder"].zero_grad()
    names = section.cure(1)
    embedding, cell, head = right = copy.deepcopy(section.before[1]).double()
    hidden, token = names["hidden"].double(), torch.zeros(3, dtype=torch.long)
    for target, token_after in zip(names["targets"], names["result"].tokens):
        hidden = cell(embedding(token), hidden.detach())
        (F.cross_entropy(head(hidden), target) / len(names["targets"])).backward()
        token = token_after
    assert close(gradients(names["decoder"]), gradients(right))


def test_unscale_twice() -> None:
    section = Section("RuntimeError: unscale_()")
    names = section.names
    scaler = torch.amp.GradScaler("cpu")

    def accumulate() -> None:
        for inputs, labels in each_batch(names):
            scaler.scale(F.cross_entropy(names["model"](inputs), labels) / 4).backward()
            scaler.unscale_(names["optimizer"])
            nn.utils.clip_grad_norm_(names["model"].parameters(), 1.0)

    with pytest.raises(RuntimeError) as raised:
        accumulate()
    assert section.message() in str(raised.value)

    names = Section("RuntimeError: unscale_()").cure()
    assert names["opt"].stats()["micro_batches"] == 2  # of six batches the last two
    assert not names["opt"].last.skipped


def test_an_update_that_is_left_over() -> None:
    section = Section("AssertionError: No inf checks")
    model, (inputs, labels) = section.names["model"], section.names["loader"][0]
    scaler = torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    opt = accumext.AccumulatingOptimizer(sgd, scaler=scaler)
    opt.backward(F.cross_entropy(model(inputs), labels))
    opt.step()
    with pytest.raises(AssertionError) as raised:
        scaler.update()
    assert section.message() in str(raised.value)
    with pytest.raises(RuntimeError, match=r"Leave scaler.step, update and unscale_ out"):
        scaler.step(opt)

    names = Section("AssertionError: No inf checks").cure()
    assert names["opt"].stats()["micro_batches"] == 2
    assert names["opt"].last.loss_scale == names["scaler"].get_scale()


def test_modified_in_place_by_a_step() -> None:
    section = Section("RuntimeError: one of the variables")
    names = section.names

    def step_on(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        names["optimizer"].step()

    with pytest.raises(RuntimeError) as raised:
        fed_own_argmax(names, step_on)
    assert section.message() in str(raised.value)

    section = Section("RuntimeError: one of the variables")
    names = section.cure(0)
    assert names["opt"].stats()["micro_batches"] == 1
    assert not torch.equal(names["head"].weight, section.before[1][2].weight)


def test_modified_in_place_by_a_state() -> None:
    section = Section("RuntimeError: one of the variables")
    embedding, cell, head = section.names["decoder"]
    ended = torch.tensor([True, False, False])

    def run(step: Callable[..., torch.Tensor]) -> None:
        state = section.names["hidden"]
        for token in section.names["targets"]:
            state = step(token, state, ended)
        head(state).sum().backward()

    def in_place(token: torch.Tensor, state: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        new = cell(embedding(token), state).tanh()
        new[ended] = state[ended]
        return new

    with pytest.raises(RuntimeError) as raised:
        run(in_place)
    assert section.message() in str(raised.value)
    run(section.cure(1)["step_unless_ended"])


def loss_of(model: nn.Module, batches: list[Any]) -> torch.Tensor:
    """The mean over batches of the mean over rows."""
    return torch.stack([F.cross_entropy(model(x.double()), y) for x, y in batches]).mean()


def norm_of_gradient(model: nn.Module, loss: torch.Tensor) -> float:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in found]).norm().item()


def test_the_loss_explodes() -> None:
    section = Section("The loss explodes")
    model, batches = section.names["model"], section.names["loader"]
    for inputs, labels in batches[:4]:
        F.cross_entropy(model(inputs), labels).backward()
    right = copy.deepcopy(section.before[0]).double()
    loss_of(right, batches[:4]).backward()
    assert close(gradients(model), 4 * gradients(right))

    # The last window holds two batches, at parameters that the first has changed.
    section = Section("The loss explodes")
    names = section.names
    after_first = copy.deepcopy(section.before[0]).double()
    loss_of(after_first, batches[:4]).backward()
    nn.utils.clip_grad_norm_(after_first.parameters(), 1.0)
    torch.optim.SGD(after_first.parameters(), lr=0.1).step()
    names = section.cure()
    norm = norm_of_gradient(after_first, loss_of(after_first, batches[4:]))
    assert names["opt"].stats()["total_norm"] == pytest.approx(norm, rel=EXACT)


def test_the_last_window() -> None:
    section = Section("The last window")
    batches = section.names["loader"]
    assert len(batches) % 4

    def tutorial(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, (inputs, labels) in enumerate(batches):
            (F.cross_entropy(model(inputs.double()), labels) / 4).backward()
            if (i + 1) % 4 == 0 or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()

    def by_definition(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for window in (batches[:4], batches[4:]):
            inputs, labels = (torch.cat(part) for part in zip(*window))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.double()), labels).backward()
            optimizer.step()

    faulty, right = (copy.deepcopy(section.before[0]).double() for _ in range(2))
    tutorial(faulty)
    by_definition(right)
    cured = section.cure()["model"]
    assert close(cured.weight.double(), right.weight)
    assert not close(faulty.weight, right.weight)


def test_gradients_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    section = Section("Gradients are None")
    names = section.cure()
    said = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert names["model"].weight.grad is None  # what people print
    (inputs, labels), *_ = names["loader"]
    right = copy.deepcopy(section.before[0]).double()
    F.cross_entropy(right(inputs.double()), labels).backward()
    main = names["opt"].main_grad(names["model"].weight)
    assert close(main.double(), right.weight.grad)
    assert set(said) == {"weight", "bias"}

    # Without the wrapper: behind detach; zeros that were left.
    model = names["model"]
    F.cross_entropy(model(inputs).detach() + model.bias, labels).backward()
    assert model.weight.grad is None
    model(inputs).sum().backward()
    model.zero_grad(set_to_none=False)
    assert model.weight.grad.norm() == 0.0


def test_schedule_before_optimizer() -> None:
    section = Section("Detected call")
    optimizer = torch.optim.SGD(section.names["model"].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)

    def accumulate() -> None:
        for i, (inputs, labels) in enumerate(each_batch(section.names)):
            F.cross_entropy(section.names["model"](inputs), labels).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
            schedule.step()

    with warnings_as("always") as said:
        accumulate()
    assert section.message().replace("`", "") in str(said[0].message).replace("`", "")
    with warnings_as("error"):
        names = section.cure()
    assert names["schedule"].last_epoch == 1  # of one whole window


def test_nan_after_a_clip() -> None:
    section = Section("NaN after some steps")
    model, (inputs, labels) = section.names["model"], section.names["loader"][0]
    F.cross_entropy(model(inputs), labels).backward()
    model.weight.grad[0, 0] = math.inf
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.weight.isnan().any()

    section = Section("NaN after some steps")
    section.names["loader"][0][0][0, 0] = math.inf
    with pytest.raises(RuntimeError, match="weight"):
        section.cure()
    assert torch.equal(section.names["model"].weight, section.before[0].weight)


def test_nan_where_all_targets_are_ignored() -> None:
    section = Section("NaN after some steps")
    names, nothing = section.names, torch.full((2,), -100)
    inputs, _ = names["loader"][0]
    assert F.cross_entropy(names["model"](inputs), nothing).isnan()

    names["loader"][0] = (inputs, nothing)
    right = copy.deepcopy(section.before[0]).double()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    for window in (names["loader"][1:4], names["loader"][4:]):
        rows, labels = (torch.cat(part) for part in zip(*window))
        optimizer.zero_grad()
        F.cross_entropy(right(rows.double()), labels).backward()
        optimizer.step()
    assert close(section.cure(1)["model"].weight.double(), right.weight)


def test_perplexity() -> None:
    section = Section("Perplexity")
    section.names["head"].weight.data.mul_(8)  # tokens of different probabilities
    embedding, cell, head = copy.deepcopy(section.names["decoder"]).double()
    means, losses = [], []
    for targets, lengths in section.names["sentences"]:
        hidden = torch.zeros(len(lengths), 8, dtype=torch.float64)
        inputs, padded, counted = torch.zeros_like(targets[0]), [], []
        for t, target in enumerate(targets):
            hidden = cell(embedding(inputs), hidden)
            each = F.cross_entropy(head(hidden), target, reduction="none")
            padded += each.tolist()
            counted += [e for e, length in zip(each.tolist(), lengths) if t < length]
            inputs = target
        means.append(sum(padded) / len(padded))
        losses += counted
    right = math.exp(sum(losses) / len(losses))
    assert section.cure()["perplexity"] == pytest.approx(right, rel=EXACT)
    assert math.exp(sum(means) / len(means)) != pytest.approx(right, rel=1e-3)


def test_calls_of_step() -> None:
    section = Section("window=4 counts")
    model, opt = section.names["model"], None

    def counted_twice() -> None:
        nonlocal opt
        opt = accumext.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), window=4)
        for i, (inputs, labels) in enumerate(2 * each_batch(section.names)):
            (F.cross_entropy(model(inputs), labels) / 4).backward()
            if (i + 1) % 4 == 0:
                opt.step()
        opt.discard()

    with warnings_as("always") as said:
        counted_twice()
    assert section.message() in str(said[0].message)
    with warnings_as("error"):
        section.cure()


def test_an_end_inside_a_window() -> None:
    section = Section("ended with micro-batches")

    def unfinished() -> None:
        model, (inputs, labels) = nn.Linear(5, 4), section.names["loader"][0]
        opt = accumext.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), window=4)
        opt.backward(F.cross_entropy(model(inputs), labels))

    with warnings_as("always") as said:
        unfinished()
        gc.collect()
    assert any(section.message() in str(one.message) for one in said)
    assert section.cure()["opt"].stats()["micro_batches"] == 2


def test_no_heading_is_left_out() -> None:
    starts = re.findall(r'Section\("([^"]+)"\)', Path(__file__).read_text())
    for heading in HEADINGS:
        assert heading in NOT_RAISED or heading.startswith(tuple(starts)), heading
    assert set(NOT_RAISED) <= set(HEADINGS)
