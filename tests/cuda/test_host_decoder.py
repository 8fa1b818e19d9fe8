"""The decoder's kernels of csrc/cuda, run on the host: against float64 truth, and exact data.

Each call runs with several grids and orders of the threads, which must leave the same bits; see
host_cuda. Launchers, captures and speed are for test_cuda_decoder.py.
"""

import functools
import itertools
import math

import pytest
import torch
from host_cuda import ASCENDING, DESCENDING, ORDERS, SHUFFLED, usual
from host_cuda.decoder import HostDecoder
from support.decode_cases import (
    COLUMNS,
    GATES,
    KINDS,
    LAYOUTS,
    LSTM,
    RNN_RELU,
    ROWS,
    Softmax,
    assert_intact,
    assert_samples,
    assert_statistics,
    check_advance,
    check_gradient,
    first_argmax,
)
from support.objective_cases import check, problem
from support.tensors import FLOAT_DTYPES, dtype_id

from accumext.decoder import _operators as reference

pytestmark = pytest.mark.build  # compiles the kernels

ACCUMULATED = (torch.float32, torch.float64)
# A tile has 4096 elements: chunks of 4096 columns of one row, of 2048 of two rows, ... down to 512
# of eight. Threads take 2 or 4 columns at once where rows are aligned.
COLUMN_EDGES = (1, 3, 5, 511, 512, 513, 1023, 1025, 2049, 4095, 4096, 4097, 8197)
ONE_RUN = ((SHUFFLED, 2),)
TWO_RUNS = usual((DESCENDING, 1), (SHUFFLED, 3))


@pytest.fixture(scope="module")
def kernels(host_executable):
    return HostDecoder(host_executable("decoder"))


@pytest.fixture(params=ACCUMULATED, ids=dtype_id)
def dtype(request):
    return request.param


def drawn(count, columns, dtype=torch.float32):
    return (3 * torch.randn(count, columns)).to(dtype), torch.randint(columns, [count])


def zeros(values, layout, dtype=None):
    return LAYOUTS[layout](torch.zeros_like(values, dtype=dtype))


# --- softmax_stats --------------------------------------------------------------------------------


@pytest.fixture
def softmax(kernels):
    def softmax(layout, values, targets, *, runs=ONE_RUN, **options):
        op = kernels.softmax_stats
        return Softmax(op, LAYOUTS[layout](values), targets, runs=runs, **options)

    return softmax


@pytest.fixture
def check_softmax(softmax):
    """Statistics are those of the definition, and tokens the first argmax or samples."""

    def check_softmax(layout, values, targets, *, bias=None, **options):
        found = softmax(layout, values, targets, bias=bias, **options)
        z = values if bias is None else values + bias
        assert_statistics(found, z, targets)
        if (uniforms := options.get("uniforms")) is None:
            assert torch.equal(found.tokens, first_argmax(z))
        else:
            assert_samples(found.tokens, z, uniforms, options.get("temperature", 1.0))

    return check_softmax


@pytest.mark.parametrize("layout", [ROWS, "shifted_slices", COLUMNS])
def test_statistics_at_every_edge(check_softmax, layout, dtype):
    for columns, count in zip(COLUMN_EDGES, itertools.cycle((2, 5, 9))):
        values, targets = drawn(3 if layout != COLUMNS else count, columns, dtype)
        targets[-1] = columns - 1
        runs = ONE_RUN if count > 3 else TWO_RUNS
        check_softmax(layout, values, targets, exps=zeros(values, layout), runs=runs)


