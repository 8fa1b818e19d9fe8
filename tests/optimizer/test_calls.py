"""Python calls of a step: none for each parameter, in whatever micro-batch of a window.

Hooks on parameters are the exception, which `accumulate_in_backward` and the overlapping all-reduce
are made of.
"""

import copy
import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from support.budget import combinations

import accumext

pytestmark = pytest.mark.skipif(
    accumext.backend() == "reference", reason="operators are Python there"
)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("calls")


@pytest.fixture
def window_of(bench):
    return bench.window_of


def through_backward(opt, loss):
    opt.backward(loss)
    opt.step()


def scaled(opt, loss):
    return loss if opt.scaler is None else opt.scaler.scale(loss)


def by_hand(opt, loss):
    scaled(opt, loss).backward()
    opt.step()
    opt.zero_grad()


def accumulated(opt, loss):
    scaled(opt, loss).backward()
    opt.accumulate(weight=2.0)
    opt.step()


def in_a_micro_batch(opt, loss):
    with opt.micro_batch():
        opt.backward(loss)
    opt.step()


def weighted(opt, loss):
    opt.backward(loss, weight=3.0)
    opt.step()


def with_a_closure(opt, loss):
    opt.step(lambda: scaled(opt, loss).backward())


WAYS = [through_backward, by_hand, accumulated, in_a_micro_batch, weighted, with_a_closure]
SETTINGS = {
    "clip": {"max_norm": 1.0},
    "no clip": {},
    "another norm": {"max_norm": 1.0, "norm_type": 1.0},
    "scaler": {"max_norm": 1.0, "scaler": torch.amp.GradScaler("cpu")},
    "raise": {"on_nonfinite": "raise"},
    "skip": {"on_nonfinite": "skip_micro_batch"},
}


@pytest.mark.parametrize(
    ("step", "name", "dtype", "window"),
    combinations(WAYS, list(SETTINGS), [torch.float32, torch.bfloat16], [1, 4]),
)
def test_parameters_cost_no_calls(window_of, step, name, dtype, window):
    settings = {"dtype": dtype, "window": window, **SETTINGS[name]}
    few, many = (window_of(count, step, **copy.deepcopy(settings)) for count in (4, 300))
    assert many == few


def test_a_window_of_one_is_short(window_of):
    for settings in ({"max_norm": 1.0}, {}):
        (calls,) = window_of(300, through_backward, **settings)
        assert 0 < calls <= 65


@pytest.mark.parametrize("ends", [False, True])
def test_parameters_of_other_wrappers_cost_no_calls(bench, ends):
    """Of one that has left its gradients in `.grad`, and may have ended; so may they."""

    def beside(count):
        theirs = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
        other = accumext.AccumulatingOptimizer(torch.optim.SGD(theirs))
        through_backward(other, torch.stack(list(map(torch.sum, theirs))).sum())
        mine = torch.nn.Parameter(torch.ones(2))
        opt = accumext.AccumulatingOptimizer(torch.optim.SGD([mine]))
        found = []
        for _ in range(6):
            loss = mine.sum()
            found.append(len(bench.traced(partial(through_backward, opt, loss)).calls))
            if ends:
                other = None
            if len(found) == 4:
                theirs.clear()
        return found

    assert beside(300) == beside(4)
