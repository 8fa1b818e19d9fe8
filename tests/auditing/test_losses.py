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


OF_ONE = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "mean of [1]": lambda x: x[None].mean(),
    "sum of [1]": lambda x: x[None].sum(),
}


def own_mean(x: Tensor) -> Tensor:
    return ((x - 1) ** 2).mean()


def own_sum(x: Tensor) -> Tensor:
    return ((x - 1) ** 2).sum()


MEAN, SUM, OWN = (True, "mean", 5.0), (True, "sum", 5.0), (False, "mean", 24)
# What is made: its losses, each with its factor; the constants from the root to them, or to a list.
LOSSES: dict[str, tuple[Callable[[], Tensor], list, list[tuple[float, bool]]]] = {
    "alone": (ce, [(*MEAN, 1)], []),
    "by one": (lambda: ce() * 1 / 1.0, [(*MEAN, 1)], [(1, True), (1, False)]),
    "multiplied": (lambda: 3 * ce() * 0.25, [(*MEAN, 0.75)], [(0.25, False), (3, False)]),
    "divided": (lambda: -(ce() / 4), [(*MEAN, -0.25)], [(0.25, True)]),
    "from the root": (lambda: -(3 * ce() / 4), [(*MEAN, -0.75)], [(0.25, True), (3, False)]),
    "by nothing": (lambda: ce() * 0, [(*MEAN, 0)], [(0, False)]),
    "divided, then by nothing": (lambda: ce() / 4 * 0, [(*MEAN, 0)], [(0, False)]),
    "by a tensor": (lambda: ce() * torch.tensor([2.0]), [(*MEAN, 2)], [(2, False)]),
    "divided by one": (lambda: ce() / torch.tensor(8.0), [(*MEAN, 0.125)], [(0.125, True)]),
    "in place": (lambda: ce().mul_(2).div_(8), [(*MEAN, 0.25)], [(0.125, True), (2, False)]),
    "in other shapes": (lambda: (ce()[None, None].squeeze() * 2).view(1),
                        [(*MEAN, 2)], [(2, False)]),
    "in another dtype": (lambda: ce().double() / 2, [(*MEAN, 0.5)], [(0.5, True)]),
    "in both": (lambda: ce()[None].squeeze().double().view(1), [(*MEAN, 1)], []),
    "scaled": (lambda: scaled(ce() / 4), [(*MEAN, 16)], [(64, False), (0.25, True)]),
    "summed": (lambda: ce(reduction="sum") / 10, [(*SUM, 0.1)], [(0.1, True)]),
    "stacked": (lambda: torch.stack([ce(), ce()]).mean() * 3, [(*MEAN, 1.5)] * 2, [(3, False)]),
    "stacked and summed": (lambda: torch.stack([ce() / 2, ce()]).sum() * 3,
                           [(*MEAN, 3), (*MEAN, 1.5)], [(3, False)]),
    "in a list": (lambda: sum([ce(), ce() / 4, 2 * ce()]) / 2,
                  [(*MEAN, 1), (*MEAN, 0.5), (*MEAN, 0.125)], [(0.5, True)]),
    "subtracted": (lambda: ce() - ce() / 2, [(*MEAN, 1), (*MEAN, -0.5)], []),
    "twice the same": (lambda: (one := ce()) + 2 * one, [(*MEAN, 3)], []),
    "weights of classes": (lambda: ce(weight=WEIGHT), [(True, "mean", 6.5, 1)], []),
    "squares": (lambda: mse_loss(logits(), X + 1) / 2, [(True, "mean", 24, 0.5)], [(0.5, True)]),
    "absolutes": (lambda: smooth_l1_loss(logits(), X + 1), [(True, "mean", 24, 1)], []),
    "huber": (lambda: huber_loss(logits(), X + 1, reduction="sum"), [(True, "sum", 24, 1)], []),
    "one's own mean": (lambda: own_mean(logits()) / 4, [(*OWN, 0.25)], [(0.25, True)]),
    "one's own sum": (lambda: own_sum(logits()) / 4, [(False, "sum", None, 0.25)], [(0.25, True)]),
    "a mean of losses of rows": (lambda: ce(reduction="none").mean() / 4,
                                 [(False, "mean", 6, 0.25)], [(0.25, True)]),
    # As over the losses of replicas, which are the losses.
    **{f"a {of} of one number": (lambda way=way: way(ce()) / 4, [(*MEAN, 0.25)], [(0.25, True)])
       for of, way in OF_ONE.items()},
    **{f"a {of} of a mean": (lambda way=way: way(own_mean(logits())) / 4,
                             [(*OWN, 0.25)], [(0.25, True)])
       for of, way in OF_ONE.items()},
}  # fmt: skip


@pytest.mark.parametrize(("make", "right", "constants"), LOSSES.values(), ids=LOSSES)
def test_losses_their_factors_and_constants(make, right, constants):
    losses, factor, found = read(make())
    rows = [(one.known, one.reduction, one.count, one.coefficient) for one in losses]
    for row, (*kind, value) in zip(sorted_by_factor(rows), sorted_by_factor(right), strict=True):
        assert row == (*kind, pytest.approx(value))
    assert [(one.value, one.divided) for one in found] == [
        (pytest.approx(value), divided) for value, divided in constants
    ]
    assert abs(factor) == pytest.approx(math.prod(value for value, _ in constants))
    assert factor >= 0 or [factor] == [pytest.approx(row[-1]) for row in right]


def sorted_by_factor(rows: list) -> list:
    return sorted(rows, key=lambda row: row[-1])


def test_label_smoothing_is_still_a_known_loss():
    losses, factor, _ = read(ce(label_smoothing=0.1) / 4)
    (known,) = (one for one in losses if one.known)
    assert (known.known, known.reduction, known.count) == MEAN
    assert known.coefficient == pytest.approx(0.9 / 4)
    assert factor == pytest.approx(1 / 4)


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
