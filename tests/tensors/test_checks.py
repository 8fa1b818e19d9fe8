"""Every broken contract of a gradient operation: its sentence, and that nothing has changed."""

import inspect
import math
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from support.gradient_operations import LISTS, PAIRS, copies, good
from support.tensors import assert_equal
from torch import nn

import accumext
from accumext.tensors import checks

DENSE = "be a dense float16, bfloat16, float32 or float64 tensor"
SPARSE = torch.eye(3).to_sparse()
EXPANDED = torch.zeros(1).expand(3)
WINDOWS = torch.zeros(4).unfold(0, 2, 1)  # [3, 2] with strides [1, 1]


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
    """By the words of the function. Operators have other ones, but write nothing either."""
    arguments = good(op)
    before = copies(arguments)
    with pytest.raises(error) as raised:
        getattr(accumext, op)(**arguments | {argument: value})
    assert str(raised.value) == f"{op}: {sentence}"
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    if argument in LISTS[op]:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            getattr(torch.ops.accumext, op)(**arguments | {argument: value})
    assert_equal(copies(arguments), before)


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


# --- calls whose arguments have other names, or are missing ---------------------------------------

E, C, H = nn.Embedding(7, 5), nn.GRUCell(5, 5), nn.Linear(5, 7)
Y, S = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(3, 5)
MEANT = [  # a function, a name that it does not have, and the one that it has
    (accumext.decode_loss, "teacher_forcing_ratio", "teacher_forcing"),
    (accumext.decode_loss, "feed_back", "feedback"),
    (accumext.generate, "num_beams", "beams"),
    (accumext.generate, "max_new_tokens", "max_length"),
    (accumext.AccumulatingOptimizer, "max_grad_norm", "max_norm"),
    (accumext.AccumulatingOptimizer, "gradient_accumulation_steps", "window"),
    (accumext.tbptt, "loss_fn", "criterion"),
    (accumext.rollout, "loss_fn", "loss"),
    (accumext.rollout, "criterion", "loss"),
    (accumext.decode_loss, "bos", "start"),
    (accumext.decode_loss, "weight", "class_weight"),
    (accumext.chunked_loss, "weight", "weights"),
    (accumext.decode_loss, "memory", "context"),
    (accumext.decode_loss, "observations", "inputs"),
    (accumext.generate, "input_ids", "prompt"),
    (accumext.tbptt, "is_init", "resets"),
    (accumext.tbptt, "lenghts", "lengths"),
    (accumext.rollout, "memory_bugdet", "memory_budget"),
    (accumext.chunked_loss, "chunksize", "chunk_size"),
]
GIVEN_TOO_LITTLE = [  # a call, and what its error says to type
    (lambda: accumext.decode_loss(E, C, H, Y, S), "got nothing. One of 'teacher', 'greedy', 'sam"),
    (lambda: accumext.decode_loss(embedding=H, feedback="greedy"), "model.embedding, model.cell"),
    (lambda: accumext.generate(embedding=H, state=S, max_length=3), "model.embedding, model.c"),
    (lambda: accumext.tbptt(step=H, targets=Y, state=S), "Such as F.cross_entropy"),
]
# A function, and a name that it does not have: another of ours has it, or nothing here is like it.
BELONGS = [
    (accumext.tbptt, "batch_first", "decode_loss"),
    (accumext.tbptt, "soft_temperature", "decode_loss"),
    (accumext.generate, "resets", "decode_loss"),
    (accumext.generate, "targets", "tbptt"),
    (accumext.rollout, "feedback", "tbptt"),
    (accumext.AccumulatingOptimizer, "steps", "rollout"),
    (accumext.chunked_loss, "k2", "rollout"),
]
UNLIKE = [
    (accumext.decode_loss, "dropout"),
    (accumext.decode_loss, "features"),
    (accumext.decode_loss, "z_loss_weight"),
    (accumext.generate, "min_length"),
    (accumext.generate, "opt"),
    (accumext.chunked_loss, "kwargs"),
    (accumext.AccumulatingOptimizer, "masks"),
]
CALLS = [
    *((lambda f=f, k=k: f(**{k: 3}), f"Did you mean {name}?") for f, k, name in MEANT),
    *GIVEN_TOO_LITTLE,
]


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_what_to_type(call, text):
    with pytest.raises(TypeError, match=rf"^\w+: \w+ must .*{re.escape(text)}"):
        call()


@pytest.mark.parametrize(("function", "name", "other"), BELONGS)
def test_names_of_other_functions_are_not_taken_for_misspelt_ones(function, name, other):
    text = rf"got {name}\. It is an argument of .*\b{other}\b"
    with pytest.raises(TypeError, match=text):
        function(**{name: 3})


@pytest.mark.parametrize(("function", "name"), UNLIKE)
def test_nothing_is_guessed_of_a_name_that_is_like_none(function, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        function(**{name: 3})


def test_other_errors_are_as_they_were():
    """Of Python where nothing is like it, and of what is called, with its traceback."""
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'zzz'"):
        accumext.generate(E, C, H, zzz=1)
    with pytest.raises(TypeError, match=r"takes .* positional arguments but 8 were given"):
        accumext.tbptt(*range(8))

    def fn(_):
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        accumext.chunked_loss(fn, S, chunks=1)


@pytest.mark.parametrize("call", [accumext.decode_loss, accumext.AccumulatingOptimizer])
def test_signatures_and_help_are_those_of_the_function(call):
    parameters = inspect.signature(call).parameters
    assert "args" not in parameters
    assert {"feedback", "window"} & set(parameters)
    assert inspect.getdoc(call)
