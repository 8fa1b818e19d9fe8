"""Lists of tensors by the kernels of csrc/cuda: against float64 truth, exact data, the reference.

Each call runs with several grids and orders of the threads, which must leave the same bits: see
host_cuda.ways. Lists are of all dtypes at once.
"""

import itertools
import math

import pytest
import torch
from support import oracle
from support.tensors import FLOAT_DTYPES, assert_bits, assert_equal, shifted

import accumext
from accumext.ops import reference
from host_cuda import ORDERS
from host_cuda.loaded import device
from host_cuda.ways import ONE_RUN, RUNS, in_every_way

accumulate_ = in_every_way(accumext.accumulate_)
clip_ = in_every_way(accumext.unscale_check_clip_accumulate_)
copy_rounded_ = in_every_way(accumext.copy_rounded_)
scale_ = in_every_way(accumext.scale_)
total_norm = in_every_way(accumext.total_norm)

# Around every edge: vectors of 2, 4 and 8 elements, warps of them, a few in flight, chunks of 8192.
EDGE_SIZES = sorted(
    {0, 2 * 8192 + 1}
    | {unit + by for unit in (2, 4, 8, 32, 64, 128, 256, 512, 1024, 2048) for by in (-1, 0, 1)}
    | {8192 + by for by in (-8, -1, 0, 1, 8)}
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
VALUES = (math.inf, -math.inf, math.nan)


def rtol(norm_type):
    return None if norm_type in (1.0, 2.0, math.inf, -math.inf) else POW_RTOL


def neighbours(tensor):
    """The elements before and behind a slice."""
    begin, base = tensor.storage_offset(), tensor._base
    return torch.cat([base[:begin], base[begin + tensor.numel() :]])


# --- accumulate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_dyadic_data_is_exact_at_every_edge(overwrite):
    """Also where main gradients are the gradients; what is overwritten is not read."""
    shapes = [*((n,) for n in EDGE_SIZES), (), (3, 0, 2), (1, 1, 1)]
    cases = list(itertools.product(DTYPE_PAIRS, shapes))
    main_grads = [oracle.dyadic(shape, main) for (main, _), shape in cases]
    grads = [oracle.dyadic(shape, grad) for (_, grad), shape in cases]
    same = [
        shifted(oracle.dyadic([n], d), by) for n in (5, 9000) for d in FLOAT_DTYPES for by in SHIFTS
    ]
    main_grads, grads = main_grads + same, grads + same
    expected = [oracle.accumulated(m, g, 0.5, overwrite) for m, g in zip(main_grads, grads)]
    for tensor in main_grads[: len(cases)] if overwrite else []:
        tensor.fill_(math.nan)
    norm = accumulate_(main_grads, grads, inv_scale=0.5, overwrite=overwrite)
    for i, (got, want) in enumerate(zip(main_grads, expected)):
        assert torch.equal(got, want), cases[i] if i < len(cases) else "in place"
    oracle.assert_norm(norm, expected, rtol=oracle.NORM_RTOL[torch.float32])


SCALES = [0.37, *(torch.tensor(0.37, dtype=dtype) for dtype in FLOAT_DTYPES)]
WAYS = itertools.cycle(itertools.product((False, True), (False, True)))


@pytest.mark.parametrize(("scale", "way"), list(zip(SCALES, WAYS)), ids=str)
def test_random_data_has_the_bits_of_the_reference(scale, way):
    overwrite, clips = way
    cases = list(itertools.product(DTYPE_PAIRS, [(4099,), (33, 9), ()]))
    main_grads = [oracle.random(shape, main) for (main, _), shape in cases]
    grads = [oracle.random(shape, grad) for (_, grad), shape in cases]
    expected = [m.clone() for m in main_grads]
    options = {"inv_scale": scale, "overwrite": overwrite}
    reference_norm = reference.accumulate_(expected, grads, **options)
    if clips:  # to more than the norm
        clip_(main_grads, grads, max_norm=1e9, **options)
    else:
        norm = accumulate_(main_grads, grads, **options)
        truth, tolerance = oracle.norm(expected), oracle.NORM_RTOL[torch.float32]
        oracle.assert_no_worse(norm, reference_norm, truth, tolerance)
    assert_bits(main_grads, expected)


@pytest.mark.parametrize("some", [slice(60), slice(60, 560), slice(560, None)], ids=str)
def test_slices_at_every_alignment(some):
    """In lists whose tables are small, large, and too large for the arguments of a kernel."""
    cases = list(itertools.product((1, 7, 8, 40, 300, 8196), DTYPE_PAIRS, SHIFTS, SHIFTS))
    cases = [(pair, n, *shifts) for n, pair, *shifts in cases[some]]
    main_grads = [shifted(oracle.dyadic([n], pair[0]), by) for pair, n, by, _ in cases]
    grads = [shifted(oracle.dyadic([n], pair[1]), by) for pair, n, _, by in cases]
    expected = [oracle.accumulated(m, g) for m, g in zip(main_grads, grads)]
    found_inf = torch.zeros(())
    norm = accumulate_(main_grads, grads, found_inf=found_inf, runs=RUNS[-2:])
    for case, got, want in zip(cases, main_grads, expected):
        assert torch.equal(got, want), case
        assert neighbours(got).isnan().all(), case
    assert found_inf.item() == 0.0  # no NaN beside a gradient was read
    oracle.assert_norm(norm, expected, rtol=oracle.NORM_RTOL[torch.float32])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_like_torchs(half):
    """Every half, what lies in the middle of two, and the floats beside those."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half).float()
    ordered = halves[halves.isfinite()].sort().values
    middles = (ordered[1:] + ordered[:-1]) / 2
    beside = [middles.nextafter(torch.tensor(side)) for side in (math.inf, -math.inf)]
    beyond = torch.tensor([65519.0, 65520.0, -65520.0, 3.4e38, 1e-45])
    grad = torch.cat([halves, middles, *beside, beyond])
    main_grad, back = torch.empty_like(grad, dtype=half), torch.empty_like(grad)
    accumulate_([main_grad], [grad], overwrite=True)
    accumulate_([back], [main_grad], overwrite=True)
    assert_bits([main_grad, back], [grad.to(half), grad.to(half).float()])


def test_one_element_that_is_not_finite(grad_dtype):
    """Sets found_inf wherever it is, and is added to its neighbours' bits alone or to none."""
    for where, value in zip((0, 1, 8192, 8999), itertools.cycle(VALUES)):
        grad, found_inf = oracle.dyadic([9000], grad_dtype), torch.zeros(())
        grad[where] = value
        grads, options = [torch.ones(3), grad], {"found_inf": found_inf, "runs": ONE_RUN}
        added, kept = ([torch.zeros(3), torch.full([9000], -0.0)] for _ in range(2))
        kept[0][1] = math.nan
        before = [m.view(torch.int32).clone() for m in kept]
        norms = [accumulate_(added, grads, **options)]
        assert found_inf.item() == 1.0
        found_inf.zero_()
        norms.append(clip_(kept, grads, max_norm=1.0, if_finite=True, **options))
        assert found_inf.item() == 1.0
        assert not torch.stack(norms).isfinite().any()
        assert_bits(added, [torch.ones(3), grad.float()])
        assert_equal([m.view(torch.int32) for m in kept], before)


# --- the grid -------------------------------------------------------------------------------------


def test_the_bits_do_not_depend_on_the_grid_or_the_order():
    """Blocks that do not divide the chunks, as many and more than there are chunks."""
    runs = tuple((order, device(n)) for order in ORDERS for n in (1, 2, 3, 20))
    grads = [oracle.random([n], torch.float32) for n in (90000, 4096, 7, 4097)]
    grads += [oracle.random([70, 131], torch.bfloat16).t(), oracle.random([300], torch.float64)]
    main_grads = [oracle.random(g.shape, torch.float32) for g in grads]
    for norm_type in (2.0, 3.0, -math.inf):
        total_norm(grads, norm_type=norm_type, runs=runs)
    accumulate_(main_grads, grads, inv_scale=0.37, runs=runs)
    clip_(main_grads, grads, max_norm=1.0, runs=runs)
    scale_(grads, 0.37, runs=runs)


# --- clip -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm_type", "max_norm"),
    [(1.0, 0.5), (2.0, 0.0), (2.0, 0.5), (2.0, math.inf), (3.0, 0.5), (math.inf, 0.5)],
)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_a_clipped_micro_batch_is_the_references(norm_type, max_norm, wide):
    pairs = [pair for pair in DTYPE_PAIRS if wide or pair[1] != torch.float64]
    cases = list(itertools.product([(4100,), (13, 7), ()], pairs))
    main_grads = [oracle.random(shape, main) for shape, (main, _) in cases]
    grads = [oracle.random(shape, grad) for shape, (_, grad) in cases]
    expected = [m.clone() for m in main_grads]
    options = {"inv_scale": 0.25, "norm_type": norm_type}
    reference.unscale_check_clip_accumulate_(expected, grads, max_norm=max_norm, **options)
    norm = clip_(main_grads, grads, max_norm=max_norm, **options)
    for got, want in zip(main_grads, expected):
        tolerance = CLIP_RTOL[got.dtype]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    tolerance = rtol(norm_type) or oracle.NORM_RTOL[torch.float32]
    oracle.assert_norm(norm, grads, rtol=tolerance, **options)


