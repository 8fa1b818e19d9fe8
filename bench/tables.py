"""Writes the measured tables of README and docs from the results in bench/results.

    python bench/tables.py            # after a benchmark has written its results there
    python bench/tables.py --check    # fails where a page says something else than they do

A table stands between two comments that name it. Below it is what it was measured with.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from _report import interval
from _timing import Spread, spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MIB, MB = 2**20, 10**6
BEGIN, END = "<!-- bench/tables.py: {} -->", "<!-- end of {} -->"

OURS, PLAIN, PER_TOKEN = "accumext", "plain autograd", "backward per token (truncated)"
BY_HAND, OURS_BF16 = "F.linear_cross_entropy, chunk by hand", "accumext, bf16"
PRODUCTS = "the head's products in torch"
LARGE, MANY, TINY = "100M in 200", "2M in 2,000", "10k in 10"
MASTERS = [f"masters_cpu_{run}" for run in range(1, 6)]  # further runs of some of the jobs
DECODER_ROLES = ("small", "wide", "many rows")
STEPS = ("unscale, clip", "unscale", "clip")
INSIDE = "docs/decoder_inside.md"
# Two threads with the C library as it comes; one and two where it is told to keep freed memory.
AVX2, AVX2_KEPT = "decoder_avx2_2", ("decoder_avx2_1_kept", "decoder_avx2_2_kept")


# --- results -----------------------------------------------------------------------------------


def result(name: str) -> dict[str, Any]:
    """A file of bench/results."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def figure(name: str, text: str) -> dict[str, Any]:
    """Return the row of a file for one figure."""
    (found,) = (row for row in result(name)["figures"] if row["figure"] == text)
    return found


def of_figure(row: dict[str, Any]) -> str:
    """A ratio with its quartiles."""
    q1, q3 = row["quartiles"]
    return interval(Spread(q1, row["measured"], q3))


def case(name: str, role: str) -> dict[str, Any]:
    """The decoder's case of a role."""
    (found,) = (entry for entry in result(name)["cases"] if entry["role"] == role)
    return found


def times_as_fast(entry: dict[str, Any], mine: str, other: str) -> Spread | None:
    """The ratio, over the repetitions in which both ran; None where one did not."""
    both = [entry["contenders"].get(name, {}).get("seconds") for name in (mine, other)]
    if None in both:
        return None
    return spread([b / a for a, b in zip(*both) if a is not None and b is not None])


def provenance(name: str, command: str) -> str:
    """Return the command, versions and machine of a measurement."""
    content = result(name)
    facts = content.get("machine") or content["versions"]  # the demo's record has no more
    words = [f"torch {facts['torch']}", f"Python {facts['python']}"]
    if "accumext" in facts:
        words.append(f"accumext {facts['accumext']}")
    if "cpu" in facts:
        machine = f"{facts['cpu']} ({facts['instruction set']}), {facts['threads']} threads"
        words.insert(0, facts.get("gpu", machine))
    return f"`python {command}`: {', '.join(words)}."


# --- tables ------------------------------------------------------------------------------------

Lines = list[str]


