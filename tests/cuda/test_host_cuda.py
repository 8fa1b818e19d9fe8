"""The kernels of csrc/cuda, run on the host: against float64 truth, exact data, the reference.

Each call runs with several grids and orders of the threads, which must leave the same bits; see
host_cuda. Tests that need a GPU (launchers, streams, captures, speed) are in test_cuda.py.
"""

from __future__ import annotations

import itertools
import math

import host_cuda
import pytest
import torch
from host_cuda import ASCENDING, ORDERS, SHUFFLED
from support import oracle, window_cases
from support.tensors import FLOAT_DTYPES, assert_bits, shifted

from accumext import reference

pytestmark = pytest.mark.build  # compiles the kernels

# Around every edge: vectors of 2, 4 and 8 elements, warps of them, a few in flight, chunks of 4096.
EDGE_SIZES = sorted(
    {0}
    | {unit + by for unit in (2, 4, 8, 32, 64, 128, 256, 512, 1024, 2048) for by in (-1, 0, 1)}
    | {chunks * 4096 + by for chunks in (1, 2) for by in (-8, -1, 0, 1, 8)}
)
SHIFTS = (0, 1, 3, 8)  # elements past an address that suits every vector
NORM_TYPES = [1.0, 2.0, 3.0, 0.5, math.inf, -math.inf, -1.0]
# float32 pow is good to a few units in the last place; a root of p < 1 multiplies that by 1 / p.
POW_RTOL = 4e-6
# The norm goes into the clip's factor, and may differ from the reference's in its last bit; then so
# may a result.
CLIP_RTOL = {
    torch.float64: 1e-6,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
DTYPE_PAIRS = list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES))
NONFINITE = pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)


@pytest.fixture(scope="module")
def kernels(host_executable):
    return host_cuda.HostCuda(host_executable("driver"))


def rtol(norm_type):
    return None if norm_type in (1.0, 2.0, math.inf, -math.inf) else POW_RTOL


def neighbours(tensor):
    """The elements before and behind a slice."""
    begin, base = tensor.storage_offset(), tensor._base
    return torch.cat([base[:begin], base[begin + tensor.numel() :]])


# --- accumulate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_dyadic_data_is_exact_at_every_edge(kernels, main_dtype, grad_dtype, overwrite):
    main_grads = [oracle.dyadic([n], main_dtype) for n in EDGE_SIZES]
    grads = [oracle.dyadic([n], grad_dtype) for n in EDGE_SIZES]
    expected = [oracle.accumulated(m, g, 0.5, overwrite) for m, g in zip(main_grads, grads)]
    norm = kernels.accumulate_(main_grads, grads, inv_scale=0.5, overwrite=overwrite)
    for size, got, want in zip(EDGE_SIZES, main_grads, expected):
        assert torch.equal(got, want), f"size {size}"
    oracle.assert_norm(norm, expected)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_every_pair_of_dtypes_in_one_table_has_the_bits_of_the_reference(kernels, overwrite):
    cases = list(itertools.product(DTYPE_PAIRS, [(4099,), (33, 9), ()]))
    main_grads = [oracle.random(shape, main) for (main, _), shape in cases]
    grads = [oracle.random(shape, grad) for (_, grad), shape in cases]
    expected = [m.clone() for m in main_grads]
    reference_norm = reference.accumulate_(expected, grads, inv_scale=0.37, overwrite=overwrite)
    norm = kernels.accumulate_(main_grads, grads, inv_scale=0.37, overwrite=overwrite)
    assert_bits(main_grads, expected)
    truth, tolerance = oracle.norm(expected), oracle.NORM_RTOL[torch.float32]
    oracle.assert_no_worse(norm, reference_norm, truth, tolerance)


