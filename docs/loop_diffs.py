"""The diffs of docs/from_your_loop.md, from the files in examples/from_your_loop.

    python docs/loop_diffs.py

writes each diff behind its mark in the page; `--check` only fails where the page says otherwise.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).with_name("from_your_loop.md")
LOOPS = PAGE.parents[1] / "examples" / "from_your_loop"
# A mark, and the diff behind it where there is one.
MARKED = re.compile(r"<!-- loop: (\w+) -->\n(?:```diff\n.*?^```\n)?", re.DOTALL | re.MULTILINE)


def lines_of(path: Path) -> list[str]:
    """A file without its docstring, which says what the page says around the diff."""
    _, _, code = path.read_text(encoding="utf-8").partition('"""\n\n')
    return code.splitlines()


def diff(loop: str) -> str:
    """Both files of a loop as one diff that shows every line."""
    before, after = (lines_of(LOOPS / f"{loop}_{side}.py") for side in ("before", "after"))
    everything = len(before) + len(after)
    # Three lines of header say no more than the heading above.
    return "\n".join(list(difflib.unified_diff(before, after, n=everything, lineterm=""))[3:])


def written(page: str) -> str:
    """The page with the diffs that its files have now."""
    return MARKED.sub(
        lambda mark: f"<!-- loop: {mark[1]} -->\n```diff\n{diff(mark[1])}\n```\n", page
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)

    old = args.page.read_text(encoding="utf-8")
    new = written(old)
    if args.check and new != old:
        print(f"{args.page.name} does not show the files: run python docs/{Path(__file__).name}")
    elif new != old:
        args.page.write_text(new, encoding="utf-8")
    return int(args.check and new != old)


if __name__ == "__main__":
    sys.exit(main())
