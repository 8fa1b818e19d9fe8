"""The table of docs/conformance.md, from a run of the tests in this folder.

    pytest tests/conformance --junitxml=run.xml
    python tests/conformance/table.py run.xml

Several runs (of both backends) make one table; a row is a test function, its text the docstring.
`--check` leaves the page as it is and fails where it does not say the same, or where a row fails.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- table.py writes from here -->", "<!-- to here -->"
VERSIONS = "Run with "
PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "lightning",
    "pytorch-ignite",
    "schedulefree",
    "tensorboard",
)

Outcomes = dict[tuple[str, str], list[str]]  # file and function: what became of its cases


def outcomes(reports: Sequence[Path]) -> Outcomes:
    """Of every test function of this folder: "passed", "failed" or "skipped", case by case."""
    cases: Outcomes = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.get("classname", "").rpartition(".")[2]
            if (HERE / f"{module}.py").exists():
                name = case.get("name", "").partition("[")[0]
                bad = [kind for kind in ("failure", "error") if case.find(kind) is not None]
                skipped = case.find("skipped") is not None
                cases[module, name].append("failed" if bad else "skipped" if skipped else "passed")
    return cases


def docstring(node: ast.Module | ast.FunctionDef) -> str:
    """The first line of a docstring, which every room and test of this folder has."""
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"{getattr(node, 'name', node)}: a test without a docstring has no row")
    return text.splitlines()[0].rstrip(".")


def table(cases: Outcomes) -> tuple[list[str], int]:
    """The lines, and how many rows did not pass."""
    lines, wrong = [], 0
    for path in sorted(HERE.glob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        lines += ["", f"### {docstring(module)}", "", "| | checks |", "|---|---|"]
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                seen = cases.get((path.stem, node.name), [])
                passed = seen.count("passed")
                result = f"{passed} passed"
                if not seen or passed < len(seen):
                    wrong += 1
                    result = f"**{passed} of {len(seen)} passed**"
                lines.append(f"| {docstring(node)} | {result} |")
    return lines, wrong


def versions() -> str:
    """What the run was with."""
    python = "Python {}.{}.{}".format(*sys.version_info[:3])
    return VERSIONS + ", ".join(
        [python, *(f"{name} {metadata.version(name)}" for name in PACKAGES)]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)

    lines, wrong = table(outcomes(args.reports))
    print("\n".join(line for line in lines if "**" in line))
    before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    if args.check:
        kept = [line for line in old.splitlines() if line and not line.startswith(VERSIONS)]
        if kept != [line for line in lines if line]:
            print(f"{args.page.name} does not say what the run says: write it again")
            wrong += 1
    else:
        new = "\n".join([BEGIN, "", versions() + ".", *lines, "", END])
        args.page.write_text(before + new + after, encoding="utf-8")
    print(f"{sum(line.startswith('| ') for line in lines)} lines, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
