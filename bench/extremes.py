"""Extreme sizes, checked against definitions: one command per extreme.

    python bench/extremes.py long-run|elements|tensors|vocabulary|steps... [--quick] [--json FILE]

long-run    10,000 micro-batches, 2 % of which overflow, in windows of 4 under a GradScaler and a
            clip, beside the same training by hand (_long_run.py): every window, skip and scale
elements    tensors of more than 2^31 elements (bfloat16, 4 GiB each): every gradient operation
tensors     100,000 tensors in one call, and an optimizer over as many parameters
vocabulary  decode_loss over 1,000,000 words, beside plain autograd
steps       decode_loss over 10,000 steps, exact and truncated, beside plain autograd

Each prints what was checked, its time, and the peak memory of its own process; the exit status is
1 if anything differs. --quick takes small sizes. With compiled kernels none needs more than 10 GiB.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _results
import torch
import torch.nn.functional as F
from _decoders import Decoder, Shape, exact
from _decoding import distance
from _facts import free_bytes, machine
from _long_run import WINDOW, living_tensors, train
from torch import Tensor, nn

import accumext
from accumext._peak_memory import peak_memory

Checks = Iterator[str]  # what has been checked, sentence by sentence; AssertionError if it differs

CPU = torch.device("cpu")
GIB = 2**30
# Two orders of summation. A sum of 2^31 terms is made of partial sums of a few thousand.
EXACT, NORM = 1e-12, 1e-6
GROWN = 4 * 2**20  # bytes that the C library may keep of what was freed


def long_run(quick: bool) -> Checks:
    for dtype in (torch.float64, torch.bfloat16):
        found = train(dtype, 400 if quick else 10_000)
        name = str(dtype).removeprefix("torch.")
        yield (
            f"{name}: {found.windows:,} windows of {WINDOW}, {found.overflows} overflows,"
            f" {found.skipped} windows skipped as by hand; parameters off by at most"
            f" {found.steps_distance:.1e}, norms by {found.norm_distance:.1e}"
        )
        assert found.more_tensors == 0, f"{found.more_tensors} more tensors than after a tenth"
        assert found.grown_bytes <= GROWN, f"the process grew by {found.grown_bytes:,} bytes"
        yield f"{name}: no tensor more than after a tenth of the run, {found.grown_bytes:,} bytes"


# --- elements -------------------------------------------------------------------------------------

SLICE = 2**27  # elements that are filled and compared at once
BEYOND = 4099  # elements past 2^31


def elements(quick: bool) -> Checks:
    part = 2**12 if quick else SLICE
    size = 16 * part + BEYOND
    need = 2 * 2 * size + 2 * 8 * part + GIB * (not quick)
    assert free_bytes(CPU) > need, f"this takes {need / GIB:.1f} GiB"
    grad, main = (torch.empty(size, dtype=torch.bfloat16) for _ in range(2))
    counts = [len(some) for some in grad.split(part)]
    values = [1.0 + i % 8 / 8 for i in range(len(counts))]  # so that a wrong address shows

    def fill(tensor: Tensor, factor: float) -> None:
        for value, some in zip(values, tensor.split(part), strict=True):
            some.fill_(value * factor)

    def holds(tensor: Tensor, factor: float) -> None:
        for i, (value, some) in enumerate(zip(values, tensor.split(part), strict=True)):
            low, high = some.aminmax()
            want = value * factor
            assert low == high == want, f"slice {i} holds {low} to {high} instead of {want}"

    norm = math.sqrt(sum(count * value**2 for count, value in zip(counts, values)))

    def near(got: Tensor, want: float, what: str) -> None:
        assert abs(got.item() - want) <= NORM * want, f"{what} is {got.item()} instead of {want}"

    fill(grad, 1.0)
    found_inf = torch.zeros(())
    near(accumext.total_norm([grad], found_inf=found_inf), norm, "the 2-norm")
    near(accumext.total_norm([grad], norm_type=1.0), sum(map(math.prod, zip(counts, values))), "1")
    grad[-1] = 77.0
    near(accumext.total_norm([grad], norm_type=math.inf), 77.0, "the largest element")
    assert found_inf.item() == 0.0
    for place in (0, size - BEYOND - 1, size - BEYOND, size - 1):
        kept = grad[place].clone()
        grad[place] = math.nan
        found_inf.zero_()
        accumext.total_norm([grad], found_inf=found_inf)
        assert found_inf.item() == 1.0, f"NaN at {place} was not found"
        grad[place] = kept
    fill(grad, 1.0)
    yield f"total_norm of {size:,} elements; NaN found around 2^31 and at both ends"

    near(accumext.accumulate_([main], [grad], inv_scale=0.5, overwrite=True), norm / 2, "the norm")
    holds(main, 0.5)
    near(accumext.accumulate_([main], [grad]), norm * 1.5, "the norm")
    holds(main, 1.5)
    yield "accumulate_, overwriting and adding: every element and the norm"

    clip = {"inv_scale": 2.0, "max_norm": 2e9}
    near(accumext.unscale_check_clip_accumulate_([main], [grad], **clip), 2 * norm, "the norm")
    holds(main, 3.5)
    grad[-1] = math.inf
    accumext.unscale_check_clip_accumulate_([main], [grad], if_finite=True, **clip)
    holds(main, 3.5)
    grad[-1] = values[-1]
    yield "unscale_check_clip_accumulate_: every element; an inf at the end keeps all out"

    accumext.scale_([main], 2.0)
    holds(main, 7.0)
    yield "scale_: every element"

    parameter = nn.Parameter(main)
    parameter.grad = grad
    near(accumext.clip_grad_norm_([parameter], norm * 4), norm, "the norm")
    holds(grad, 1.0)
    near(accumext.clip_grad_norm_([parameter], norm / 4), norm, "the norm")
    near(accumext.total_norm([grad]) * 4, norm, "the clipped norm times 4")  # rounded alike
    yield "clip_grad_norm_: idle and clipping"


# --- tensors --------------------------------------------------------------------------------------


def tensors(quick: bool) -> Checks:
    count = 1_000 if quick else 100_000
    torch.manual_seed(0)
    sizes = torch.randint(0, 9, [count]).tolist()
    dtypes = (torch.float32, torch.bfloat16)
    grads = [torch.randint(-8, 9, [n]).to(dtypes[i % 2]) for i, n in enumerate(sizes)]
    mains = [torch.randint(-8, 9, [n]).float() for n in sizes]

    def flat(some: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.double() for tensor in some])

    def near(got: Tensor, want: Tensor, what: str) -> None:
        assert abs(got - want) <= NORM * want, f"{what} is {got} instead of {want}"

    wide, expected = flat(grads), flat(mains)
    near(accumext.total_norm(grads), wide.norm(), "the norm")
    expected += wide / 2
    near(accumext.accumulate_(mains, grads, inv_scale=0.5), expected.norm(), "the norm")
    assert torch.equal(flat(mains), expected), "accumulate_ differs"
    options = {"max_norm": 1e9, "if_finite": True}
    accumext.unscale_check_clip_accumulate_(mains, grads, **options)
    expected += wide
    assert torch.equal(flat(mains), expected), "unscale_check_clip_accumulate_ differs"
    accumext.scale_(mains, 0.25)
    assert torch.equal(flat(mains), expected / 4), "scale_ differs"
    seconds = -time.perf_counter()
    accumext.accumulate_(mains, grads, inv_scale=0.5)
    seconds += time.perf_counter()
    yield f"every operation on {count:,} tensors, exactly; accumulate_ takes {seconds * 1e3:.0f} ms"

    parameters = [nn.Parameter(tensor) for tensor in mains]
    before = flat([parameter.detach() for parameter in parameters])
    sgd = torch.optim.SGD(parameters, lr=1.0)
    opt = accumext.AccumulatingOptimizer(sgd, window=2, max_norm=1.0)
    living = living_tensors()
    for sign in (1.0, 3.0):
        for parameter, grad in zip(parameters, grads):
            parameter.grad = sign * grad.float()
        opt.accumulate()
        opt.step()
    near(torch.as_tensor(opt.last.total_norm), 2 * wide.norm(), "the window's norm")
    after = flat([parameter.detach() for parameter in parameters])
    step = 2 * wide / (2 * wide.norm() + 1e-6)
    off = float((before - after - step).norm() / before.norm())
    assert off <= NORM, f"the step is off by {off:.1e}"
    opt.zero_grad()
    yield f"a window over {count:,} parameters, clipped: off by {off:.1e}"
    assert living_tensors() <= living + 16, "tensors of the window outlive it"
    yield "no tensor of the window outlives it"


# --- decoders -------------------------------------------------------------------------------------


def decoder_of(*shape: int) -> tuple[Decoder, Tensor]:
    """Return a GRU in float64 with targets, and its first state."""
    torch.manual_seed(0)
    decoder = Decoder(Shape(*shape), "gru", CPU).cast(torch.float64)
    return decoder, torch.randn(shape[1], shape[3], dtype=torch.float64)


def loss_of(decoder: Decoder, state: Tensor, **options: Any) -> accumext.DecodeOutput:
    modules = decoder.embedding, decoder.cell, decoder.head
    return accumext.decode_loss(*modules, decoder.targets, state, **options)


def compare(out: accumext.DecodeOutput, decoder: Decoder, state: Tensor, window: int) -> str:
    """Say how near loss and gradients are to those by hand."""
    gradients = torch.autograd.grad(out.loss, decoder.parameters())
    truth = exact(decoder, out.inputs, state, window)
    assert torch.equal(out.tokens, truth.greedy), "a token is not the argmax"
    off = abs(out.loss.item() / truth.loss.item() - 1)
    far = distance(gradients, truth.gradients)
    assert off <= EXACT, f"the loss is off by {off:.1e}"
    assert far <= EXACT, f"the gradient is off by {far:.1e}"
    return f"loss off by {off:.1e}, gradient by {far:.1e}, every token the argmax"


def vocabulary(quick: bool) -> Checks:
    size = 5_000 if quick else 1_000_000
    decoder, state = decoder_of(8, 2, size, 8)
    for feedback in ("teacher", "greedy"):
        out = loss_of(decoder, state, feedback=feedback, start=size - 1)
        yield f"V={size:,}, {feedback}: {compare(out, decoder, state, window=8)}"
    out = loss_of(decoder, state, feedback="greedy", k1=2, k2=2)
    yield f"V={size:,}, k1=k2=2: {compare(out, decoder, state, window=2)}"


def steps(quick: bool) -> Checks:
    count, batch, words, size = (400, 2, 300, 16) if quick else (10_000, 2, 2_000, 16)
    decoder, state = decoder_of(count, batch, words, size)
    for window in (None, 25):
        out = loss_of(decoder, state, feedback="greedy", k1=window, k2=window)
        yield f"T={count:,}, k1=k2={window}: {compare(out, decoder, state, window or count)}"
    result = accumext.tbptt(
        lambda token, state: (decoder.head(s := decoder.cell(decoder.embedding(token), state)), s),
        decoder.targets,
        state,
        criterion=F.cross_entropy,
        k1=25,
    )
    assert torch.equal(result.tokens, out.tokens), "tbptt feeds other tokens"
    far = distance(decoder.gradients(), exact(decoder, out.inputs, state, 25).gradients)
    assert far <= EXACT, f"the gradient of tbptt is off by {far:.1e}"
    yield f"T={count:,}: the gradient of tbptt is off by {far:.1e}"

    # Of one step: states, gradients of outputs and gates, tokens, losses; logits are not kept.
    step = batch * (8 * size * 16 + 64)
    logits = 8 * batch * words
    shorter = count // 10

    def peak(length: int, window: int | None) -> int:
        decoder, state = decoder_of(length, batch, words, size)
        options = {"feedback": "greedy", "k1": window, "k2": window}
        return peak_memory(lambda: loss_of(decoder, state, **options).loss.backward())

    for window in (None, 25):
        long, short = peak(count, window), peak(shorter, window)
        grown = (long - short) / (count - shorter)
        assert grown <= step < logits, f"every step takes {grown:,.0f} bytes"
        yield (
            f"T={count:,}, k1=k2={window}: {long:,} bytes at the peak, {grown:,.0f} for a step"
            f" more, whose logits would take {logits:,}"
        )


# --- the command ----------------------------------------------------------------------------------

EXTREMES: dict[str, Callable[[bool], Checks]] = {
    "long-run": long_run,
    "elements": elements,
    "tensors": tensors,
    "vocabulary": vocabulary,
    "steps": steps,
}


def examine(name: str, quick: bool) -> dict[str, Any]:
    """Examine one extreme, in a process of its own."""
    start, checked, difference = time.perf_counter(), [], None
    try:
        for sentence in EXTREMES[name](quick):
            checked.append(sentence)
            print(f"  {sentence}", flush=True)
    except Exception as error:  # whatever it is, the next extreme can be examined
        difference = f"{type(error).__name__}: {error}"
        print(f"  {difference}", flush=True)
    return {
        "name": name,
        "checked": checked,
        "difference": difference,
        "seconds": time.perf_counter() - start,
        "peak_bytes": process_peak(),
    }


def process_peak() -> int | None:
    """Return the most bytes that this process has had in memory; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> int:
    parser = _results.parser(__doc__, "extreme", device=False)
    parser.add_argument("names", nargs="+", choices=list(EXTREMES), metavar="EXTREME")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(CPU), "quick": args.quick, "extremes": []}
    for name in args.names:
        print(name, flush=True)
        row = _results.run_apart(examine, name, args.quick)
        report["extremes"].append(row)
        _results.write(args.json, report)
        peak = f", at most {row['peak_bytes'] / GIB:.2f} GiB" if row["peak_bytes"] else ""
        print(f"  {row['seconds']:.1f} s{peak}", flush=True)
    return 1 if any(row["difference"] for row in report["extremes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
