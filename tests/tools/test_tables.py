"""The measured tables of the pages are those of the results in bench/results."""

import json
import runpy
import sys

import _results
import pytest
import tables
from support import ROOT


def test_pages_say_what_the_results_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    runpy.run_path(str(ROOT / "bench" / "tables.py"), run_name="__main__")


def test_a_page_that_says_something_else_is_found_and_written_anew(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    pages = {name: (ROOT / name).read_text() for name in ("README.md", "docs/kernels.md")}
    wrong = pages["docs/kernels.md"].replace("`total_norm` of float32", "`norm` of float32", 1)
    for name, text in (pages | {"docs/kernels.md": wrong}).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"tables\.py would change docs/kernels\.md$"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    assert {name: (tmp_path / name).read_text() for name in pages} == pages


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- bench/tables.py: other --><!-- end of other -->", "no table is called 'other'"),
        ("<!-- bench/tables.py: decoder --><!-- end of steps -->", "the end of a table is missing"),
    ],
)
def test_a_place_without_a_table_or_an_end_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        tables.written(text)


def test_a_result_has_a_row_on_each_line():
    rows = [{"job": f"job {n}", "seconds": [0.25 * n] * 3} for n in range(9)]
    content = {
        "machine": {"cpu": "x"},
        "rows": rows,
        "failed": {},
        "empty": [],
        "words": ["y" * 99] * 20,
    }
    text = _results.as_text(content)
    assert json.loads(text) == content
    lines = [line.strip().rstrip(",]}") for line in text.splitlines()]
    assert all(json.dumps(row).rstrip("]}") in lines for row in rows)
    assert '"machine": {"cpu": "x"' in lines
    assert max(map(len, lines)) < 200