def test_slices_at_every_alignment(kernels, main_dtype, grad_dtype):
    cases = list(itertools.product((1, 7, 8, 40, 300, 4090, 4100), SHIFTS, SHIFTS))
    main_grads = [shifted(oracle.dyadic([n], main_dtype), by) for n, by, _ in cases]
    grads = [shifted(oracle.dyadic([n], grad_dtype), by) for n, _, by in cases]
    expected = [oracle.accumulated(m, g) for m, g in zip(main_grads, grads)]
    found_inf = torch.zeros(())
    norm = kernels.accumulate_(main_grads, grads, found_inf=found_inf)
    for case, got, want in zip(cases, main_grads, expected):
        assert torch.equal(got, want), f"(size, shift of main, shift of grad) {case}"
        assert neighbours(got).isnan().all(), f"(size, shift of main, shift of grad) {case}"
    assert found_inf.item() == 0.0  # no NaN beside a gradient was read
    oracle.assert_norm(norm, expected)


@pytest.mark.parametrize("shift", SHIFTS)
def test_main_gradients_may_be_the_gradients(kernels, shift, dtype):
    tensors = [shifted(oracle.dyadic([n], dtype), shift) for n in (5, 4099, 9000)]
    expected = [oracle.accumulated(t, t, 0.5) for t in tensors]
    norm = kernels.accumulate_(tensors, tensors, inv_scale=0.5)
    assert all(map(torch.equal, tensors, expected))
    oracle.assert_norm(norm, expected)


def test_any_strides(kernels):
    layouts = [
        lambda t: t.contiguous(),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda t: t.new_full((*t.shape[:-1], 2 * t.shape[-1]), math.nan)[..., ::2].copy_(t),
        lambda t: t.new_full([n + 2 for n in t.shape], math.nan)[1:-1, 1:-1, 1:-1, 1:-1].copy_(t),
    ]
    pairs = list(itertools.product(layouts, layouts))
    main_grads = [main(oracle.dyadic((5, 3, 7, 34), torch.float32)) for main, _ in pairs]
    grads = [grad(oracle.dyadic((5, 3, 7, 34), torch.float16)) for _, grad in pairs]
    main_grads += [oracle.dyadic((70, 131), torch.bfloat16).t(), torch.zeros(4, 3)]
    grads += [oracle.dyadic((131, 70), torch.float64), torch.arange(3.0).expand(4, 3)]
    expected = [oracle.accumulated(m, g) for m, g in zip(main_grads, grads)]
    holes = [m.untyped_storage().nbytes() // m.element_size() - m.numel() for m in main_grads]
    norm = kernels.accumulate_(main_grads, grads)
    assert all(map(torch.equal, main_grads, expected))
    oracle.assert_norm(norm, expected)
    for main_grad, count in zip(main_grads, holes):
        memory = torch.empty(0, dtype=main_grad.dtype).set_(main_grad.untyped_storage())
        assert memory.isnan().sum() == count


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)], ids=str)
def test_zero_dim_and_empty(kernels, shape, dtype):
    main_grad, grad = oracle.dyadic(shape, dtype), oracle.dyadic(shape, dtype)
    expected = oracle.accumulated(main_grad, grad)
    norm = kernels.accumulate_([main_grad], [grad])
    assert torch.equal(main_grad, expected)
    oracle.assert_norm(norm, [expected])


def test_no_tensors(kernels):
    assert kernels.accumulate_([], []).item() == 0.0
    assert kernels.unscale_check_clip_accumulate_([], [], max_norm=1.0).item() == 0.0
    kernels.scale_([], 2.0)