def markdown(*rows: Sequence[str]) -> Lines:
    """The rows of a table; the first one is its head."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def demo() -> Lines:
    rows = []
    for row in result("demo_cpu")["comparison"]:
        error = row["gradient_distance"]
        shown = f"{error:.2f}" if error > 0.01 else f"{error:.0e}".replace("e-0", "e-")
        peak = f"{row['peak_memory'] / MB:.0f} MB"
        rows.append((row["name"], f"{row['seconds']:.2f}", peak, shown))
    head = ("", "seconds per batch", "peak memory", "gradient error")
    return markdown(head, *rows)


def sizes(role: str) -> str:
    found = case("decoder_cpu", role)
    return f"T={found['steps']}, B={found['batch']}, H={found['size']}"


def decoder_ratios(*rows: tuple[str, str, str], of_avx2: bool = False) -> Lines:
    """Ranges of the medians of two runs with AVX-512; a row is its label, a contender, and what it
    is beside. With AVX2, before them, medians with one thread and with two."""
    runs = ("decoder_cpu", "decoder_cpu_again")

    def cell(role: str, mine: str, other: str) -> str:
        found = [times_as_fast(case(run, role), mine, other) for run in runs]
        if None in found:
            return ""
        low, high = (f"{f([s.median for s in found if s]):.1f}" for f in (min, max))
        return low if low == high else f"{low}-{high}"

    def with_avx2(role: str, other: str, *sources: str) -> str:
        found = [times_as_fast(case(source, role), OURS, other) for source in sources]
        return " / ".join(f"{s.median:.1f}" for s in found if s)

    body = []
    if of_avx2:
        for label, *which in (
            ("plain PyTorch, AVX2", PLAIN, AVX2),
            ("plain PyTorch that keeps its heap, AVX2", PLAIN, *AVX2_KEPT),
            (f"{PRODUCTS}, AVX2", PRODUCTS, *AVX2_KEPT),
        ):
            body.append((label, *(with_avx2(role, *which) for role in DECODER_ROLES)))
    body += [(label, *(cell(role, *both) for role in DECODER_ROLES)) for label, *both in rows]
    return markdown(("times as fast as", *map(sizes, DECODER_ROLES)), *body)


def decoder_times() -> Lines:
    cases = [case("decoder_cpu", role)["contenders"] for role in DECODER_ROLES]
    names = {
        PLAIN: PLAIN,
        PER_TOKEN: PER_TOKEN,
        BY_HAND: "`F.linear_cross_entropy`, chunked by hand",
        OURS: OURS,
        OURS_BF16: "accumext, bfloat16 autocast",
        PRODUCTS: PRODUCTS,
    }
    rows = [
        (
            label,
            *(
                interval(Spread(**found[name]["spread"]), 1e3, 0) if name in found else ""
                for found in cases
            ),
        )
        for name, label in names.items()
    ]
    return markdown(("ms", *map(sizes, DECODER_ROLES)), *rows)


def decoder_by_shape() -> Lines:
    """Medians in ms where the heap is kept; before those with two threads, those by default."""

    def medians(source: str) -> dict[str, dict[str, str]]:
        return {
            shape_of(entry): {
                name: f"{1e3 * way['spread']['median']:,.0f}"
                for name, way in entry["contenders"].items()
            }
            for entry in result(source)["cases"]
        }

    rows, fresh = [], medians(AVX2)
    for source, threads in zip(AVX2_KEPT, "12"):
        for shape, ways in medians(source).items():
            both = [ways[PLAIN], ways[OURS]]
            if threads == "2":
                both = [f"{fresh[shape][n]} / {ways[n]}" for n in (PLAIN, OURS)]
            rows.append((shape, threads, *both, ways[OURS_BF16], ways[PRODUCTS]))
    head = ("T, B, H, V", "threads", "plain PyTorch", OURS, "accumext in bfloat16", "the products")
    return markdown(head, *rows)


def shape_of(entry: dict[str, Any]) -> str:
    return ", ".join(f"{entry[name]:,}" for name in ("steps", "batch", "size", "vocabulary"))


def known() -> Lines:
    """Medians in ms of known inputs: accumext / the better of PyTorch's two ways."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    for threads in (1, 2):
        for job in result(f"known_avx2_{threads}")["jobs"]:
            *shape, layers = job["job"].removeprefix("known, ").split(", ")
            medians = {way: 1e3 * statistics.median(times) for way, times in job["seconds"].items()}
            mine, best = medians.pop(OURS), min(medians.values())
            row = found.setdefault(", ".join(f"{int(size):,}" for size in shape), {})
            row[threads, layers] = " / ".join(f"{ms:,.{mine < 100:d}f}" for ms in (mine, best))
    columns = {
        (threads, layers): f"{of_layers}, {of_threads}"
        for threads, of_threads in ((1, "1 thread"), (2, "2 threads"))
        for layers, of_layers in (("1", "one layer"), ("2", "two layers"))
    }
    rows = [(shape, *(row.get(column, "") for column in columns)) for shape, row in found.items()]
    return markdown(("T, B, H, V", *columns.values()), *rows)


def loops(
    *rows: tuple[str, str], source: str = "loops_cpu", usual: str = "the loop", ours: str
) -> Lines:
    """A row is its label and its job, whose first way is the usual one."""
    body = []
    jobs = {job["job"]: job for job in result(source)["jobs"]}
    for label, name in rows:
        seconds, peaks = jobs[name]["seconds"], jobs[name]["peak_bytes"]
        first = next(iter(seconds))
        loop, mine = (statistics.median(seconds[who]) for who in (first, OURS))
        ratio = spread([a / b for a, b in zip(seconds[first], seconds[OURS])])
        both = f"{peaks[first] / MIB:.1f}, {peaks[OURS] / MIB:.1f} MiB"
        body.append(
            (
                label,
                f"{loop * 1e3:.0f} ms",
                f"{mine * 1e3:.0f} ms",
                interval(ratio, 1, 1 + (ratio.median < 1.0)),
                both,
            )
        )
    return markdown(("", usual, ours, "times as fast", "peaks"), *body)


