"""No threads of the kernels of csrc/cuda race, and the detector that says so, host_cuda/races.h,
finds the faults that are put in for it."""

import functools
import re
from collections.abc import Callable, Sequence
from operator import attrgetter

import pytest
import torch
from support import decoder_calls, window_cases
from support.decode_cases import KINDS, LSTM, RNN_RELU, RNN_TANH
from support.tensors import FLOAT_DTYPES, shifted
from torch import Tensor

import accumext
from accumext.backends import _build
from host_cuda import ASCENDING, loaded, mutants
from host_cuda.checks import backward, windows
from host_cuda.checks.windows import EOS, STATIC, Window
from host_cuda.loaded import STEP_BY_STEP, device

Lists = Callable[[list[Tensor], list[Tensor]], object]
Case = Callable[[], object]

# One order of the threads speaks for all.


def window(*, on: int = device(3), taught: bool = False, **options) -> Case:
    def call() -> None:
        w = Window(**options)
        if taught:
            w.teacher_mask = None  # everywhere
        w.decode(windows.operator, runs=((ASCENDING, on),))

    return call


def stages(count: int) -> Case:
    """A window whose cells' weights do not stay in shared memory."""
    size = 2 * 8 * 16 * 40 * 4 + 8 * 1024 * count + 1024  # products, stream, all else
    on = device(1, shared_bytes=size + STATIC)
    return window(kind=RNN_TANH, units=64, words=16 * 8 * 5, steps=2, on=on)


def step_by_step() -> None:
    """Several blocks for the units of a row."""
    for kind in KINDS:
        options = {"kind": kind, "dtype": torch.float32, "units": 257, "words": 100, "steps": 2}
        for own, layers in ((False, 2), (True, 1)):
            window(
                own=own, layers=layers, dropout=0.5, feedback="sample", temperature=0.8,
                lengths=True, eos=EOS, on=STEP_BY_STEP, **options,
            )()  # fmt: skip


def steps_backward(on: int, **options) -> Case:
    def call() -> None:
        carried = {"ended": True, "gated": True, "limited": True}
        for kind in KINDS:
            arguments = backward.backward(kind, steps=4, **options, **carried)
            backward.operator(*arguments, runs=((ASCENDING, on),))

    return call


def through_time(batch: int) -> Case:
    return steps_backward(device(3), batch=batch, units=21)


def tensors(dtypes: Sequence[torch.dtype], shift: int) -> list[Tensor]:
    """In one and several chunks, with and without elements before and behind all vectors; the last
    of each dtype begins `shift` elements past an address that suits vectors, one is strided."""
    cases = [(1, 0), (300, 0), (9001, 0), (4099, 3), (300, shift)]
    some = [shifted(torch.randn(n).to(dtype), by) for dtype in dtypes for n, by in cases]
    return [torch.randn(70, 90).t(), *some]


def lists(call: Lists) -> Case:
    """Of tensors, and others of the next dtype."""

    def both() -> None:
        loaded.use_device(device(1))
        others = (*FLOAT_DTYPES[1:], FLOAT_DTYPES[0])
        call(tensors(FLOAT_DTYPES, 0), tensors(others, 1))

    return both


def window_factors() -> None:
    case = window_cases.CASES[0]
    for main_grads, norm in ([], True), (tensors(FLOAT_DTYPES, 0), False):
        numbers, flags = window_cases.unwritten()
        operands = window_cases.operands(case, True, norm)
        torch.ops.accumext.window_factors(numbers, flags, main_grads, *operands)


def heads(call: Callable[..., decoder_calls.Call], **options) -> Case:
    """Of rows that share a tile, and of rows with tiles of their own."""

    def both() -> None:
        loaded.use_device(device(1))
        call(rows=3, words=4500, logit_rows=1, **options)()
        call(rows=9, words=1200, logit_rows=9, narrow=True, **options)()

    return both