@pytest.mark.parametrize("exps_layout", LAYOUTS)
def test_any_strides_and_dtypes(check_softmax, exps_layout):
    dtypes = itertools.cycle(itertools.product(FLOAT_DTYPES, ACCUMULATED))
    shapes = itertools.cycle(((7, 520), (1, 520), (3, 4100), (3, 1030)))
    for layout, shape, (exps_dtype, dtype) in zip(LAYOUTS, shapes, dtypes):
        values, targets = drawn(*shape, dtype)
        check_softmax(layout, values, targets, exps=zeros(values, exps_layout, exps_dtype))


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_sum_of_a_large_vocabulary(check_softmax, layout):
    check_softmax(layout, *drawn(2, 50257))


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_bits_do_not_depend_on_the_grid_or_the_order(softmax, layout):
    runs = [*zip(ORDERS, (1, 2, 5)), (ASCENDING, 3), (SHUFFLED, 30)]
    count = 2 if layout == ROWS else 9
    values, targets = drawn(count, 8200 if layout == ROWS else 2100)
    for uniforms in (None, torch.rand(count, dtype=torch.float64)):
        exps = zeros(values, layout)
        softmax(layout, values, targets, uniforms=uniforms, temperature=0.7, exps=exps, runs=runs)


@pytest.mark.parametrize("layout", [ROWS, "shifted_slices", COLUMNS])
def test_the_first_of_equal_logits_wins(softmax, layout):
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
def test_samples(check_softmax, layout, temperature):
    shapes = ((8, 5), (3, 700), (9, 2100), (2, 9001))
    for (count, columns), dtype in zip(shapes, itertools.cycle(ACCUMULATED)):
        values, targets = drawn(count, columns, dtype)
        uniforms = torch.rand(count, dtype=torch.float64)
        uniforms[0], uniforms[-1] = 0.0, 1.0 - 2.0**-53
        check_softmax(layout, values, targets, uniforms=uniforms, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("layout", [ROWS, "shifted_slices", COLUMNS])
def test_samples_of_equal_probabilities_are_exact(softmax, layout, temperature):
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
def test_the_smallest_temperature_takes_the_argmax(softmax, layout, dtype):
    values, targets = drawn(4, 5000, dtype)
    uniforms = torch.tensor([0.0, 0.3, 0.9, 1.0 - 2.0**-53], dtype=torch.float64)
    for temperature in (1e-30, 5e-324):
        found = softmax(layout, values, targets, uniforms=uniforms, temperature=temperature)
        assert torch.equal(found.tokens, first_argmax(values))


def test_an_infinite_temperature_takes_any_token_that_is_not_masked(softmax, dtype):
    values, _ = drawn(4, 100, dtype)
    values[:, 4:] = -math.inf
    uniforms = torch.tensor([0.0, 0.3, 0.6, 0.9], dtype=torch.float64)
    targets = torch.zeros(4, dtype=torch.int64)
    found = softmax(ROWS, values, targets, uniforms=uniforms, temperature=math.inf)
    assert found.tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_masked_vocabularies(check_softmax, layout, dtype):
    """-inf in whole chunks: before, behind and between those that have a number."""
    values, targets = drawn(4, 9000, dtype)
    values[0, :4200] = -math.inf
    values[1, 2:] = -math.inf
    values[2, 500:8800] = -math.inf
    values[3, :8999] = -math.inf
    check_softmax(layout, values, targets, exps=zeros(values, layout))
    uniforms = torch.tensor([0.0, 0.99, 0.5, 0.5], dtype=torch.float64)
    check_softmax(layout, values, targets, uniforms=uniforms, temperature=0.8)


def test_the_largest_uniform_number_picks_no_masked_token(check_softmax, dtype):
    """Where sums in two orders differ, the running sum may stay below the threshold."""
    values, targets = drawn(24, 700, dtype)
    values[:, 500:] = -math.inf
    uniforms = torch.full([24], 1 - 2.0**-53, dtype=torch.float64)
    check_softmax(ROWS, values, targets, uniforms=uniforms, temperature=0.8)


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sample"])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_rows_that_are_not_numbers_keep_to_themselves(softmax, layout, sampled):
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


def test_a_target_outside_of_the_vocabulary_reads_nothing(softmax):
    values, _ = drawn(3, 100)
    exps = torch.zeros(3, 100)
    found = softmax(ROWS, values, torch.tensor([-1, 100, 99]), exps=exps)
    assert found.stats[2].isnan().tolist() == [True, True, False]
    assert (exps[:2] > 0.0).all()


def test_strided_columns(kernels, softmax):
    """Targets, uniform numbers and tokens that are not next to each other."""
    values, targets = drawn(5, 600)
    uniforms = torch.rand(5, dtype=torch.float64)
    expected = softmax(ROWS, values, targets, uniforms=uniforms)
    spread = [torch.stack([t, t + 1], 1)[:, 0] for t in (targets, uniforms)]
    tokens = torch.full([5, 3], -7)
    stats = torch.full([5, 3], math.nan).t()
    kernels.softmax_stats(values, spread[0], spread[1], 1.0, None, tokens[:, 1], stats)
    assert torch.equal(tokens[:, 1], expected.tokens)
    assert (tokens[:, ::2] == -7).all()
    assert torch.equal(stats, expected.stats)


@pytest.mark.parametrize("layout", [ROWS, "shifted_slices", COLUMNS])
def test_a_bias_is_added_to_the_logits(check_softmax, layout, dtype):
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
def test_objectives_at_every_edge(kernels, options, along):
    op = functools.partial(kernels.head_objective, runs=ONE_RUN)
    edges = (1, 5, 4095, 4096, 4097, 8197) if along else (1, 3, 511, 512, 513, 1025)
    counts = itertools.cycle((3, 9, 1))
    for columns, count, dtype in zip(edges, counts, itertools.cycle(ACCUMULATED)):
        check(problem(count, columns, dtype, **options), op=op, along=along)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_objectives_bits_do_not_depend_on_the_grid_or_the_order(kernels, weight):
    runs = usual(*zip(ORDERS, (1, 2, 5)), (SHUFFLED, 30))
    given = problem(9, 1200, torch.float32, weight, size=300, **OBJECTIVES["everything"])
    check(given, kept=weight, op=functools.partial(kernels.head_objective, runs=runs))


@pytest.mark.parametrize("kept", FLOAT_DTYPES, ids=dtype_id)
def test_gradients_of_every_dtype(kernels, kept, dtype):
    given = problem(3, 520, dtype, **OBJECTIVES["everything"])
    check(given, kept=kept, op=functools.partial(kernels.head_objective, runs=ONE_RUN))


@pytest.mark.parametrize(
    ("size", "dtype"),
    list(zip((0, 1, 255, 256, 257, 600), itertools.cycle(ACCUMULATED))),
    ids=str,
)
def test_words_that_a_teacher_gives_more_than_once(kernels, size, dtype):
    """Neighbours, in the same turn of a block's threads and in another one, and all the same."""
    given = problem(5, 200, dtype, soft="tokens", size=size)
    given.indices[0] = 7
    given.indices[1] = torch.arange(size) // 2 % 200
    given.indices[2] = torch.arange(size) % 100
    check(given, op=functools.partial(kernels.head_objective, runs=TWO_RUNS))


def test_objectives_with_masked_words(kernels, dtype):
    """Whole chunks that cannot be, in the model, its teacher, or both."""
    given = problem(9, 2000, dtype, soft="head", entropy_weight=0.5, z_loss=0.1)
    given.bias[:600] = given.teacher[2][:600] = -math.inf
    given.teacher[2][900:1600] = -math.inf
    given.targets.clamp_(min=600)
    check(given, op=functools.partial(kernels.head_objective, runs=TWO_RUNS))
    given.bias[900:1600] = -math.inf
    _, stats, gradients = given.run(op=kernels.head_objective)
    assert all(value[given.targets >= 1600].isfinite().all() for value in stats.values())
    assert (gradients[:, :600] == 0).all()
    assert (gradients[:, 900:1600] == 0).all()
    given.teacher[2][1000] = 0.0  # what the teacher says, and the model cannot
    assert given.run(op=kernels.head_objective)[1]["divergence"].isposinf().all()


def test_objectives_of_rows_that_are_not_numbers(kernels):
    given = problem(9, 700, torch.float32, soft="tokens and head", entropy_weight=0.5)
    whole = given.run(op=kernels.head_objective)
    given.hidden[4], given.hidden[7, 0] = math.nan, math.inf
    tokens, stats, gradients = given.run(op=kernels.head_objective)
    assert tokens[4] == 0
    assert stats["logsumexp"][[4, 7]].isnan().all()
    others = torch.tensor([0, 1, 2, 3, 5, 6, 8])
    assert torch.equal(tokens[others], whole[0][others])
    assert torch.equal(gradients[others], whole[2][others])


def test_words_outside_of_the_vocabulary_are_not_touched(kernels):
    given = problem(3, 40, torch.float32, soft="tokens")
    given.indices[0, 1:3] = torch.tensor([-1, 40])
    given.targets[:] = torch.tensor([3, -1, 40])
    _, stats, gradients = given.run(op=kernels.head_objective)
    assert stats["divergence"].isnan().tolist() == [True, False, False]
    for name in ("target_logit", "target_gradient"):
        assert stats[name].isnan().tolist() == [False, True, True]
    assert gradients.isfinite().all()


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [check_advance, check_gradient], ids=["advance", "gradient"])
def test_cells(kernels, step, kind, dtype):
    op = kernels.rnn_advance if step is check_advance else kernels.rnn_gradient
    op = functools.partial(op, runs=ONE_RUN)
    for shape, ended in zip([(1, 1), (3, 255), (2, 256), (5, 257)], itertools.cycle((False, True))):
        step(op, kind, shape, dtype, live=torch.rand(shape[0]) < 0.6 if ended else None)
    for layout in (ROWS, COLUMNS):
        live = torch.tensor([True, False, True])
        step(op, kind, (3, 40), dtype, live=live, layout=LAYOUTS[layout])


