"""Clipping: one micro-batch as it is accumulated, and clip_grad_norm_ against torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import oracle
from support.device import DeviceReads, cpu_as_device

import accumext

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]
# The norm's error goes into the factor; float32 results are rounded a few times more. Half results
# are compared after rounding, where that error may decide one unit in the last place.
CLIP_RTOL = {
    torch.float64: 1e-5,  # with float32 gradients the norm is float32
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def clipped(grads, *, inv_scale=1.0, max_norm, norm_type=2.0):
    """The clipped gradients in float64, by definition."""
    norm = oracle.norm(grads, norm_type, inv_scale)
    coef = min(1.0, max_norm / (norm + 1e-6))
    return [g.double() * (inv_scale * coef) for g in grads]


@pytest.mark.parametrize(
    "max_norm", [0.0, 0.5, 1e9, math.inf], ids=["zero", "clips", "large", "inf"]
)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_clipped_micro_batch(norm_type, max_norm, main_dtype, grad_dtype):
    main_grads = [oracle.random(shape, main_dtype) for shape in [(2049,), (13, 7), ()]]
    grads = [oracle.random(m.shape, grad_dtype) for m in main_grads]
    added = clipped(grads, inv_scale=0.25, max_norm=max_norm, norm_type=norm_type)
    expected = [(m.double() + a).to(main_dtype) for m, a in zip(main_grads, added, strict=True)]
    norm = accumext.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=0.25, max_norm=max_norm, norm_type=norm_type
    )
    rtol = CLIP_RTOL[main_dtype]
    for got, want in zip(main_grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)
    oracle.assert_norm(norm, grads, norm_type=norm_type, inv_scale=0.25, rtol=4e-6)


def test_a_clipped_micro_batch_of_dyadic_data_is_exact():
    # Unscaled, 9 and 16 ones: norms of 3 and 4, and so of 5.
    grads = [torch.full([9], 2.0), torch.full([2, 8], 2.0, dtype=torch.float16)]
    main_grads = [torch.full([9], 1.0), torch.zeros(2, 8)]
    norm = accumext.unscale_check_clip_accumulate_(main_grads, grads, inv_scale=0.5, max_norm=2.0)
    coef = 2.0 / (torch.tensor(5.0) + 1e-6)
    assert norm.item() == 5.0
    assert torch.equal(main_grads[0], 1.0 + 2.0 * (coef * 0.5).expand(9))
    assert torch.equal(main_grads[1], 2.0 * (coef * 0.5).expand(2, 8))


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_below_max_norm_it_is_accumulate(main_dtype, grad_dtype, overwrite):
    main_grads = [oracle.random([n], main_dtype) for n in (65537, 3)]
    grads = [oracle.random([n], grad_dtype) for n in (65537, 3)]
    expected = [m.clone() for m in main_grads]
    accumext.accumulate_(expected, grads, inv_scale=0.37, overwrite=overwrite)
    accumext.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=0.37, max_norm=1e9, overwrite=overwrite
    )
    assert all(map(torch.equal, main_grads, expected))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_limit_just_above_the_norm_does_not_scale_up(norm_type, grad_dtype):
    grads = [oracle.random(shape, grad_dtype) for shape in [(2049,), (13, 7), ()]]
    expected = [torch.ones(g.shape) for g in grads]
    main_grads = [torch.ones(g.shape) for g in grads]
    accumext.accumulate_(expected, grads, inv_scale=0.25)
    limit = 1.25 * oracle.norm(grads, norm_type, 0.25)
    accumext.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=0.25, max_norm=limit, norm_type=norm_type
    )
    assert all(map(torch.equal, main_grads, expected))


@pytest.mark.parametrize("operator", [False, True], ids=["function", "operator"])
def test_inv_scale_as_tensor_equals_float_and_is_not_read(operator, dtype):
    op = torch.ops.accumext if operator else accumext
    grads = [oracle.random([100], torch.float32)]
    by_float, by_tensor = [torch.zeros(100)], [torch.zeros(100)]
    inv_scale = torch.tensor(0.37, dtype=dtype)
    accumext.unscale_check_clip_accumulate_(
        by_float, grads, inv_scale=inv_scale.item(), max_norm=1.0
    )
    with DeviceReads() as reads:
        op.unscale_check_clip_accumulate_(by_tensor, grads, inv_scale=inv_scale, max_norm=1.0)
    assert torch.equal(by_tensor[0], by_float[0])
    assert reads.count == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("where", [0, 35000, 69999], ids=["first", "middle", "last"])
def test_if_finite_keeps_every_bit(where, value, main_dtype, grad_dtype):
    main_grads = [
        oracle.random([70000], main_dtype),
        torch.tensor([math.nan, -0.0], dtype=main_dtype),
    ]
    before = [m.view(torch.uint8).clone() for m in main_grads]
    grads = [oracle.random([70000], grad_dtype), torch.ones(2, dtype=grad_dtype)]
    grads[0][where] = value
    found_inf = torch.zeros(())
    with DeviceReads() as reads:
        norm = accumext.unscale_check_clip_accumulate_(
            main_grads, grads, max_norm=1.0, found_inf=found_inf, if_finite=True
        )
    assert reads.count == 0
    assert found_inf.item() == 1.0
    assert not norm.isfinite()
    for main_grad, bits in zip(main_grads, before, strict=True):
        assert torch.equal(main_grad.view(torch.uint8), bits)


def test_if_finite_accumulates_finite_gradients():
    main_grads, expected = [torch.ones(5)], [torch.ones(5)]
    grads = [torch.arange(5.0)]
    found_inf = torch.ones(())  # of an earlier micro-batch: sticky, and no reason to skip this one
    accumext.unscale_check_clip_accumulate_(expected, grads, max_norm=1.0)
    accumext.unscale_check_clip_accumulate_(
        main_grads, grads, max_norm=1.0, found_inf=found_inf, if_finite=True
    )
    assert torch.equal(main_grads[0], expected[0])
    assert found_inf.item() == 1.0


def test_a_nonfinite_micro_batch_goes_in_like_torchs():
    grads = [torch.tensor([1.0, math.inf]), torch.tensor([2.0])]
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.cat(grads)
    torch.nn.utils.clip_grad_norm_(parameter, 1.0)
    main_grads = [torch.zeros(2), torch.zeros(1)]
    accumext.unscale_check_clip_accumulate_(main_grads, grads, max_norm=1.0)
    torch.testing.assert_close(torch.cat(main_grads), parameter.grad, equal_nan=True)


def test_no_tensors():
    assert accumext.unscale_check_clip_accumulate_([], [], max_norm=1.0).item() == 0.0


# --- clip_grad_norm_ ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("max_norm", [0.5, 1e9, math.inf], ids=["clips", "large", "inf"])
@pytest.mark.parametrize("norm_type", [*NORM_TYPES, "inf", 2, -math.inf, -1.0], ids=str)
def test_equals_torch(norm_type, max_norm):
    ours = parameters((torch.float32, torch.float64))
    theirs = twin(ours)
    norm = accumext.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for got, want in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


MAX_NORMS = {
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


@pytest.mark.parametrize("empty", [False, True], ids=["", "without gradients"])
@pytest.mark.parametrize("norm_type", [0, 0.0, 2.0, "inf", np.float64(3.0), np.int32(1)], ids=str)
@pytest.mark.parametrize("max_norm", MAX_NORMS.values(), ids=MAX_NORMS)
def test_any_limit_goes_into_the_formula_like_torchs(max_norm, norm_type, empty):
    ours = [] if empty else parameters((torch.float32, torch.float64))
    for parameter in ours[-1:]:
        parameter.grad.zero_()  # the 0-norm counts gradients that are not all zero
    theirs = twin(ours)
    norm = accumext.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for got, want in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0], ids=str)
def test_the_0_norm_counts_gradients(value):
    ours = parameters()
    ours[0].grad.zero_()
    ours[0].grad[5] = value
    theirs = twin(ours)
    norm = accumext.clip_grad_norm_(ours, 1.0, 0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0, 0))
    assert norm.item() == 2 + (value != 0)


def test_half_gradients_are_clipped_by_a_float32_norm():
    ours = parameters((torch.float16,), scale=2000.0)  # a norm beyond 65504, the largest half
    before = [g.clone() for g in grads_of(ours)]
    norm = accumext.clip_grad_norm_(ours, 100.0)
    oracle.assert_norm(norm, before)
    for got, want in zip(grads_of(ours), clipped(before, max_norm=100.0), strict=True):
        rtol = CLIP_RTOL[torch.float16]
        torch.testing.assert_close(got, want.half(), rtol=rtol, atol=2.0**-24)


def test_generators_single_tensors_and_foreach():
    for arguments in [lambda ps: (p for p in ps), lambda ps: tuple(ps), lambda ps: ps[0]]:
        ours = parameters()
        theirs = twin(ours)
        norm = accumext.clip_grad_norm_(arguments(ours), max_norm=1.0, foreach=True)
        expected = torch.nn.utils.clip_grad_norm_(arguments(theirs), max_norm=1.0)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for got, want in zip(grads_of(ours), grads_of(theirs), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_nothing_to_clip():
    assert accumext.clip_grad_norm_([], 1.0).item() == 0.0
    assert accumext.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    with pytest.warns(UserWarning, match="empty generator") as warned:
        accumext.clip_grad_norm_((p for p in []), 1.0)
    assert warned[0].filename == __file__


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
    for got, want in zip(grads_of(ps), before, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_nonfinite_gradients_end_like_torchs(value):
    ours = parameters()
    ours[0].grad[5] = value
    theirs = twin(ours)
    norm = accumext.clip_grad_norm_(ours, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for got, want in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_norms_of_several_devices_meet_on_the_first():
    ours = parameters()
    theirs = twin(ours)
    for ps in (ours, theirs):
        ps[2].data, ps[2].grad = ps[2].data.cuda(), None
        ps[2].grad = torch.ones_like(ps[2])
    norm = accumext.clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    for got, want in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(got, want)


def test_only_error_if_nonfinite_reads_the_device():
    ps = parameters()
    with cpu_as_device(), DeviceReads() as reads:
        accumext.clip_grad_norm_(ps, 1.0)
    assert reads.count == 0


def test_without_a_limit_an_overflowed_norm_clips_nothing() -> None:
    grads = [torch.full((4,), 1e30)]  # finite, but their squares are not
    main_grads = [torch.zeros(4)]
    norm = accumext.unscale_check_clip_accumulate_(main_grads, grads, max_norm=math.inf)
    assert norm.isinf()
    assert torch.equal(main_grads[0], grads[0])