# --- norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_p_at_every_edge(norm_type, dtype):
    grads = [oracle.random([n], dtype) + 0.1 for n in EDGE_SIZES]
    norm = total_norm(grads, norm_type=norm_type, runs=RUNS[-2:])
    oracle.assert_norm(norm, grads, norm_type=norm_type, rtol=rtol(norm_type))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_norm_of_mixed_dtypes_strides_and_alignments(norm_type):
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
    norm = total_norm(grads, **options)
    tolerance = rtol(norm_type) or oracle.NORM_RTOL[torch.float32]
    oracle.assert_norm(norm, grads, rtol=tolerance, **options)


def test_nothing_has_a_norm_of_zero():
    nothing = [torch.empty(2, 0), torch.empty(0)]
    for norm_type in NORM_TYPES:
        options = {"norm_type": norm_type, "runs": ONE_RUN}
        assert total_norm(nothing, **options).item() == 0.0
        grads = [torch.empty(0), torch.tensor([2.0]), torch.empty(0)]
        assert total_norm(grads, **options).item() == pytest.approx(2.0)
    for grads in ([], nothing):
        found = clip_(grads, grads, max_norm=1.0, runs=ONE_RUN)
        assert found.item() == 0.0
        scale_(grads, 2.0, runs=ONE_RUN)