@pytest.mark.parametrize(("kind", "copies"), list(zip(KINDS, FLOAT_DTYPES)), ids=str)
def test_biases_and_rounded_copies_of_the_state(kernels, kind, copies, dtype):
    batch, units = 3, 257
    rows, parts = GATES[kind] * units, 2 if kind == LSTM else 1
    from_x, from_h = torch.randn(2, batch, rows, dtype=dtype)
    bias_x, bias_h = torch.randn(2, rows, dtype=dtype)
    state = [*torch.randn(parts, batch, units, dtype=dtype), None][:2]
    live, kept = torch.tensor([True, False, True]), torch.rand(batch, units) < 0.5
    expected, found = ([None if s is None else torch.zeros_like(s) for s in state] for _ in "12")
    kernels.rnn_advance(kind, from_x + bias_x, from_h + bias_h, live, *state, *expected)
    for some in (None, kept):
        operand = LAYOUTS["shifted_slices"](torch.zeros(batch, units, dtype=copies))
        output = LAYOUTS["shifted_slices"](torch.zeros(batch, units, dtype=copies))
        kernels.rnn_advance(
            kind, from_x, from_h, live, *state, *found, bias_x=bias_x, bias_h=bias_h,
            operand=operand, output=output, kept=some, scale=1.25,
        )  # fmt: skip
        for mine, its in zip(found, expected):
            assert (mine is None and its is None) or torch.equal(mine, its)
        assert torch.equal(operand, expected[0].to(copies))
        left = expected[0] if some is None else expected[0] * some * 1.25
        assert torch.equal(output, left.to(copies))
        assert_intact(operand)
        assert_intact(output)


