"""What calls of the decoder's operators put on the device, and that no order of the threads changes
a bit of them. pytest runs this with the launchers loaded: test_host_cuda.py."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.decoder_calls import (
    KINDS,
    Call,
    backward_call,
    beam_call,
    end_rows_call,
    head_call,
    objective_call,
    sample_call,
    select_call,
    steps_call,
    top_call,
)
from support.tensors import assert_equal
from torch.profiler import ProfilerActivity, profile

from host_cuda import ORDERS, loaded
from host_cuda.loaded import CROWDED, H100, SLICE, SMALLER, STEP_BY_STEP

# Rounded operands with sums of some dozens of float32 in two orders; exponentials in bfloat16.
CLOSE = 2.0**-7
# Of torch's operators those that put nothing on a device.
FREE = ("aten::empty", "aten::narrow", "aten::select", "aten::transpose")


@pytest.fixture(autouse=True)
def a_device_that_goes_step_by_step():
    yield
    loaded.use_device(STEP_BY_STEP)
    loaded.set_order(ORDERS[0])


def enqueued(call: Call) -> dict[str, int]:
    """Kernels, products and other operators of torch that run on the device."""
    before = loaded.launches()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        call()
    found = Counter(
        event.name
        for event in record.events()
        if event.cpu_parent is not None and event.cpu_parent.name.startswith("accumext::")
    )
    counts = {name: count for name, count in found.items() if name not in FREE}
    return {"kernels": loaded.launches() - before, **counts}


def budget(way: str, layers: int, steps: int) -> dict[str, int]:
    """Of a call. Each step of one layer takes three products and three kernels where tokens are
    predicted, two and one more for each further layer; else a product and a kernel in each layer.
    Once, the state is copied, the inputs are looked up, and those that are known are multiplied;
    backward the last gradient is passed on."""
    once, in_step = {
        "predicted": ((1, 0, layers), (2 + layers, 1 + 2 * layers)),
        "known": ((1, layers, layers), (layers, layers)),
        "backward": ((1, 0, 0), (1, 1)),
    }[way]
    kernels, products = (a + b * steps for a, b in zip(once, in_step))
    return {"kernels": kernels, "aten::mm": products, "aten::copy_": once[2]}


def calls(steps: int) -> Iterator[tuple[Call, dict[str, int]]]:
    """Step by step: every kind of cell, and each dtype with one layer and with several; and what
    they may put on the device."""
    for kind, dtype, layers in (
        ("gru", "wide", 3), ("gru", "narrow", 1), ("lstm", "wide", 1), ("lstm", "narrow", 3),
        ("rnn_tanh", "wide", 1), ("rnn_relu", "narrow", 1),
    ):  # fmt: skip
        options: dict[str, Any] = {"steps": steps, "narrow": dtype == "narrow"}
        predicted = steps_call(kind, ends=True, layers=layers, **options)
        yield predicted, budget("predicted", layers, steps)
        known = steps_call(kind, head=False, layers=layers, **options)
        yield known, budget("known", layers, steps)
        yield backward_call(kind, **options), budget("backward", 1, steps)


def windows(steps: int) -> Iterator[Call]:
    """Those that one kernel takes whole: forward with a head, and backward."""
    options: dict[str, Any] = {"steps": steps, "narrow": True}
    for kind, layers in zip(KINDS, (1, 3, 1, 1), strict=True):
        yield steps_call(kind, ends=True, layers=layers, **options)
        yield backward_call(kind, **options)
    for batch in (9, 17, 33):
        yield steps_call("gru", bias=-50.0, batch=batch, sampled=False, **options)
        yield backward_call("lstm", batch=batch, **options)


def others() -> Iterator[Call]:
    """Rows of logits in several pieces, no exponentials, the argmax, dropout around the layers,
    tokens that are their own targets."""
    yield steps_call("gru", exps=False, ends=True)
    yield steps_call("lstm", logit_rows=2, ends=True)
    yield head_call(rows=20, words=900, logit_rows=9)
    yield head_call(rows=20, words=900, logit_rows=9, own=True)
    yield objective_call(rows=20, words=900, logit_rows=9)
    yield objective_call(rows=20, words=900, narrow=True, soft="all words")
    yield steps_call("gru", own=True, around=True, ends=True)
    yield steps_call("lstm", layers=2, around=True, head=False)
    yield head_call(rows=20, words=900, logit_rows=20, sampled=False, narrow=True)
    yield top_call(words=5000, size=70)
    for top_k in (20, 10**6):
        yield sample_call(words=5000, top_k=top_k)
    yield beam_call(beams=7, words=20, levels=9)
    yield select_call(layers=2)


def written(call: Call) -> list[torch.Tensor]:
    copy = call.to("cpu")
    copy()
    return copy.written


def test_bits_depend_on_no_order_of_threads():
    for call in [*(call for call, _ in calls(steps=3)), *others()]:
        results = []
        for order in ORDERS:
            loaded.set_order(order)
            results.append(written(call))
        for other in results[1:]:
            assert_equal(results[0], other)


@pytest.mark.parametrize("steps", [2, 5])
def test_launches_of_a_call(steps):
    for i, (call, allowed) in enumerate(calls(steps)):
        counts = enqueued(call)
        assert all(count <= allowed.get(op, 0) for op, count in counts.items()), (i, counts)


def test_launches_of_a_step_of_generate():
    """A product and two kernels for every piece of rows, and one for what follows from them."""
    loaded.use_device(H100)
    product = {"kernels": 2, "aten::mm": 1}
    for top_k, top_p in ((50, 1.0), (50, 0.9), (300, 1.0), (10**6, 0.9)):
        call = sample_call(words=5000, top_k=top_k, top_p=top_p, logit_rows=32)
        assert enqueued(call) == product
    assert enqueued(top_call(logit_rows=32)) == product
    for call in (beam_call(beams=4), select_call(), end_rows_call()):
        assert enqueued(call) == {"kernels": 1}


@pytest.mark.parametrize("device", [SLICE, H100, SMALLER])
def test_a_window_is_one_launch(device):
    """Forward and backward, however many steps it has; its results are those of the loop."""
    for steps in (2, 5) if device == SLICE else (2,):
        some = itertools.islice(windows(steps), None if device == SLICE else 2)
        for i, call in enumerate(some):
            loaded.use_device(STEP_BY_STEP)
            loop = written(call)
            loaded.use_device(device)
            window = written(call)
            assert enqueued(call) == {"kernels": 1}, (i, steps)
            for a, b in zip(loop, window, strict=True):
                torch.testing.assert_close(a, b, rtol=CLOSE, atol=CLOSE, msg=f"{i}, {steps} steps")


def test_a_window_goes_step_by_step_where_its_blocks_do_not_fit():
    """Of whose kernel a multiprocessor cannot hold a block."""
    for call in itertools.islice(windows(steps=2), 2):
        counts = []
        for device in (STEP_BY_STEP, CROWDED):
            loaded.use_device(device)
            counts.append(enqueued(call))
        assert counts[0] == counts[1]
        assert counts[0]["kernels"] > 1
