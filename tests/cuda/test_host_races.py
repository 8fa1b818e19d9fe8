"""No threads of the kernels of csrc/cuda race, and the detector that says so, host_cuda/races.h,
finds the faults that are put in for it."""

import functools
import re
import subprocess
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import host_cuda
import pytest
import torch
from host_cuda import ASCENDING, HostCuda, mutants, races
from host_cuda.decoder import FeedBack, HostDecoder, HostPersistent, Lookup
from host_cuda.race_mutants import MUTANTS
from support import window_cases
from support.decode_cases import GATES, KINDS, LSTM, RNN_RELU, RNN_TANH
from support.objective_cases import problem
from support.once import once
from support.programs import compiler
from support.tensors import FLOAT_DTYPES, shifted
from test_host_decoder import backward
from test_host_persistent import EOS, Window
from torch import Tensor

from accumext.backends import _build

pytestmark = pytest.mark.build  # compiles the kernels

RUNS = ((ASCENDING, 3),)  # blocks; one order of the threads speaks for all
ONE_BLOCK = ((ASCENDING, 1),)
DRIVERS = {"driver": HostCuda, "decoder": HostDecoder, "persistent": HostPersistent}


class Case(NamedTuple):
    driver: str
    call: Callable


# --- calls ----------------------------------------------------------------------------------------


def window(*, blocks: int = 3, plan: dict | None = None, taught: bool = False, **options) -> Case:
    def call(kernels: HostPersistent) -> None:
        runs = ((ASCENDING, blocks),)
        w = Window(**options)
        if taught:
            w.teacher_mask = None  # everywhere
        w.decode(kernels.decode_steps, runs=runs, **(plan or {}))

    return Case("persistent", call)


def tensors(dtypes: Sequence[torch.dtype], shift: int) -> list[Tensor]:
    """In one and several chunks, with and without elements before and behind all vectors; the last
    of each dtype begins `shift` elements past an address that suits vectors, one is strided."""
    cases = [(1, 0), (300, 0), (9001, 0), (4099, 3), (300, shift)]
    some = [shifted(torch.randn(n).to(dtype), by) for dtype in dtypes for n, by in cases]
    return [torch.randn(70, 90).t(), *some]


def lists(call: Callable[[HostCuda, list[Tensor], list[Tensor]], object]) -> Case:
    """Of tensors, and others of the next dtype."""

    def both(kernels: HostCuda) -> None:
        others = (*FLOAT_DTYPES[1:], FLOAT_DTYPES[0])
        call(kernels, tensors(FLOAT_DTYPES, 0), tensors(others, 1))

    return Case("driver", both)


def window_factors(kernels: HostCuda) -> None:
    case = window_cases.CASES[0]
    for main_grads, norm in ([], window_cases.number(case.norm)), (tensors(FLOAT_DTYPES, 0), None):
        numbers, flags = window_cases.unwritten()
        options = window_cases.operands(case, True)
        kernels.window_factors(numbers, flags, main_grads, norm, **options, runs=RUNS)


def softmax(*, sampled: bool = False, fed_back: bool = False) -> Case:
    """Of rows that share a tile, and of rows with tiles of their own."""

    def call(kernels: HostDecoder) -> None:
        for rows, words, along in ((3, 4500, True), (9, 1200, False)):
            logits, exps = torch.randn(rows, words), torch.zeros(rows, words, dtype=torch.bfloat16)
            if not along:
                logits, exps = logits.t().contiguous().t(), exps.t().contiguous().t()
            kernels.softmax_stats(
                logits, torch.randint(words, (rows,)),
                torch.rand(rows, dtype=torch.float64) if sampled else None, 0.7, exps,
                torch.zeros(rows, dtype=torch.int64), torch.zeros(3, rows), runs=RUNS,
                feed_back=feed_back(rows, words) if fed_back else None,
            )  # fmt: skip

    return Case("decoder", call)


def softmax_of_many_chunks(kernels: HostDecoder) -> None:
    """More of them than threads of a row."""
    logits = torch.randn(17_000, 5).t()
    tokens, stats = torch.zeros(5, dtype=torch.int64), torch.zeros(3, 5)
    kernels.softmax_stats(logits, tokens, None, 1.0, None, tokens, stats, runs=RUNS)