@pytest.mark.parametrize(
    ("kind", "gated", "limited"),
    [*itertools.product([LSTM], (False, True), (False, True)), *((k, True, True) for k in KINDS)],
)
def test_a_gradient_is_passed_on_before_it_goes_through_a_cell(kernels, kind, gated, limited):
    batch, units = 4, 257
    rows, lstm = GATES[kind] * units, kind == LSTM
    d_out, h, c, c_next, dh, dc, product = torch.randn(7, batch, units)
    pre = torch.randn(batch, 4 * units)
    live = torch.tensor([True, False, True, True])
    gate = torch.tensor([1.0, 0.5, 0.0, 1.25]) if gated else None
    limit = torch.tensor(0.25) if limited else None
    dh[2, 0] = math.inf if gated else 1.0  # cut off, not NaN
    passed = []
    for d in (dh + product, dc):
        if gate is not None:
            d = torch.where(gate[:, None] == 0, 0, d * gate[:, None])
        passed.append(d if limit is None else d.clamp(-limit, limit))
    results = []
    for start, more in ((passed, {}), ((dh, dc), {"product": product, "gate": gate})):
        if more:
            more["limit"] = limit
        mine, mine_c = start[0].clone(), start[1].clone() if lstm else None
        d_x, d_h = torch.zeros(2, batch, rows)
        operand = torch.zeros(batch, rows, dtype=torch.bfloat16)
        memory = (c, c_next) if lstm else (None, None)
        kernels.rnn_gradient(
            kind, d_out, pre, h, *memory, live, mine, mine_c, d_x, d_h, operand=operand, **more
        )
        assert torch.equal(operand, d_h.to(torch.bfloat16))
        results.append([mine, d_x, d_h, *([mine_c] if lstm else [])])
    for a, b in zip(*results):
        assert torch.equal(a, b)
    assert not results[1][1].isnan().any()