def test_more_partials_than_the_last_block_takes_at_once():
    for count in (300, 1000, 8200):  # at once, eight of each of 1024 threads
        grads = list(torch.arange(count, dtype=torch.float64).sqrt().split(1))
        norm = total_norm(grads, runs=ONE_RUN)
        assert norm.item() == pytest.approx(math.sqrt(count * (count - 1) // 2), rel=1e-12)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_what_is_not_finite_is_found_and_nan_is_kept(norm_type):
    for where, value in zip((0, 8192, 8999), VALUES):
        grad, found_inf = torch.ones(9000), torch.zeros(())
        grad[where] = value
        grads = [torch.ones(5), grad, torch.ones(5)]
        options = {"norm_type": norm_type, "found_inf": found_inf, "runs": ONE_RUN}
        norm = total_norm(grads, **options)
        assert found_inf.item() == 1.0
        assert norm.isnan() == math.isnan(value)


# --- scale ----------------------------------------------------------------------------------------


def test_scale_has_the_bits_of_the_reference():
    grads, slices = [], []
    for dtype in FLOAT_DTYPES:
        slices += [shifted(oracle.random([n], dtype), by) for n in (5, 40, 4100) for by in SHIFTS]
        grads += [oracle.random([n], dtype) for n in EDGE_SIZES]
        grads += [oracle.random([7, 9], dtype).t(), oracle.random([40], dtype)[::2]]
    grads += slices
    expected = [g.clone() for g in grads]
    reference.scale_(expected, 0.37)
    scale_(grads, 0.37)
    assert_bits(grads, expected)
    assert all(neighbours(grad).isnan().all() for grad in slices)


@pytest.mark.parametrize("factor", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
def test_a_factor_of_one_changes_no_bit(factor):
    bits = torch.arange(0x7F7F, 0x7F90, dtype=torch.int16)  # with signalling NaN: no product is
    grad = bits.clone().view(torch.bfloat16)
    scale_([grad], factor)
    assert torch.equal(grad.view(torch.int16), bits)


# --- copy_rounded ---------------------------------------------------------------------------------

SEEDS = pytest.mark.parametrize(
    "seed", [None, torch.tensor(7), torch.tensor(-(5 << 40))], ids=["nearest", "seed", "key"]
)


@SEEDS
def test_rounded_copies_have_the_bits_of_the_reference(seed):
    """At every edge and alignment, with the numbers of empty tensors counted; of every magnitude;
    of any strides."""
    targets, sources = [], []
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65519.0, 3.4e38, 1e-45])
    for target, source in DTYPE_PAIRS:
        exponents = torch.empty(3000, dtype=torch.float64).uniform_(-160, 130)
        wild = torch.cat([torch.randn(3000).double() * exponents.exp2(), special.double()])
        sources += [oracle.random([n], source) for n in EDGE_SIZES]
        sources += [wild.to(source), oracle.random((7, 9), source).t()]
        targets += [s.new_full(s.shape, math.nan, dtype=target) for s in sources[len(targets) :]]
        for n, by, other in itertools.product((5, 40, 4100), SHIFTS, SHIFTS):
            sources.append(shifted(oracle.random([n], source), other))
            targets.append(shifted(torch.zeros(n, dtype=target), by))
    sources += [
        oracle.random((70, 131), torch.float32).t(),
        oracle.random((5, 3, 7, 34), torch.float32).contiguous(memory_format=torch.channels_last),
        oracle.random((40, 60), torch.float64)[1:30, ::3],
    ]
    targets += [torch.zeros(s.shape, dtype=torch.bfloat16) for s in sources[-3:-1]]
    targets[-1] = targets[-1].contiguous(memory_format=torch.channels_last)
    targets.append(torch.zeros(20, 29, dtype=torch.float16).t())
    expected = [t.clone() for t in targets]
    for some in (slice(40), slice(40, 400), slice(400, None)):  # tables of every kind
        reference.copy_rounded_(expected[some], sources[some], seed=seed)
        lists = targets[some], sources[some]
        copy_rounded_(*lists, seed=seed, found_inf=torch.zeros(()), runs=RUNS[-2:])
    assert_bits(targets, expected)
    slices = [target for target in targets if target._base is not None and target.dim() == 1]
    assert all(neighbours(target).isnan().all() for target in slices)


@SEEDS
@pytest.mark.parametrize("value", [1.0, math.nan, -0.0])
def test_rounded_copies_are_made_unless_found_inf_is_set(value, seed):
    bits = torch.arange(0x7F7F, 0x7F90, dtype=torch.int16)  # with signalling NaN
    target, options = bits.clone().view(torch.bfloat16), {"seed": seed, "runs": ONE_RUN}
    copy_rounded_([target], [torch.ones(17)], found_inf=torch.tensor(value), **options)
    assert torch.equal(target.view(torch.int16), bits) == (value != 0.0)
    copy_rounded_([target], [bits.view(torch.bfloat16)], **options)
    assert torch.equal(target.view(torch.int16), bits)
    copy_rounded_([], [], **options)
