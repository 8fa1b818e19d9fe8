"""Tests that run by default: of large ones every pair of values, and any test that is named."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support import ROOT
from support.matrix import covering
from support.once import once


def pairs_of(rows: list[tuple[int, ...]]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(4, 4, 4, 2, 2), (3, 2, 5, 3)], ids=str)
@pytest.mark.parametrize("differ", [False, True], ids=["all", "some"])
def test_few_rows_hold_every_pair_that_any_holds(sizes: tuple[int, ...], differ: bool) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    rows = [row for row in rows if row[0] != row[1] or not differ]
    chosen = [rows[index] for index in covering(rows)]
    assert pairs_of(chosen) == pairs_of(rows)
    assert len(chosen) <= 1.5 * max(a * b for a, b in itertools.combinations(sizes, 2))


def test_of_two_axes_every_value_is_held_once() -> None:
    pairs = itertools.product(range(12), range(10))
    rows = [(a, a + 100, b) for a, b in pairs]  # two names that one decorator sets
    chosen = [rows[index] for index in covering(rows)]
    assert {row[0] for row in chosen} == set(range(12))
    assert {row[2] for row in chosen} == set(range(10))
    assert len(chosen) == 12


LARGE = """
import pytest

@pytest.mark.parametrize("c", [object() for _ in range(5)])
@pytest.mark.parametrize("b", [object() for _ in range(5)])
@pytest.mark.parametrize("a", [object() for _ in range(5)])
def test_large(a, b, c):
    pass

@pytest.mark.skipif(True, reason="does not run here")
@pytest.mark.parametrize("a", range(101))
def test_skipped(a):
    pass

@pytest.mark.slow
def test_slow():
    pass
"""
pytest_plugins = "pytester"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the settings of this one and three tests."""
    pytester.makefile(".toml", pyproject=(ROOT / "pyproject.toml").read_text())
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tests / "test_some.py").write_text(LARGE)
    return pytester


def test_pairs_run_by_default_and_everything_with_no_markers(project: pytest.Pytester) -> None:
    default = project.runpytest_inprocess("-n0").parseoutcomes()
    assert default["passed"] < 125 // 2
    assert default["passed"] + default["deselected"] == 126
    assert default["skipped"] == 101
    assert project.runpytest_inprocess("-n0", "-m", "").parseoutcomes()["passed"] == 126


def test_a_test_that_is_named_runs(project: pytest.Pytester) -> None:
    outcomes = project.runpytest_inprocess("-n0", "tests/test_some.py::test_slow").parseoutcomes()
    assert outcomes == {"passed": 1}
    marked = "-m", "not slow", "tests/test_some.py::test_slow"
    assert project.runpytest_inprocess("-n0", *marked).parseoutcomes() == {"deselected": 1}


def test_what_failed_is_made_again_and_what_is_there_is_not(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    calls = []

    def make(folder: Path) -> None:
        calls.append(list(folder.iterdir()))
        (folder / "half").touch()
        if len(calls) == 1:
            raise RuntimeError("the first time")

    with pytest.raises(RuntimeError, match="the first time"):
        once(tmp_path_factory, "made-in-test", make)
    folder = once(tmp_path_factory, "made-in-test", make)
    assert once(tmp_path_factory, "made-in-test", make) == folder
    assert calls == [[], []]
