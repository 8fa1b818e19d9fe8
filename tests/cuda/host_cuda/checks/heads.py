"""A decoder's heads by the kernels of csrc/cuda: against float64 truth, and exact data.

Each call runs with several grids and orders of the threads, which must leave the same bits: see
host_cuda.ways.
"""

import functools
import itertools
import math

import pytest
import torch
from support.decode_cases import (
    COLUMNS,
    LAYOUTS,
    ROWS,
    Softmax,
    assert_samples,
    assert_statistics,
    first_argmax,
)
from support.objective_cases import check, problem
from support.tensors import FLOAT_DTYPES, dtype_id

from host_cuda import DESCENDING, ORDERS, SHUFFLED
from host_cuda.loaded import device
from host_cuda.ways import ONE_RUN, Runs, in_every_way, usual

pytestmark = pytest.mark.usefixtures("products_that_choose")

head_objective = in_every_way(torch.ops.accumext.head_objective.default)
_head_forward = in_every_way(torch.ops.accumext.head_forward.default)

ACCUMULATED = (torch.float32, torch.float64)
# A tile has 4096 elements: chunks of 4096 columns of one row, of 2048 of two rows, ... down to 512
# of eight. Threads take 2 or 4 columns at once where rows are aligned.
COLUMN_EDGES = (1, 3, 5, 511, 512, 513, 1023, 1025, 2049, 4095, 4096, 4097, 8197)
TWO_RUNS = usual((DESCENDING, device(1)), (SHUFFLED, device(3)))


@pytest.fixture(params=ACCUMULATED, ids=dtype_id)
def dtype(request):
    return request.param


def drawn(count, columns, dtype=torch.float32):
    return (3 * torch.randn(count, columns)).to(dtype), torch.randint(columns, [count])


def zeros(values, layout, dtype=None):
    return LAYOUTS[layout](torch.zeros_like(values, dtype=dtype))


# --- softmax_stats --------------------------------------------------------------------------------


def softmax_stats(
    values, targets, uniforms, temperature, exps, tokens, stats, *, bias=None, logit_rows, runs
) -> None:  # fmt: skip
    """The head whose logits these are."""
    _head_forward(
        torch.eye(len(values), dtype=values.dtype), values.t().contiguous(), bias, targets,
        uniforms, temperature, exps, logit_rows, tokens, stats, runs=runs,
    )  # fmt: skip


def softmax(layout, values, targets, *, runs: Runs = ONE_RUN, **options) -> Softmax:
    """The launcher puts logits of several rows side by side, those of one along the row."""
    rows = 1 if layout == ROWS else len(values)
    return Softmax(softmax_stats, values, targets, runs=runs, logit_rows=rows, **options)


def check_softmax(layout, values, targets, *, bias=None, **options):
    """Statistics are those of the definition, and tokens the first argmax or samples."""
    found = softmax(layout, values, targets, bias=bias, **options)
    z = values if bias is None else values + bias
    assert_statistics(found, z, targets)
    if (uniforms := options.get("uniforms")) is None:
        assert torch.equal(found.tokens, first_argmax(z))
    else:
        assert_samples(found.tokens, z, uniforms, options.get("temperature", 1.0))


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_statistics_at_every_edge(layout, dtype):
    for columns, count in zip(COLUMN_EDGES, itertools.cycle((2, 5, 9))):
        values, targets = drawn(3 if layout != COLUMNS else count, columns, dtype)
        targets[-1] = columns - 1
        runs = ONE_RUN if count > 3 else TWO_RUNS
        check_softmax(layout, values, targets, exps=zeros(values, layout), runs=runs)


