"""The bookkeeping of beam search and the ends of rows, by the kernels of csrc/cuda: against plain
PyTorch, which tests of whole searches compare with lists of hypotheses."""

import math

import pytest
import torch
from support.decoder_calls import Call, beam_call, end_rows_call, select_call
from support.tensors import dtype_id

from accumext.generation import _beam_step, _stepper
from host_cuda import DESCENDING, ORDERS, SHUFFLED
from host_cuda.loaded import device
from host_cuda.ways import in_every_way, usual

RUNS = usual((DESCENDING, device(1)), (SHUFFLED, device(3)))
REFERENCES = {
    "beam_step": _beam_step.beam_step_reference,
    "select_states": _beam_step.select_states_reference,
    "end_rows": _stepper.end_rows_reference,
}


def check(call: Call, runs=RUNS) -> bool:
    """Return whether a hypothesis has ended in a step of beam search."""
    plain, before = call.to("cpu"), call.to("cpu")
    REFERENCES[call.op](*plain.arguments)
    in_every_way(getattr(torch.ops.accumext, call.op).default)(*call.arguments, runs=runs)
    for got, want in zip(call.written, plain.written, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
    return call.op == "beam_step" and not torch.equal(call.arguments[8][1], before.arguments[8][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("levels", [3, 10**6])
def test_steps_of_beam_search(dtype, levels):
    """One hypothesis, fewer words than hypotheses, more continuations, or hypotheses, than
    threads."""
    ended = []
    for beams, words in ((1, 1), (1, 9), (2, 1), (3, 5), (4, 300), (17, 4), (20, 40), (300, 2)):
        ended.append(check(beam_call(beams=beams, words=words, levels=levels, dtype=dtype)))
    ended.append(check(beam_call(beams=2, words=9, size=1, levels=levels, dtype=dtype)))
    assert any(ended)


@pytest.mark.parametrize("length", [3, 9])
def test_every_word_may_end_or_none(length):
    for eos in (-1, 0):
        call = beam_call(beams=3, words=5)
        call.arguments[1][:] = 0
        call.arguments[3][:], call.arguments[6] = length, eos
        assert check(call) == (length == 3 or eos == 0)


def test_scores_that_are_not_numbers_are_the_best():
    for dead in (False, True):
        call = beam_call(rows=4, beams=3, words=9)
        logits, scores, kept = call.arguments[0], call.arguments[7], call.arguments[8][0]
        logits[1], logits[6, 2], kept[0, 2] = math.nan, math.nan, math.nan
        scores[:, 0], scores[1, 2] = -1.0, math.nan
        if dead:
            scores[1] = -math.inf
        check(call, runs=tuple(zip(ORDERS, map(device, (1, 2, 3)))))


def test_states_of_every_size():
    for i, dtype in enumerate((torch.bool, torch.bfloat16, torch.float32, torch.float64)):
        check(select_call(dtype=dtype, layers=i % 3, rows=(1, 5, 40, 3)[i]))


def test_rows_end():
    for rows, eos in ((1, 2), (300, -1), (257, 2)):
        check(end_rows_call(rows=rows, eos=eos))
