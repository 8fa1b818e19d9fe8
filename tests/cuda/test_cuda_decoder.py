"""The decoder's operators on a GPU: their stream, no wait, few launches, graphs. gpu_checks.py has
their values, and on the host kernels and launchers run in test_host_*.py."""

import pytest
import torch
from support.decoder_calls import KINDS, backward_call, head_call, objective_call, steps_call
from support.gpu import LAUNCHES, launched
from support.tensors import assert_equal

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("compiled_kernels"),
]

GPU = "cuda"
SLEEP_CYCLES = 200_000_000  # about 0.1 s: many times what any call here needs on the host


def test_the_bits_are_those_of_every_call():
    for narrow in (False, True):
        call = head_call(rows=64, words=50257, logit_rows=32, narrow=narrow).to(GPU)
        results = []
        for _ in range(5):
            copy = call.to(GPU)
            copy()
            results.append(copy.written)
        for other in results[1:]:
            assert_equal(other, results[0])


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
    assert_equal(got, first.written)


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
        assert_equal(call.written, eager.written)
