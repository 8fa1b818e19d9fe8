"""The losses at the root of a graph: their kind, their targets, and their factors.

Factors are those that a test multiplies with; targets are those that it does not ignore.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    mse_loss,
    smooth_l1_loss,
)
from torch.utils.checkpoint import checkpoint

from accumext.audit._events import Loss
from accumext.audit._graph import Losses, SavedTensors

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, 1])
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0])


def logits() -> Tensor:
    return X.clone().requires_grad_() * 1


def ce(x: Tensor | None = None, **changes) -> Tensor:
    """A loss that tells its targets, since what it saves is watched."""
    with SavedTensors().watch():
        return cross_entropy(logits() if x is None else x, Y, **changes)


def read(loss: Tensor, **changes) -> tuple[tuple[Loss, ...], float]:
    losses = Losses(loss.grad_fn)
    loss.backward(**changes)
    return losses.end()()


def scaled(loss: Tensor) -> Tensor:
    return GradScaler("cpu", init_scale=64.0).scale(loss)


MEAN, SUM = ("mean", 5.0), ("sum", 5.0)
FACTORS: dict[str, tuple[Callable[[], Tensor], list, float]] = {
    "alone": (ce, [(*MEAN, 1)], 1),
    "multiplied": (lambda: 3 * ce() * 0.5, [(*MEAN, 1.5)], 1.5),
    "divided": (lambda: -(ce() / 4), [(*MEAN, -0.25)], -0.25),
    "by a tensor": (lambda: ce() * torch.tensor([2.0]), [(*MEAN, 2)], 2),
    "in place": (lambda: ce().mul_(2).div_(8), [(*MEAN, 0.25)], 0.25),
    "in other shapes": (lambda: (ce()[None, None].squeeze() * 2).view(1), [(*MEAN, 2)], 2),
    "in another dtype": (lambda: ce().double() / 2, [(*MEAN, 0.5)], 0.5),
    "scaled": (lambda: scaled(ce() / 4), [(*MEAN, 16)], 16),
    "summed": (lambda: ce(reduction="sum") / 10, [(*SUM, 0.1)], 0.1),
    "stacked": (lambda: torch.stack([ce(), ce()]).mean() * 3, [(*MEAN, 1.5)] * 2, 3),
    "stacked and summed": (lambda: torch.stack([ce() / 2, ce()]).sum() * 3,
                           [(*MEAN, 3), (*MEAN, 1.5)], 3),
    "in a list": (lambda: sum([ce(), ce() / 4, 2 * ce()]) / 2,
                  [(*MEAN, 1), (*MEAN, 0.5), (*MEAN, 0.125)], 0.5),
    "subtracted": (lambda: ce() - ce() / 2, [(*MEAN, 1), (*MEAN, -0.5)], 1),
    "twice the same": (lambda: (one := ce()) + 2 * one, [(*MEAN, 3)], 1),
    "weights of classes": (lambda: ce(weight=WEIGHT), [("mean", 6.5, 1)], 1),
    "squares": (lambda: mse_loss(logits(), X + 1) / 2, [("mean", None, 0.5)], 0.5),
    "absolutes": (lambda: smooth_l1_loss(logits(), X + 1), [("mean", None, 1)], 1),
    "huber": (lambda: huber_loss(logits(), X + 1, reduction="sum"), [("sum", None, 1)], 1),
}  # fmt: skip


def sorted_by_factor(rows: list) -> list:
    return sorted(rows, key=lambda row: row[2])


@pytest.mark.parametrize(("make", "right", "all_of_them"), FACTORS.values(), ids=FACTORS)
def test_factors(make, right, all_of_them):
    losses, factor = read(make())
    found = [(one.reduction, one.count, one.coefficient) for one in losses]
    for row, (*kind, value) in zip(sorted_by_factor(found), sorted_by_factor(right), strict=True):
        assert row == (*kind, pytest.approx(value))
    assert all(one.known for one in losses)
    assert factor == pytest.approx(all_of_them)


def test_label_smoothing_is_still_a_known_loss():
    losses, factor = read(ce(label_smoothing=0.1) / 4)
    (known,) = (one for one in losses if one.known)
    assert (known.reduction, known.count) == MEAN
    assert known.coefficient == pytest.approx(0.9 / 4)
    assert factor == pytest.approx(1 / 4)


def own_mean(x: Tensor) -> Tensor:
    return ((x - 1) ** 2).mean()


def own_sum(x: Tensor) -> Tensor:
    return ((x - 1) ** 2).sum()


@pytest.mark.parametrize(
    ("own", "row"), [(own_mean, ("mean", 24, 0.25)), (own_sum, ("sum", None, 0.25))]
)
def test_losses_of_a_loop_s_own(own, row):
    (only,), factor = read(own(logits()) / 4)
    assert (only.reduction, only.count, only.coefficient) == row
    assert (only.known, factor) == (False, 0.25)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_loss(reentrant):
    head = nn.Linear(4, 4)
    loss = checkpoint(lambda x: cross_entropy(head(x), Y), logits(), use_reentrant=reentrant)
    losses, factor = read(loss / 4)
    assert factor == 0.25
    assert {one.coefficient for one in losses} == {0.25}
    assert all(one.count in (None, 5.0) for one in losses)


def test_a_retained_graph_has_one_number():
    loss = ce()
    other = ce()
    (first,), _ = read(loss, retain_graph=True)
    (second,), _ = read(loss / 2)
    (third,), _ = read(other)
    assert first.node == second.node != third.node


def test_a_parameter_in_the_sum_is_no_loss_that_comes_again():
    """As a learned weight of a loss, added to it: its node is none of a micro-batch's."""
    weight = nn.Parameter(torch.zeros(()))
    passes = [read(own_sum(logits()) * (-weight).exp() + weight)[0] for _ in range(2)]
    first, second = ({one.node for one in losses} for losses in passes)
    assert not first & second


def test_hooks_are_gone_after_the_pass():
    loss = ce()
    read(loss, retain_graph=True)
    losses = Losses(loss.grad_fn)
    losses.end()
    loss.backward()
    assert losses.end()() == ((), 0.0)


@pytest.mark.parametrize(
    ("make", "classes"),
    [(ce, 4), (lambda: ce() + ce(torch.randn(6, 9, requires_grad=True)), 9),
     (lambda: mse_loss(logits(), X), 0),
     (lambda: binary_cross_entropy_with_logits(logits(), X.sigmoid()), 0)],
    ids=["4", "4 and 9", "squares", "binary"],
)  # fmt: skip
def test_classes_of_a_loss(make, classes):
    assert Losses(make().grad_fn).classes == classes
