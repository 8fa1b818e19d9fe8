"""What bench/trainers found, in words: the tables of docs/trainers.md.

What is not the mean over the targets of the micro-batches that a step holds is bold.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

WINDOW, BATCHES, EPOCHS = 4, 10, 2
TOKENS = [1, 2, 3, 4, 4, 3, 2, 1, 1, 4]  # of the micro-batches of a run with unequal ones
Step = dict[str, Any]  # passes, micro-batches and their factors, learning rate
Found = dict[str, Any]  # what one run did


class Row(NamedTuple):
    name: str
    runs: dict[str, Found]


def rows(content: dict[str, Any]) -> Iterator[Row]:
    for program in content["trainers"].values():
        for name, runs in program.get("rows", {}).items():
            yield Row(name, runs)


def versions(content: dict[str, Any]) -> str:
    programs = content["trainers"].values()
    found = (next(iter(program.get("versions", {}).items()), ()) for program in programs)
    return ", ".join(dict.fromkeys(" ".join(each) for each in found if each))


def notes(row: Row) -> str:
    """Return what a program found that is no step with factors."""
    return "; ".join(row.runs.get("plain", {}).get("notes", ()))


def not_run(content: dict[str, Any]) -> list[str]:
    """Return the programs that gave no result, with the error."""
    programs = content["trainers"].items()
    return [f"{name}: {program['error']}" for name, program in programs if "error" in program]


def number(value: float) -> str:
    """Return a fraction if it is one of small numbers."""
    near = Fraction(value).limit_denominator(20)
    return str(near) if abs(near - value) < 2e-5 else f"{value:.3g}"


def near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-3 * max(abs(a), abs(b))


def alike(values: list[float]) -> bool:
    return all(near(value, values[0]) for value in values)


def times_the_mean(step: Step, tokens: list[int] | None = None) -> float | None:
    """Return how many times the mean over the targets the step is; None if it is no multiple."""
    counts = [tokens[k] if tokens else 1 for k in step["micro_batches"]]
    ratios = [f * sum(counts) / n for f, n in zip(step["factors"], counts)]
    return sum(step["factors"]) if ratios and alike(ratios) else None


def in_words(step: Step) -> str:
    """Describe a step's micro-batches and their factors."""
    factors, lost = step["factors"], len(step["passes"]) - len(step["micro_batches"])
    if not factors:
        return f"**{step.get('error', 'nothing')}**"
    listed = f"{len(factors)} x {number(factors[0])}"
    if not alike(factors):
        listed = ", ".join(number(f) for f in factors)
    times = times_the_mean(step)
    if lost > 0:
        return f"**{listed}; {lost} lost**"
    if times is None:
        return f"**{listed}**"
    return listed if near(times, 1.0) else f"**{listed}: {number(times)} times the mean**"


def full_window(row: Row) -> str:
    found = row.runs.get("plain", {})
    if not found or "error" in found:
        return str(found.get("error", ""))
    return in_words(found["steps"][0]) if found["steps"] else "**no step**"


def epoch_end(row: Row) -> str:
    """Describe what becomes of the last two micro-batches of an epoch."""
    found, count = row.runs.get("plain", {}), 0
    epoch = found.get("epoch", BATCHES)
    for step in found.get("steps", ()):
        count += len(step["passes"])
        inside = epoch - count + len(step["passes"])  # its passes of the first epoch
        if count == epoch:
            return "" if inside in (WINDOW, epoch) else in_words(step)
        if count > epoch and len(step["micro_batches"]) <= len(step["passes"]) - inside:
            return f"**{inside} dropped**"
        if count > epoch:
            return f"{inside} join the next epoch: {in_words(step)}"
    return ""


def training_end(row: Row) -> str:
    """Count the last micro-batches that no step used, in a whole training and a stopped one."""
    words = []
    for name, of in (("plain", "at the end"), ("stopped", "if stopped")):
        found = row.runs.get(name, {})
        if left := len(found.get("left", {}).get("passes", ())):
            words.append(f"**{left} dropped** {of}")
        elif "steps" in found and name == "stopped":
            words.append("none if stopped")
    return ", ".join(words)


