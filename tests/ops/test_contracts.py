"""Every broken contract of a gradient operation: its sentence, and that nothing has changed."""

import math

import pytest
import torch
from support.gradient_operations import LISTS, PAIRS, copies, good
from support.tensors import assert_equal

import accumext

DENSE = "be a dense float16, bfloat16, float32 or float64 tensor"
SPARSE = torch.eye(3).to_sparse()
EXPANDED = torch.zeros(1).expand(3)
WINDOWS = torch.zeros(4).unfold(0, 2, 1)  # [3, 2] with strides [1, 1]


ALL_GRADS = (*PAIRS, "total_norm", "scale_")
NORMS = ("unscale_check_clip_accumulate_", "total_norm")
UNSCALING = (*PAIRS, "total_norm")
COPY = ("copy_rounded_",)
ones, f64 = torch.ones, torch.float64


def shared(name, other, own=False):
    contract = f"be {other} or share no memory with it" if own else f"share no memory with {other}"
    advice = f"Give it memory of its own: {name}.clone()"
    return f"{name} must {contract}, got some of its elements. {advice}"


def with_memory(arguments):
    """Copies of tensors that have a memory of their elements."""
    return [t for t in copies(arguments) if t.layout == torch.strided and not t.is_meta]


MAIN_0, MAIN_1 = "main_grads[0]", "main_grads[1]"
# Operations, arguments in place of good ones (or what makes them of eight numbers in memory), the
# error, and its sentence after `<op>: `.
CASES = [
    (PAIRS, {"grads": [ones(3)]}, ValueError,
     "grads must have one entry per main gradient, 2, got 1"),
    (PAIRS, {"grads": [ones(3), ones(4)]}, ValueError,
     "grads[1] must have the shape of main_grads[1], [2, 2], got [4]"),
    (PAIRS, {"grads": [ones(3), ones(2, 2, 1)]}, ValueError,
     "grads[1] must have the shape of main_grads[1], [2, 2], got [2, 2, 1]"),
    (PAIRS, {"main_grads": [EXPANDED, ones(2, 2)]}, ValueError,
     "main_grads[0] must not overlap itself in memory, got shape [3] with strides [0]. "
     "Give it memory of its own: main_grads[0].contiguous()"),
    (PAIRS, {"main_grads": [ones(3), None]}, TypeError,
     f"main_grads[1] must {DENSE}, got NoneType"),
    (PAIRS, {"main_grads": [ones(3), ones(2, 2).int()]}, TypeError,
     f"main_grads[1] must {DENSE}, got an int32 tensor"),
    (("scale_",), {"grads": [WINDOWS]}, ValueError,
     "grads[0] must not overlap itself in memory, got shape [3, 2] with strides [1, 1]. "
     "Give it memory of its own: grads[0].contiguous()"),
    (ALL_GRADS, {"grads": ones(3)}, TypeError,
     "grads must be a list of tensors, got a float32 tensor"),
    (ALL_GRADS, {"grads": [ones(3), "x"]}, TypeError, f"grads[1] must {DENSE}, got str"),
    (ALL_GRADS, {"grads": [ones(3), ones(2, 2).cfloat()]}, TypeError,
     f"grads[1] must {DENSE}, got a complex64 tensor"),
    (ALL_GRADS, {"grads": [ones(3), ones(2, 2).bool()]}, TypeError,
     f"grads[1] must {DENSE}, got a bool tensor"),
    (ALL_GRADS, {"grads": [SPARSE, ones(2, 2)]}, TypeError,
     f"grads[0] must {DENSE}, got a sparse_coo tensor"),
    (("total_norm", "scale_"), {"grads": [ones(3), ones(2, device="meta")]}, ValueError,
     "grads[1] must be on the device of grads[0], cpu, got meta"),
    (PAIRS, {"grads": [ones(3), ones(2, 2, device="meta")]}, ValueError,
     "grads[1] must be on the device of main_grads[0], cpu, got meta"),
    (UNSCALING, {"inv_scale": "1"}, TypeError, "inv_scale must be a number, got str"),
    (UNSCALING, {"inv_scale": math.nan}, ValueError, "inv_scale must not be NaN, got nan"),
    (UNSCALING, {"inv_scale": ones(1)}, ValueError, "inv_scale must be 0-dim, got shape [1]"),
    (UNSCALING, {"inv_scale": torch.tensor(1)}, TypeError,
     "inv_scale must be a float or a 0-dim float tensor, got an int64 tensor"),
    (UNSCALING, {"found_inf": ones(1)}, ValueError, "found_inf must be 0-dim, got shape [1]"),
    (UNSCALING, {"found_inf": ones((), dtype=f64)}, TypeError,
     "found_inf must be a 0-dim float32 tensor, got a float64 tensor"),
    (UNSCALING, {"found_inf": 0.0}, TypeError,
     "found_inf must be a 0-dim float32 tensor, got float"),
    (("scale_",), {"factor": ones(2)}, ValueError, "factor must be 0-dim, got shape [2]"),
    (("scale_",), {"factor": None}, TypeError, "factor must be a number, got NoneType"),
    (("scale_",), {"factor": math.nan}, ValueError, "factor must not be NaN, got nan"),
    (NORMS, {"norm_type": 0.0}, ValueError, "norm_type must be nonzero, got 0.0"),
    (NORMS, {"norm_type": math.nan}, ValueError, "norm_type must not be NaN, got nan"),
    (NORMS, {"norm_type": "fro"}, TypeError, "norm_type must be a number, got str"),
    (NORMS[:1], {"max_norm": -1.0}, ValueError, "max_norm must be at least 0, got -1.0"),
    (NORMS[:1], {"max_norm": math.nan}, ValueError, "max_norm must be at least 0, got nan"),
    (NORMS[:1], {"max_norm": None}, TypeError, "max_norm must be a number, got NoneType"),
    (COPY, {"targets": [ones(6).half()], "sources": [ones(6)] * 2}, ValueError,
     "sources must have one entry per target, 1, got 2"),
    (COPY, {"sources": [ones(3), ones(4)]}, ValueError,
     "sources[1] must have the shape of targets[1], [2, 2], got [4]"),
    (COPY, {"targets": [EXPANDED], "sources": [ones(3)]}, ValueError,
     "targets[0] must not overlap itself in memory, got shape [3] with strides [0]. "
     "Give it memory of its own: targets[0].contiguous()"),
    (COPY, {"seed": 3}, TypeError,
     "seed must be a 0-dim int64 tensor, got int. On the device of the lists: "
     "torch.tensor(0, device=...)"),
    (COPY, {"seed": torch.tensor([3])}, ValueError, "seed must be 0-dim, got shape [1]"),
    (COPY, {"seed": torch.tensor(3, device="meta")}, ValueError,
     "seed must be on the device of targets[0], cpu, got meta"),
    (COPY, {"found_inf": True}, TypeError, "found_inf must be a 0-dim float32 tensor, got bool"),

    (PAIRS, lambda b: {"main_grads": [b, b]}, ValueError, shared(MAIN_1, MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [b[:4], b[3:7]]}, ValueError, shared(MAIN_1, MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [b[2:6], b[:2], b[5:]]}, ValueError,
     shared("main_grads[2]", MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [b[::3], b[3:4]]}, ValueError, shared(MAIN_1, MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [b, b.view(torch.half)[15:]]}, ValueError,
     shared(MAIN_1, MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [b[1:]], "grads": [b[:-1]]}, ValueError,
     shared("grads[0]", MAIN_0, own=True)),
    (PAIRS, lambda b: {"main_grads": [b.view(2, 4)[:, :2]], "grads": [b.view(2, 4)[:, :2].t()]},
     ValueError, shared("grads[0]", MAIN_0, own=True)),
    (PAIRS, lambda b: {"main_grads": [b], "grads": [b[:1].expand(8)]}, ValueError,
     shared("grads[0]", MAIN_0, own=True)),
    (PAIRS, lambda b: {"main_grads": [b[:4], b[4:]], "grads": [b[4:], b[:4]]}, ValueError,
     shared("grads[0]", MAIN_1)),
    (PAIRS, lambda b: {"main_grads": [b[:4]], "inv_scale": b[3]}, ValueError,
     shared("inv_scale", MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [b[:4]], "found_inf": b[3]}, ValueError,
     shared("found_inf", MAIN_0)),
    (PAIRS, lambda b: {"main_grads": [ones(4)], "grads": [b[:4]], "found_inf": b[3]}, ValueError,
     shared("found_inf", "grads[0]")),
    (PAIRS, lambda b: {"main_grads": [b[:3]], "inv_scale": b[3], "found_inf": b[3]}, ValueError,
     shared("found_inf", "inv_scale")),
    (("total_norm",), lambda b: {"grads": [ones(2), b], "found_inf": b[2]}, ValueError,
     shared("found_inf", "grads[1]")),
    (("scale_",), lambda b: {"grads": [b], "factor": b[1]}, ValueError,
     shared("factor", "grads[0]")),
    (COPY, lambda b: {"targets": [b[:3], b[2:5]]}, ValueError, shared("targets[1]", "targets[0]")),
    (COPY, lambda b: {"targets": [b[:3]], "sources": [b[1:4]]}, ValueError,
     shared("sources[0]", "targets[0]", own=True)),
    (COPY, lambda b: {"targets": [b[:3], ones(3).half()], "sources": [ones(3), b[:3]]}, ValueError,
     shared("sources[1]", "targets[0]")),
    (COPY, lambda b: {"targets": [b], "seed": b.view(torch.int64)[1]}, ValueError,
     shared("seed", "targets[0]")),
    (COPY, lambda b: {"targets": [b], "found_inf": b[2]}, ValueError,
     shared("found_inf", "targets[0]")),
]  # fmt: skip
EACH = [(op, *case[1:]) for case in CASES for op in case[0]]


@pytest.mark.parametrize(
    ("op", "broken", "error", "sentence"), EACH, ids=[f"{c[0]}-{i}" for i, c in enumerate(EACH)]
)
def test_broken_contract(op, broken, error, sentence):
    """By the words of the function. Operators have other ones, but write nothing either."""
    written, *read = LISTS[op]
    if callable(broken):
        broken = broken(torch.arange(1.0, 9))
        for name in read:
            broken.setdefault(name, [torch.ones_like(tensor) for tensor in broken[written]])
    arguments = good(op) | broken
    before = with_memory(arguments)
    with pytest.raises(error) as raised:
        getattr(accumext, op)(**arguments)
    assert str(raised.value) == f"{op}: {sentence}"
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    if broken.keys() & {*LISTS[op]}:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            getattr(torch.ops.accumext, op)(**arguments)
    assert_equal(with_memory(arguments), before)


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