def head_objective(kernels: HostDecoder) -> None:
    """Of rows that share a tile, and of rows with tiles of their own; of words that are the same,
    and of all words."""
    op = functools.partial(kernels.head_objective, runs=RUNS)
    for soft, words, along in (("tokens", 4500, True), ("all words", 1200, False)):
        rows = problem(9, words, torch.float32, soft=f"{soft} and head", size=600, temperature=2.0)
        if soft == "tokens":
            rows.indices.fill_(7)
        rows.run(kept=torch.bfloat16, op=op, along=along)


def lookup(rows: int, words: int) -> Lookup:
    width = 300
    table = torch.randn(words, width)
    kept = torch.rand(rows, width) < 0.5
    return Lookup(table, torch.zeros(rows, width, dtype=torch.bfloat16), kept, scale=2.0)


def feed_back(rows: int, words: int) -> FeedBack:
    live_later = torch.ones(2, rows, dtype=torch.bool)
    return FeedBack(
        later=2, batch=rows, pad=0, eos=1, rows=torch.zeros(rows, dtype=torch.int64),
        live=torch.arange(rows) % 2 == 0, live_later=live_later,
        teacher=torch.randint(words, (rows,)), teacher_mask=torch.rand(rows) < 0.5,
        inputs=torch.zeros(rows, dtype=torch.int64), lookup=lookup(rows, words),
    )  # fmt: skip


def look_up(kernels: HostDecoder) -> None:
    kernels.look_up(lookup(5, 40), torch.randint(40, (5,)), runs=RUNS)


def clear_tokens(kernels: HostDecoder) -> None:
    kernels.clear_tokens(torch.ones(300, 7), torch.randint(9, (300,)), runs=RUNS)


BATCH, UNITS = 3, 257


def rnn_advance(kernels: HostDecoder) -> None:
    live = torch.tensor([True, False, True])
    for kind in KINDS:
        products = torch.randn(2, BATCH, GATES[kind] * UNITS)
        h, c = torch.randn(2, BATCH, UNITS)
        c = c if kind == LSTM else None
        kernels.rnn_advance(
            kind, *products, live, h, c, h, c, operand=torch.zeros(BATCH, UNITS),
            output=torch.zeros(BATCH, UNITS), kept=torch.rand(BATCH, UNITS) < 0.5, runs=RUNS,
        )  # fmt: skip


def rnn_gradient(kernels: HostDecoder) -> None:
    live, gate = torch.tensor([True, False, True]), torch.rand(BATCH)
    for kind in KINDS:
        d_out, h, c, c_next, dh, dc, product = torch.randn(7, BATCH, UNITS)
        memory = (c, c_next) if kind == LSTM else (None, None)
        d_x, d_h = torch.zeros(2, BATCH, GATES[kind] * UNITS)
        kernels.rnn_gradient(
            kind, d_out, torch.randn(BATCH, 4 * UNITS), h, *memory, live, dh,
            dc if kind == LSTM else None, d_x, d_h, operand=torch.zeros(BATCH, GATES[kind] * UNITS),
            product=product, gate=gate, limit=torch.tensor(0.25), runs=RUNS,
        )  # fmt: skip


def through_time(batch: int) -> Case:
    def call(kernels: HostDecoder) -> None:
        for kind in KINDS:
            options = {"ended": True, "gated": True, "limited": True}
            kernels.rnn_backward(
                *backward(kind, batch=batch, units=21, steps=4, **options), runs=RUNS
            )

    return Case("decoder", call)


def rnn_pass_on(kernels: HostDecoder) -> None:
    dh, dc, product = torch.randn(3, BATCH, UNITS)
    kernels.rnn_pass_on(dh, dc, product, torch.rand(BATCH), torch.tensor(0.25), runs=RUNS)


def stages(count: int) -> Case:
    """A window whose cells' weights do not stay in shared memory."""
    size = 2 * 8 * 16 * 40 * 4 + 8 * 1024 * count + 1024  # products, stream, all else
    plan = {"shared_bytes": size, "resident": False, "stages": count}
    return window(kind=RNN_TANH, units=64, words=16 * 8 * 5, steps=2, blocks=1, plan=plan)


