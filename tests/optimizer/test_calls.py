"""Python calls of a step: none for each parameter, and few, in whatever micro-batch of a window.

Hooks on parameters are the exception, which `accumulate_in_backward` and the overlapping all-reduce
are made of.
"""

import copy
import sys
from functools import partial

import pytest
import torch
from support import ROOT
from support.budget import combinations

import accumext

sys.path.append(str(ROOT / "bench"))
from calls import in_a_micro_batch, through_backward, traced, window_of

pytestmark = pytest.mark.skipif(
    accumext.backend() == "reference", reason="operators are Python there"
)


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
    "never looks": {"on_nonfinite": "step"},
}


@pytest.mark.parametrize(
    ("step", "name", "dtype", "window"),
    combinations(WAYS, list(SETTINGS), [torch.float32, torch.bfloat16], [1, 4]),
)
def test_parameters_cost_no_calls(step, name, dtype, window):
    settings = {"dtype": dtype, "window": window, **SETTINGS[name]}
    few, many = (window_of(count, step, **copy.deepcopy(settings)) for count in (4, 300))
    assert [len(trace.calls) for trace in many] == [len(trace.calls) for trace in few]


# Of every micro-batch of a window: the first one opens it, the last one closes it and steps.
BUDGETS = {
    ("no clip", through_backward): ([54], [37, 11, 11, 48]),
    ("clip", through_backward): ([55], [37, 11, 11, 36]),
    ("scaler", through_backward): ([59], [39, 13, 13, 40]),
    ("never looks", through_backward): ([46], [37, 11, 11, 41]),
    ("masters", through_backward): ([132], [79, 50, 50, 102]),
    ("no clip", in_a_micro_batch): ([114], [83, 60, 60, 97]),
    ("clip", in_a_micro_batch): ([108], [83, 60, 60, 85]),
    ("scaler", in_a_micro_batch): ([112], [85, 62, 62, 89]),
    ("masters", in_a_micro_batch): ([179], [127, 101, 101, 153]),
}
# Calls of C functions for each parameter, by the lines of the package, where there are any.
FOR_EACH = {
    ("no clip", through_backward): ([0], [2, 0, 0, 0]),
    ("clip", through_backward): ([0], [2, 0, 0, 0]),
    ("scaler", through_backward): ([0], [2, 0, 0, 0]),
    ("never looks", through_backward): ([0], [2, 0, 0, 0]),
    ("masters", through_backward): ([12], [8, 0, 0, 4]),
    ("no clip", in_a_micro_batch): ([2], [2, 0, 0, 0]),
    ("clip", in_a_micro_batch): ([2], [2, 0, 0, 0]),
    ("scaler", in_a_micro_batch): ([2], [2, 0, 0, 0]),
    ("masters", in_a_micro_batch): ([12], [8, 0, 0, 4]),
}


def settings_of(name):
    halves = {"max_norm": 1.0, "dtype": torch.bfloat16}
    return copy.deepcopy(halves if name == "masters" else SETTINGS[name])


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(("name", "step"), BUDGETS)
def test_budget(name, step, window):
    budget = BUDGETS[name, step][window > 1]
    for count in (4, 300):
        traces = window_of(count, step, window=window, **settings_of(name))
        found = [len(trace.calls) for trace in traces]
        assert all(0 < calls <= most for calls, most in zip(found, budget, strict=True)), found


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(("name", "step"), FOR_EACH)
def test_calls_of_c_for_each_parameter(name, step, window):
    few, many = (window_of(n, step, window=window, **settings_of(name)) for n in (4, 300))
    found = [(b.native - a.native) / 296 for a, b in zip(few, many, strict=True)]
    assert found == FOR_EACH[name, step][window > 1]


@pytest.mark.parametrize("ends", [False, True])
def test_parameters_of_other_wrappers_cost_no_calls(ends):
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
            found.append(len(traced(partial(through_backward, opt, loss)).calls))
            if ends:
                other = None
            if len(found) == 4:
                theirs.clear()
        return found

    assert beside(300) == beside(4)
