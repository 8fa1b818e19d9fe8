"""copy_rounded_ against Tensor.to, the neighbours of every value, and Philox in Python's ints."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from support import oracle
from support.device import DeviceReads
from support.tensors import FLOAT_DTYPES, HALF_DTYPES, assert_bits

import accumext
from accumext import reference

# Around every edge, blocks of 128 random elements among them.
EDGE_SIZES = sorted({*oracle.EDGE_SIZES, *(7, 8, 9, 64, 127, 128, 129, 255, 257)})
PAIRS = list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES))
NARROWING = [(to, of) for to, of in PAIRS if to.itemsize < of.itemsize]
# Of a frequency, in standard deviations: of some hundred frequencies, one in ten thousand runs has
# a larger one. Seeds are fixed, so that it is always the same run.
SIGMAS = 5.0
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

by_pair = pytest.mark.parametrize(("target_dtype", "source_dtype"), NARROWING, ids=str)
half = pytest.mark.parametrize("half", HALF_DTYPES, ids=str)


def bits(tensor):
    return tensor.contiguous().view(BITS[tensor.element_size()])


def rounded(source, dtype, seed=None):
    target = torch.full(source.shape, math.nan, dtype=dtype)
    accumext.copy_rounded_([target], [source], seed=None if seed is None else torch.tensor(seed))
    return target


def finite_values(half):
    """All finite numbers of a half-precision dtype in float64, ascending; 0 once."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(half).double()
    return values[values.isfinite()].unique()


def neighbours(source, half):
    """The largest number of the dtype that is no more than each element, and the next one."""
    values = finite_values(half)
    above = torch.searchsorted(values, source.double(), right=True).clamp(1, len(values) - 1)
    return values[above - 1], values[above]


def everywhere(count, dtype, of=torch.float16):
    """Signed values in all magnitudes that `of` has, and beyond both ends."""
    info = torch.finfo(of)
    low, high = math.log2(info.smallest_normal) - 30, math.log2(info.max) + 2
    exponents = torch.empty(count, dtype=torch.float64).uniform_(low, high)
    return torch.randn(count).sign().double().mul(exponents.exp2()).to(dtype)


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -2.5])


# --- to nearest -----------------------------------------------------------------------------------


@half
def test_every_half_and_what_lies_between_is_rounded_like_torchs(half):
    values = finite_values(half)
    between = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, between, 2 * values[-1:] - values[-2], between[-1:] * 1.01])
    exact = points.float()
    inf = torch.tensor(math.inf)
    source = torch.cat([exact, exact.nextafter(inf), exact.nextafter(-inf), SPECIAL])
    target = rounded(source, half)
    assert_bits([target], [source.to(half)])
    # The definition: the nearer neighbour, and of two as near the one whose last bit is 0.
    inside = source.double().abs() <= values[-1]
    lower, upper = neighbours(source[inside], half)
    down, up = source[inside].double() - lower, upper - source[inside].double()
    even = bits(lower.to(half)) % 2 == 0
    nearest = torch.where((down < up) | ((down == up) & even), lower, upper)
    assert torch.equal(target[inside].double(), nearest)


def test_every_pair_of_dtypes_has_the_bits_of_copy():
    sources = [everywhere(n, of) for _, of in PAIRS for n in (*EDGE_SIZES[:20], 70001)]
    dtypes = [to for to, _ in PAIRS for _ in range(21)]
    targets = [torch.full(s.shape, math.nan, dtype=d) for s, d in zip(sources, dtypes, strict=True)]
    assert accumext.copy_rounded_(targets, sources) is None
    assert_bits(targets, [s.to(d) for s, d in zip(sources, dtypes, strict=True)])


def test_the_same_dtype_is_copied_bit_by_bit(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)  # signalling NaN among them
    source = torch.cat([every] * 4).view(dtype)
    assert torch.equal(bits(rounded(source, dtype)), bits(source))
    assert torch.equal(bits(rounded(source, dtype, seed=1)), bits(source))


