"""The Python of the documentation runs: the blocks of a page one after the other, as they stand.

The names that a page takes for granted, such as a model, are in `pages/<page>.py`, which runs
before it; a function `close` of that file runs after it.
"""

import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import ROOT

PAGES = sorted(path.stem for path in ROOT.glob("docs/*.md"))
SETUPS = Path(__file__).with_name("pages")

# Page and first line of the blocks that are compiled only, with the reason.
NOT_RUN = {
    ("recipes", "self.accumulating = accumext.AccumulatingOptimizer("): "lines of torchtitan's",
    ("recipes", "with self.accumulating.micro_batch(model):"): "lines of torchtitan's",
    ("recipes", "opt = accumext.AccumulatingOptimizer(adam, window=4, max_norm=1.0)"): (
        "lines of a program with transformers; test_frameworks.py trains like that"
    ),
    ("install", "import os"): "compiles kernels; test_package.py does the same",
}


class Block(NamedTuple):
    """A fenced block of Python."""

    page: str
    heading: str  # the nearest one above it
    line: int  # of its first line in the page
    code: str

    def compiled(self) -> Any:
        """Compile the code so that tracebacks show the line of the page."""
        return compile("\n" * (self.line - 1) + self.code, f"docs/{self.page}.md", "exec")

    def is_run(self) -> bool:
        return (self.page, self.code.split("\n")[0]) not in NOT_RUN


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of Python of a page, in order."""
    blocks, heading = [], ""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for found in re.finditer(r"^(`{3,})(.*)\n((?s:.*?))^\1$|^#+ (.*)", text, re.MULTILINE):
        _, language, code, title = found.groups()
        heading = title or heading
        if language == "python":
            blocks.append(Block(page, heading, text.count("\n", 0, found.start(3)) + 1, code))
    return blocks


def names_before(page: str) -> dict[str, Any]:
    """Return the names that a page takes for granted."""
    setup = SETUPS / f"{page}.py"
    torch.manual_seed(0)
    return runpy.run_path(str(setup)) if setup.exists() else {}


# A page may make a GradScaler for a GPU; without one torch disables it, and says so.
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_code(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = names_before(page)
    try:
        for block in blocks_of(page):
            code = block.compiled()
            if block.is_run():
                if "optimizer" in names:  # gradients of another cure would be the next one's, too
                    names["optimizer"].zero_grad()
                exec(code, names)
    finally:
        names.get("close", lambda: None)()


def test_names_of_what_is_not_run():
    found = {(page, block.code.split("\n")[0]) for page in PAGES for block in blocks_of(page)}
    assert set(NOT_RUN) <= found
    assert {path.stem for path in SETUPS.glob("*.py")} <= set(PAGES)