def test_a_state_may_be_advanced_in_place(kernels):
    from_x, from_h, h, c = (torch.randn(3, n) for n in (80, 80, 20, 20))
    live = torch.tensor([True, False, True])
    expected = torch.zeros(3, 20), torch.zeros(3, 20)
    kernels.rnn_advance(LSTM, from_x, from_h, live, h, c, *expected)
    kernels.rnn_advance(LSTM, from_x, from_h, live, h, c, h, c)
    assert torch.equal(h, expected[0])
    assert torch.equal(c, expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_saturate_and_a_nan_stays(kernels, kind):
    x = torch.tensor([[200.0], [-200.0], [math.nan], [-0.5]])
    gates = GATES[kind]
    from_x, zero, state = x.expand(4, gates).contiguous(), torch.zeros(4, gates), torch.ones(4, 1)
    got, want = ([torch.zeros(4, 1), torch.zeros(4, 1)] for _ in range(2))
    for op, into in ((kernels.rnn_advance, got), (reference.rnn_advance, want)):
        c, c_next = (state, into[1]) if kind == LSTM else (None, None)
        op(kind, from_x, zero, None, state, c, into[0], c_next)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert got[0][2].isnan()
    assert kind != RNN_RELU or got[0].flatten()[[0, 1, 3]].tolist() == [200.0, 0.0, 0.0]


def test_nothing_of_an_ended_row_is_computed_with(kernels):
    """NaN in a row that is not live reaches no gradient."""
    nan, dead = torch.full([1, 12], math.nan), torch.tensor([False])
    d_x, d_h, dh, dc = nan.clone(), nan.clone(), torch.ones(1, 3), torch.ones(1, 3)
    kernels.rnn_gradient(
        LSTM, nan[:, :3], nan, nan[:, :3], nan[:, :3], nan[:, :3], dead, dh, dc, d_x, d_h
    )
    assert not d_x.any()
    assert not d_h.any()
    assert (dh == 1.0).all()
    assert (dc == 1.0).all()


# --- all steps backward in one launch -------------------------------------------------------------


def backward(
    kind, *, batch, units, steps, dtype=torch.bfloat16, in_memory="transposed", ended=False,
    gated=False, limited=False,
):  # fmt: skip
    """The arguments of rnn_backward; what is written is NaN."""
    width = GATES[kind] * units
    weight = (torch.randn(width, units) / width**0.5).to(dtype).t()
    d_x = torch.full((steps, batch, width), math.nan)
    return [
        kind, torch.randn(steps, batch, units),
        torch.randn(steps, batch, 4 * units) if width > units else None,
        torch.randn(steps + 1, batch, units),
        torch.randn(steps + 1, batch, units) if kind == LSTM else None,
        torch.rand(steps, batch) < 0.7 if ended else None,
        torch.rand(steps, batch).round(decimals=1) if gated else None,
        torch.tensor(0.4) if limited else None,
        {"transposed": weight, "dense": weight.contiguous(),
         "strided": weight.repeat_interleave(2, 1)[:, ::2]}[in_memory],
        torch.randn(units, batch).t(), torch.randn(batch, units) if kind == LSTM else None,
        d_x, torch.full_like(d_x, math.nan) if kind == 0 else None,
    ]  # fmt: skip


def check_backward(kernels, arguments, runs, bands=0):
    """Against the reference, which rounds what is multiplied to the same dtype: summed in another
    order, a number may round to its other neighbour in every step."""
    expected = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    kernels.rnn_backward(*arguments, bands=bands, runs=runs)
    reference.rnn_backward_reference(*expected)
    rtol = len(arguments[1]) * torch.finfo(arguments[8].dtype).eps
    for got, want in zip(arguments[9:], expected[9:]):
        if got is not None:
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


# Batch, units -> bands by the number of multiprocessors: of up to 16 rows each, as many as blocks
# allow. Units are taken in groups of eight.
WINDOWS = {
    (1, 37): {3: 1}, (9, 7): {5: 1}, (5, 8): {132: 1}, (16, 9): {3: 1}, (5, 70): {3: 1},
    (17, 37): {3: 1, 4: 2}, (33, 37): {3: 1, 5: 2, 6: 3}, (64, 37): {3: 1, 5: 2, 8: 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_all_steps_at_once(kernels, kind, window):
    batch, units = window
    all_plans = list(WINDOWS[window].items())
    for count, bands in all_plans if kind == LSTM else all_plans[-1:]:
        arguments = backward(kind, batch=batch, units=units, steps=3)
        check_backward(kernels, arguments, usual((DESCENDING, count), (SHUFFLED, count)), bands)


@pytest.mark.parametrize("in_memory", ["transposed", "dense", "strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_steps_at_once_with_what_is_carried(kernels, kind, in_memory):
    carried = {"transposed": (True, True), "dense": (True, False), "strided": (False, True)}
    gated, limited = carried[in_memory]
    for dtype, units in ((torch.bfloat16, 20), (torch.float16, 1)):
        arguments = backward(
            kind, batch=18, units=units, steps=4, dtype=dtype, in_memory=in_memory, ended=True,
            gated=gated, limited=limited,
        )  # fmt: skip
        check_backward(kernels, arguments, ONE_RUN)


def test_all_steps_at_once_leave_the_bits_of_one_after_the_other(kernels):
    for kind in KINDS:
        together = backward(kind, batch=6, units=20, steps=5, ended=True, gated=True)
        apart = [a.clone() if isinstance(a, torch.Tensor) else a for a in together]
        kernels.rnn_backward(*together, runs=ONE_RUN)
        for t in reversed(range(5)):
            one = [a if a is None or isinstance(a, int) else a[t : t + 1] for a in apart[:7]]
            for state in (3, 4):
                one[state] = None if apart[state] is None else apart[state][t : t + 2]
            written = [None if a is None else a[t : t + 1] for a in apart[11:]]
            kernels.rnn_backward(*one, *apart[7:11], *written, runs=ONE_RUN)
        for a, b in zip(together[9:], apart[9:]):
            assert a is None or torch.equal(a, b)