head, objective = decoder_calls.head_call, decoder_calls.objective_call
CASES: dict[str, Case] = {
    "gru": window(),
    "float16": window(dtype=torch.float16, exps_dtype=torch.float32),
    "lstm, two layers, dropout": window(kind=LSTM, layers=2, dropout=0.5, units=21),
    "rnn, three layers": window(kind=RNN_RELU, layers=3, steps=2),
    "passes": window(units=50, steps=2, on=device(1)),
    "two stages": stages(2),
    "three stages": stages(3),
    "sample": window(batch=3, words=300, feedback="sample", temperature=0.8, lengths=True, eos=EOS),
    "sample, taught": window(batch=3, words=100, feedback="sample", steps=2, taught=True),
    "sample as it is": window(batch=3, words=100, feedback="sample", steps=2),
    "scheduled": window(words=9, steps=4, feedback="scheduled", lengths=True, eos=EOS),
    "batch of 16, unaligned": window(batch=16, words=130, steps=2, aligned=False, width=33),
    "batch of 17": window(batch=17, steps=2),
    "batch of 33": window(batch=33, words=100, steps=2),
    "batch of 64": window(batch=64, words=100, steps=2),
    "step by step": step_by_step,
    "one row": window(batch=1, dtype=torch.float32, words=100, steps=2, on=STEP_BY_STEP),
    "accumulate": lists(lambda a, b: accumext.accumulate_(a, b, inv_scale=0.5)),
    "in place": lists(lambda a, _: accumext.accumulate_(a, a)),
    "overwrite": lists(lambda a, b: accumext.accumulate_(a, b, overwrite=True)),
    "clip": lists(
        lambda a, b: accumext.unscale_check_clip_accumulate_(
            a, b, max_norm=1.0, found_inf=torch.zeros(()), if_finite=True
        )
    ),
    "norm": lists(lambda _, b: accumext.total_norm(b)),
    "norm of powers": lists(lambda _, b: accumext.total_norm(b, norm_type=3.0)),
    # More than four blocks take at once.
    "many tensors": lists(lambda *_: accumext.total_norm(list(torch.randn(160)))),
    "scale": lists(lambda a, _: accumext.scale_(a, 0.5)),
    "copy_rounded": lists(lambda a, b: accumext.copy_rounded_(a, b)),
    "copy_rounded with a seed": lists(
        lambda a, b: accumext.copy_rounded_(a, b, seed=torch.tensor(7))
    ),
    "window_factors": window_factors,
    "softmax": heads(head, sampled=False),
    "softmax, sampled": heads(head),
    "softmax, own targets": heads(head, own=True),
    "softmax, many chunks": heads(  # more of them than threads of a row
        lambda **_: head(rows=5, words=17_000, logit_rows=5, sampled=False)
    ),
    "best words": lambda: decoder_calls.top_call(words=4500, size=70)(),
    "sample of the best": lambda: decoder_calls.sample_call(words=4500)(),
    "sample of shares": lambda: decoder_calls.sample_call(rows=2, words=4500, top_k=200)(),
    "beams": lambda: decoder_calls.beam_call(beams=7, words=20, levels=9)(),
    "states of beams": lambda: decoder_calls.select_call(layers=2)(),
    "ends of rows": lambda: decoder_calls.end_rows_call()(),
    "head_objective": heads(objective),
    "head_objective of all words": heads(functools.partial(objective, soft="all words")),
    "through time": through_time(9),
    "through time, batch of 17": through_time(17),
    "through time, batch of 64": through_time(64),
    "back step by step": steps_backward(STEP_BY_STEP, batch=3, units=257, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_no_threads_race(name):
    CASES[name]()
    assert loaded.races() == ""


def test_every_kernel_has_been_launched():
    sources = "".join(path.read_text() for path in _build.csrc().glob("cuda/**/*.cuh"))
    kernels = set(re.findall(r"__global__[^;{]*?(\w+_kernel)\(", sources))
    assert len(kernels) > 10
    assert {kernel for kernel in kernels if kernel not in loaded.kernels()} == set()


@pytest.mark.parametrize("mutant", mutants.RACES, ids=attrgetter("name"))
def test_a_mutant_is_found(mutant):
    words = loaded.words_with_mutant(mutants.ALL.index(mutant), CASES[mutant.shown_by])
    assert f"race in {mutant.words}" in words