def rates(found: Found) -> list[float]:
    return [step["lr"] for step in found.get("steps", ())]


def schedule(row: Row) -> str:
    """Say when a schedule moves; the rate of a step counts the schedule's calls before."""
    found = row.runs.get("plain", {})
    moves = [b - a for a, b in zip(rates(found), rates(found)[1:])]
    sizes = [len(step["passes"]) for step in found.get("steps", ())][1:]
    if not any(moves):
        return ""
    if all(move == 1 for move in moves):
        skipped = rates(row.runs.get("skipped", {}))
        if len(skipped) < 2:
            return "per step"
        moved = skipped[1] - skipped[0] > 1
        return "per step, " + ("**also a skipped one**" if moved else "not a skipped one")
    if moves == sizes or moves == [len(step["passes"]) for step in found["steps"]][:-1]:
        return "**per micro-batch**"
    if set(moves) <= {0, 1}:
        return "per epoch"
    steady = all(move >= 0 for move in moves) or all(move <= 0 for move in moves)
    return "per epoch" if steady and len(set(rates(found))) == EPOCHS else ""


def clip(row: Row) -> str:
    found = row.runs.get("clip", {})
    max_norm = found.get("max_norm", 0.1)
    if not found:
        return ""
    if "error" in found:
        return str(found["error"])
    step = found["steps"][0]
    if not alike(step["factors"]):
        return f"**of each micro-batch: {', '.join(number(f) for f in step['factors'])}**"
    if all(near(each["norm"], max_norm) for each in found["steps"]):
        return "once"
    if step == row.runs["plain"]["steps"][0]:
        return "**none**"
    return f"**norms after it: {', '.join(number(each['norm']) for each in found['steps'])}**"


def unequal(row: Row) -> str:
    """Say whether means are over targets, or over micro-batches."""
    found = row.runs.get("unequal", {})
    if not found or "error" in found:
        return str(found.get("error", ""))
    step = found["steps"][0]
    times = times_the_mean(step, found.get("tokens", TOKENS))
    if times is not None:
        exact = "mean over targets"
        return exact if near(times, 1) else f"{exact}, **times {number(times)}**"
    return "**mean of means**" if alike(step["factors"]) else f"**{in_words(step).strip('*')}**"


def resumed(row: Row) -> str:
    """Describe what the first step after a resume inside a window holds."""
    found = row.runs.get("resumed", {})
    if not found or "error" in found:
        return str(found.get("error", ""))
    before = found["before_resuming"]
    first = found["steps"][before["steps"]]
    lost = f"**{len(before['passes'])} lost**; " if before["passes"] else ""
    return f"{lost}{in_words(first)}"


def cures(row: Row) -> str:
    """Return settings with which every step is the mean over its targets, as a run found."""
    words = []
    for name, found in row.runs.items():
        if not name.startswith("cure: "):
            continue
        counts = found.get("tokens", TOKENS) if "unequal" in found else None
        means = [times_the_mean(step, counts) for step in found.get("steps", ())]
        right = (
            means
            and not found["left"]["passes"]
            and all(mean is not None and near(mean, 1.0) for mean in means)
        )
        label = name.removeprefix("cure: ")
        words.append(label if right else f"{label}: **not right**")
    return "; ".join(words)


def audited(said: dict[str, Any]) -> str:
    """Return what the audit says of all runs of a row, each with the runs if not with the first."""
    found: dict[str, list[str]] = {}
    for name, entry in said.items():
        if "error" in entry:
            found.setdefault(f"error: {entry['error']}", []).append(name)
        for kind, mark in (("findings", ""), ("questions", "?")):
            for each in entry[kind]:
                found.setdefault(f"{each}{mark}", []).append(name)
    first = next(iter(said), "")  # what it says of that, it says of the others too
    words = (
        each if first in names else f"{each} ({', '.join(names)})" for each, names in found.items()
    )
    if found or not said:
        return ", ".join(words)
    return "no findings" if any(entry.get("windows") for entry in said.values()) else "sees no step"