def test_two_thousand_small_tensors(kernels):
    sizes = torch.randint(0, 40, [2000]).tolist()
    main_grads = [oracle.dyadic([n], DTYPE_PAIRS[i % 16][0]) for i, n in enumerate(sizes)]
    grads = [oracle.dyadic([n], DTYPE_PAIRS[i % 16][1]) for i, n in enumerate(sizes)]
    expected = [oracle.accumulated(m, g) for m, g in zip(main_grads, grads)]
    norm = kernels.accumulate_(main_grads, grads)
    assert all(map(torch.equal, main_grads, expected))
    oracle.assert_norm(norm, expected, rtol=oracle.NORM_RTOL[torch.float32])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_like_torchs(kernels, half):
    """Every half, what lies in the middle of two, and the floats beside those."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half).float()
    ordered = halves[halves.isfinite()].sort().values
    middles = (ordered[1:] + ordered[:-1]) / 2
    beside = [middles.nextafter(torch.tensor(side)) for side in (math.inf, -math.inf)]
    beyond = torch.tensor([65519.0, 65520.0, -65520.0, 3.4e38, 1e-45])
    grad = torch.cat([halves, middles, *beside, beyond])
    main_grad, back = torch.empty_like(grad, dtype=half), torch.empty_like(grad)
    kernels.accumulate_([main_grad], [grad], overwrite=True)
    kernels.accumulate_([back], [main_grad], overwrite=True)
    assert_bits([main_grad, back], [grad.to(half), grad.to(half).float()])


def test_inv_scale_as_tensor_equals_float(kernels, dtype):
    grads = [oracle.random([100], torch.float32)]
    by_float, by_tensor = [torch.zeros(100)], [torch.zeros(100)]
    inv_scale = torch.tensor(0.37, dtype=dtype)
    kernels.accumulate_(by_float, grads, inv_scale=inv_scale.item())
    kernels.accumulate_(by_tensor, grads, inv_scale=inv_scale)
    assert_bits(by_tensor, by_float)


def test_overwrite_reads_nothing_of_the_main_gradients(kernels, dtype):
    grad, main_grad = oracle.dyadic([50], dtype), torch.full([50], math.nan)
    norm = kernels.accumulate_([main_grad], [grad], overwrite=True)
    assert torch.equal(main_grad, grad.float())
    oracle.assert_norm(norm, [main_grad])


@NONFINITE
@pytest.mark.parametrize("where", [0, 1, 4100, 8999], ids=str)
def test_found_inf_sees_one_element(kernels, where, value, grad_dtype):
    grad, found_inf = oracle.dyadic([9000], grad_dtype), torch.zeros(())
    grad[where] = value
    main_grads = [torch.zeros(3), torch.zeros(9000)]
    norm = kernels.accumulate_(main_grads, [torch.ones(3), grad], found_inf=found_inf)
    assert found_inf.item() == 1.0
    assert not norm.isfinite()
    assert_bits(main_grads, [torch.ones(3), grad.float()])


@pytest.mark.parametrize("before", [0.0, 1.0, 0.25])
def test_found_inf_is_left_as_it_was_by_finite_gradients(kernels, before):
    found_inf = torch.tensor(before)
    kernels.accumulate_([torch.full([3], math.inf)], [torch.ones(3)], found_inf=found_inf)
    kernels.accumulate_([], [], found_inf=found_inf)
    assert found_inf.item() == before


# --- the grid -------------------------------------------------------------------------------------


def test_the_bits_do_not_depend_on_the_grid_or_the_order(kernels):
    """One block, some that do not divide the chunks, as many and more than there are chunks."""
    runs = [*itertools.product(ORDERS, (1, 2, 3, 7)), (ASCENDING, 13), (SHUFFLED, 90)]
    grads = [oracle.random([n], torch.float32) for n in (20000, 4096, 7, 4097)]
    grads += [oracle.random([70, 131], torch.bfloat16).t(), oracle.random([300], torch.float64)]
    main_grads = [oracle.random(g.shape, torch.float32) for g in grads]
    for norm_type in NORM_TYPES:
        kernels.total_norm(grads, norm_type=norm_type, runs=runs)
    kernels.accumulate_(main_grads, grads, inv_scale=0.37, runs=runs)
    kernels.unscale_check_clip_accumulate_(main_grads, grads, max_norm=1.0, runs=runs)
    kernels.scale_(grads, 0.37, runs=runs)


# --- clip -----------------------------------------------------------------------------------------


def test_a_clipped_micro_batch_of_dyadic_data_is_exact(kernels):
    # Unscaled, 9 and 16 ones: norms of 3 and 4, and so of 5.
    grads = [torch.full([9], 2.0), torch.full([2, 8], 2.0, dtype=torch.float16)]
    main_grads = [torch.full([9], 1.0), torch.zeros(2, 8)]
    norm = kernels.unscale_check_clip_accumulate_(main_grads, grads, inv_scale=0.5, max_norm=2.0)
    coef = 2.0 / (torch.tensor(5.0) + 1e-6)
    assert norm.item() == 5.0
    assert torch.equal(main_grads[0], 1.0 + 2.0 * (coef * 0.5).expand(9))
    assert torch.equal(main_grads[1], 2.0 * (coef * 0.5).expand(2, 8))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, math.inf], ids=["zero", "clips", "inf"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_a_clipped_micro_batch_is_the_references(kernels, norm_type, max_norm, grad_dtype):
    cases = list(itertools.product([(4100,), (13, 7), ()], FLOAT_DTYPES))
    main_grads = [oracle.random(shape, dtype) for shape, dtype in cases]
    grads = [oracle.random(shape, grad_dtype) for shape, _ in cases]
    expected = [m.clone() for m in main_grads]
    options = {"inv_scale": 0.25, "norm_type": norm_type}
    reference.unscale_check_clip_accumulate_(expected, grads, max_norm=max_norm, **options)
    norm = kernels.unscale_check_clip_accumulate_(main_grads, grads, max_norm=max_norm, **options)
    for got, want in zip(main_grads, expected):
        tolerance = CLIP_RTOL[got.dtype]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    oracle.assert_norm(norm, grads, rtol=rtol(norm_type), **options)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_below_max_norm_it_is_accumulate(kernels, overwrite):
    main_grads = [shifted(oracle.random([500], main), 1) for main, _ in DTYPE_PAIRS]
    grads = [shifted(oracle.random([500], grad), 3) for _, grad in DTYPE_PAIRS]
    expected = [m.clone() for m in main_grads]
    reference.accumulate_(expected, grads, inv_scale=0.37, overwrite=overwrite)
    kernels.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=0.37, max_norm=1e9, overwrite=overwrite
    )
    assert_bits(main_grads, expected)


@NONFINITE
@pytest.mark.parametrize("where", [0, 4100, 8999], ids=str)
def test_if_finite_keeps_every_bit(kernels, where, value, grad_dtype):
    main_grads = [oracle.random([9000], torch.float32), torch.tensor([math.nan, -0.0])]
    before = [m.view(torch.int32).clone() for m in main_grads]
    grads = [oracle.random([9000], grad_dtype), torch.ones(2, dtype=grad_dtype)]
    grads[0][where] = value
    found_inf = torch.zeros(())
    norm = kernels.unscale_check_clip_accumulate_(
        main_grads, grads, max_norm=1.0, found_inf=found_inf, if_finite=True
    )
    assert found_inf.item() == 1.0
    assert not norm.isfinite()
    assert all(torch.equal(m.view(torch.int32), bits) for m, bits in zip(main_grads, before))


def test_if_finite_accumulates_finite_gradients(kernels):
    main_grad, found_inf = torch.ones(5), torch.ones(())  # found_inf of an earlier micro-batch
    kernels.unscale_check_clip_accumulate_(
        [main_grad], [torch.arange(5.0)], max_norm=math.inf, found_inf=found_inf, if_finite=True
    )
    assert torch.equal(main_grad, 1 + torch.arange(5.0))
    assert found_inf.item() == 1.0


def test_a_nonfinite_micro_batch_goes_in_like_the_references(kernels):
    grads = [torch.tensor([1.0, math.inf]), torch.tensor([2.0, math.nan])]
    main_grads, expected = ([torch.zeros(2), torch.zeros(2)] for _ in range(2))
    reference.unscale_check_clip_accumulate_(expected, grads, max_norm=1.0)
    kernels.unscale_check_clip_accumulate_(main_grads, grads, max_norm=1.0)
    assert_bits(main_grads, expected)


# --- norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_p_at_every_edge(kernels, norm_type, dtype):
    grads = [oracle.random([n], dtype) + 0.1 for n in EDGE_SIZES]
    norm = kernels.total_norm(grads, norm_type=norm_type)
    oracle.assert_norm(norm, grads, norm_type=norm_type, rtol=rtol(norm_type))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_norm_of_mixed_dtypes_strides_and_alignments(kernels, norm_type):
    grads = [
        oracle.random([60, 40], torch.float32).t(),
        oracle.random([2, 3, 4, 5], torch.float16).contiguous(memory_format=torch.channels_last),
        oracle.random([100], torch.float64)[::3],
        oracle.random([1, 7], torch.float32).expand(5, 7),
        oracle.random([], torch.bfloat16),
        torch.empty(0),
    ]
    for size, dtype, shift in itertools.product((9, 4100), FLOAT_DTYPES, SHIFTS):
        grads.append(shifted(oracle.random([size], dtype), shift))
    options = {"norm_type": norm_type, "inv_scale": 3 * 2.0**-16}
    norm = kernels.total_norm(grads, **options)
    tolerance = rtol(norm_type) or oracle.NORM_RTOL[torch.float32]
    oracle.assert_norm(norm, grads, rtol=tolerance, **options)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_empty_is_zero(kernels, norm_type):
    for grads in ([], [torch.empty(2, 0), torch.empty(0)]):
        assert kernels.total_norm(grads, norm_type=norm_type).item() == 0.0
    grads = [torch.empty(0), torch.tensor([2.0]), torch.empty(0)]
    assert kernels.total_norm(grads, norm_type=norm_type).item() == pytest.approx(2.0)


def test_more_partials_than_the_last_block_takes_at_once(kernels):
    grads = list(torch.arange(4200.0).unbind())
    oracle.assert_norm(kernels.total_norm(grads, runs=[(SHUFFLED, 7)]), grads)


@NONFINITE
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_what_is_not_finite_is_found_and_nan_is_kept(kernels, norm_type, value):
    for where in (0, 4000, 8999):
        grad, found_inf = torch.ones(9000), torch.zeros(())
        grad[where] = value
        norm = kernels.total_norm(
            [torch.ones(5), grad, torch.ones(5)], norm_type=norm_type, found_inf=found_inf
        )
        assert found_inf.item() == 1.0
        assert norm.isnan() == math.isnan(value)


def test_found_inf_is_about_elements_not_about_the_norm(kernels):
    found_inf = torch.zeros(())
    assert kernels.total_norm([torch.tensor([3e38, 3e38])], found_inf=found_inf).item() == math.inf
    assert found_inf.item() == 0.0


# --- scale ----------------------------------------------------------------------------------------


def test_scale_has_the_bits_of_the_reference(kernels, dtype):
    slices = [shifted(oracle.random([n], dtype), by) for n in (5, 40, 4100) for by in SHIFTS]
    grads = [oracle.random([n], dtype) for n in EDGE_SIZES] + slices
    grads += [oracle.random([7, 9], dtype).t(), oracle.random([40], dtype)[::2]]
    expected = [g.clone() for g in grads]
    reference.scale_(expected, 0.37)
    kernels.scale_(grads, 0.37)
    assert_bits(grads, expected)
    assert all(neighbours(grad).isnan().all() for grad in slices)


@pytest.mark.parametrize("factor", [0.5, 0.0, math.inf, math.nan], ids=str)
def test_products_of_mixed_dtypes_are_those_of_ieee(kernels, factor):
    values = torch.tensor([1.0, -2.0, 0.0, -0.0, math.inf, math.nan])
    grads = [values[:n].to(d, copy=True) for n in (0, 1, 6) for d in FLOAT_DTYPES]
    expected = [(g.double() * factor).to(g.dtype) for g in grads]
    kernels.scale_(grads, torch.tensor(factor, dtype=torch.bfloat16))
    assert_bits(grads, expected)


@pytest.mark.parametrize("factor", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
def test_a_factor_of_one_changes_no_bit(kernels, factor):
    bits = torch.arange(0x7F7F, 0x7F90, dtype=torch.int16)  # with signalling NaN: no product is
    grad = bits.clone().view(torch.bfloat16)
    kernels.scale_([grad], factor)
    assert torch.equal(grad.view(torch.int16), bits)


# --- copy_rounded ---------------------------------------------------------------------------------

SEEDS = pytest.mark.parametrize(
    "seed", [None, torch.tensor(7), torch.tensor(-(5 << 40))], ids=["nearest", "seed", "key"]
)


@SEEDS
def test_rounded_copies_have_the_bits_of_the_reference(kernels, seed, dtype):
    """From every dtype, at every edge and alignment, with the numbers of empty tensors counted."""
    sources = [oracle.random([n], source) for n in EDGE_SIZES for source in FLOAT_DTYPES]
    targets = [s.new_full(s.shape, math.nan, dtype=dtype) for s in sources]
    shifts = itertools.product((5, 40, 4100), SHIFTS, SHIFTS)
    for (n, by, other), source in zip(shifts, itertools.cycle(FLOAT_DTYPES)):
        sources.append(shifted(oracle.random([n], source), other))
        targets.append(shifted(torch.zeros(n, dtype=dtype), by))
    expected = [t.clone() for t in targets]
    reference.copy_rounded_(expected, sources, seed=seed)
    kernels.copy_rounded_(targets, sources, seed=seed, found_inf=torch.zeros(()))
    assert_bits(targets, expected)
    slices = [target for target in targets if target._base is not None]
    assert all(neighbours(target).isnan().all() for target in slices)


@SEEDS
def test_rounded_copies_of_every_magnitude(kernels, seed):
    for target, source in itertools.product(FLOAT_DTYPES, FLOAT_DTYPES):
        exponents = torch.empty(3000, dtype=torch.float64).uniform_(-160, 130)
        wild = torch.randn(3000).double() * exponents.exp2()
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65519.0, 3.4e38, 1e-45])
        sources = [torch.cat([wild, special.double()]).to(source)]
        targets, expected = ([torch.zeros(3008, dtype=target)] for _ in range(2))
        reference.copy_rounded_(expected, sources, seed=seed)
        kernels.copy_rounded_(targets, sources, seed=seed, runs=[(ASCENDING, 1)])
        assert_bits(targets, expected)


@SEEDS
def test_rounded_copies_of_any_strides(kernels, seed):
    sources = [
        oracle.random((70, 131), torch.float32).t(),
        oracle.random((5, 3, 7, 34), torch.float32).contiguous(memory_format=torch.channels_last),
        oracle.random((40, 60), torch.float64)[1:30, ::3],
        oracle.random((), torch.float32),
    ]
    targets = [torch.zeros(s.shape, dtype=torch.bfloat16) for s in sources[:2]]
    targets += [torch.zeros(20, 29, dtype=torch.float16).t(), torch.zeros((), dtype=torch.float16)]
    targets[1] = targets[1].contiguous(memory_format=torch.channels_last)
    expected = [t.clone() for t in targets]
    reference.copy_rounded_(expected, sources, seed=seed)
    kernels.copy_rounded_(targets, sources, seed=seed)
    assert_bits(targets, expected)


@SEEDS
@pytest.mark.parametrize("value", [1.0, math.nan, -0.0])
def test_rounded_copies_are_made_unless_found_inf_is_set(kernels, value, seed):
    bits = torch.arange(0x7F7F, 0x7F90, dtype=torch.int16)  # with signalling NaN
    target = bits.clone().view(torch.bfloat16)
    kernels.copy_rounded_([target], [torch.ones(17)], seed=seed, found_inf=torch.tensor(value))
    assert torch.equal(target.view(torch.int16), bits) == (value != 0.0)
    kernels.copy_rounded_([target], [bits.view(torch.bfloat16)], seed=seed)
    assert torch.equal(target.view(torch.int16), bits)
    kernels.copy_rounded_([], [], seed=seed)


# --- window factors -------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_a_window_has_the_factors_of_the_definition(kernels, on_device):
    for case in window_cases.CASES:
        numbers, flags = window_cases.unwritten()
        options = window_cases.operands(case, on_device)
        norm = window_cases.number(case.norm)
        kernels.window_factors(numbers, flags, [], norm, **options, runs=[(ASCENDING, 1)])
        window_cases.assert_factors(numbers, flags, case)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_the_norm_of_a_window_is_that_of_total_norm(kernels, bad, dtype):
    """Rounded to float32 unless a main gradient is float64."""
    main_grads = [oracle.random([9000], torch.float32), oracle.random([33], dtype), torch.zeros(0)]
    if bad is not None:
        main_grads[1][7] = bad
    norm = kernels.total_norm(main_grads).item()
    case = window_cases.Case(norm, scale=3.0, max_norm=0.7, checks_norm=False, overflow=bad)
    numbers, flags = window_cases.unwritten()
    options = window_cases.operands(case, True) | {"overflow": None}
    kernels.window_factors(numbers, flags, main_grads, None, **options)
    window_cases.assert_factors(numbers, flags, case)
