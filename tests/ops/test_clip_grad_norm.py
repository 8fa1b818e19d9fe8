"""clip_grad_norm_ against torch's: norms, limits and gradients of every kind."""

import math

import numpy as np
import pytest
import torch
from support import oracle
from support.device import DeviceReads, cpu_as_device
from support.recorded_warnings import warnings_as

import accumext


def parameters(dtypes=(torch.float32,), scale=1.0):
    made = []
    for dtype in dtypes:
        for shape in [(2049,), (13, 7), ()]:
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = oracle.random(shape, dtype) * scale
            made.append(parameter)
    made.insert(1, torch.nn.Parameter(torch.zeros(3)))  # without a gradient
    return made


def twin(originals):
    """The same parameters and gradients again."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in originals]
    for copy, original in zip(copies, originals, strict=True):
        copy.grad = None if original.grad is None else original.grad.clone()
    return copies


def grads_of(ps):
    return [p.grad for p in ps if p.grad is not None]


MAX_NORMS = {
    "clips": 0.5,
    "large": 1e9,
    "inf": math.inf,
    "tensor": torch.tensor(0.5),
    "tensor of one element": torch.tensor([0.5], dtype=torch.float64),
    "int tensor": torch.tensor(2),
    "numpy": np.float32(0.5),
    "numpy int": np.int64(2),
    "numpy array": np.array(0.5),
    "bool": True,
    "zero": 0.0,
    "negative": -2.0,
    "-inf": -math.inf,
    "nan": math.nan,
}
NORM_TYPES = [0, 0.0, 1.0, 2.0, 2, 3.0, math.inf, "inf", -math.inf, -1.0]
NORM_TYPES += [np.float64(3.0), np.int32(1)]


def assert_clipped_alike(ours, max_norm, norm_type=2.0, given=list, **options):
    """As torch clips the same gradients, by nearly the same norm; `given` makes the argument."""
    theirs = twin(ours)
    norm = accumext.clip_grad_norm_(given(ours), max_norm, norm_type, **options)
    expected = torch.nn.utils.clip_grad_norm_(given(theirs), max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(grads_of(ours), grads_of(theirs), rtol=1e-5, atol=0, equal_nan=True)
    return norm


@pytest.mark.parametrize("norm_type", NORM_TYPES, ids=str)
@pytest.mark.parametrize("max_norm", MAX_NORMS.values(), ids=MAX_NORMS)
def test_any_limit_goes_into_the_formula_like_torchs(max_norm, norm_type):
    ours = parameters((torch.float32, torch.float64))
    ours[-1].grad.zero_()  # the 0-norm counts gradients that are not all zero
    if norm_type in (-1.0, -math.inf):  # of which a zero makes a zero
        ours[-1].grad.fill_(0.3)
    assert_clipped_alike(ours, max_norm, norm_type)
    assert_clipped_alike([], max_norm, norm_type)


@pytest.mark.parametrize("norm_type", [0, 2.0])
@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0], ids=str)
def test_gradients_that_are_not_finite_or_zero(value, norm_type):
    ours = parameters()
    ours[0].grad.zero_()
    ours[0].grad[5] = value
    norm = assert_clipped_alike(ours, 1.0, norm_type)
    if norm_type == 0:  # the number of gradients
        assert norm.item() == 2 + (value != 0)


def test_half_gradients_are_clipped_by_a_float32_norm():
    ours = parameters((torch.float16,), scale=2000.0)  # a norm beyond 65504, the largest half
    before = [g.clone() for g in grads_of(ours)]
    norm = accumext.clip_grad_norm_(ours, 100.0)
    oracle.assert_norm(norm, before)
    for got, want in zip(grads_of(ours), oracle.clipped(before, max_norm=100.0), strict=True):
        rtol = oracle.CLIP_RTOL[torch.float16]
        torch.testing.assert_close(got, want.half(), rtol=rtol, atol=2.0**-24)


@pytest.mark.parametrize("given", [lambda ps: (p for p in ps), tuple, lambda ps: ps[0]])
def test_generators_single_tensors_and_foreach(given):
    assert_clipped_alike(parameters(), 1.0, given=given, foreach=True)


def test_nothing_to_clip():
    assert accumext.clip_grad_norm_([], 1.0).item() == 0.0
    assert accumext.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    with warnings_as("always") as said:
        accumext.clip_grad_norm_((p for p in []), 1.0)
    (warning,) = said
    assert "empty generator" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("coalesced", [False, True], ids=["uncoalesced", "coalesced"])
def test_sparse_gradients_count_by_their_coalesced_values(coalesced):
    indices, values = torch.tensor([[0, 2, 2]]), torch.tensor([[3.0, 0.0], [1.0, 2.0], [1.0, 2.0]])
    embedding, dense = torch.nn.Parameter(torch.zeros(4, 2)), torch.nn.Parameter(torch.zeros(1))
    embedding.grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    if coalesced:
        embedding.grad = embedding.grad.coalesce()
    dense.grad = torch.tensor([1.0])
    expected = embedding.grad.to_dense() / (math.sqrt(9 + 4 + 16 + 1) + 1e-6)
    norm = accumext.clip_grad_norm_([embedding, dense], max_norm=1.0)
    assert norm.item() == pytest.approx(math.sqrt(30))
    torch.testing.assert_close(embedding.grad.to_dense(), expected)
    assert dense.grad.item() == pytest.approx(1 / math.sqrt(30), rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_error_if_nonfinite_scales_nothing(value):
    ps = parameters()
    ps[0].grad[5] = value
    before = [g.clone() for g in grads_of(ps)]
    with pytest.raises(RuntimeError, match="clip_grad_norm_: total_norm must be finite, got"):
        accumext.clip_grad_norm_(ps, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(grads_of(ps), before, rtol=0, atol=0, equal_nan=True)


def test_only_error_if_nonfinite_reads_the_device():
    ps = parameters()
    with cpu_as_device(), DeviceReads() as reads:
        accumext.clip_grad_norm_(ps, 1.0)
    assert reads.count == 0