CASES = {
    "gru": window(),
    "float16": window(dtype=torch.float16, exps_dtype=torch.float32),
    "lstm, two layers, dropout": window(kind=LSTM, layers=2, dropout=0.5, units=21),
    "rnn, three layers": window(kind=RNN_RELU, layers=3, steps=2),
    "passes": window(units=50, steps=2, blocks=1),
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
    "accumulate": lists(lambda kernels, a, b: kernels.accumulate_(a, b, inv_scale=0.5, runs=RUNS)),
    "in place": lists(lambda kernels, a, _: kernels.accumulate_(a, a, runs=RUNS)),
    "overwrite": lists(lambda kernels, a, b: kernels.accumulate_(a, b, overwrite=True, runs=RUNS)),
    "clip": lists(
        lambda kernels, a, b: kernels.unscale_check_clip_accumulate_(
            a, b, max_norm=1.0, found_inf=torch.zeros(()), if_finite=True, runs=RUNS
        )
    ),
    "norm": lists(lambda kernels, _, b: kernels.total_norm(b, runs=RUNS)),
    "norm of powers": lists(lambda kernels, _, b: kernels.total_norm(b, norm_type=3.0, runs=RUNS)),
    "many tensors": Case(  # more than one block takes at once
        "driver", lambda kernels: kernels.total_norm(list(torch.randn(40)), runs=ONE_BLOCK)
    ),
    "scale": lists(lambda kernels, a, _: kernels.scale_(a, 0.5, runs=RUNS)),
    "copy_rounded": lists(lambda kernels, a, b: kernels.copy_rounded_(a, b, runs=RUNS)),
    "copy_rounded with a seed": lists(
        lambda kernels, a, b: kernels.copy_rounded_(a, b, seed=torch.tensor(7), runs=RUNS)
    ),
    "window_factors": Case("driver", window_factors),
    "softmax": softmax(),
    "softmax, sampled": softmax(sampled=True),
    "softmax, fed back": softmax(sampled=True, fed_back=True),
    "softmax, many chunks": Case("decoder", softmax_of_many_chunks),
    "head_objective": Case("decoder", head_objective),
    "look_up": Case("decoder", look_up),
    "clear_tokens": Case("decoder", clear_tokens),
    "rnn_advance": Case("decoder", rnn_advance),
    "rnn_gradient": Case("decoder", rnn_gradient),
    "rnn_pass_on": Case("decoder", rnn_pass_on),
    "through time": through_time(9),
    "through time, batch of 17": through_time(17),
    "through time, batch of 64": through_time(64),
}


# --- the kernels ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call(host_compiler, tmp_path_factory):
    """Make the call of a case, by a driver that is compiled once for all workers."""
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    if "clang" in version.stdout:
        pytest.skip("the detector knows what GCC calls, not what clang does")

    def call(name: str) -> None:
        case = CASES[name]
        detector = once(tmp_path_factory, "race-detector", races.build_detector)
        folder = once(
            tmp_path_factory,
            f"host-races-{case.driver}",
            lambda folder: races.build(case.driver, folder, detector),
        )
        case.call(DRIVERS[case.driver](folder / case.driver))

    return call


@pytest.mark.parametrize("name", CASES)
def test_no_threads_race(call, name):
    call(name)


@pytest.mark.parametrize("mutant", MUTANTS, ids=attrgetter("name"))
def test_a_mutant_is_found(call, monkeypatch, mutant):
    monkeypatch.setenv(mutants.VARIABLE, str(MUTANTS.index(mutant)))
    with pytest.raises(RuntimeError, match=f"race in {mutant.words}"):
        call(mutant.shown_by)


def test_every_kernel_has_a_driver():
    """And so the names above are those of all kernels."""
    sources = "".join(path.read_text() for path in _build.csrc().glob("cuda/**/*.cuh"))
    kernels = set(re.findall(r"__global__[^;{]*?(\w+_kernel)\(", sources))
    drivers = "".join((host_cuda.FOLDER / f"{name}.cpp").read_text() for name in DRIVERS)
    assert len(kernels) > 10
    assert {kernel for kernel in kernels if kernel not in drivers} == set()
