"""Every broken contract of a gradient operation: its sentence, and that nothing has changed."""

from __future__ import annotations

import inspect
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accumext
from accumext import _checks

DENSE = "be a dense float16, bfloat16, float32 or float64 tensor"
SPARSE = torch.eye(3).to_sparse()
EXPANDED = torch.zeros(1).expand(3)
WINDOWS = torch.zeros(4).unfold(0, 2, 1)  # [3, 2] with strides [1, 1]


class Calls:
    """One good call per operation; a test breaks one argument of it."""

    def __init__(self) -> None:
        self.main_grads = [torch.ones(3), torch.ones(2, 2, dtype=torch.float64)]
        self.grads = [torch.ones(3).half(), torch.ones(2, 2)]
        self.found_inf = torch.tensor(0.25)

    def accumulate_(self, **broken):
        arguments = {
            "main_grads": self.main_grads,
            "grads": self.grads,
            "found_inf": self.found_inf,
        }
        return accumext.accumulate_(**(arguments | broken))

    def unscale_check_clip_accumulate_(self, **broken):
        arguments = {
            "main_grads": self.main_grads,
            "grads": self.grads,
            "found_inf": self.found_inf,
        }
        return accumext.unscale_check_clip_accumulate_(**(arguments | {"max_norm": 1.0} | broken))

    def total_norm(self, **broken):
        return accumext.total_norm(**({"grads": self.grads, "found_inf": self.found_inf} | broken))

    def scale_(self, **broken):
        return accumext.scale_(**({"grads": self.grads, "factor": 2.0} | broken))

    def state(self):
        return [t.clone() for t in [*self.main_grads, *self.grads, self.found_inf]]


PAIRS = ("accumulate_", "unscale_check_clip_accumulate_")
ALL_GRADS = (*PAIRS, "total_norm", "scale_")
NORMS = ("unscale_check_clip_accumulate_", "total_norm")
UNSCALING = (*PAIRS, "total_norm")
ones, f64 = torch.ones, torch.float64

# operations, broken argument, its value, error, the sentence after `<op>: `
CASES = [
    (PAIRS, "grads", [ones(3)], ValueError,
     "grads must have one entry per main gradient, 2, got 1"),
    (PAIRS, "grads", [ones(3), ones(4)], ValueError,
     "grads[1] must have the shape of main_grads[1], [2, 2], got [4]"),
    (PAIRS, "grads", [ones(3), ones(2, 2, 1)], ValueError,
     "grads[1] must have the shape of main_grads[1], [2, 2], got [2, 2, 1]"),
    (PAIRS, "main_grads", [EXPANDED, ones(2, 2)], ValueError,
     "main_grads[0] must not overlap itself in memory, got shape [3] with strides [0]. "
     "Give it memory of its own: main_grads[0].contiguous()"),
    (PAIRS, "main_grads", [ones(3), None], TypeError, f"main_grads[1] must {DENSE}, got NoneType"),
    (PAIRS, "main_grads", [ones(3), ones(2, 2).int()], TypeError,
     f"main_grads[1] must {DENSE}, got an int32 tensor"),
    (("scale_",), "grads", [WINDOWS], ValueError,
     "grads[0] must not overlap itself in memory, got shape [3, 2] with strides [1, 1]. "
     "Give it memory of its own: grads[0].contiguous()"),
    (ALL_GRADS, "grads", ones(3), TypeError,
     "grads must be a list of tensors, got a float32 tensor"),
    (ALL_GRADS, "grads", [ones(3), "x"], TypeError, f"grads[1] must {DENSE}, got str"),
    (ALL_GRADS, "grads", [ones(3), ones(2, 2).cfloat()], TypeError,
     f"grads[1] must {DENSE}, got a complex64 tensor"),
    (ALL_GRADS, "grads", [ones(3), ones(2, 2).bool()], TypeError,
     f"grads[1] must {DENSE}, got a bool tensor"),
    (ALL_GRADS, "grads", [SPARSE, ones(2, 2)], TypeError,
     f"grads[0] must {DENSE}, got a sparse_coo tensor"),
    (("total_norm", "scale_"), "grads", [ones(3), ones(2, device="meta")], ValueError,
     "grads[1] must be on the device of grads[0], cpu, got meta"),
    (PAIRS, "grads", [ones(3), ones(2, 2, device="meta")], ValueError,
     "grads[1] must be on the device of main_grads[0], cpu, got meta"),
    (UNSCALING, "inv_scale", "1", TypeError, "inv_scale must be a number, got str"),
    (UNSCALING, "inv_scale", math.nan, ValueError, "inv_scale must not be NaN, got nan"),
    (UNSCALING, "inv_scale", ones(1), ValueError, "inv_scale must be 0-dim, got shape [1]"),
    (UNSCALING, "inv_scale", torch.tensor(1), TypeError,
     "inv_scale must be a float or a 0-dim float tensor, got an int64 tensor"),
    (UNSCALING, "found_inf", ones(1), ValueError, "found_inf must be 0-dim, got shape [1]"),
    (UNSCALING, "found_inf", ones((), dtype=f64), TypeError,
     "found_inf must be a 0-dim float32 tensor, got a float64 tensor"),
    (UNSCALING, "found_inf", 0.0, TypeError, "found_inf must be a 0-dim float32 tensor, got float"),
    (("scale_",), "factor", ones(2), ValueError, "factor must be 0-dim, got shape [2]"),
    (("scale_",), "factor", None, TypeError, "factor must be a number, got NoneType"),
    (("scale_",), "factor", math.nan, ValueError, "factor must not be NaN, got nan"),
    (NORMS, "norm_type", 0.0, ValueError, "norm_type must be nonzero, got 0.0"),
    (NORMS, "norm_type", math.nan, ValueError, "norm_type must not be NaN, got nan"),
    (NORMS, "norm_type", "fro", TypeError, "norm_type must be a number, got str"),
    (NORMS[:1], "max_norm", -1.0, ValueError, "max_norm must be at least 0, got -1.0"),
    (NORMS[:1], "max_norm", math.nan, ValueError, "max_norm must be at least 0, got nan"),
    (NORMS[:1], "max_norm", None, TypeError, "max_norm must be a number, got NoneType"),
]  # fmt: skip
EACH = [(op, *case[1:]) for case in CASES for op in case[0]]


