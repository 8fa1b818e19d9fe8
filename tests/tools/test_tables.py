"""The measured tables of the pages are those of the results in bench/results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import _report
import tables


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "tables.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_pages_say_what_the_results_do() -> None:
    done = run(ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_page_that_says_something_else_is_found_and_written_anew(tmp_path: Path) -> None:
    for name in ("bench", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    page = tmp_path / "docs" / "kernels.md"
    right = page.read_text()
    row = next(line for line in right.splitlines() if line.startswith("| `total_norm` of float32"))
    page.write_text(right.replace(row, row.replace("0.9", "1.9", 1)))
    found = run(tmp_path, "--check")
    assert found.returncode == 1
    assert "docs/kernels.md" in found.stderr
    assert run(tmp_path).returncode == 0
    assert page.read_text() == right


def test_every_table_has_one_place() -> None:
    for name, table in tables.TABLES.items():
        text = (ROOT / table.page).read_text()
        assert text.count(tables.BEGIN.format(name)) == text.count(tables.END.format(name)) == 1


def test_results_are_written_with_a_line_for_each_list_of_numbers() -> None:
    content = {
        "a": [1, 2.5, None],
        "b": [],
        "c": [{"d": ["x  [y", "z]"], "e": "f\n g"}],
        "h": [[1], [2]],
    }
    text = _report.as_text(content)
    assert json.loads(text) == content
    assert ' "a": [1, 2.5, null],\n' in text
    results = [path.read_text() for path in (ROOT / "bench" / "results").glob("*.json")]
    assert all(_report.as_text(json.loads(text)) == text for text in results)
