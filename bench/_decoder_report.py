"""The report of the decoder's benchmark: a table per case, figures against targets, and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from _decoders import OURS, PLAIN, Shape
from _decoding import Result
from _report import interval
from _results import known
from _timing import Spread, rounded

MIB = 2**20


class Faster(NamedTuple):
    """In this role, `contender` is at least `target` times as fast as `against`."""

    role: str
    contender: str
    against: str
    target: float

    def rows(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        return [
            {
                "figure": f"{result.case}: {self.contender} over {self.against}",
                **self._asdict(),
                "measured": measured.median,
                "quartiles": [measured.q1, measured.q3],
            }
            for result in results
            if result.case.shape.role == self.role
            and (measured := result.ratio(self.contender, self.against))
        ]


class Smaller(NamedTuple):
    """In this role, accumext's peak memory goes at least `target` times into plain autograd's."""

    role: str
    target: float

    def rows(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        return [
            {
                "figure": f"{result.case}: peak of {PLAIN} over that of {OURS}",
                **self._asdict(),
                "measured": result.checked[PLAIN].peak_bytes / result.checked[OURS].peak_bytes,
            }
            for result in results
            if result.case.shape.role == self.role and {PLAIN, OURS} <= result.checked.keys()
        ]


class Waits(NamedTuple):
    """In this role, accumext's host waits for the GPU at most `target` times."""

    role: str
    target: int = 0

    def rows(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        return [
            {
                "figure": f"{result.case}: synchronisations of {OURS}",
                **self._asdict(),
                "measured": result.checked[OURS].synchronisations,
            }
            for result in results
            if result.case.shape.role == self.role and OURS in result.checked
        ]


class Growth(NamedTuple):
    """By how much accumext's peak memory grows from one role to the other, in states [B, H]."""

    role: str
    longer: str
    target: float | None = None

    def rows(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        found = {result.case.shape.role: result for result in results if OURS in result.checked}
        if not {self.role, self.longer} <= found.keys():
            return []
        short, long = found[self.role], found[self.longer]
        grown = long.checked[OURS].peak_bytes - short.checked[OURS].peak_bytes
        states = states_bytes(long.case.shape) - states_bytes(short.case.shape)
        return [
            {
                "figure": f"{long.case}: growth of accumext's peak from T={short.case.shape.steps},"
                f" {grown:,} bytes, over the {states:,} bytes of the states",
                **self._asdict(),
                "measured": grown / states,
            }
        ]


def states_bytes(shape: Shape) -> int:
    """Return the bytes of one float32 state for every step and row."""
    return 4 * shape.tokens * shape.size


def table(result: Result) -> str:
    """Return a table with one row per contender."""
    names = [*result.checked, *(name for name in result.seconds if name not in result.checked)]
    width = max(map(len, [*names, *result.left_out]))
    lines = [
        f"\n{result.case}",
        f"  {'':{width}}{'runs':>6}{'ms [quartiles]':>28}{'tokens/s':>10}{'peak MiB':>10}"
        f"{'gradient off':>14}{'recurrent':>11}{'not greedy':>12}{'waits':>7}"
        f"  times faster than {PLAIN}",
    ]
    for name in names:
        lines.append(f"  {name:{width}}{_timed(name, result)}{_checked(name, result)}")
        if name != PLAIN and (ratio := result.ratio(name, PLAIN)):
            lines[-1] += f"  {interval(ratio)}"
    lines += [f"  {name:{width}}  left out: {why}" for name, why in result.left_out.items()]
    return "\n".join(lines)


def contender_rows(result: Result) -> list[dict[str, Any]]:
    """Return a row for each contender of a case; what is not known is left out."""
    shape = result.case.shape
    about = {"case": str(result.case), **shape._asdict()}
    rows: dict[str, dict[str, Any]] = {name: {} for name in [*result.checked, *result.seconds]}
    for name, checked in result.checked.items():
        rows[name] |= checked._asdict()
    for name, seconds in result.seconds.items():
        host = result.host_spread(name)
        faster, ours_faster = result.ratio(name, PLAIN), result.ratio(OURS, name)
        rows[name] |= {
            "runs": sum(taken is not None for taken in seconds),
            "seconds": rounded(result.spread(name)),
            "host_seconds": rounded(host) if host else None,
            "times_faster": rounded(faster) if faster else None,  # than plain autograd
            "accumext_times_faster": rounded(ours_faster) if ours_faster else None,
        }
    for name, why in result.left_out.items():
        rows.setdefault(name, {})["left_out"] = why
    return [known(about | {"contender": name} | row) for name, row in rows.items()]


def _timed(name: str, result: Result) -> str:
    if name not in result.seconds:
        return f"{'-':>6}{'-':>28}{'-':>10}"
    runs = sum(taken is not None for taken in result.seconds[name])
    spread: Spread = result.spread(name)
    return f"{runs:6}{interval(spread, 1e3, 1):>28}{result.tokens_per_second(name):10,.0f}"


def _checked(name: str, result: Result) -> str:
    if name not in result.checked:
        return f"{'-':>10}{'-':>14}{'-':>11}{'-':>12}{'-':>7}"
    found = result.checked[name]
    distances = found.gradient_distance, found.recurrent_distance
    overall, recurrent = ("-" if value is None else f"{value:.1e}" for value in distances)
    counts = found.not_greedy, found.synchronisations
    wrong, waits = ("-" if count is None else count for count in counts)
    return f"{found.peak_bytes / MIB:10.1f}{overall:>14}{recurrent:>11}{wrong:>12}{waits:>7}"
