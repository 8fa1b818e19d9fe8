"""copy_rounded_ against Tensor.to, and against its definition by Philox in Python's ints."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from support import oracle
from support.device import DeviceReads
from support.tensors import FLOAT_DTYPES, HALF_DTYPES, assert_bits

import accumext
from accumext.ops import reference

# Around every edge, blocks of 128 random elements among them.
EDGE_SIZES = sorted({*oracle.EDGE_SIZES, *(7, 8, 9, 64, 127, 128, 129, 255, 257)})
PAIRS = list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES))
NARROWING = [(to, of) for to, of in PAIRS if to.itemsize < of.itemsize]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

by_pair = pytest.mark.parametrize(("target_dtype", "source_dtype"), NARROWING, ids=str)
half = pytest.mark.parametrize("half", HALF_DTYPES, ids=str)
of_kernels = pytest.mark.skipif(accumext.backend() == "reference", reason="the reference itself")


def bits(tensor):
    return tensor.contiguous().view(BITS[tensor.element_size()])


def copy_rounded(targets, sources, seed=None, **options):
    """By a seed on the host."""
    seed = None if seed is None else torch.tensor(seed)
    accumext.copy_rounded_(targets, sources, seed=seed, **options)


def rounded(source, dtype, seed=None):
    target = torch.full(source.shape, math.nan, dtype=dtype)
    copy_rounded([target], [source], seed)
    return target


def finite_values(half):
    """All finite numbers of a half-precision dtype in float64, ascending; 0 once."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(half).double()
    return values[values.isfinite()].unique()


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
    assert_bits([rounded(source, half)], [source.to(half)])


def test_every_pair_of_dtypes_has_the_bits_of_copy():
    sources = [everywhere(n, of) for _, of in PAIRS for n in EDGE_SIZES[:20]]
    dtypes = [to for to, _ in PAIRS for _ in range(20)]
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
        copy_rounded(expected, [s.contiguous() for s in sources], seed)
        copy_rounded(targets, sources, seed)
        assert_bits(targets, expected)


@of_kernels
def test_large_targets_at_any_alignment():
    size = 4_200_000  # large enough to be written past the caches, where aligned
    source = torch.randn(size + 3)
    for offset, half, seed in itertools.product((0, 1), HALF_DTYPES, (None, 3)):
        memory = torch.full((size + 16,), 7.0, dtype=half)
        copy_rounded([memory[offset : offset + size]], [source[offset : offset + size]], seed)
        expected = rounded(source[offset : offset + size], half, seed)
        assert torch.equal(memory[offset : offset + size], expected)
        assert (memory[offset + size :] == 7.0).all()
        if seed is None:
            assert torch.equal(expected, source[offset : offset + size].to(half))


# --- stochastically -------------------------------------------------------------------------------


@by_pair
def test_what_the_target_has_stays(target_dtype, source_dtype):
    exact = everywhere(5000, target_dtype, of=target_dtype)
    exact = torch.cat([exact, SPECIAL.to(target_dtype), exact.new_tensor([0.0, -0.0])])
    for seed in range(4):
        assert_bits([rounded(exact.to(source_dtype), target_dtype, seed)], [exact])


def philox(counter, key):
    (a, b, c, d), (k, m) = counter, key
    for _ in range(7):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


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
    copy_rounded(targets, sources, seed)
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


# From float32 to bfloat16 16 digits are dropped, of which the high bits decide.
@pytest.mark.parametrize(
    ("target_dtype", "source_dtype"), [p for p in NARROWING if p != (torch.bfloat16, torch.float32)]
)
def test_the_low_bits_decide_where_the_high_ones_leave_it_open(target_dtype, source_dtype):
    """Of values whose nearness, in 17 digits, and the high bits of their elements add up so."""
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


@of_kernels
@by_pair
def test_kernels_have_the_bits_of_the_reference_by_any_number_of_threads(
    target_dtype, source_dtype, two_threads
):
    of = target_dtype if target_dtype != torch.float32 else torch.bfloat16
    sources = [everywhere(n, source_dtype, of=of) for n in EDGE_SIZES]
    sources += [torch.cat([oracle.random([1000], source_dtype), SPECIAL.to(source_dtype)])]
    sources += [oracle.random([33, 130], source_dtype).t(), oracle.random([], source_dtype)]
    expected = [torch.full(s.shape, math.nan, dtype=target_dtype) for s in sources]
    reference.copy_rounded_(expected, sources, seed=torch.tensor(5 << 40 | 3))
    for threads in two_threads:
        torch.set_num_threads(threads)
        targets = [torch.full_like(e, math.nan) for e in expected]
        torch.ops.accumext.copy_rounded_(targets, sources, seed=torch.tensor(5 << 40 | 3))
        assert_bits(targets, expected)


# --- the arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, math.nan, math.inf, -1.0, 1e-45])
def test_found_inf_leaves_every_bit_unless_it_is_zero(value, seed):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    targets = [every.clone().view(half) for half in HALF_DTYPES]
    targets += [every.clone().view(torch.float32), every.clone().view(torch.float64)]
    sources = [torch.zeros(t.shape, dtype=torch.float64) for t in targets]
    found_inf = torch.tensor(value)
    with DeviceReads() as reads:
        copy_rounded(targets, sources, seed, found_inf=found_inf)
    assert reads.count == 0
    for target in targets:
        assert torch.equal(target.view(torch.int16), every if value else torch.zeros_like(every))


def test_a_target_may_be_its_source():
    tensor = torch.randn(100)
    before = tensor.clone()
    accumext.copy_rounded_([tensor], [tensor], seed=torch.tensor(1))
    assert torch.equal(tensor, before)
