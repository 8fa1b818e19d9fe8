"""A recurrent layer's steps backward in one launch, against the reference."""

import math

import pytest
import torch
from support.decode_cases import GATES, KINDS, LSTM

from accumext.decoder import _operators as reference
from host_cuda import DESCENDING, SHUFFLED, loaded
from host_cuda.loaded import device
from host_cuda.ways import ONE_RUN, Runs, in_every_way, usual

operator = in_every_way(torch.ops.accumext.rnn_backward.default)


def rnn_backward(*arguments: object, runs: Runs) -> None:
    """The operator, which takes one launch."""
    before = loaded.launches()
    operator(*arguments, runs=runs)
    assert loaded.launches() == before + len(runs)


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


def check_backward(arguments, runs):
    """Against the reference, which rounds what is multiplied to the same dtype: summed in another
    order, a number may round to its other neighbour in every step."""
    expected = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    rnn_backward(*arguments, runs=runs)
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
def test_all_steps_at_once(kind, window):
    batch, units = window
    all_plans = list(WINDOWS[window].items())
    for count, bands in all_plans if kind == LSTM else all_plans[-1:]:
        arguments = backward(kind, batch=batch, units=units, steps=3)
        check_backward(arguments, usual((DESCENDING, device(count)), (SHUFFLED, device(count))))
        units_of_block = 8 * math.ceil(units / (count // bands) / 8)
        assert loaded.blocks() == bands * math.ceil(units / units_of_block)


@pytest.mark.parametrize("in_memory", ["transposed", "dense", "strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_steps_at_once_with_what_is_carried(kind, in_memory):
    carried = {"transposed": (True, True), "dense": (True, False), "strided": (False, True)}
    gated, limited = carried[in_memory]
    for dtype, units in ((torch.bfloat16, 20), (torch.float16, 1)):
        arguments = backward(
            kind, batch=18, units=units, steps=4, dtype=dtype, in_memory=in_memory, ended=True,
            gated=gated, limited=limited,
        )  # fmt: skip
        check_backward(arguments, ONE_RUN)


def test_all_steps_at_once_leave_the_bits_of_one_after_the_other():
    for kind in KINDS:
        together = backward(kind, batch=6, units=20, steps=5, ended=True, gated=True)
        apart = [a.clone() if isinstance(a, torch.Tensor) else a for a in together]
        rnn_backward(*together, runs=ONE_RUN)
        for t in reversed(range(5)):
            one = [a if a is None or isinstance(a, int) else a[t : t + 1] for a in apart[:7]]
            for state in (3, 4):
                one[state] = None if apart[state] is None else apart[state][t : t + 2]
            written = [None if a is None else a[t : t + 1] for a in apart[11:]]
            rnn_backward(*one, *apart[7:11], *written, runs=ONE_RUN)
        for a, b in zip(together[9:], apart[9:]):
            assert a is None or torch.equal(a, b)