@pytest.mark.parametrize(
    ("op", "argument", "value", "error", "sentence"),
    EACH,
    ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(EACH)],
)
def test_broken_contract(op, argument, value, error, sentence):
    calls = Calls()
    before = calls.state()
    with pytest.raises(error) as raised:
        getattr(calls, op)(**{argument: value})
    assert str(raised.value) == f"{op}: {sentence}"
    assert all(map(torch.equal, calls.state(), before))


@pytest.mark.parametrize("op", ALL_GRADS)
def test_the_good_call_is_good(op):
    getattr(Calls(), op)()


@pytest.mark.parametrize("op", ALL_GRADS)
def test_no_second_traceback_of_the_kernels_own_error(op):
    with pytest.raises(TypeError) as raised:
        getattr(Calls(), op)(grads=[torch.ones(3), torch.ones(2, 2).int()])
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize("op", ALL_GRADS)
def test_operators_refuse_before_they_write(op):
    # Through torch.ops the compiled kernels do not find the words, but they do find the fault.
    calls = Calls()
    calls.grads[1] = torch.ones(2, 2).int()
    before = calls.state()
    arguments = {
        "accumulate_": lambda: ((calls.main_grads, calls.grads), {"found_inf": calls.found_inf}),
        "unscale_check_clip_accumulate_": lambda: (
            (calls.main_grads, calls.grads),
            {"max_norm": 1.0, "found_inf": calls.found_inf},
        ),
        "total_norm": lambda: ((calls.grads,), {"found_inf": calls.found_inf}),
        "scale_": lambda: ((calls.grads, 2.0), {}),
    }
    args, kwargs = arguments[op]()
    with pytest.raises((RuntimeError, TypeError)):
        getattr(torch.ops.accumext, op)(*args, **kwargs)
    assert all(map(torch.equal, calls.state(), before))


# --- clip_grad_norm_ ------------------------------------------------------------------------------


def parameter_with(grad):
    parameter = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    return parameter


COMPLEX = torch.ones(3, dtype=torch.complex64)
CLIP_CASES = [
    ({"max_norm": "1"}, TypeError, "max_norm must be a number, got str"),
    ({"max_norm": None}, TypeError, "max_norm must be a number, got NoneType"),
    ({"max_norm": ones(2)}, ValueError, "max_norm must have one element, got shape [2]"),
    ({"norm_type": math.nan}, ValueError, "norm_type must not be NaN, got nan"),
    ({"norm_type": None}, TypeError, "norm_type must be a number, got NoneType"),
    ({"norm_type": "fro"}, TypeError, "norm_type must be a number, got str"),
    ({"parameters": 5}, TypeError,
     "parameters must be a tensor or an iterable of tensors, got int"),
    ({"foreach": 1}, TypeError, "foreach must be a bool or None, got int"),
    ({"parameters": [1.0]}, TypeError, "parameters[0] must be a tensor, got float"),
    ({"parameters": [parameter_with(ones(2)), parameter_with(COMPLEX)]}, TypeError,
     f"parameters[1].grad must {DENSE}, got a complex64 tensor"),
    ({"parameters": [parameter_with(ones(2)), parameter_with(EXPANDED)]}, ValueError,
     "parameters[1].grad must not overlap itself in memory, got shape [3] with strides [0]. "
     "Give it memory of its own: parameters[1].grad.contiguous()"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "error", "sentence"),
    CLIP_CASES,
    ids=[next(iter(c[0])) + f"-{i}" for i, c in enumerate(CLIP_CASES)],
)
def test_clip_grad_norm(broken, error, sentence):
    parameter = parameter_with(torch.full([3], 2.0))
    with pytest.raises(error) as raised:
        accumext.clip_grad_norm_(**({"parameters": [parameter], "max_norm": 1.0} | broken))
    assert str(raised.value) == f"clip_grad_norm_: {sentence}"
    assert torch.equal(parameter.grad, torch.full([3], 2.0))