def rollout() -> Lines:
    (job,) = (job for job in result("loops_cpu")["jobs"] if job["job"] == "rollout")
    labels = {
        "the loop": "the loop, with the graph of all steps",
        OURS: "`rollout`, by default in segments of 72 steps",
        "accumext, checkpoint=32": "`checkpoint=32`",
        "accumext, checkpoint=16": "`checkpoint=16`",
        "accumext, memory_budget=3145728": "`memory_budget=3 * 2**20`",
    }
    rows = []
    for name, label in labels.items():
        seconds = job["seconds"][name]
        ratio = spread([a / b for a, b in zip(seconds, job["seconds"]["the loop"])]).median
        peak = job["peak_bytes"][name] / MIB
        rows.append((label, interval(spread(seconds), 1e3, 0), f"{ratio:.2f}", f"{peak:.1f}"))
    return markdown(("", "ms", "times the time of the loop", "peak, MiB"), *rows)


def decoder_on_a_gpu() -> Lines:
    found = case("decoder_h100", "large")["contenders"]
    rows = []
    for name in (PLAIN, PER_TOKEN, "checkpointed head", OURS, PRODUCTS):
        ratio = times_as_fast(case("decoder_h100", "large"), OURS, name)
        peak = found[name].get("peak_bytes")
        rows.append(
            (
                name,
                interval(Spread(**found[name]["spread"]), 1e3, 1),
                interval(ratio, 1, 1) if ratio and name != OURS else "",
                "" if peak is None else f"{peak / MIB:.0f}",
            )
        )
    return markdown(("", "ms", "accumext is times as fast", "peak, MiB"), *rows)


def gradients(
    head: Sequence[str], *rows: tuple[str, ...], allowed: bool = False, source: str = "cpu"
) -> Lines:
    """A row is its cells, and last the figure that it shows."""
    body = []
    for *cells, text in rows:
        found = figure(source, text)
        body.append((*cells, of_figure(found), *([f"{found['allowed']:.2f}"] if allowed else [])))
    return markdown(head, *body)


def gradients_rounded(*rows: tuple[str, str]) -> Lines:
    """A row is its label and its figure, which is shown without quartiles."""
    body = [(label, f"{figure('cpu', text)['measured']:.1f}") for label, text in rows]
    return markdown(("", "times as fast as stock PyTorch"), *body)


def steps(source: str = "cpu", shapes: Sequence[str] = (LARGE, MANY, TINY)) -> Lines:
    """A complete step of the wrapper, and what the memory allows for the large one."""
    labels = {
        LARGE: "100M elements in 200 tensors",
        MANY: "2M elements in 2,000 tensors",
        TINY: "10,000 elements in 10 tensors",
    }
    rows = []
    for optimizer in ("AdamW fused", "SGD foreach"):
        label = optimizer.replace(" ", ", ")
        for shape in shapes:
            words = labels[shape]
            found = [
                figure(source, f"boundary, {optimizer}: {job}, {shape}: accumext over torch")
                for job in STEPS
            ]
            rows.append((f"{label}; {words}", *(f"{row['measured']:.2f}" for row in found)))
            if shape == LARGE:
                rows.append(("its limit", *(f"{row['allowed']:.2f}" for row in found)))
    head = ("times as fast as stock PyTorch", "scaler and clip", "scaler alone", "clip alone")
    return markdown(head, *rows)


