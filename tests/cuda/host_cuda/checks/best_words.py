"""The best words of rows, and samples of them, by the kernels of csrc/cuda: against stable sorts,
and exact data. Each call runs with several grids and orders of the threads: see host_cuda.ways."""

import itertools
import math

import pytest
import torch
from support.samples import assert_drawn, kept_shares
from support.tensors import dtype_id
from torch import Tensor

from host_cuda import DESCENDING, ORDERS, SHUFFLED
from host_cuda.loaded import device
from host_cuda.ways import ONE_RUN, Runs, in_every_way, usual

pytestmark = pytest.mark.usefixtures("products_that_choose")

_head_top = in_every_way(torch.ops.accumext.head_top.default)
_head_sample = in_every_way(torch.ops.accumext.head_sample.default)

DTYPES = (torch.float32, torch.float64)
# A chunk has 4096 columns. A search finds at most 64 words.
COLUMN_EDGES = (1, 3, 64, 65, 4095, 4096, 4097, 8197)
SIZES = (1, 2, 63, 64, 65, 200)
TWO_RUNS = usual((DESCENDING, device(1)), (SHUFFLED, device(3)))
LARGEST_UNIFORM = 1 - 2.0**-53
# Sums of some thousand exponentials, each within a few units in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(params=DTYPES, ids=dtype_id)
def dtype(request):
    return request.param


def drawn(rows: int, columns: int, dtype: torch.dtype, levels: int = 10**6) -> Tensor:
    """Logits; few levels make many equal."""
    return (torch.randint(levels, (rows, columns)).double() * 12 / levels - 6).to(dtype)