# --- numbers of other libraries -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, int])
def test_integers_of_numpy(kind):
    got = _checks.positive_int("op", "n", kind(3))
    assert type(got) is int
    assert got == 3
    with pytest.raises(ValueError, match="op: n must be at least 1, got 0"):
        _checks.positive_int("op", "n", kind(0))


@pytest.mark.parametrize(
    "value", [True, np.True_, 2.0, np.float64(2), "2", torch.tensor(2)], ids=repr
)
def test_what_is_no_integer(value):
    with pytest.raises(TypeError, match="op: n must be an int, got"):
        _checks.positive_int("op", "n", value)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int32, Fraction])
def test_numbers_of_numpy(kind):
    got = _checks.number("op", "x", kind(3))
    assert type(got) is float
    assert got == 3.0
    expected, grads = [torch.ones(4)], [torch.ones(4)]
    accumext.scale_(expected, 3.0)
    if kind is not Fraction:
        accumext.scale_(grads, kind(3))
        assert torch.equal(grads[0], expected[0])
        assert accumext.total_norm(grads, norm_type=kind(1), inv_scale=kind(1)).item() == 12.0


@pytest.mark.parametrize("value", [True, np.True_, "2", 1j, torch.tensor(2.0)], ids=repr)
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match="op: x must be a number, got"):
        _checks.number("op", "x", value)


# --- calls whose arguments have other names, or are missing

E, C, H = nn.Embedding(7, 5), nn.GRUCell(5, 5), nn.Linear(5, 7)
Y, S = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(3, 5)
SGD = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
DECODE = {"embedding": E, "cell": C, "head": H, "targets": Y}


@pytest.mark.parametrize(
    ("call", "given", "text"),
    [
        (accumext.decode_loss, {"teacher_forcing_ratio": 0.5}, "Did you mean teacher_forcing?"),
        (accumext.decode_loss, {"feed_back": "greedy"}, "Did you mean feedback?"),
        (accumext.generate, {"num_beams": 3}, "Did you mean beams?"),
        (accumext.generate, {"max_new_tokens": 3}, "Did you mean max_length?"),
        (accumext.AccumulatingOptimizer, {"max_grad_norm": 1.0}, "Did you mean max_norm?"),
        (
            accumext.AccumulatingOptimizer,
            {"gradient_accumulation_steps": 4},
            "Did you mean window?",
        ),
        (accumext.tbptt, {"loss_fn": F.cross_entropy}, "Did you mean criterion?"),
        (accumext.rollout, {"memory_bugdet": 3}, "Did you mean memory_budget?"),
        (accumext.chunked_loss, {"chunksize": 3}, "Did you mean chunk_size?"),
        (accumext.decode_loss, DECODE, "got nothing. One of 'teacher', 'greedy', 'sample', 'sch"),
        (
            accumext.decode_loss,
            {"embedding": H, "feedback": "greedy"},
            "model.embedding, model.cell",
        ),
        (
            accumext.generate,
            {"embedding": H, "state": S, "max_length": 3},
            "model.embedding, model.c",
        ),
        (accumext.tbptt, {"step": H, "targets": Y, "state": S}, "Such as F.cross_entropy"),
    ],
)
def test_what_to_type(call: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=rf"^{call.__name__}: \w+ must .*{re.escape(text)}"):
        call(**given)


def test_what_to_type_where_arguments_have_no_names() -> None:
    with pytest.raises(TypeError, match=r"^decode_loss: feedback must be given, got nothing. One"):
        accumext.decode_loss(E, C, H, Y, S)


def test_other_errors_are_as_they_were() -> None:
    """Of Python where nothing is like it, and of what is called, with its traceback."""
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'zzz'"):
        accumext.generate(E, C, H, zzz=1)
    with pytest.raises(TypeError, match=r"takes .* positional arguments but 8 were given"):
        accumext.tbptt(*range(8))

    def fn(_: torch.Tensor) -> torch.Tensor:
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        accumext.chunked_loss(fn, S, chunks=1)


@pytest.mark.parametrize("call", [accumext.decode_loss, accumext.AccumulatingOptimizer])
def test_signatures_and_help_are_those_of_the_function(call: Any) -> None:
    parameters = inspect.signature(call).parameters
    assert "args" not in parameters
    assert {"feedback", "window"} & set(parameters)
    assert inspect.getdoc(call)
