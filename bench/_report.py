"""The report of a benchmark: a table per job, figures against targets, and rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _results import known, write
from _timing import Result, Spread, rounded

# Values of a figure's `against` besides a contender: the least time for the bytes that have to
# move, the bytes per second of torch.copy_, and the device's time itself, with at most `target`.
LIMIT, COPY, MICROSECONDS = "the limit", "torch.copy_'s bandwidth", "microseconds"


class Figure(NamedTuple):
    """In this job, `contender` is at least `target` times as fast as `against`."""

    job: str
    role: str  # of the shape
    contender: str
    against: str
    target: float | None  # None: nothing is promised


def table(result: Result) -> str:
    """Return a table with one row per contender."""
    if result.memory:
        return memory_table(result)
    width = max(map(len, result.seconds))
    lines = [
        f"\n{result.job}: {result.shape}",
        f"  {'':{width}}  B/element {'ms [quartiles]':>28}{'GB/s':>8}{'of limit':>10}"
        f"{'of copy':>9}{'host ms':>9}  times faster",
    ]
    for name, traffic in result.traffic.items():
        shares = result.share(name), result.share_of_copy(name)
        share, copy = (f"{share.median:.0%}" if share else "-" for share in shares)
        ratio, host = result.ratio(name, result.baseline), result.host_spread(name)
        lines.append(
            f"  {name:{width}}  {traffic!s:10}{interval(result.spread(name), 1e3, 3):>28}"
            f"{result.rate(name) / 1e9:8.1f}{share:>10}{copy:>9}"
            f"{f'{host.median * 1e3:.3f}' if host else '-':>9}"
            + ("" if name == result.baseline else f"  {interval(ratio)}")
        )
    return "\n".join(lines)


def memory_table(
    result: Result, head: str = "sets of gradients", unit: float = 1.0, over: bool = True
) -> str:
    """Return a table of memory and times, also over that of the first contender or inversely."""
    first = result.baseline
    width = max(map(len, result.seconds))
    ratios = f"time over {first}" if over else "times faster"
    lines = [
        f"\n{result.job}{f': {result.shape}' if result.shape.elements else ''}",
        f"  {'':{width}}{'ms [quartiles]':>32}{head:>19}  {ratios}",
    ]
    for name, taken in result.memory.items():
        ratio = interval(result.ratio(first, name) if over else result.ratio(name, first))
        lines.append(
            f"  {name:{width}}{interval(result.spread(name), 1e3, 3):>32}{taken / unit:19.2f}"
            + ("" if name == first else f"  {ratio}")
        )
    return "\n".join(lines)


def evaluate(figures: Sequence[Figure], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the measured figures, with the ratio that the memory allows by the bytes of both."""
    rows = []
    for figure in figures:
        for result in results:
            if (result.job, result.shape.role) != (figure.job, figure.role):
                continue
            allowed: float | None = 1.0
            measured = result.share(figure.contender)
            if figure.against == COPY:
                measured = result.share_of_copy(figure.contender)
            elif figure.against == MICROSECONDS:
                measured, allowed = (
                    Spread(*(1e6 * s for s in result.spread(figure.contender))),
                    None,
                )
            elif figure.against != LIMIT:
                measured = result.ratio(figure.contender, figure.against)
                allowed = result.allowed(figure.contender, figure.against)
            if measured is None:
                continue
            rows.append(
                {
                    "figure": f"{figure.job}, {result.shape}: {figure.contender}"
                    f" over {figure.against}",
                    **figure._asdict(),
                    "measured": measured.median,
                    "quartiles": [measured.q1, measured.q3],
                    "allowed": allowed,
                }
            )
    return rows


def figure_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line per figure; if there are bytes to compare, with the ratio that they allow."""
    lines = ["\nfigure | target | measured [quartiles]"]
    if any("allowed" in row for row in rows):
        lines[0] += " | allowed by the memory"
    for row in rows:
        cells = [row["figure"], _plain(row["target"]), _plain(row["measured"])]
        if "quartiles" in row:
            q1, q3 = row["quartiles"]
            cells[2] = interval(Spread(q1, row["measured"], q3))
        if "allowed" in row:
            cells.append("-" if row["allowed"] is None else f"{row['allowed']:.2f}")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def contender_rows(result: Result) -> list[dict[str, Any]]:
    """Return a row for each contender of a result; what is not known is left out."""
    first, shape = result.baseline, result.shape
    rows = []
    for name, traffic in result.traffic.items():
        share, of_copy = result.share(name), result.share_of_copy(name)
        host = result.host_spread(name)
        row = {
            "job": result.job,
            "elements": shape.elements,
            "tensors": shape.tensors,
            "contender": name,
            "bytes_per_element": str(traffic),
            "runs": len(result.seconds[name]),
            "seconds": rounded(result.spread(name)),
            "times_faster": rounded(result.ratio(name, first)),  # than the first contender
            "time_over_first": rounded(result.ratio(first, name)),
            "host_seconds": rounded(host) if host else None,
            "share_of_limit": rounded(share) if share else None,
            "share_of_copy": rounded(of_copy) if of_copy else None,
            "sets_of_gradients": result.memory.get(name),  # at the highest point of a run
        }
        rows.append(known(row))
    return rows


def write_json(
    path: Path | None,
    facts: dict[str, Any],
    results: Sequence[Result],
    figures: Sequence[dict[str, Any]],
    failed: dict[str, str],
) -> None:
    rows = [row for result in results for row in contender_rows(result)]
    write(path, {"machine": facts, "rows": rows, "figures": figures, "failed": failed})


def interval(values: Spread, unit: float = 1.0, digits: int = 2) -> str:
    """Return the median, and in brackets where half of the values lie."""
    q1, median, q3 = (f"{value * unit:.{digits}f}" for value in values)
    return f"{median} [{q1}, {q3}]"


def _plain(value: float | bool | None) -> str:
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}"
