"""The losses at the root of a graph: their kind, their targets, and their factors.

Factors are those that a test multiplies with; targets are those that it does not ignore.
"""

import math
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

from accumext.auditing._events import Constant, Loss
from accumext.auditing._graph import Losses, SavedTensors

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, 1])
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0])


def logits() -> Tensor:
    return X.clone().requires_grad_() * 1


def ce(x: Tensor | None = None, **changes) -> Tensor:
    """A loss that tells its targets, since what it saves is watched."""
    with SavedTensors().watch():
        return cross_entropy(logits() if x is None else x, Y, **changes)


def read(loss: Tensor, **changes) -> tuple[tuple[Loss, ...], float, tuple[Constant, ...]]:
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
    "squares": (lambda: mse_loss(logits(), X + 1) / 2, [("mean", 24, 0.5)], 0.5),
    "absolutes": (lambda: smooth_l1_loss(logits(), X + 1), [("mean", 24, 1)], 1),
    "huber": (lambda: huber_loss(logits(), X + 1, reduction="sum"), [("sum", 24, 1)], 1),
}  # fmt: skip


def sorted_by_factor(rows: list) -> list:
    return sorted(rows, key=lambda row: row[2])


@pytest.mark.parametrize(("make", "right", "all_of_them"), FACTORS.values(), ids=FACTORS)
def test_factors(make, right, all_of_them):
    losses, factor, _ = read(make())
    found = [(one.reduction, one.count, one.coefficient) for one in losses]
    for row, (*kind, value) in zip(sorted_by_factor(found), sorted_by_factor(right), strict=True):
        assert row == (*kind, pytest.approx(value))
    assert all(one.known for one in losses)
    assert factor == pytest.approx(all_of_them)


def test_label_smoothing_is_still_a_known_loss():
    losses, factor, _ = read(ce(label_smoothing=0.1) / 4)
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
    (only,), factor, _ = read(own(logits()) / 4)
    assert (only.reduction, only.count, only.coefficient) == row
    assert (only.known, factor) == (False, 0.25)


CONSTANTS: dict[str, tuple[Callable[[], Tensor], list[tuple[float, bool]]]] = {
    "alone": (ce, []),
    "by one": (lambda: ce() * 1 / 1.0, [(1, True), (1, False)]),
    "in other shapes": (lambda: ce()[None].squeeze().double().view(1), []),
    "divided": (lambda: ce() / 4, [(1 / 4, True)]),
    "multiplied": (lambda: ce() * 0.25, [(1 / 4, False)]),
    "from the root to the loss": (lambda: -(3 * ce() / 4),
                                  [(1 / 4, True), (3, False)]),
    "by a tensor": (lambda: ce() / torch.tensor(8.0), [(1 / 8, True)]),
    "in place": (lambda: ce().mul_(2).div_(8), [(1 / 8, True), (2, False)]),
    "scaled": (lambda: scaled(ce() / 4), [(64, False), (1 / 4, True)]),
    "a mean of one number": (lambda: ce().mean() / 4, [(1 / 4, True)]),
    "a sum of one number": (lambda: ce()[None].sum() / 4, [(1 / 4, True)]),
    "a mean of a mean, as of replicas": (lambda: own_mean(logits())[None].mean() / 4,
                                         [(1 / 4, True)]),
    "down to a list": (lambda: (ce() / 3 + 2 * ce()) / 2, [(1 / 2, True)]),
    "down to a stack": (lambda: torch.stack([ce(), ce()]).mean() / 4, [(1 / 4, True)]),
    "down to a sum of one's own": (lambda: own_sum(logits()) / 4, [(1 / 4, True)]),
    "by nothing": (lambda: ce() * 0, [(0, False)]),
    "divided, then by nothing": (lambda: ce() / 4 * 0, [(0, False)]),
}  # fmt: skip


@pytest.mark.parametrize(("make", "right"), CONSTANTS.values(), ids=CONSTANTS)
def test_constants_from_the_root_to_the_losses(make, right):
    _, factor, constants = read(make())
    assert [(one.value, one.divided) for one in constants] == [
        (pytest.approx(value), divided) for value, divided in right
    ]
    assert abs(factor) == pytest.approx(math.prod(value for value, _ in right))


OF_ONE = [lambda x: x.mean(), lambda x: x.sum(), lambda x: x[None].mean(), lambda x: x[None].sum()]


@pytest.mark.parametrize("of_one", OF_ONE, ids=["mean", "sum", "mean of [1]", "sum of [1]"])
@pytest.mark.parametrize(
    ("make", "row"), [(ce, (True, *MEAN)), (lambda: own_mean(logits()), (False, "mean", 24))]
)
def test_a_mean_of_one_number_is_no_loss(of_one, make, row):
    """As over the losses of replicas, which are the losses"""
    (only,), *_ = read(of_one(make()) / 4)
    assert (only.known, only.reduction, only.count, only.coefficient) == (*row, 0.25)


def test_a_mean_of_several_numbers_is_a_loss():
    """Of what has no reduction, such as losses of each row"""
    (only,), *_ = read(ce(reduction="none").mean() / 4)
    assert (only.known, only.reduction, only.count, only.coefficient) == (False, "mean", 6, 0.25)


def of_trunk() -> Tensor:
    x = logits()
    return ce(x) + ce(x)


def of_leaf() -> Tensor:
    x = X.clone().requires_grad_()
    return torch.stack([ce(x), ce(x), ce(x)]).sum()


NUMBERS: dict[str, tuple[Callable[[], Tensor], int, bool]] = {
    "one": (ce, 1, False),
    "none": (lambda: own_sum(logits()), 1, False),
    "of graphs of their own": (lambda: ce() + ce() / 2, 2, True),
    "of one leaf": (of_leaf, 3, True),
    "of one forward pass": (of_trunk, 2, False),
    "with a penalty": (lambda: ce() + own_mean(logits()), 1, False),
    "means": (lambda: own_mean(logits()) + own_mean(logits()), 2, True),
}


@pytest.mark.parametrize(("make", "number", "separate"), NUMBERS.values(), ids=NUMBERS)
def test_losses_of_one_pass(make, number, separate):
    losses = Losses(make().grad_fn)
    assert (losses.number, losses.separate) == (number, separate)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_loss(reentrant):
    head = nn.Linear(4, 4)
    loss = checkpoint(lambda x: cross_entropy(head(x), Y), logits(), use_reentrant=reentrant)
    losses, factor, _ = read(loss / 4)
    assert factor == 0.25
    assert {one.coefficient for one in losses} == {0.25}
    assert all(one.count in (None, 5.0) for one in losses)


def test_a_retained_graph_has_one_number():
    loss = ce()
    other = ce()
    (first,), *_ = read(loss, retain_graph=True)
    (second,), *_ = read(loss / 2)
    (third,), *_ = read(other)
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
    assert losses.end()() == ((), 0.0, ())


@pytest.mark.parametrize(
    ("make", "classes"),
    [(ce, 4), (lambda: ce() + ce(torch.randn(6, 9, requires_grad=True)), 9),
     (lambda: mse_loss(logits(), X), 0),
     (lambda: binary_cross_entropy_with_logits(logits(), X.sigmoid()), 0)],
    ids=["4", "4 and 9", "squares", "binary"],
)  # fmt: skip
def test_classes_of_a_loss(make, classes):
    assert Losses(make().grad_fn).classes == classes