@pytest.mark.parametrize("exps_layout", LAYOUTS)
def test_any_strides_and_dtypes(exps_layout):
    dtypes = itertools.cycle(itertools.product(FLOAT_DTYPES, ACCUMULATED))
    shapes = itertools.cycle(((7, 520), (1, 520), (3, 4100), (3, 1030)))
    for layout, shape, (exps_dtype, dtype) in zip(LAYOUTS, shapes, dtypes):
        values, targets = drawn(*shape, dtype)
        check_softmax(layout, values, targets, exps=zeros(values, exps_layout, exps_dtype))


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_sum_of_a_large_vocabulary(layout):
    check_softmax(layout, *drawn(2, 50257))


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_bits_do_not_depend_on_the_grid_or_the_order(layout):
    runs = tuple(zip(ORDERS, map(device, (1, 2, 3))))
    count = 2 if layout == ROWS else 9
    values, targets = drawn(count, 8200 if layout == ROWS else 2100)
    for uniforms in (None, torch.rand(count, dtype=torch.float64)):
        exps = zeros(values, layout)
        softmax(layout, values, targets, uniforms=uniforms, temperature=0.7, exps=exps, runs=runs)


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_first_of_equal_logits_wins(layout):
    """Two peaks each: neighbours, of one thread, of one warp, of two warps, of two chunks."""
    columns = 8200
    pairs = [(0, 1), (0, 3), (5, 261), (31, 32), (40, 2000), (511, 512), (512, 8199), (4095, 4096)]
    pairs += [(1, 4097), (8191, 8192), (8198, 8199), (0, 8199), (3, 4), (1023, 1024), (255, 256)]
    values = torch.full([len(pairs), columns], -1.0)
    for row, pair in enumerate(pairs):
        values[row, list(pair)] = 2.0
    targets = torch.tensor([second for _, second in pairs])
    found = softmax(layout, values, targets)
    assert found.tokens.tolist() == [first for first, _ in pairs]
    assert_statistics(found, values, targets)
    found = softmax(layout, torch.zeros(3, columns), targets[:3])
    assert found.tokens.tolist() == [0, 0, 0]
    assert found.stats[1].tolist() == [columns] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_samples(layout, temperature):
    shapes = ((8, 5), (3, 700), (9, 2100), (2, 9001))
    for (count, columns), dtype in zip(shapes, itertools.cycle(ACCUMULATED)):
        values, targets = drawn(count, columns, dtype)
        uniforms = torch.rand(count, dtype=torch.float64)
        uniforms[0], uniforms[-1] = 0.0, 1.0 - 2.0**-53
        check_softmax(layout, values, targets, uniforms=uniforms, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_samples_of_equal_probabilities_are_exact(layout, temperature):
    """Logits of 0 and -inf: every sum is a whole number, and so are the thresholds."""
    columns, masses = 4200, [2**n for n in range(12)]
    rows = [(mass, (0, mass // 2, mass - 1)[i % 3]) for i, mass in enumerate(masses)]
    values = torch.full([len(rows), columns], -math.inf)
    allowed = [torch.randperm(columns)[:mass].sort().values for mass, _ in rows]
    for row, some in zip(values, allowed):
        row[some] = 0.0
    uniforms = torch.tensor([rank / mass for mass, rank in rows], dtype=torch.float64)
    targets = torch.tensor([int(some[0]) for some in allowed])
    found = softmax(layout, values, targets, uniforms=uniforms, temperature=temperature)
    assert found.tokens.tolist() == [int(a[rank]) for a, (_, rank) in zip(allowed, rows)]
    assert found.stats[1].tolist() == [mass for mass, _ in rows]


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_smallest_temperature_takes_the_argmax(layout, dtype):
    values, targets = drawn(4, 5000, dtype)
    uniforms = torch.tensor([0.0, 0.3, 0.9, 1.0 - 2.0**-53], dtype=torch.float64)
    for temperature in (1e-30, 5e-324):
        found = softmax(layout, values, targets, uniforms=uniforms, temperature=temperature)
        assert torch.equal(found.tokens, first_argmax(values))


def test_an_infinite_temperature_takes_any_token_that_is_not_masked(dtype):
    values, _ = drawn(4, 100, dtype)
    values[:, 4:] = -math.inf
    uniforms = torch.tensor([0.0, 0.3, 0.6, 0.9], dtype=torch.float64)
    targets = torch.zeros(4, dtype=torch.int64)
    found = softmax(ROWS, values, targets, uniforms=uniforms, temperature=math.inf)
    assert found.tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_masked_vocabularies(layout, dtype):
    """-inf in whole chunks: before, behind and between those that have a number."""
    values, targets = drawn(4, 9000, dtype)
    values[0, :4200] = -math.inf
    values[1, 2:] = -math.inf
    values[2, 500:8800] = -math.inf
    values[3, :8999] = -math.inf
    check_softmax(layout, values, targets, exps=zeros(values, layout))
    uniforms = torch.tensor([0.0, 0.99, 0.5, 0.5], dtype=torch.float64)
    check_softmax(layout, values, targets, uniforms=uniforms, temperature=0.8)


def test_the_largest_uniform_number_picks_no_masked_token(dtype):
    """Where sums in two orders differ, the running sum may stay below the threshold."""
    values, targets = drawn(24, 700, dtype)
    values[:, 500:] = -math.inf
    uniforms = torch.full([24], 1 - 2.0**-53, dtype=torch.float64)
    check_softmax(ROWS, values, targets, uniforms=uniforms, temperature=0.8)


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sample"])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_rows_that_are_not_numbers_keep_to_themselves(layout, sampled):
    columns = 5000
    values, targets = drawn(6, columns)
    wrong = {0: (4100, math.nan), 2: (0, math.inf), 3: (columns - 1, math.nan)}
    for row, (column, value) in wrong.items():
        values[row, column] = value
    values[5] = -math.inf
    values[0, 4500] = math.nan  # not the first
    uniforms = torch.full([6], 0.5, dtype=torch.float64) if sampled else None
    found = softmax(layout, values, targets, uniforms=uniforms, exps=zeros(values, layout))
    for row, column in [(row, at) for row, (at, _) in wrong.items()] + [(5, 0)]:
        assert found.stats[1, row].isnan()
        assert found.tokens[row] == column
        assert found.exps[row].isnan().any()
    good = [1, 4]
    half = None if uniforms is None else uniforms[good]
    alone = softmax(ROWS, values[good], targets[good], uniforms=half)
    assert torch.equal(found.tokens[good], alone.tokens)
    torch.testing.assert_close(found.stats[:, good], alone.stats)


def test_a_target_outside_of_the_vocabulary_reads_nothing():
    values, _ = drawn(3, 100)
    exps = torch.zeros(3, 100)
    found = softmax(ROWS, values, torch.tensor([-1, 100, 99]), exps=exps)
    assert found.stats[2].isnan().tolist() == [True, True, False]
    assert (exps[:2] > 0.0).all()


def test_strided_columns():
    """Targets, uniform numbers and tokens that are not next to each other."""
    values, targets = drawn(5, 600)
    uniforms = torch.rand(5, dtype=torch.float64)
    expected = softmax(ROWS, values, targets, uniforms=uniforms)
    spread = [torch.stack([t, t + 1], 1)[:, 0] for t in (targets, uniforms)]
    tokens = torch.full([5, 3], -7)
    stats = torch.full([5, 3], math.nan).t()
    softmax_stats(
        values, *spread, 1.0, None, tokens[:, 1], stats, logit_rows=1, runs=ONE_RUN
    )  # fmt: skip
    assert torch.equal(tokens[:, 1], expected.tokens)
    assert (tokens[:, ::2] == -7).all()
    assert torch.equal(stats, expected.stats)


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_a_bias_is_added_to_the_logits(layout, dtype):
    for count, columns in ((1, 1), (3, 520), (9, 700), (2, 4100)):
        values, targets = drawn(count, columns, dtype)
        bias = torch.stack([torch.randn(columns, dtype=dtype)] * 2, 1)[:, 0]
        uniforms = None if columns == 520 else torch.rand(count, dtype=torch.float64)
        options = {"uniforms": uniforms, "temperature": 0.8, "bias": bias}
        check_softmax(layout, values, targets, exps=zeros(values, layout), **options)


# --- head_objective -------------------------------------------------------------------------------

OBJECTIVES = {
    "entropy": {"entropy_weight": 0.3, "z_loss": 0.1},
    "tokens": {"soft": "tokens", "temperature": 2.5, "bias": False},
    "head": {"soft": "head", "temperature": 0.5},
    "all words": {"soft": "all words"},
    "everything": {
        "soft": "tokens and head", "temperature": 3.0, "entropy_weight": -0.2, "z_loss": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("along", [False, True], ids=["rows side by side", "columns side by side"])
@pytest.mark.parametrize("options", OBJECTIVES.values(), ids=OBJECTIVES)
def test_objectives_at_every_edge(options, along):
    op = functools.partial(head_objective, runs=ONE_RUN)
    edges = (1, 5, 4095, 4096, 4097, 8197) if along else (1, 3, 511, 512, 513, 1025)
    counts = itertools.cycle((3, 9, 1))
    for columns, count, dtype in zip(edges, counts, itertools.cycle(ACCUMULATED)):
        check(problem(count, columns, dtype, **options), op=op, along=along)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_objectives_bits_do_not_depend_on_the_grid_or_the_order(weight):
    runs = usual(*zip(ORDERS, map(device, (1, 2, 3))), (SHUFFLED, device(30)))
    given = problem(9, 1200, torch.float32, weight, size=300, **OBJECTIVES["everything"])
    check(given, kept=weight, op=functools.partial(head_objective, runs=runs))


@pytest.mark.parametrize("kept", FLOAT_DTYPES, ids=dtype_id)
def test_gradients_of_every_dtype(kept, dtype):
    given = problem(3, 520, dtype, **OBJECTIVES["everything"])
    check(given, kept=kept, op=functools.partial(head_objective, runs=ONE_RUN))


def test_objectives_with_masked_words(dtype):
    """Whole chunks that cannot be, in the model, its teacher, or both."""
    given = problem(9, 2000, dtype, soft="head", entropy_weight=0.5, z_loss=0.1)
    given.bias[:600] = given.teacher[2][:600] = -math.inf
    given.teacher[2][900:1600] = -math.inf
    given.targets.clamp_(min=600)
    check(given, op=functools.partial(head_objective, runs=TWO_RUNS))
    given.bias[900:1600] = -math.inf
    _, stats, gradients = given.run(op=functools.partial(head_objective, runs=ONE_RUN))
    assert all(value[given.targets >= 1600].isfinite().all() for value in stats.values())
    assert (gradients[:, :600] == 0).all()
    assert (gradients[:, 900:1600] == 0).all()
    given.teacher[2][1000] = 0.0  # what the teacher says, and the model cannot
    assert (
        given.run(op=functools.partial(head_objective, runs=ONE_RUN))[1]["divergence"]
        .isposinf()
        .all()
    )


def test_words_outside_of_the_vocabulary_are_not_touched():
    given = problem(3, 40, torch.float32, soft="tokens")
    given.indices[0, 1:3] = torch.tensor([-1, 40])
    given.targets[:] = torch.tensor([3, -1, 40])
    _, stats, gradients = given.run(op=functools.partial(head_objective, runs=ONE_RUN))
    assert stats["divergence"].isnan().tolist() == [True, False, False]
    for name in ("target_logit", "target_gradient"):
        assert stats[name].isnan().tolist() == [False, True, True]
    assert gradients.isfinite().all()
