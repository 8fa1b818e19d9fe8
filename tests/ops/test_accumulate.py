"""accumulate_ against float64 truth, exact where the data are dyadic, and the reference."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.budget import examples
from support.tensors import FLOAT_DTYPES, assert_equal

import accumext
from accumext.ops import reference

LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "every_second": lambda t: t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 9)[..., ::2].copy_(t),
    "inner_slice": lambda t: t.new_full([n + 4 for n in t.shape], 9)[2:-2, 2:-2, 2:-2, 2:-2].copy_(
        t
    ),
    "reversed_dims": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "contiguous": lambda t: t.contiguous(),
    "expanded": lambda t: t[:1].expand(t.shape),  # to be read alone
}


def assert_accumulates(main_grads, grads, **options):
    """Exactly the sums of dyadic data, and their norm."""
    pairs = zip(main_grads, grads, strict=True)
    expected = [oracle.accumulated(*pair, **options) for pair in pairs]
    factor = options.pop("factor", 1.0)
    norm = accumext.accumulate_(main_grads, grads, inv_scale=factor, **options)
    assert_equal(main_grads, expected)
    oracle.assert_norm(norm, expected)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_dyadic_data_is_exact_at_every_edge(main_dtype, grad_dtype, overwrite):
    main_grads = [oracle.dyadic([n], main_dtype) for n in oracle.EDGE_SIZES]
    grads = [oracle.dyadic([n], grad_dtype) for n in oracle.EDGE_SIZES]
    assert_accumulates(main_grads, grads, factor=0.5, overwrite=overwrite)


def test_every_pair_of_dtypes_in_one_call():
    shapes = itertools.cycle([(7, 5), (), (0,), (3, 0, 2)])
    pairs = list(zip(shapes, itertools.product(FLOAT_DTYPES, FLOAT_DTYPES)))
    main_grads = [oracle.dyadic(shape, main_dtype) for shape, (main_dtype, _) in pairs]
    grads = [oracle.dyadic(shape, grad_dtype) for shape, (_, grad_dtype) in pairs]
    assert_accumulates(main_grads, grads)


@settings(max_examples=examples(60), deadline=None)
@given(sizes=st.lists(st.sampled_from(oracle.EDGE_SIZES[:15]), max_size=12))
def test_any_list_of_sizes(sizes):
    main_grads = [oracle.dyadic([n], torch.float32) for n in sizes]
    assert_accumulates(main_grads, [oracle.dyadic([n], torch.bfloat16) for n in sizes])


@pytest.mark.parametrize("main_layout", [layout for layout in LAYOUTS if layout != "expanded"])
def test_any_strides(main_layout):
    shape = (5, 3, 7, 34)
    for read in LAYOUTS.values():
        main_grad = LAYOUTS[main_layout](oracle.dyadic(shape, torch.float32))
        assert_accumulates([main_grad], [read(oracle.dyadic(shape, torch.float16))])


def test_a_strided_tensor_of_several_chunks():
    main_grad = oracle.dyadic((400, 401), torch.float32).t()
    assert_accumulates([main_grad], [oracle.dyadic((401, 400), torch.float64)])


def test_slices_leave_their_neighbours_alone(dtype):
    base = oracle.dyadic([200], dtype)
    expected = base.clone()
    expected[3:97] = oracle.accumulated(base[3:97], torch.ones(94))
    accumext.accumulate_([base[3:97]], [torch.ones(94)])
    assert torch.equal(base, expected)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_random_data_has_the_bits_of_the_reference(main_dtype, grad_dtype, overwrite):
    main_grads = [oracle.random(shape, main_dtype) for shape in [(65537,), (33, 9), ()]]
    grads = [oracle.random(m.shape, grad_dtype) for m in main_grads]
    expected = [m.clone() for m in main_grads]
    reference_norm = reference.accumulate_(expected, grads, inv_scale=0.37, overwrite=overwrite)
    norm = torch.ops.accumext.accumulate_(main_grads, grads, inv_scale=0.37, overwrite=overwrite)
    assert_equal(main_grads, expected)
    truth, rtol = oracle.norm(expected), oracle.NORM_RTOL[norm.dtype]
    oracle.assert_no_worse(norm, reference_norm, truth, rtol)


def test_each_operation_is_rounded_once():
    # 1 + 2**-12 squared needs 25 bits: a fused multiply-add, or double, would keep the last.
    x = 1.0 + 2.0**-12
    main_grad = torch.tensor([-1.0])
    accumext.accumulate_([main_grad], [torch.tensor([x])], inv_scale=x)
    assert main_grad.item() == 2.0**-11


def test_overwrite_reads_nothing_of_the_main_gradients(dtype):
    grad = oracle.dyadic([50], dtype)
    main_grad = torch.full([50], math.nan)
    norm = accumext.accumulate_([main_grad], [grad], overwrite=True)
    assert torch.equal(main_grad, grad.float())
    oracle.assert_norm(norm, [main_grad])


def test_nonfinite_gradients_go_into_the_sum():
    main_grad = torch.zeros(3)
    norm = accumext.accumulate_([main_grad], [torch.tensor([math.inf, 1.0, math.nan])])
    assert main_grad[0] == math.inf
    assert main_grad[1] == 1.0
    assert main_grad[2].isnan()
    assert norm.isnan()
