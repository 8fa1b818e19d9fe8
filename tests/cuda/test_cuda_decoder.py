"""The decoder's kernels on a GPU: float64 truth, one stream, no wait, few launches, graphs.

The kernels themselves are also run on the host (test_host_decoder.py); here are the launchers, and
sizes that only a GPU takes.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.decode_cases import (
    COLUMNS,
    GRU,
    KINDS,
    LAYOUTS,
    LSTM,
    ROWS,
    Softmax,
    assert_samples,
    assert_statistics,
    check_advance,
    check_gradient,
    first_argmax,
)
from support.gpu import LAUNCHES, launched
from support.tensors import FLOAT_DTYPES, dtype_id

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("compiled_kernels"),
]

GPU = "cuda"
ACCUMULATED = (torch.float32, torch.float64)
SHAPES = [(1, 1), (1, 50257), (3, 4097), (8, 513), (9, 8200), (32, 50257), (256, 32000)]
SLEEP_CYCLES = 200_000_000  # about 0.1 s: many times what any call here needs on the host


@pytest.fixture(params=ACCUMULATED, ids=dtype_id)
def dtype(request):
    return request.param


def softmax_stats(*args):
    torch.ops.accumext.softmax_stats(*args)


def drawn(count, columns, dtype=torch.float32):
    values = (3 * torch.randn(count, columns)).to(GPU, dtype)
    return values, torch.randint(columns, [count], device=GPU)


def uniform_numbers(count):
    uniforms = torch.rand(count, dtype=torch.float64)
    uniforms[0], uniforms[-1] = 0.0, 1.0 - 2.0**-53
    return uniforms.to(GPU)


# --- softmax_stats --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("exps_layout", [ROWS, COLUMNS, "every_other"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics(layout, exps_layout, shape, dtype):
    values, targets = drawn(*shape, dtype)
    exps = LAYOUTS[exps_layout](torch.zeros_like(values))
    found = Softmax(softmax_stats, LAYOUTS[layout](values), targets, exps=exps)
    assert_statistics(found, values, targets)
    assert torch.equal(found.tokens, first_argmax(values))


@pytest.mark.parametrize("exps_dtype", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", ["aligned_slices", COLUMNS])
def test_exps_of_every_dtype(layout, exps_dtype, dtype):
    values, targets = drawn(11, 50257, dtype)
    exps = LAYOUTS[layout](torch.zeros(11, 50257, dtype=exps_dtype, device=GPU))
    found = Softmax(softmax_stats, LAYOUTS[layout](values), targets, exps=exps)
    assert_statistics(found, values, targets)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_samples(layout, shape, temperature, dtype):
    values, targets = drawn(*shape, dtype)
    uniforms = uniform_numbers(len(values))
    logits = LAYOUTS[layout](values)
    found = Softmax(softmax_stats, logits, targets, uniforms=uniforms, temperature=temperature)
    assert_samples(found.tokens, values, uniforms, temperature)
    assert_statistics(found, values, targets)


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_samples_of_equal_probabilities_are_exact(layout):
    """Logits of 0 and -inf: every sum is a whole number, and so are the thresholds."""
    columns, count = 50257, 16
    masses = [2**n for n in range(count)]
    values = torch.full([count, columns], -math.inf)
    allowed = [torch.randperm(columns)[:mass].sort().values for mass in masses]
    for row, some in zip(values, allowed):
        row[some] = 0.0
    ranks = [mass // 2 for mass in masses]
    uniforms = torch.tensor([r / n for r, n in zip(ranks, masses)], dtype=torch.float64)
    targets = torch.tensor([int(some[0]) for some in allowed])
    logits = LAYOUTS[layout](values.to(GPU))
    found = Softmax(softmax_stats, logits, targets.to(GPU), uniforms=uniforms.to(GPU))
    assert found.tokens.tolist() == [int(a[r]) for a, r in zip(allowed, ranks)]
    assert found.stats[1].tolist() == masses


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_what_is_not_a_number_has_a_token(value):
    values, targets = drawn(4, 50257)
    values[1, 40000] = value
    values[2] = -math.inf
    for uniforms in (None, uniform_numbers(4)):
        found = Softmax(softmax_stats, values.t().contiguous().t(), targets, uniforms=uniforms)
        assert found.stats[1].isnan().tolist() == [False, True, True, False]
        assert found.tokens[1:3].tolist() == [40000, 0]


def test_the_bits_are_those_of_every_call():
    values, targets = drawn(64, 50257)
    uniforms = uniform_numbers(64)
    for layout in (ROWS, COLUMNS):
        found = [
            Softmax(
                softmax_stats,
                LAYOUTS[layout](values),
                targets,
                uniforms=uniforms,
                temperature=0.7,
                exps=torch.zeros_like(values),
            )
            for _ in range(5)
        ]
        for other in found[1:]:
            assert torch.equal(other.tokens, found[0].tokens)
            assert torch.equal(other.stats, found[0].stats)
            assert torch.equal(other.exps, found[0].exps)


def test_no_rows():
    Softmax(softmax_stats, torch.zeros(0, 5, device=GPU), torch.zeros(0, dtype=int, device=GPU))


def test_broken_contracts():
    good = {
        "logits": torch.zeros(3, 5, device=GPU),
        "targets": torch.zeros(3, dtype=torch.int64, device=GPU),
        "uniforms": None,
        "temperature": 1.0,
        "exps": None,
        "tokens": torch.zeros(3, dtype=torch.int64, device=GPU),
        "stats": torch.zeros(3, 3, device=GPU),
    }
    softmax_stats(*good.values())
    for change in [
        {"targets": good["targets"].cpu()},
        {"targets": good["targets"].int()},
        {"targets": good["targets"][:2]},
        {"uniforms": torch.zeros(3, device=GPU)},
        {"exps": torch.zeros(3, 6, device=GPU)},
        {"exps": torch.zeros(3, 1, device=GPU).expand(3, 5)},
        {"temperature": 0.0},
        {"tokens": good["tokens"][:1].expand(3)},
        {"stats": good["stats"][:2]},
        {"stats": good["stats"].double()},
        {"logits": good["logits"].half()},
        {"logits": good["logits"][:, :0]},
    ]:
        with pytest.raises(RuntimeError):
            softmax_stats(*(good | change).values())


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [check_advance, check_gradient], ids=["advance", "gradient"])
def test_cells(step, kind, ended, dtype):
    ops = torch.ops.accumext
    op = ops.rnn_advance if step is check_advance else ops.rnn_gradient
    for shape in [(1, 1), (3, 255), (2, 257), (64, 1024)]:
        live = torch.rand(shape[0], device=GPU) < 0.6 if ended else None
        for layout in (ROWS, "shifted_slices", COLUMNS):
            step(op, kind, shape, dtype, live=live, layout=LAYOUTS[layout], device=GPU)


# --- the host does not wait, and launches little --------------------------------------------------


def lstm_step():
    gates = [torch.randn(32, 4 * 512, device=GPU) for _ in range(2)]
    h, c, h_next, c_next = (torch.randn(32, 512, device=GPU) for _ in range(4))
    live = torch.rand(32, device=GPU) < 0.9
    return (LSTM, *gates, live, h, c, h_next, c_next), (h_next, c_next)


def gru_gradient():
    d_out, h, dh = (torch.randn(32, 512, device=GPU) for _ in range(3))
    pre = torch.randn(32, 4 * 512, device=GPU)
    d_x, d_h = (torch.zeros(32, 3 * 512, device=GPU) for _ in range(2))
    return (GRU, d_out, pre, h, None, None, None, dh, None, d_x, d_h), (dh, d_x, d_h)


def statistics():
    values, targets = drawn(32, 50257)
    exps = torch.zeros(50257, 32, dtype=torch.bfloat16, device=GPU).t()
    tokens, stats = torch.zeros_like(targets), torch.zeros(3, 32, device=GPU)
    arguments = (
        values.t().contiguous().t(),
        targets,
        uniform_numbers(32),
        0.8,
        exps,
        tokens,
        stats,
    )
    return arguments, (exps, tokens, stats)


# Per operation what makes its arguments and names what it writes, and its launches.
CALLS = {
    "softmax_stats": (statistics, 2),
    "rnn_advance": (lstm_step, 1),
    "rnn_gradient": (gru_gradient, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits(name):
    op, (make, _) = getattr(torch.ops.accumext, name), CALLS[name]
    arguments, _ = make()
    op(*arguments)  # kernels are loaded and memory is taken at the first call
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query(), "the host waited for the GPU"


@pytest.mark.parametrize("name", CALLS)
def test_launches(name):
    if not launched(lambda: torch.ones(5, device=GPU), LAUNCHES):
        pytest.skip("torch.profiler sees no kernels on this machine")
    op, (make, launches) = getattr(torch.ops.accumext, name), CALLS[name]
    arguments, _ = make()
    op(*arguments)
    names = launched(lambda: op(*arguments), LAUNCHES)
    assert len(names) == launches, names


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_in_order_with_its_stream(name):
    op, (make, _) = getattr(torch.ops.accumext, name), CALLS[name]
    arguments, written = make()
    source = [t.clone() if isinstance(t, torch.Tensor) else t for t in arguments]
    op(*arguments)
    expected = [t.clone() for t in written]
    tensors = [pair for pair in zip(arguments, source) if isinstance(pair[0], torch.Tensor)]
    for to, _ in tensors:
        to.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        for to, values in tensors:
            to.copy_(values)
        op(*arguments)
        got = [t.clone() for t in written]
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_graph_has_the_bits_of_eager_calls(name):
    op, (make, _) = getattr(torch.ops.accumext, name), CALLS[name]
    arguments, written = make()
    op(*make()[0])  # kernels are not loaded in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*arguments)
    for _ in range(3):
        values, expected = make()
        for to, value in zip(arguments, values):
            if isinstance(to, torch.Tensor):
                to.copy_(value)
        op(*values)
        graph.replay()
        assert all(map(torch.equal, written, expected))
