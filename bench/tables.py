"""Writes the measured tables of README and docs from the results in bench/results.

    python bench/tables.py            # after a benchmark has written its results there
    python bench/tables.py --check    # fails if a page says something else than they do

A table stands between two comments that name it. Below it is what it was measured with.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _trainers
from _report import interval
from _timing import Spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PLACE = re.compile(r"<!-- bench/tables\.py: (.+?) -->.*?<!-- end of \1 -->", re.DOTALL)
MIB, MB = 2**20, 10**6

OURS, PLAIN, PER_TOKEN = "accumext", "plain autograd", "backward per token (truncated)"
OURS_BF16, PRODUCTS = "accumext, bf16", "the head's products in torch"
LARGE, MANY, TINY = "100M in 200", "2M in 2,000", "10k in 10"
MASTERS = ("cpu", *(f"masters_cpu_{run}" for run in range(1, 6)))  # further runs of some jobs
ROLES = ("small", "wide", "many rows")
# Two threads with the C library as it comes; one and two if it is told to keep freed memory.
AVX2, AVX2_KEPT = "decoder_avx2_2", ("decoder_avx2_1_kept", "decoder_avx2_2_kept")
PRECISION = ("precision_avx512_1_kept", "precision_avx2_1_kept")
AVX512, AVX512_KEPT = "decoder_avx512_2", "decoder_avx512_2_kept"


# --- results -----------------------------------------------------------------------------------


@functools.cache
def result(name: str) -> dict[str, Any]:
    """Return the content of a file of bench/results."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def one(entries: Iterable[dict[str, Any]], **known: str) -> dict[str, Any]:
    """Return the only entry with these values."""
    (found,) = (entry for entry in entries if known.items() <= entry.items())
    return found


def figure(name: str, text: str) -> dict[str, Any]:
    return one(result(name)["figures"], figure=text)


def contenders(name: str, **known: str) -> dict[str, dict[str, Any]]:
    """Return the rows with these values, by their contenders."""
    return {row["contender"]: row for row in result(name)["rows"] if known.items() <= row.items()}


def median(row: dict[str, Any], quantity: str = "seconds") -> float:
    """Return the middle one of three quartiles."""
    return Spread(*row[quantity]).median


def span(values: Sequence[float], digits: int = 1) -> str:
    """Return the lowest and the highest."""
    low, high = (f"{of(values):.{digits}f}" for of in (min, max))
    return low if low == high else f"{low}-{high}"


def provenance(name: str, command: str) -> str:
    """Return the command, versions and machine of a measurement."""
    content = result(name)
    facts = content["machine"]
    words = [
        f"{name} {facts[name.lower()]}"
        for name in ("torch", "Python", "accumext")
        if name.lower() in facts
    ]
    if "cpu" in facts:
        machine = f"{facts['cpu']} ({facts['instruction set']}), {facts['threads']} threads"
        words.insert(0, facts.get("gpu", machine))
    return f"`python {command}`: {', '.join(words)}."


# --- tables ------------------------------------------------------------------------------------

Lines = list[str]