def masters() -> Lines:
    """Shares of the memory's speed: the median of several runs, the lowest and the highest."""
    rows = []
    for label, job in (
        ("`accumulate_` of bfloat16 into float32", "accumulate_ bf16, {}: accumext"),
        ("`accumulate_` of float16 into float32", "accumulate_ fp16, {}: accumext"),
        (
            "`accumulate_(overwrite=True)` of bfloat16, the first of a window",
            "accumulate_ overwrite bf16, {}: accumext",
        ),
        (
            "`copy_rounded_` of float32 into bfloat16, to nearest",
            "copy_rounded_ bf16, {}: accumext",
        ),
        ("the same, stochastically", "copy_rounded_ bf16, {}: accumext, stochastic"),
    ):
        text = f"{job.format(LARGE)} over the limit"
        shares = [figure(run, text)["measured"] for run in ("cpu", *MASTERS)]
        middle, low, high = statistics.median(shares), min(shares), max(shares)
        rows.append((label, f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    return markdown(("100M elements in 200 tensors", "share of the limit"), *rows)


def programs() -> Lines:
    """Medians of the runs, and the range of their ratios."""
    labels = {
        ("attention_seq2seq", "teacher"): "attention, teacher-forced",
        ("attention_seq2seq", "greedy"): "attention, greedy",
        ("lstm_seq2seq", ""): "two-layer LSTMs",
        ("word_language_model", ""): "language model, a chunk",
        ("self_critical_captioner", ""): "self-critical captions",
        ("recurrent_forecaster", ""): "forecaster",
        ("transformer_decoder", ""): "Transformer with a cache",
    }
    entries = {(e["program"], e["title"]): e["runs"] for e in result("programs_cpu")["programs"]}
    rows = []
    for key, label in labels.items():
        runs, cells = entries[key], []
        for way in ("plain PyTorch", OURS):
            seconds, peak = (
                statistics.median(run[f"{way}, {unit}"] for run in runs) for unit in ("s", "MB")
            )
            cells.append(f"{seconds:.2f} s, {peak:.0f} MB")
        ratios = [run["plain PyTorch, s"] / run["accumext, s"] for run in runs]
        low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        rows.append((label, *cells, low if low == high else f"{low}-{high}"))
    return markdown(("", "plain PyTorch", OURS, "times as fast"), *rows)


# --- where they stand --------------------------------------------------------------------------


# Shapes of bench/_window_jobs.py, in words.
WINDOW_SHAPES = {
    (10**4, 10): "10 tensors of 1,000",
    (2 * 10**6, 2000): "2,000 of 1,000",
    (3 * 10**7, 60): "60 of 500,000",
    (9_477_120, 144): "transformer of 12 layers",
}
WINDOW_LOOPS = {
    "accumext, backward": "`opt.backward`",
    "accumext, usual loop": "your own `loss.backward()`",
    "Accelerate": "Accelerate",
}


def window_job(entry: dict[str, Any]) -> str:
    """Return the name of a job of whole windows, without its shape."""
    return str(entry["job"]).removesuffix(", transformer")


def windows(loop: str, entry: dict[str, Any]) -> float:
    """The time of a window over that of the loop by hand, in the median."""
    ratio = times_as_fast(entry, "by hand", loop)
    return math.nan if ratio is None else ratio.median


def windows_in_short() -> Lines:
    """Ranges over all optimizers and windows in full precision; sets of gradients beside."""
    rows = []
    for shape, label in WINDOW_SHAPES.items():
        jobs = [
            entry
            for entry in result("windows_cpu")["jobs"]
            if (entry["elements"], entry["tensors"]) == shape and "bf16" not in entry["job"]
        ]
        ratios = [[windows(loop, entry) for entry in jobs] for loop in WINDOW_LOOPS]
        (sgd,) = (entry for entry in jobs if window_job(entry) == "window of 4, SGD")
        sets = [sgd["contenders"][n]["sets_of_gradients"] for n in ("by hand", *WINDOW_LOOPS)]
        times = (f"{min(each):.2f}-{max(each):.2f}" for each in ratios)
        rows.append((label, *times, " / ".join(f"{n:.1f}" for n in sets[:3])))
    head = ("time of a window over the loop by hand", *WINDOW_LOOPS.values())
    return markdown((*head, "sets of gradients: by hand, and the first two"), *rows)


def windows_in_full() -> Lines:
    """Medians of every job; for bfloat16 `accumulate_in_backward` is the last."""
    jobs = result("windows_cpu")["jobs"]
    rows = []
    for name in dict.fromkeys(window_job(e) for e in jobs if e["job"].startswith("window")):
        cells = []
        for shape in WINDOW_SHAPES:
            found = [
                entry
                for entry in jobs
                if (entry["elements"], entry["tensors"]) == shape and window_job(entry) == name
            ]
            loops = [*WINDOW_LOOPS, *["accumext, in backward"] * ("bf16" in name)]
            cells.append(" / ".join(f"{windows(n, e):.2f}" for e in found for n in loops))
        rows.append((name, *cells))
    return markdown(("`opt.backward` / own loop / Accelerate", *WINDOW_SHAPES.values()), *rows)


class Table(NamedTuple):
    """A table of a page, the result that it shows, and the command that makes another one."""

    page: str
    result: str
    command: str
    lines: Callable[[], Lines]


def boundary(kind: str, shape: str) -> str:
    return f"unscale, check, norm, clip, {shape}: accumext, {kind} over torch foreach"


def clipping(what: str, shape: str) -> str:
    return f"clip_grad_norm_, {what}, {shape}: accumext over torch foreach"


def accumulate(dtype: str, shape: str, other: str = "torch: cast, unscale, add, norm") -> str:
    return f"accumulate_ {dtype}, {shape}: accumext over {other}"


def of_copy(operation: str, way: str = "") -> str:
    return f"{operation}, {LARGE}: accumext{way} over torch.copy_'s bandwidth"


ACCUMULATE, DECODER = "bench/accumulate.py", "bench/decoder.py"
WINDOWS = f"{ACCUMULATE} --jobs window"
IN_PLACE = "unscale, check, norm, clip, in place"
FOLDED = "the same, with the factor applied as the optimizer reads"
STOCK = "`unscale_` and `clip_grad_norm_(foreach=True)`"
COPY = "`copy_`, by bytes"

TABLES = {
    "demo": Table("README.md", "demo_cpu", "-m accumext demo", demo),
    "decoder": Table(
        "README.md",
        AVX2,
        DECODER,
        partial(
            decoder_ratios,
            ("plain PyTorch, AVX-512", OURS, PLAIN),
            (f"{PRODUCTS}, AVX-512", OURS, PRODUCTS),
            of_avx2=True,
        ),
    ),
    "gradients": Table(
        "README.md",
        "cpu",
        ACCUMULATE,
        partial(
            gradients_rounded,
            ("unscale, check, norm and clip, in place", boundary("materialised", LARGE)),
            (
                "the same, with the factor applied by a fused optimizer as it reads the gradient",
                boundary("folded", LARGE),
            ),
            ("`clip_grad_norm_` when there is nothing to clip", clipping("nothing to clip", LARGE)),
            (
                "accumulate float16 into float32 with unscaling, check and norm",
                accumulate("fp16", LARGE),
            ),
            (
                "unscale, check, norm and clip of 2,000 tensors of 1,000 elements",
                boundary("materialised", MANY),
            ),
        ),
    ),
    "windows": Table("README.md", "windows_cpu", WINDOWS, windows_in_short),
    "windows in full": Table("docs/optimizer.md", "windows_cpu", WINDOWS, windows_in_full),
    "decoder by shape": Table(INSIDE, AVX2, f"{DECODER} --shape ...", decoder_by_shape),
    "known": Table(INSIDE, "known_avx2_2", "bench/loops.py known", known),
    "decoder times": Table(INSIDE, "decoder_cpu", DECODER, decoder_times),
    "generate": Table(
        INSIDE,
        "loops_cpu",
        "bench/loops.py generate",
        partial(
            loops,
            ("greedy", "generate, greedy"),
            ("samples", "generate, samples"),
            ("samples, `top_k=50`", "generate, top_k=50"),
            ("samples, `top_p=0.9`", "generate, top_p=0.9"),
            ("beam search, K = 4", "generate, 4 beams"),
            ours="`generate`",
        ),
    ),
    "rollout": Table(INSIDE, "loops_cpu", "bench/loops.py rollout", rollout),
    "programs": Table("docs/programs.md", "programs_cpu", "bench/programs.py", programs),
    "large lists": Table(
        "docs/kernels.md",
        "cpu",
        ACCUMULATE,
        partial(
            gradients,
            ("operation (100M elements in 200 tensors)", "times as fast as", "", "limit"),
            (
                "`total_norm` of float32, with the check",
                "a plain C++ loop that reads",
                f"total_norm fp32, {LARGE}: accumext over the limit",
            ),
            (IN_PLACE, STOCK, boundary("materialised", LARGE)),
            (FOLDED, STOCK, boundary("folded", LARGE)),
            ("`clip_grad_norm_`, nothing to clip", "torch's", clipping("nothing to clip", LARGE)),
            ("`clip_grad_norm_`, clipping", "torch's", clipping("clipping", LARGE)),
            (
                "`accumulate_` of bfloat16 into float32, check, norm",
                "`add_` alone",
                accumulate("bf16", LARGE, "torch add_ alone"),
            ),
            (
                "`accumulate_` of float16 into float32, check, norm",
                "`add_` alone",
                accumulate("fp16", LARGE, "torch add_ alone"),
            ),
            ("`accumulate_` of bfloat16", "cast, unscale, add, norm", accumulate("bf16", LARGE)),
            ("`accumulate_` of float16", "cast, unscale, add, norm", accumulate("fp16", LARGE)),
            allowed=True,
        ),
    ),
    "masters": Table(
        "docs/kernels.md",
        "cpu",
        "bench/accumulate.py --jobs round accumulate --shape 1e8/200",
        masters,
    ),
    "many tensors": Table(
        "docs/kernels.md",
        "cpu",
        ACCUMULATE,
        partial(
            gradients,
            (
                "operation (2,000 tensors of 1,000 elements)",
                "times as fast as stock PyTorch with foreach",
            ),
            ("`total_norm`", f"total_norm fp32, {MANY}: accumext over torch foreach"),
            (IN_PLACE, boundary("materialised", MANY)),
            (FOLDED, boundary("folded", MANY)),
            ("`clip_grad_norm_`, nothing to clip", clipping("nothing to clip", MANY)),
            ("`clip_grad_norm_`, clipping", clipping("clipping", MANY)),
            ("`accumulate_` of bfloat16", accumulate("bf16", MANY)),
            ("`accumulate_` of float16", accumulate("fp16", MANY)),
        ),
    ),
    "steps": Table("docs/kernels.md", "cpu", ACCUMULATE, steps),
    "lists on a GPU": Table(
        "docs/kernels.md",
        "h100",
        f"{ACCUMULATE} --device cuda",
        partial(
            gradients,
            ("100M elements in 200 tensors", "times as fast as", ""),
            ("`total_norm` of float32, with the check", COPY, of_copy("total_norm fp32")),
            (IN_PLACE, COPY, of_copy("unscale, check, norm, clip", ", materialised")),
            (
                "`accumulate_` of bfloat16 into float32, check, norm",
                COPY,
                of_copy("accumulate_ bf16"),
            ),
            (
                "`accumulate_` of float16 into float32, check, norm",
                COPY,
                of_copy("accumulate_ fp16"),
            ),
            (IN_PLACE, STOCK, boundary("materialised", LARGE)),
            (FOLDED, STOCK, boundary("folded", LARGE)),
            source="h100",
        ),
    ),
    "steps on a GPU": Table(
        "docs/kernels.md",
        "h100",
        f"{ACCUMULATE} --device cuda",
        partial(steps, "h100", (LARGE, TINY)),
    ),
    "decoder on a GPU": Table(
        "docs/kernels.md", "decoder_h100", f"{DECODER} --device cuda", decoder_on_a_gpu
    ),
    "loops on a GPU": Table(
        "docs/kernels.md",
        "loops_h100",
        "bench/loops.py --device cuda",
        partial(
            loops,
            ("`generate`, greedy", "generate, greedy"),
            ("`generate`, samples", "generate, samples"),
            ("`generate`, `top_k=50`", "generate, top_k=50"),
            ("`generate`, `top_p=0.9`", "generate, top_p=0.9"),
            ("`generate`, beam search, K = 4", "generate, 4 beams"),
            ("`rollout`", "rollout"),
            ("`decode_loss`, known tokens, `nn.LSTM`", "teacher, nn.LSTM"),
            ("`decode_loss`, known tokens, `nn.GRU`", "teacher, nn.GRU"),
            ("`decode_loss`, known tokens, a function", "teacher, a function"),
            source="loops_h100",
            usual="by hand",
            ours=OURS,
        ),
    ),
}


def written(page: str) -> str:
    """The text of a page with its tables as the results say."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in TABLES.items():
        if table.page != page:
            continue
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} has no place for the table {name!r}: {begin} and {end}")
        below = textwrap.wrap(provenance(table.result, table.command), 120, break_on_hyphens=False)
        text = before + "\n".join([begin, "", *table.lines(), "", *below, "", end]) + after
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail where it differs")
    args = parser.parse_args()
    differ = []
    for page in dict.fromkeys(table.page for table in TABLES.values()):
        text = written(page)
        if text != (ROOT / page).read_text(encoding="utf-8"):
            differ.append(page)
            if not args.check:
                (ROOT / page).write_text(text, encoding="utf-8")
    if args.check and differ:
        sys.exit(f"python bench/tables.py would change {', '.join(differ)}")


if __name__ == "__main__":
    main()
