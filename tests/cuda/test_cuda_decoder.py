"""The decoder's operators on a GPU: float64 truth, one stream, no wait, few launches, graphs.

Kernels and launchers are also run on the host (test_host_decoder.py, test_host_launchers.py); here
are torch's products between them, and sizes that only a GPU takes.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.decode_cases import (
    LAYOUTS,
    Softmax,
    assert_samples,
    assert_statistics,
    first_argmax,
)
from support.decoder_calls import KINDS, backward_call, head_call, objective_call, steps_call
from support.gpu import LAUNCHES, launched
from support.objective_cases import check, problem
from support.tensors import FLOAT_DTYPES, dtype_id

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("compiled_kernels"),
]

GPU = "cuda"
ACCUMULATED = (torch.float32, torch.float64)
SHAPES = [(1, 1), (1, 50257), (3, 4097), (8, 513), (9, 8200), (32, 50257), (256, 32000)]
SLEEP_CYCLES = 200_000_000  # about 0.1 s: many times what any call here needs on the host
NEVER = -1e30  # a logit whose exponential is 0, and which times 0 is not NaN


@pytest.fixture(params=ACCUMULATED, ids=dtype_id)
def dtype(request):
    return request.param


def softmax_stats(logits, targets, uniforms, temperature, exps, tokens, stats):
    """Through the head: the product of the logits with a unit matrix is exact."""
    unit = torch.eye(len(logits), dtype=logits.dtype, device=logits.device)
    torch.ops.accumext.head_forward(
        unit, logits.t(), None, targets, uniforms, temperature, exps, 32, tokens, stats
    )


def drawn(count, columns, dtype=torch.float32):
    values = (3 * torch.randn(count, columns)).to(GPU, dtype)
    return values, torch.randint(columns, [count], device=GPU)


# --- head_forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("exps_layout", "exps_dtype"), list(zip(LAYOUTS, itertools.cycle(FLOAT_DTYPES)))
)
def test_statistics(exps_layout, exps_dtype, shape, dtype):
    values, targets = drawn(*shape, dtype)
    exps = LAYOUTS[exps_layout](torch.zeros_like(values, dtype=exps_dtype))
    found = Softmax(softmax_stats, values, targets, exps=exps)
    assert_statistics(found, values, targets)
    assert torch.equal(found.tokens, first_argmax(values))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples(shape, temperature, dtype):
    values, targets = drawn(*shape, dtype)
    uniforms = torch.rand(len(values), dtype=torch.float64)
    uniforms[0], uniforms[-1] = 0.0, 1.0 - 2.0**-53
    uniforms = uniforms.to(GPU)
    found = Softmax(softmax_stats, values, targets, uniforms=uniforms, temperature=temperature)
    assert_samples(found.tokens, values, uniforms, temperature)
    assert_statistics(found, values, targets)


def test_samples_of_equal_probabilities_are_exact():
    """Logits of 0, and others of no probability: every sum is a whole number, and so are the
    thresholds."""
    columns, count = 50257, 16
    masses = [2**n for n in range(count)]
    values = torch.full([count, columns], NEVER)
    allowed = [torch.randperm(columns)[:mass].sort().values for mass in masses]
    for row, some in zip(values, allowed):
        row[some] = 0.0
    ranks = [mass // 2 for mass in masses]
    uniforms = torch.tensor([r / n for r, n in zip(ranks, masses)], dtype=torch.float64)
    targets = torch.tensor([int(some[0]) for some in allowed])
    found = Softmax(softmax_stats, values.to(GPU), targets.to(GPU), uniforms=uniforms.to(GPU))
    assert found.tokens.tolist() == [int(a[r]) for a, r in zip(allowed, ranks)]
    assert found.stats[1].tolist() == masses


def test_the_bits_are_those_of_every_call():
    for narrow in (False, True):
        call = head_call(rows=64, words=50257, logit_rows=32, narrow=narrow).to(GPU)
        results = []
        for _ in range(5):
            copy = call.to(GPU)
            copy()
            results.append(copy.written)
        for other in results[1:]:
            assert all(map(torch.equal, other, results[0]))


def test_broken_contracts():
    good = {
        "hidden": torch.zeros(3, 7, device=GPU),
        "weight": torch.zeros(5, 7, device=GPU),
        "bias": torch.zeros(5, device=GPU),
        "targets": torch.zeros(3, dtype=torch.int64, device=GPU),
        "uniforms": None,
        "temperature": 1.0,
        "exps": None,
        "logit_rows": 2,
        "tokens": torch.zeros(3, dtype=torch.int64, device=GPU),
        "stats": torch.zeros(3, 3, device=GPU),
    }
    torch.ops.accumext.head_forward(*good.values())
    for change in [
        {"weight": good["weight"].cpu()},
        {"weight": good["weight"].double()},
        {"weight": good["weight"][:, :6]},
        {"weight": good["weight"][:0], "bias": None},
        {"bias": good["bias"].half()},
        {"bias": good["bias"][:4]},
        {"targets": good["targets"].cpu()},
        {"targets": good["targets"].int()},
        {"targets": good["targets"][:2]},
        {"uniforms": torch.zeros(3, device=GPU)},
        {"exps": torch.zeros(3, 6, device=GPU)},
        {"exps": torch.zeros(3, 1, device=GPU).expand(3, 5)},
        {"temperature": 0.0},
        {"logit_rows": 0},
        {"tokens": good["tokens"][:1].expand(3)},
        {"stats": good["stats"][:2]},
        {"stats": good["stats"].double()},
        {"hidden": good["hidden"].half()},
    ]:
        with pytest.raises(RuntimeError):
            torch.ops.accumext.head_forward(*(good | change).values())


# --- head_objective -------------------------------------------------------------------------------

TAUGHT = {"temperature": 2.0, "entropy_weight": 0.1, "z_loss": 0.1}


@pytest.mark.parametrize("soft", ["none", "tokens", "head", "all words", "tokens and head"])
@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
def test_objectives(shape, soft, dtype):
    given = problem(*shape, dtype, soft=soft, size=700, **TAUGHT)
    check(given.to(GPU))
    check(given.to(GPU), logit_rows=2, along=True)


@pytest.mark.parametrize("kept", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_objectives_in_half_precision(weight, kept):
    given = problem(32, 50257, torch.float32, weight, soft="tokens and head", **TAUGHT)
    check(given.to(GPU), kept=kept)


# --- all operators --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_float32_products_obey_torchs_precision(kind):
    before = torch.get_float32_matmul_precision()
    results = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            torch.manual_seed(0)
            call = backward_call(kind).to(GPU)
            call()
            results.append(call.written)
    finally:
        torch.set_float32_matmul_precision(before)
    for exact, tf32 in zip(*results):
        torch.testing.assert_close(tf32, exact, rtol=2.0**-6, atol=2.0**-6)


# --- the host does not wait, and launches little --------------------------------------------------


# Heads of 32 rows, and steps with all that they can do.
CALLS = {
    "head_forward": lambda: head_call(rows=32, words=50257, logit_rows=32, narrow=True),
    "head_objective": lambda: objective_call(rows=32, words=50257, logit_rows=32, narrow=True),
    "decode_steps": lambda: steps_call("lstm", layers=2, ends=True, narrow=True),
    "known steps": lambda: steps_call("gru", layers=2, head=False),
    "rnn_backward": lambda: backward_call("gru", narrow=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits(name):
    call = CALLS[name]().to(GPU)
    call.to(GPU)()  # kernels are loaded and memory is taken at the first call
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query(), "the host waited for the GPU"


@pytest.mark.parametrize("call_of", [steps_call, backward_call])
def test_a_window_in_half_precision_is_one_launch(call_of):
    """However many steps it has."""
    if not launched(lambda: torch.ones(5, device=GPU), LAUNCHES):
        pytest.skip("torch.profiler sees no kernels on this machine")
    counts = set()
    for steps in (2, 12):
        call = call_of("gru", steps=steps, narrow=True).to(GPU)
        call.to(GPU)()
        counts.add(len(launched(call, LAUNCHES)))
    assert len(counts) == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_in_order_with_its_stream(name):
    source = CALLS[name]().to(GPU)
    first = source.to(GPU)
    first()
    call = source.to(GPU)
    for tensor in call.tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        for to, values in zip(call.tensors, source.tensors):
            to.copy_(values)
        call()
        got = [t.clone() for t in call.written]
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, first.written))


@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_graph_has_the_bits_of_eager_calls(name):
    call = CALLS[name]().to(GPU)
    call.to(GPU)()  # kernels are not loaded in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        eager = CALLS[name]().to(GPU)
        for to, values in zip(call.tensors, eager.tensors):
            to.copy_(values)
        eager()
        graph.replay()
        assert all(map(torch.equal, call.written, eager.written))