def markdown(*rows: Sequence[str]) -> Lines:
    """Return the lines of a table, of whose rows the first is the head."""
    lines = ["|".join(("", *(f" {cell} " if cell else " " for cell in row), "")) for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def by_role(head: str, rows: dict[str, Callable[[str], str]]) -> Lines:
    """Make a column for each of the decoder's shapes; a row says what its cell is."""
    cases = [contenders(AVX2, role=role)[OURS] for role in ROLES]
    sizes = (f"T={found['steps']}, B={found['batch']}, H={found['size']}" for found in cases)
    return markdown((head, *sizes), *((label, *map(of, ROLES)) for label, of in rows.items()))


def decoder_ratios(rows: dict[str, tuple[str, tuple[str, ...]]]) -> Lines:
    """Show how many times as fast as another contender accumext is, in the median."""

    def cell(other: str, runs: tuple[str, ...], role: str) -> str:
        found = [contenders(run, role=role)[other] for run in runs]
        return " / ".join(f"{median(row, 'accumext_times_faster'):.1f}" for row in found)

    return by_role("times as fast as", {label: partial(cell, *row) for label, row in rows.items()})


def decoder_times() -> Lines:
    names = {
        PLAIN: PLAIN,
        PER_TOKEN: PER_TOKEN,
        "F.linear_cross_entropy, chunk by hand": "`F.linear_cross_entropy`, chunked by hand",
        OURS: OURS,
        OURS_BF16: "accumext, bfloat16 autocast",
        PRODUCTS: PRODUCTS,
    }

    def time(name: str, role: str) -> str:
        return interval(Spread(*contenders(AVX512, role=role)[name]["seconds"]), 1e3, 0)

    times = {label: partial(time, name) for name, label in names.items()}
    return by_role("ms", times)


def decoder_by_shape() -> Lines:
    """Show medians in ms if the heap is kept; before those with two threads, those by default."""

    def medians(source: str) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for row in result(source)["rows"]:
            shape = ", ".join(f"{row[n]:,}" for n in ("steps", "batch", "size", "vocabulary"))
            if "seconds" in row:
                ways = found.setdefault(shape, {})
                ways[row["contender"]] = f"{1e3 * median(row):,.0f}"
        return found

    rows, fresh = [], medians(AVX2)
    for source, threads in zip(AVX2_KEPT, "12"):
        for shape, ways in medians(source).items():
            both = [ways[PLAIN], ways[OURS]]
            if threads == "2":
                both = [f"{fresh[shape][n]} / {ways[n]}" for n in (PLAIN, OURS)]
            rows.append((shape, threads, *both, ways[OURS_BF16], ways[PRODUCTS]))
    head = ("T, B, H, V", "threads", "plain PyTorch", OURS, "accumext in bfloat16", "the products")
    return markdown(head, *rows)


def decoder_on_a_gpu() -> Lines:
    rows, found = [], contenders("decoder_h100", role="large")
    for name in (PLAIN, PER_TOKEN, "checkpointed head", OURS, PRODUCTS):
        row = found[name]
        faster = interval(Spread(*row["accumext_times_faster"]), 1, 1) if name != OURS else ""
        peak = f"{row['peak_bytes'] / MIB:.0f}" if "peak_bytes" in row else ""
        rows.append((name, interval(Spread(*row["seconds"]), 1e3, 1), faster, peak))
    return markdown(("", "ms", "accumext is times as fast", "peak, MiB"), *rows)


def known_cells(source: str) -> dict[tuple[str, str, str], str]:
    """Return medians in ms of known inputs, accumext / the better of PyTorch's two ways, by shape,
    kind and number of layers."""
    found = {}
    for job in dict.fromkeys(row["job"] for row in result(source)["rows"]):
        kind, *shape, layers = job.split(", ")
        medians = {way: 1e3 * median(row) for way, row in contenders(source, job=job).items()}
        mine = medians[OURS]
        best = min(ms for way, ms in medians.items() if not way.startswith(OURS))
        cell = " / ".join(f"{ms:,.{mine < 100:d}f}" for ms in (mine, best))
        found[", ".join(f"{int(size):,}" for size in shape), kind, layers] = cell
    return found


LAYERS = {"1": "one layer", "2": "two layers"}


def known() -> Lines:
    """Show known inputs in float32, by threads and layers."""
    by_threads = {threads: known_cells(f"known_avx2_{threads}") for threads in (1, 2)}
    head = [
        f"{layers}, {threads}"
        for threads in ("1 thread", "2 threads")
        for layers in LAYERS.values()
    ]
    rows = [
        (
            shape,
            *(by_threads[t].get((shape, "known", layers), "") for t in (1, 2) for layers in LAYERS),
        )
        for shape in dict.fromkeys(shape for shape, *_ in by_threads[1])
    ]
    return markdown(("T, B, H, V", *head), *rows)


def known_with_amx() -> Lines:
    """Show known inputs by precision and layers."""
    cells = known_cells("known_amx_2")
    kinds = {"known": "float32", "known in bfloat16": "bfloat16"}
    head = [f"{layers}, {dtype}" for dtype in kinds.values() for layers in LAYERS.values()]
    rows = [
        (shape, *(cells[shape, kind, layers] for kind in kinds for layers in LAYERS))
        for shape in dict.fromkeys(shape for shape, *_ in cells)
    ]
    return markdown(("T, B, H, V", *head), *rows)


def precision() -> Lines:
    """Show the time over that of float32, of modules or under autocast, whichever is more."""
    calls = {
        "generate": "`generate`",
        "greedy": "`decode_loss`, greedy",
        "teacher": "`decode_loss`, known tokens",
    }
    dtypes = ("float16", "bfloat16")

    def over_float32(call: str, rows: int, dtype: str, run: str) -> float:
        ways = contenders(run, job=f"precision, {call}, {rows}")
        return max(median(ways[f"{dtype}{how}"], "time_over_first") for how in ("", ", autocast"))

    def cell(call: str, rows: int, dtype: str) -> str:
        return " / ".join(f"{over_float32(call, rows, dtype, run):.2f}" for run in PRECISION)

    body = [
        (str(rows), *(cell(call, rows, dtype) for call in calls for dtype in dtypes))
        for rows in (1, 2, 4, 6, 8, 16, 32, 64)
    ]
    return markdown(("rows", *(f"{of}, {d}" for of in calls.values() for d in dtypes)), *body)


def loops(source: str, usual: str, ours: str, rows: dict[str, str]) -> Lines:
    """Show jobs by their labels; the first way of each is the usual one."""
    body = []
    for label, name in rows.items():
        ways = contenders(source, job=name)
        both_ways = next(iter(ways.values())), ways[OURS]
        times = Spread(*ways[OURS]["times_faster"])
        both = [f"{median(way) * 1e3:.0f} ms" for way in both_ways]
        peaks = ", ".join(f"{way['peak_bytes'] / MIB:.1f}" for way in both_ways)
        faster = interval(times, 1, 1 + (times.median < 1.0))
        body.append((label, *both, faster, f"{peaks} MiB"))
    return markdown(("", usual, ours, "times as fast", "peaks"), *body)


def rollout() -> Lines:
    ways, rows = contenders("rollout_cpu", job="rollout"), []
    for name, label in {
        "the loop": "the loop, with the graph of all steps",
        OURS: "`rollout`, which keeps it, too",
        "accumext, checkpoint=32": "`checkpoint=32`",
        "accumext, checkpoint=16": "`checkpoint=16`",
        "accumext, memory_budget=3145728": "`memory_budget=3 * 2**20`",
    }.items():
        way = ways[name]
        seconds, peak = interval(Spread(*way["seconds"]), 1e3, 0), way["peak_bytes"] / MIB
        rows.append((label, seconds, f"{median(way, 'time_over_first'):.2f}", f"{peak:.1f}"))
    return markdown(("", "ms", "times the time of the loop", "peak, MiB"), *rows)


def gradients(source: str, head: Sequence[str], *rows: tuple[str, ...]) -> Lines:
    """Show rows that are cells and last a figure; beside it what the memory allows."""
    body = []
    for *cells, text in rows:
        found = figure(source, text)
        q1, q3 = found["quartiles"]
        shown = interval(Spread(q1, found["measured"], q3))
        allowed = [f"{found['allowed']:.2f}"] if head[-1] == "limit" else []
        body.append((*cells, shown, *allowed))
    return markdown(head, *body)


def steps(source: str, labels: dict[str, str]) -> Lines:
    """Show a complete step of the wrapper, and what the memory allows for the large one."""
    rows = []
    for optimizer in ("AdamW fused", "SGD foreach"):
        for shape, words in labels.items():
            found = [
                figure(source, f"boundary, {optimizer}: {job}, {shape}: accumext over torch")
                for job in ("unscale, clip", "unscale", "clip")
            ]
            label = f"{optimizer.replace(' ', ', ')}; {words}"
            rows.append((label, *(f"{row['measured']:.2f}" for row in found)))
            if shape == LARGE:
                rows.append(("its limit", *(f"{row['allowed']:.2f}" for row in found)))
    head = ("times as fast as stock PyTorch", "scaler and clip", "scaler alone", "clip alone")
    return markdown(head, *rows)


def masters() -> Lines:
    """Show shares of the memory's speed: the median of several runs, the lowest and the highest."""
    rows = []
    for label, job, ours in (
        ("`accumulate_` of bfloat16 into float32", "accumulate_ bf16", OURS),
        ("`accumulate_` of float16 into float32", "accumulate_ fp16", OURS),
        (
            "`accumulate_(overwrite=True)` of bfloat16, the first of a window",
            "accumulate_ overwrite bf16",
            OURS,
        ),
        ("`copy_rounded_` of float32 into bfloat16, to nearest", "copy_rounded_ bf16", OURS),
        ("the same, stochastically", "copy_rounded_ bf16", "accumext, stochastic"),
    ):
        text = f"{job}, {LARGE}: {ours} over the limit"
        shares = [figure(run, text)["measured"] for run in MASTERS]
        middle, low, high = statistics.median(shares), min(shares), max(shares)
        rows.append((label, f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    return markdown(("100M elements in 200 tensors", "share of the limit"), *rows)


def programs() -> Lines:
    """Show medians of the runs, and the range of their ratios."""
    rows = []
    for (program, title), label in {
        ("attention_seq2seq", "teacher"): "attention, teacher-forced",
        ("attention_seq2seq", "greedy"): "attention, greedy",
        ("lstm_seq2seq", ""): "two-layer LSTMs",
        ("word_language_model", ""): "language model, a chunk",
        ("self_critical_captioner", ""): "self-critical captions",
        ("recurrent_forecaster", ""): "forecaster",
        ("transformer_decoder", ""): "Transformer with a cache",
    }.items():
        entry = one(result("programs_cpu")["programs"], program=program, title=title)
        cells = [
            f"{entry[f'{way}, s']:.2f} s, {entry[f'{way}, MB']:.0f} MB"
            for way in ("plain PyTorch", OURS)
        ]
        rows.append((label, *cells, span(entry["times as fast"])))
    return markdown(("", "plain PyTorch", OURS, "times as fast"), *rows)


def busy() -> Lines:
    rows = []
    for row in result("busy_cpu")["rows"]:
        q1, ratio, q3 = row["ratio"]
        seconds = (f"{1e3 * row[f'{when}, s']:,.0f}" for when in ("quiet", "busy"))
        rows.append((f"{row['job']}, {row['way']}", *seconds, interval(Spread(q1, ratio, q3))))
    return markdown(("ms", "quiet", "beside a busy process", "times as long"), *rows)


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


def window_jobs(shape: tuple[int, int]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return jobs of whole windows of a shape, by their names without it: rows by their loops."""
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result("windows_cpu")["rows"]:
        if row["job"].startswith("window") and (row["elements"], row["tensors"]) == shape:
            job = jobs.setdefault(row["job"].removesuffix(", transformer"), {})
            job[row["contender"]] = row
    return jobs


def over_by_hand(job: dict[str, dict[str, Any]], loop: str) -> float:
    """Return the time of a window over that of the loop by hand, its first, in the median."""
    return median(job[loop], "time_over_first")


def windows_in_short() -> Lines:
    """Show ranges over all optimizers and windows in full precision, and sets of gradients."""
    rows = []
    for shape, label in WINDOW_SHAPES.items():
        jobs = {name: job for name, job in window_jobs(shape).items() if "bf16" not in name}
        times = (span([over_by_hand(j, loop) for j in jobs.values()], 2) for loop in WINDOW_LOOPS)
        sgd = jobs["window of 4, SGD"]
        sets = [sgd[n]["sets_of_gradients"] for n in ("by hand", *list(WINDOW_LOOPS)[:2])]
        rows.append((label, *times, " / ".join(f"{n:.1f}" for n in sets)))
    head = ("time of a window over the loop by hand", *WINDOW_LOOPS.values())
    return markdown((*head, "sets of gradients: by hand, and the first two"), *rows)


def windows_in_full() -> Lines:
    """Show medians of every job; for bfloat16 `accumulate_in_backward` is the last."""
    shapes = [window_jobs(shape) for shape in WINDOW_SHAPES]
    rows = []
    for name in dict.fromkeys(name for jobs in shapes for name in jobs):
        ways = [*WINDOW_LOOPS, *["accumext, in backward"] * ("bf16" in name)]
        found = [
            [over_by_hand(jobs[name], n) for n in ways] if name in jobs else [] for jobs in shapes
        ]
        rows.append((name, *(" / ".join(f"{n:.2f}" for n in each) for each in found)))
    return markdown(("`opt.backward` / own loop / Accelerate", *WINDOW_SHAPES.values()), *rows)


def foreign_optimizers() -> Lines:
    """Show the optimizers of a package in one row if all was found alike."""
    content = result("optimizers_cpu")
    alike: dict[tuple[str, ...], list[str]] = {}
    for package, version, name, *found in content["optimizers"]:
        alike.setdefault((f"{package} {version}", *found), []).append(name)
    rows = ((key[0], ", ".join(names), *key[1:]) for key, names in alike.items())
    columns = (f"`{name}`" if "=" in name else name for name in content["columns"])
    packages = len({row[0] for row in content["optimizers"]})
    sentence = f"{len(content['optimizers'])} optimizers of {packages} packages:"
    return [sentence, "", *markdown(("package", "optimizers", *columns), *rows)]


def trainers(columns: Mapping[str, Callable[[_trainers.Row], str]]) -> Lines:
    """Show each loop of a trainer of which one of the columns says something."""
    found = [
        (row.name, *cells)
        for row in _trainers.rows(result("trainers_cpu"))
        if not _trainers.notes(row) and any(cells := [of(row) for of in columns.values()])
    ]
    return markdown(("loop", *columns), *found)


def trainers_others() -> Lines:
    """List what is no step with factors, the programs that failed, and versions."""
    content = result("trainers_cpu")
    found = [
        f"{row.name}: {said}" for row in _trainers.rows(content) if (said := _trainers.notes(row))
    ]
    found += [f"Not run: {text}" for text in _trainers.not_run(content)]
    texts = [*(f"- {text}." for text in found), f"- Versions: {_trainers.versions(content)}."]
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)
    ]


def trainers_audited() -> Lines:
    said = result("trainers_audit_cpu")["trainers"]
    reports = {
        name: runs for program in said.values() for name, runs in program.get("rows", {}).items()
    }
    columns = {
        "audit says": lambda row: _trainers.audited(reports.get(row.name, {})),
        "right with": _trainers.cures,
    }
    return trainers(columns)


# --- by their names ----------------------------------------------------------------------------


class Table(NamedTuple):
    """The result that a table shows, the command that makes another one, and its lines."""

    result: str
    command: str
    lines: Callable[[], Lines]


ACCUMULATE, DECODER = "bench/accumulate.py", "bench/decoder.py"
IN_PLACE = "unscale, check, norm, clip, in place"
FOLDED = "the same, with the factor applied as the optimizer reads"
IDLE, CLIPS = "`clip_grad_norm_`, nothing to clip", "`clip_grad_norm_`, clipping"
BF16, FP16 = "`accumulate_` of bfloat16", "`accumulate_` of float16"
NORM = "`total_norm` of float32, with the check"
BF16_CHECKED, FP16_CHECKED = (f"{label} into float32, check, norm" for label in (BF16, FP16))
STOCK, BY_BYTES = "`unscale_` and `clip_grad_norm_(foreach=True)`", "`copy_`, by bytes"
FOREACH, CAST = "over torch foreach", "over torch: cast, unscale, add, norm"
UNSCALE = "unscale, check, norm, clip, {}: accumext"
FIGURES = {  # of a shape
    IN_PLACE: f"{UNSCALE}, materialised {FOREACH}",
    FOLDED: f"{UNSCALE}, folded {FOREACH}",
    IDLE: f"clip_grad_norm_, nothing to clip, {{}}: accumext {FOREACH}",
    CLIPS: f"clip_grad_norm_, clipping, {{}}: accumext {FOREACH}",
    BF16: f"accumulate_ bf16, {{}}: accumext {CAST}",
    FP16: f"accumulate_ fp16, {{}}: accumext {CAST}",
    BF16_CHECKED: "accumulate_ bf16, {}: accumext over torch add_ alone",
    FP16_CHECKED: "accumulate_ fp16, {}: accumext over torch add_ alone",
}


def of(label: str, shape: str = LARGE) -> str:
    return FIGURES[label].format(shape)


def of_copy(operation: str, way: str = "") -> str:
    return f"{operation}, {LARGE}: accumext{way} over torch.copy_'s bandwidth"


SIZES = {
    LARGE: "100M elements in 200 tensors",
    MANY: "2M elements in 2,000 tensors",
    TINY: "10,000 elements in 10 tensors",
}
GENERATE = {
    "greedy": "generate, greedy",
    "samples": "generate, samples",
    "samples, `top_k=50`": "generate, top_k=50",
    "samples, `top_p=0.9`": "generate, top_p=0.9",
    "beam search, K = 4": "generate, 4 beams",
}
ON_A_GPU = {
    "`generate`, greedy": "generate, greedy",
    "`generate`, samples": "generate, samples",
    "`generate`, `top_k=50`": "generate, top_k=50",
    "`generate`, `top_p=0.9`": "generate, top_p=0.9",
    "`generate`, beam search, K = 4": "generate, 4 beams",
    "`rollout`": "rollout",
    "`decode_loss`, known tokens, `nn.LSTM`": "teacher, nn.LSTM",
    "`decode_loss`, known tokens, `nn.GRU`": "teacher, nn.GRU",
    "`decode_loss`, known tokens, a function": "teacher, a function",
}
IN_README = {
    "plain PyTorch at its best, AVX2": (PLAIN, AVX2_KEPT),
    f"{PRODUCTS}, AVX2": (PRODUCTS, AVX2_KEPT),
    "plain PyTorch at its best, AVX-512, two threads": (PLAIN, (AVX512_KEPT,)),
    f"{PRODUCTS}, AVX-512, two threads": (PRODUCTS, (AVX512_KEPT,)),
}
AGAINST = {
    IN_PLACE: STOCK,
    FOLDED: STOCK,
    IDLE: "torch's",
    CLIPS: "torch's",
    BF16_CHECKED: "`add_` alone",
    FP16_CHECKED: "`add_` alone",
    BF16: "cast, unscale, add, norm",
    FP16: "cast, unscale, add, norm",
}
LARGE_LISTS = (
    ("operation (100M elements in 200 tensors)", "times as fast as", "", "limit"),
    (NORM, "a plain C++ loop that reads", f"total_norm fp32, {LARGE}: accumext over the limit"),
    *((label, against, of(label)) for label, against in AGAINST.items()),
)
MANY_TENSORS = (
    ("operation (2,000 tensors of 1,000 elements)", "times as fast as stock PyTorch with foreach"),
    ("`total_norm`", f"total_norm fp32, {MANY}: accumext {FOREACH}"),
    *((label, of(label, MANY)) for label in (IN_PLACE, FOLDED, IDLE, CLIPS, BF16, FP16)),
)
LISTS_ON_A_GPU = (
    (SIZES[LARGE], "times as fast as", ""),
    (NORM, BY_BYTES, of_copy("total_norm fp32")),
    (IN_PLACE, BY_BYTES, of_copy("unscale, check, norm, clip", ", materialised")),
    (BF16_CHECKED, BY_BYTES, of_copy("accumulate_ bf16")),
    (FP16_CHECKED, BY_BYTES, of_copy("accumulate_ fp16")),
    (IN_PLACE, STOCK, of(IN_PLACE)),
    (FOLDED, STOCK, of(FOLDED)),
)
LOOPS = partial(loops, "loops_cpu", "the loop", "`generate`", GENERATE)
LOOPS_ON_A_GPU = partial(loops, "loops_h100", "by hand", OURS, ON_A_GPU)
TRAINERS_STEPS = {
    "a window of 4": _trainers.full_window,
    "the last 2 of an epoch": _trainers.epoch_end,
    "never used": _trainers.training_end,
    "unequal targets": _trainers.unequal,
}
TRAINERS_MORE = {
    "clip": _trainers.clip,
    "schedule": _trainers.schedule,
    "resumed inside a window": _trainers.resumed,
}
OF_ROUNDING = f"{ACCUMULATE} --jobs round accumulate --shape 1e8/200"
TABLES = {
    "decoder": Table(AVX2, DECODER, partial(decoder_ratios, IN_README)),
    "windows": Table("windows_cpu", f"{ACCUMULATE} --jobs window", windows_in_short),
    "windows in full": Table("windows_cpu", f"{ACCUMULATE} --jobs window", windows_in_full),
    "decoder by shape": Table(AVX2, f"{DECODER} --shape ...", decoder_by_shape),
    "known": Table("known_avx2_2", "bench/loops.py known", known),
    "known with AMX": Table("known_amx_2", "bench/loops.py known", known_with_amx),
    "decoder times": Table(AVX512, f"{DECODER} --shape ...", decoder_times),
    "precision": Table(PRECISION[0], "bench/loops.py precision --threads 1", precision),
    "generate": Table("loops_cpu", "bench/loops.py generate", LOOPS),
    "rollout": Table("rollout_cpu", "bench/loops.py rollout", rollout),
    "programs": Table("programs_cpu", "bench/programs.py", programs),
    "busy": Table("busy_cpu", "bench/busy.py", busy),
    "optimizers": Table("optimizers_cpu", "bench/optimizers.py", foreign_optimizers),
    "trainers": Table("trainers_cpu", "bench/trainers", partial(trainers, TRAINERS_STEPS)),
    "trainers, others": Table("trainers_cpu", "bench/trainers", trainers_others),
    "trainers, more": Table("trainers_cpu", "bench/trainers", partial(trainers, TRAINERS_MORE)),
    "trainers audited": Table("trainers_audit_cpu", "bench/trainers --audit", trainers_audited),
    "large lists": Table("cpu", ACCUMULATE, partial(gradients, "cpu", *LARGE_LISTS)),
    "masters": Table("cpu", OF_ROUNDING, masters),
    "many tensors": Table("cpu", ACCUMULATE, partial(gradients, "cpu", *MANY_TENSORS)),
    "steps": Table("cpu", ACCUMULATE, partial(steps, "cpu", SIZES)),
    "lists on a GPU": Table(
        "h100", f"{ACCUMULATE} --device cuda", partial(gradients, "h100", *LISTS_ON_A_GPU)
    ),
    "steps on a GPU": Table(
        "h100",
        f"{ACCUMULATE} --device cuda",
        partial(steps, "h100", {shape: SIZES[shape] for shape in (LARGE, TINY)}),
    ),
    "decoder on a GPU": Table("decoder_h100", f"{DECODER} --device cuda", decoder_on_a_gpu),
    "loops on a GPU": Table("loops_h100", "bench/loops.py --device cuda", LOOPS_ON_A_GPU),
}


def written(text: str) -> str:
    """Return the text of a page with its tables as the results say."""

    def anew(place: re.Match[str]) -> str:
        name = place[1]
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}")
        table = TABLES[name]
        below = textwrap.wrap(provenance(table.result, table.command), 120, break_on_hyphens=False)
        begin, end = f"<!-- bench/tables.py: {name} -->", f"<!-- end of {name} -->"
        return "\n".join([begin, "", *table.lines(), "", *below, "", end])

    anew_text, places = PLACE.subn(anew, text)
    if places != text.count("<!-- bench/tables.py: "):
        raise ValueError("the end of a table is missing")
    return anew_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    args = parser.parse_args()
    differ = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        text = written(before)
        if text != before:
            differ.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(text, encoding="utf-8")
    if args.check and differ:
        sys.exit(f"python bench/tables.py would change {', '.join(differ)}")


if __name__ == "__main__":
    main()