def best(
    values: Tensor, size: int, *, bias: Tensor | None = None, logit_rows: int = 2,
    runs: Runs = ONE_RUN,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of the head whose logits these are: logits, tokens and statistics."""
    rows = len(values)
    logits = values.new_full((rows, size + 1), math.nan)[:, :size]
    tokens, stats = torch.full((size, rows), -7).t(), values.new_full((2, rows), math.nan)
    unit, weight = torch.eye(rows, dtype=values.dtype), values.t().contiguous()
    _head_top(unit, weight, bias, logit_rows, logits, tokens, stats, runs=runs)
    return logits, tokens, stats


def sample(
    values: Tensor, uniforms: Tensor, top_k: int, top_p: float, temperature: float = 1.0, *,
    bias: Tensor | None = None, runs: Runs = ONE_RUN,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = len(values)
    tokens, stats = torch.full((rows, 2), -7)[:, 1], values.new_full((3, rows), math.nan)
    unit, weight = torch.eye(rows, dtype=values.dtype), values.t().contiguous()
    _head_sample(
        unit, weight, bias, uniforms, temperature, top_k, top_p, 2, tokens, stats, runs=runs
    )
    return tokens, stats


def check_best(values: Tensor, size: int, bias: Tensor | None = None, **options: object) -> None:
    z = values if bias is None else values + bias
    order = z.sort(dim=1, descending=True, stable=True)
    logits, tokens, stats = best(values, size, bias=bias, **options)
    assert torch.equal(tokens, order.indices[:, :size])
    torch.testing.assert_close(logits, order.values[:, :size], rtol=0, atol=0, equal_nan=True)
    check_stats(stats, z)


def check_stats(stats: Tensor, z: Tensor) -> None:
    assert torch.equal(stats[0], z.amax(1))
    total = (z.double() - z.double().amax(1, keepdim=True)).exp().sum(1)
    torch.testing.assert_close(
        stats[1].double(), total, rtol=TOLERANCE[z.dtype], atol=0.0, equal_nan=True
    )


def check_sample(values, uniforms, top_k, top_p, temperature=1.0, bias=None, **options) -> None:
    z = values if bias is None else values + bias
    tokens, stats = sample(values, uniforms, top_k, top_p, temperature, bias=bias, **options)
    shares = kept_shares(z, top_k, top_p, temperature)
    assert_drawn(tokens, shares, uniforms, TOLERANCE[values.dtype])
    check_stats(stats, z)
    assert torch.equal(stats[2], z.gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("levels", [3, 10**6])
def test_the_best_at_every_edge(dtype, levels):
    sizes = itertools.cycle(SIZES)
    for columns, rows in zip(COLUMN_EDGES, itertools.cycle((1, 3))):
        for size in {min(next(sizes), columns) for _ in range(2)}:
            runs = TWO_RUNS if size == 65 else ONE_RUN
            check_best(drawn(rows, columns, dtype, levels), size, runs=runs)


def test_the_best_of_a_large_vocabulary(dtype):
    check_best(drawn(2, 50257, dtype), 50)
    check_best(drawn(1, 50257, dtype), 1, torch.randn(50257, dtype=dtype))


@pytest.mark.parametrize("columns", [100, 8200])
def test_equal_words_and_those_that_are_not_numbers(columns, dtype):
    values = drawn(8, columns, dtype, 2)
    values[1], values[2] = torch.inf, -torch.inf
    values[3, ::2], values[4, ::3], values[4, 1::3] = -torch.inf, -0.0, 0.0
    values[5, ::2], values[6, columns // 2], values[7] = torch.inf, torch.nan, torch.nan
    for size in (1, 80):
        order = values.sort(dim=1, descending=True, stable=True)
        logits, tokens, stats = best(values, size)
        assert torch.equal(tokens, order.indices[:, :size])
        assert torch.equal(logits.nan_to_num(9.0), order.values[:, :size].nan_to_num(9.0))
        assert stats[1].isfinite().tolist() == [i in (0, 3, 4) for i in range(8)]


def test_the_bits_do_not_depend_on_the_grid_or_the_order(dtype):
    runs = tuple(zip(ORDERS, map(device, (1, 2, 30))))
    values, uniforms = drawn(3, 9000, dtype, 50), torch.rand(3, dtype=torch.float64)
    best(values, 70, runs=runs)
    for top_k in (20, 300):
        sample(values, uniforms, top_k, 0.7, 0.8, runs=runs)


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [3, 10**6])
def test_samples_at_every_edge(levels, dtype):
    kept = itertools.cycle(itertools.product((7, 65, 10**6, 64, 300), (0.405, 1.0, 1e-9)))
    uniforms = torch.tensor([0.0, 0.4, LARGEST_UNIFORM], dtype=torch.float64)
    for columns, temperature in zip(COLUMN_EDGES, itertools.cycle((1.0, 1.5))):
        four = list(itertools.islice(kept, 4))
        for top_k, top_p in four[:2] if levels == 3 else four[2:]:
            top_k = min(top_k, columns)
            if top_k == columns > 64 and top_p == 1:
                continue  # another operator's
            bias = torch.randn(columns, dtype=dtype) if top_k == 7 else None
            values = drawn(3, columns, dtype, levels)
            check_sample(values, uniforms, top_k, top_p, temperature, bias)


def test_samples_of_a_large_vocabulary(dtype):
    uniforms = torch.tensor([0.3, 0.9], dtype=torch.float64)
    for top_k, top_p in ((50, 1.0), (50257, 0.9), (1000, 0.5)):
        check_sample(drawn(2, 50257, dtype), uniforms, top_k, top_p)


# At any temperature these logits are the same.
@pytest.mark.parametrize(("dtype", "temperature"), list(zip(DTYPES, (0.5, 1.0))), ids=str)
def test_samples_of_equal_probabilities_are_exact(dtype, temperature):
    """Logits of 0 and -inf: every sum is a whole number, and so are the thresholds."""
    columns, masses = 4200, [1, 2, 16, 64, 128, 2048]
    values = torch.full([len(masses), columns], -math.inf, dtype=dtype)
    allowed = [torch.randperm(columns)[:mass].sort().values for mass in masses]
    for row, some in zip(values, allowed):
        row[some] = 0.0
    for count in (3, 64, 100):
        kept = [min(mass, count) for mass in masses]
        ranks = [(0, n // 2, n - 1)[i % 3] for i, n in enumerate(kept)]
        uniforms = torch.tensor([(r + 0.5) / n for r, n in zip(ranks, kept)], dtype=torch.float64)
        tokens, stats = sample(values, uniforms, count, 1.0, temperature)
        assert tokens.tolist() == [int(a[rank]) for a, rank in zip(allowed, ranks)]
        assert stats[1].tolist() == masses
    for row, (mass, some) in enumerate(zip(masses, allowed)):
        kept = (mass + 1) // 2  # the fewest that reach a little less than this share
        uniforms = torch.tensor([LARGEST_UNIFORM], dtype=torch.float64)
        for top_k in (columns, 64) if mass <= 64 else (columns,):
            top_p = (kept - 0.5) / mass
            tokens, _ = sample(values[row : row + 1], uniforms, top_k, top_p, temperature)
            assert tokens.tolist() == [int(some[kept - 1])]


def test_the_smallest_and_an_infinite_temperature(dtype):
    values = drawn(4, 5000, dtype)
    uniforms = torch.tensor([0.0, 0.3, 0.6, LARGEST_UNIFORM], dtype=torch.float64)
    for top_k, top_p, temperature in ((5, 1.0, 5e-324), (5000, 0.9, 1e-30)):
        tokens, _ = sample(values, uniforms, top_k, top_p, temperature)
        assert torch.equal(tokens, values.argmax(1))
    values[:, 4:] = -math.inf
    for top_k in (4, 70):
        tokens, _ = sample(values, uniforms, top_k, 1.0, math.inf)
        assert tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("top_k", [5, 100, 9000])
def test_masked_words_are_not_drawn(top_k, dtype):
    """-inf in whole chunks, and fewer words that can be than may be kept."""
    values = drawn(4, 9000, dtype)
    values[0, :4200], values[1, 2:] = -math.inf, -math.inf
    values[2, 500:8800], values[3, :8999] = -math.inf, -math.inf
    uniforms = torch.tensor([0.0, LARGEST_UNIFORM, 0.5, LARGEST_UNIFORM], dtype=torch.float64)
    check_sample(values, uniforms, top_k, 0.999, 0.8)


@pytest.mark.parametrize("top_k", [5, 100, 5000])
def test_rows_that_are_no_distributions_take_the_argmax(top_k):
    values = drawn(6, 5000, torch.float32)
    wrong = {0: (4100, math.nan), 2: (0, math.inf), 3: (4999, math.nan)}
    for row, (column, value) in wrong.items():
        values[row, column] = value
    values[5], values[0, 4500] = -math.inf, math.nan
    uniforms = torch.full([6], 0.5, dtype=torch.float64)
    tokens, stats = sample(values, uniforms, top_k, 0.9)
    assert {row: int(tokens[row]) for row in (0, 2, 3, 5)} == {0: 4100, 2: 0, 3: 4999, 5: 0}
    assert stats[1].isnan().tolist() == [row not in (1, 4) for row in range(6)]
    alone, _ = sample(values[[1, 4]], uniforms[:2], top_k, 0.9)
    assert torch.equal(tokens[[1, 4]], alone)