def laid_out_like(tensor, dtype):
    """NaN with the strides and the gaps of a tensor, which `to` would not keep."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.full((elements,), math.nan, dtype=dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def layouts(make):
    """Pairs of tensors of one shape whose elements lie in every order, with gaps or without."""
    padded = make((5, 3, 9, 70))[:, 1:, ::2, 1:]
    yield make((40, 30)).t(), make((30, 40))
    yield make((30, 40)), make((40, 30)).t()
    yield make((5, 3, 7, 34)).contiguous(memory_format=torch.channels_last), make((5, 3, 7, 34))
    yield padded, padded.clone(memory_format=torch.contiguous_format)
    yield make((3, 200))[:, 5:190], make((3, 300))[:, 7:192]
    yield make((3, 1100))[:, 5:1006], make((3, 1001))  # runs that begin within a block of bits
    yield make((4, 5, 6)).permute(2, 0, 1), make((4, 5, 6)).permute(2, 0, 1)
    yield make(()), make(())
    yield make((3, 0)), make((3, 0))
    yield make((300,))[::3], make((100,))


@pytest.mark.parametrize("seed", [None, 7])
def test_strides_make_no_difference(seed, dtype):
    """Elements are numbered in row-major order wherever they lie."""
    for target_dtype in FLOAT_DTYPES:
        pairs = list(layouts(lambda shape: oracle.random(shape, dtype)))
        sources = [source for _, source in pairs]
        targets = [laid_out_like(tensor, target_dtype) for tensor, _ in pairs]
        expected = [s.to(target_dtype).contiguous() for s in sources]
        options = {} if seed is None else {"seed": torch.tensor(seed)}
        accumext.copy_rounded_(expected, [s.contiguous() for s in sources], **options)
        accumext.copy_rounded_(targets, sources, **options)
        assert_bits(targets, expected)


def test_gaps_are_not_written():
    memory = torch.full((6, 40), 9.0, dtype=torch.bfloat16)
    accumext.copy_rounded_([memory[1:5, ::2]], [torch.zeros(4, 20)], seed=torch.tensor(1))
    assert memory.sum().item() == 9.0 * (240 - 80)


def test_large_targets_at_any_alignment():
    size = 4_200_000  # large enough to be written past the caches, where aligned
    source = torch.randn(size + 3)
    for offset, half, seed in itertools.product((0, 1), HALF_DTYPES, (None, 3)):
        memory = torch.full((size + 16,), 7.0, dtype=half)
        accumext.copy_rounded_(
            [memory[offset : offset + size]],
            [source[offset : offset + size]],
            seed=None if seed is None else torch.tensor(seed),
        )
        expected = rounded(source[offset : offset + size], half, seed)
        assert torch.equal(memory[offset : offset + size], expected)
        assert (memory[offset + size :] == 7.0).all()
        if seed is None:
            assert torch.equal(expected, source[offset : offset + size].to(half))


# --- stochastically -------------------------------------------------------------------------------


@by_pair
def test_only_the_two_neighbours_appear(target_dtype, source_dtype):
    if target_dtype == torch.float32:
        source = everywhere(20_000, source_dtype, of=torch.float32)
        nearest = source.float()
        inf = torch.tensor(math.inf)
        lower = torch.where(nearest.double() > source, nearest.nextafter(-inf), nearest).double()
        upper = torch.where(nearest.double() < source, nearest.nextafter(inf), nearest).double()
    else:
        source = everywhere(20_000, source_dtype, of=target_dtype)
        lower, upper = neighbours(source, target_dtype)
    inside = source.double().abs() <= torch.finfo(target_dtype).max
    target = rounded(source, target_dtype, seed=11)
    got, lower, upper = target[inside].double(), lower[inside], upper[inside]
    lower = torch.where(upper == source[inside], upper, lower)
    upper = torch.where(lower == source[inside], lower, upper)
    assert ((got == lower) | (got == upper)).all()
    different = lower != upper
    assert (got == lower)[different].any()
    assert (got == upper)[different].any()
    assert torch.equal(target.signbit(), source.signbit())
    # Beyond the largest finite number to nearest.
    assert_bits([target[~inside]], [source[~inside].to(target_dtype)])


@by_pair
def test_what_the_target_has_stays(target_dtype, source_dtype):
    exact = everywhere(5000, target_dtype, of=target_dtype)
    exact = torch.cat([exact, SPECIAL.to(target_dtype), exact.new_tensor([0.0, -0.0])])
    for seed in range(20):
        assert_bits([rounded(exact.to(source_dtype), target_dtype, seed)], [exact])


def fractions(half):
    """Some numbers and how near they are to the upper neighbour, normal and subnormal ones."""
    distance = 2.0**-24 if half == torch.float16 else 2.0**-133  # of subnormal numbers
    eps = torch.finfo(half).eps
    for part in (0.5, 0.25, 0.1, 0.9, 1 / 128):
        yield 1.0 + part * eps, part
        yield -3.0 - part * 2 * eps, part  # away from zero
        yield (37 + part) * distance, part
        yield part * distance, part
        yield torch.finfo(half).max * (1.0 - (1 - part) * eps / (2 - eps)), part


@half
def test_frequencies_are_the_distances(half):
    count = 40_000
    for number, (value, _) in enumerate(fractions(half)):
        source = torch.full((count,), value, dtype=torch.float32)
        lower, upper = neighbours(source[:1], half)
        exact = ((source[:1].double() - lower) / (upper - lower)).item()
        ups = (rounded(source, half, seed=number).double() == upper).sum().item()
        deviation = math.sqrt(count * exact * (1 - exact))
        assert abs(ups - count * exact) <= SIGMAS * deviation, (value, ups / count, exact)


@half
def test_the_mean_over_seeds_is_the_value(half):
    source, seeds = torch.randn(4000), 400
    lower, upper = neighbours(source, half)
    mean = sum(rounded(source, half, seed).double() for seed in range(seeds)) / seeds
    up = (source.double() - lower) / (upper - lower)
    deviation = (up * (1 - up) / seeds).sqrt() * (upper - lower)
    errors = (mean - source.double()) / deviation.clamp(min=1e-30)
    assert errors.abs().max() <= SIGMAS + 1  # the most of 4000
    assert abs(errors.mean().item()) <= SIGMAS / math.sqrt(len(source))
    assert errors.std().item() == pytest.approx(1.0, abs=0.1)  # neither more nor less random


KNOWN = [  # counter, key and result of the authors' test vectors
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]  # fmt: skip


def philox(counter, key):
    (a, b, c, d), (k, m) = counter, key
    for _ in range(7):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_in_python_is_that_of_its_authors(counter, key, result):
    assert philox(counter, key) == result


def random_bits(seed, tensor, element):
    """The 32 bits of an element by their definition."""
    result = 0
    for stream in range(2):
        counter = (element // 8 % 2**32, element // 8 >> 32, tensor, stream)
        words = philox(counter, (seed % 2**32, seed >> 32 & 0xFFFFFFFF))
        half = words[element % 8 // 2] >> element % 2 * 16 & 0xFFFF
        result = result << 16 | half
    return result


@pytest.mark.parametrize("seed", [0, 0x0123456789ABCDEF, -1])
@by_pair
def test_the_bits_are_those_of_philox(target_dtype, source_dtype, seed):
    of = target_dtype if target_dtype != torch.float32 else torch.float16
    sources = [oracle.random([n], source_dtype) for n in (3, 0, 1, 200)]
    sources.append(everywhere(300, source_dtype, of=of))
    targets = [torch.empty(s.shape, dtype=target_dtype) for s in sources]
    accumext.copy_rounded_(targets, sources, seed=torch.tensor(seed))
    largest = torch.finfo(target_dtype).max
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        towards = source.abs().to(target_dtype)  # a neighbour, of which the other is next to it
        steps = bits(towards)
        beyond = towards.double() > source.double().abs()
        inner = (steps - beyond.to(steps.dtype)).view(target_dtype)
        outer = (steps + (~beyond).to(steps.dtype)).view(target_dtype)
        for e, value in enumerate(source.abs().tolist()):
            if value > largest:
                continue
            low, high = Fraction(inner[e].item()), outer[e].item()
            width = Fraction(high) - low if math.isfinite(high) else 1  # of an exact value
            part = (Fraction(value) - low) / width
            up = math.floor(part * 2**31) + (random_bits(seed, number, e) >> 1) >= 2**31
            assert target[e].abs() == (high if up else inner[e]), (number, e)


@by_pair
def test_the_low_bits_decide_where_the_high_ones_leave_it_open(target_dtype, source_dtype):
    """Of values whose nearness, in 17 digits, and the high bits of their elements add up so."""
    if (target_dtype, source_dtype) == (torch.bfloat16, torch.float32):
        pytest.skip("16 digits are dropped, of which the high bits decide")
    seed, count = 5, 300
    words = [random_bits(seed, 0, element) for element in range(count)]
    nearness = [(2**17 - 1 - 2 * (word >> 16)) / 2**17 for word in words]
    # In units of the least subnormal number: of float32 as a source, 24 digits are left.
    unit = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}[target_dtype]
    source = torch.tensor(nearness, dtype=torch.float64).add(3).ldexp(torch.tensor(unit).double())
    target = rounded(source.to(source_dtype), target_dtype, seed).double()
    up = torch.tensor([word & 0xFFFF >= 0x8000 for word in words])
    lower = 3 * 2.0**unit
    assert torch.equal(target, torch.where(up, lower * 4 / 3, lower))
    assert 100 < up.sum() < 200


@by_pair
def test_kernels_have_the_bits_of_the_reference(target_dtype, source_dtype):
    of = target_dtype if target_dtype != torch.float32 else torch.bfloat16
    sources = [everywhere(n, source_dtype, of=of) for n in EDGE_SIZES]
    sources += [torch.cat([oracle.random([1000], source_dtype), SPECIAL.to(source_dtype)])]
    sources += [oracle.random([33, 130], source_dtype).t(), oracle.random([], source_dtype)]
    targets, expected = (
        [torch.full(s.shape, math.nan, dtype=target_dtype) for s in sources] for _ in range(2)
    )
    reference.copy_rounded_(expected, sources, seed=torch.tensor(5 << 40 | 3))
    torch.ops.accumext.copy_rounded_(targets, sources, seed=torch.tensor(5 << 40 | 3))
    assert_bits(targets, expected)


@half
def test_neither_threads_nor_other_tensors_change_the_bits(half):
    sources = [torch.randn(n) for n in (300_001, 5, 70_000)]
    threads = torch.get_num_threads()
    results = []
    for count, first in ((1, sources[0]), (2, sources[0]), (2, torch.randn(3))):
        torch.set_num_threads(count)
        targets = [torch.empty(s.shape, dtype=half) for s in (first, *sources[1:])]
        accumext.copy_rounded_(targets, [first, *sources[1:]], seed=torch.tensor(9))
        results.append(targets)
    torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    for i in (1, 2):
        assert torch.equal(results[0][i], results[1][i])
        assert torch.equal(results[0][i], results[2][i])


@half
def test_seeds_and_tensors_and_elements_differ(half):
    source = torch.full((4096,), 1.0 + torch.finfo(half).eps / 2)
    targets = [torch.empty(4096, dtype=half) for _ in range(2)]
    accumext.copy_rounded_(targets, [source, source], seed=torch.tensor(1))
    runs = [*targets, rounded(source, half, 2), rounded(source, half, 1 + 2**32)]
    runs += [targets[0].roll(by) for by in (1, 2, 8, 128)]
    assert torch.equal(rounded(source, half, 1), targets[0])
    allowed = SIGMAS * math.sqrt(4096) / 2
    for a, b in itertools.combinations(runs, 2):
        assert abs((a == b).sum().item() - 2048) <= allowed


# --- the arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -1.0, 1e-45])
def test_found_inf_leaves_every_bit(value, seed):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    targets = [every.clone().view(half) for half in HALF_DTYPES]
    targets += [every.clone().view(torch.float32), every.clone().view(torch.float64)]
    sources = [torch.randn(t.shape, dtype=torch.float64) for t in targets]
    found_inf = torch.tensor(value)
    seed = None if seed is None else torch.tensor(seed)
    with DeviceReads() as reads:
        accumext.copy_rounded_(targets, sources, seed=seed, found_inf=found_inf)
    assert reads.count == 0
    for target in targets:
        assert torch.equal(target.view(torch.int16), every)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_found_inf_of_zero_is_none(zero):
    sources = [torch.randn(1000), torch.randn(7)]
    targets = [torch.empty(s.shape, dtype=torch.bfloat16) for s in sources]
    accumext.copy_rounded_(targets, sources, found_inf=torch.tensor(zero))
    assert all(torch.equal(t, s.bfloat16()) for t, s in zip(targets, sources, strict=True))


def test_a_target_may_be_its_source():
    tensor = torch.randn(100)
    before = tensor.clone()
    accumext.copy_rounded_([tensor], [tensor], seed=torch.tensor(1))
    assert torch.equal(tensor, before)


def test_negated_views():
    base = torch.zeros(100, dtype=torch.bfloat16)
    source = torch.randn(100)
    accumext.copy_rounded_([torch._neg_view(base)], [torch._neg_view(source)])
    assert torch.equal(base, source.bfloat16())
    expected = rounded(source, torch.bfloat16, 3)
    accumext.copy_rounded_([torch._neg_view(base)], [source], seed=torch.tensor(3))
    assert torch.equal(base, -expected)
    accumext.copy_rounded_([torch._neg_view(base)], [source * 2], found_inf=torch.tensor(1.0))
    assert torch.equal(base, -expected)


def test_no_tensors():
    accumext.copy_rounded_([], [], seed=torch.tensor(1), found_inf=torch.tensor(0.0))


def test_autograd_is_told_of_the_write():
    weight, target = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * target).sum()
    accumext.copy_rounded_([target], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_are_written():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    master = torch.nn.Parameter(torch.ones(3))
    accumext.copy_rounded_([parameter], [master])
    assert parameter.is_leaf
    assert parameter.tolist() == [1.0, 1.0, 1.0]


A, F = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6)
CONTRACTS = [
    ({"targets": [A], "sources": [F, F]}, ValueError,
     "sources must have one entry per target, 1, got 2"),
    ({"sources": [F[:5]]}, ValueError,
     "sources[0] must have the shape of targets[0], [6], got [5]"),
    ({"sources": [F.int()]}, TypeError,
     "sources[0] must be a dense float16, bfloat16, float32 or float64 tensor, "
     "got an int32 tensor"),
    ({"targets": A}, TypeError, "targets must be a list of tensors, got a bfloat16 tensor"),
    ({"targets": [A[:1].expand(6)]}, ValueError,
     "targets[0] must not overlap itself in memory, got shape [6] with strides [0]. "
     "Give it memory of its own: targets[0].contiguous()"),
    ({"targets": [F[:3], F[2:5]], "sources": [A[:3], A[:3]]}, ValueError,
     "targets[1] must share no memory with targets[0], got some of its elements. "
     "Give it memory of its own: targets[1].clone()"),
    ({"targets": [F[:3]], "sources": [F[1:4]]}, ValueError,
     "sources[0] must be targets[0] or share no memory with it, got some of its elements. "
     "Give it memory of its own: sources[0].clone()"),
    ({"targets": [F[:3], A[:3]], "sources": [A[3:].float(), F[:3]]}, ValueError,
     "sources[1] must share no memory with targets[0], got some of its elements. "
     "Give it memory of its own: sources[1].clone()"),
    ({"seed": 3}, TypeError,
     "seed must be a 0-dim int64 tensor, got int. On the device of the lists: "
     "torch.tensor(0, device=...)"),
    ({"seed": torch.tensor(3, dtype=torch.int32)}, TypeError,
     "seed must be a 0-dim int64 tensor, got an int32 tensor. On the device of the lists: "
     "torch.tensor(0, device=...)"),
    ({"seed": torch.tensor([3])}, ValueError, "seed must be 0-dim, got shape [1]"),
    ({"seed": torch.tensor(3, device="meta")}, ValueError,
     "seed must be on the device of targets[0], cpu, got meta"),
    ({"found_inf": torch.zeros(1)}, ValueError, "found_inf must be 0-dim, got shape [1]"),
    ({"found_inf": True}, TypeError, "found_inf must be a 0-dim float32 tensor, got bool"),
    ({"targets": [F], "sources": [A], "found_inf": F[2]}, ValueError,
     "found_inf must share no memory with targets[0], got some of its elements. "
     "Give it memory of its own: found_inf.clone()"),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "error", "sentence"), CONTRACTS)
def test_broken_contract(broken, error, sentence):
    arguments = {"targets": [A], "sources": [F]} | broken
    with pytest.raises(error) as raised:
        accumext.copy_rounded_(**arguments)
    assert str(raised.value) == f"copy_rounded_: {sentence}"
    assert not A.any()
    assert not F.any()


def test_the_seed_may_not_be_written():
    memory = torch.zeros(4, dtype=torch.float64)
    seed = memory.view(torch.int64)[1]
    with pytest.raises(ValueError, match=r"seed must share no memory with targets\[0\]"):
        accumext.copy_rounded_([memory], [torch.ones(4)], seed=seed)
    assert not memory.any()


def test_inference_tensors_are_written_in_inference_mode_only():
    with torch.inference_mode():
        target = torch.zeros(3)
        accumext.copy_rounded_([target], [torch.ones(3)])
    with pytest.raises(RuntimeError, match=r"copy_rounded_: targets\[0\] must not be an inference"):
        accumext.copy_rounded_([target], [torch.ones(3)])
