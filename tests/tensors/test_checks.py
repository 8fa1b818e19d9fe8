"""Numbers and bools as arguments: of Python, of other libraries, and what is none."""

import inspect
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import accumext
from accumext.tensors import checks

# --- numbers of other libraries -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, int])
def test_integers_of_numpy(kind):
    got = checks.positive_int("op", "n", kind(3))
    assert (type(got), got) == (int, 3)
    with pytest.raises(ValueError, match="op: n must be at least 1, got 0"):
        checks.positive_int("op", "n", kind(0))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int32, Fraction])
def test_numbers_of_numpy(kind):
    got = checks.number("op", "x", kind(3))
    assert (type(got), got) == (float, 3.0)
    grads = [torch.ones(4)]
    accumext.scale_(grads, kind(3))
    assert accumext.total_norm(grads, norm_type=kind(1), inv_scale=kind(1)).item() == 12.0


NO_NUMBERS = [True, np.True_, "2", torch.tensor(2), 1j]


@pytest.mark.parametrize(
    ("check", "contract", "value"),
    [(checks.positive_int, "an int", value) for value in (*NO_NUMBERS, 2.0, np.float64(2))]
    + [(checks.number, "a number", value) for value in NO_NUMBERS],
)
def test_what_is_no_number(check, contract, value):
    with pytest.raises(TypeError, match=f"op: x must be {contract}, got"):
        check("op", "x", value)


# --- True or False ------------------------------------------------------------------------------

X = torch.ones(4)
PARTS = (nn.Embedding(7, 5), nn.GRUCell(5, 5), nn.Linear(5, 7))
FLAGGED = {  # of every public function with such an argument, a call that is right but for it
    accumext.accumulate_: partial(accumext.accumulate_, [X], [X.clone()]),
    accumext.unscale_check_clip_accumulate_: partial(
        accumext.unscale_check_clip_accumulate_, [X], [X.clone()], max_norm=9.0
    ),
    accumext.clip_grad_norm_: partial(accumext.clip_grad_norm_, [], 1.0),
    accumext.masters: partial(accumext.masters, [nn.Parameter(X)]),
    accumext.decode_loss: partial(
        accumext.decode_loss, *PARTS, torch.zeros(4, 3, dtype=torch.int64), feedback="greedy"
    ),
    accumext.decode_memory: partial(accumext.decode_memory, *PARTS, (4, 3), feedback="greedy"),
    accumext.generate: partial(accumext.generate, *PARTS, max_length=3),
    accumext.AccumulatingOptimizer: partial(
        accumext.AccumulatingOptimizer, torch.optim.SGD([nn.Parameter(X)])
    ),
}


def flags_of(function):
    """The arguments of a function that are True or False."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool)]


@pytest.mark.parametrize("value", ["yes", 1, None, np.True_, torch.tensor(True)], ids=repr)
def test_what_is_no_bool(value):
    public = [getattr(accumext, name) for name in accumext.__all__]
    results = {accumext.WindowReport}
    assert {f for f in public if callable(f) and flags_of(f)} - results == FLAGGED.keys()
    for function, call in FLAGGED.items():
        for name in flags_of(function):
            text = rf"^\w+: {name} must be a bool, got {checks.type_name(value)}$"
            with pytest.raises(TypeError, match=text):
                call(**{name: value})
    assert torch.equal(X, torch.ones(4))
