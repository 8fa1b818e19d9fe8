"""The page of what works says what the run says, and nothing else."""

from __future__ import annotations

import importlib.util
from xml.etree import ElementTree

import pytest
from support import ROOT

FOLDER = ROOT / "tests" / "conformance"


@pytest.fixture
def table():
    """The script, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("table", FOLDER / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(table, path, outcome_of):
    """A JUnit report of two cases of every test, as pytest writes it."""
    suite = ElementTree.Element("testsuite")
    for _, rows in table.sections():
        for file, function, _ in rows:
            for number in range(2):
                names = {"classname": f"tests.any.{file}", "name": f"{function}[{number}]"}
                case = ElementTree.SubElement(suite, "testcase", names)
                outcome = outcome_of(file, function, number)
                if outcome != "passed":
                    ElementTree.SubElement(case, outcome)
    ElementTree.ElementTree(suite).write(path)
    return str(path)


def passed(*_):
    return "passed"


@pytest.fixture
def page(tmp_path, table):
    """A page written from a run that passed."""
    path = tmp_path / "page.md"
    path.write_text(f"Before.\n{table.BEGIN}\n{table.END}\nAfter.\n", encoding="utf-8")
    assert table.main([report(table, tmp_path / "good.xml", passed), "--page", str(path)]) == 0
    return path


def test_the_page_holds_a_row_per_test_and_what_stands_around_it(page, table):
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    row = "| An inf on one rank or on all skips the window everywhere, and loss scales stay equal |"
    assert f"{row} passed |" in text
    assert "## Data-parallel training (DDP, or a process group), 2 and 3 processes" in text
    assert f"{table.VERSIONS}Python" in text


@pytest.mark.parametrize(
    ("outcome", "said"),
    [("failure", "failed"), ("error", "failed"), ("skipped", "skipped"), (None, "not run")],
)
def test_a_case_that_did_not_pass_is_seen(page, table, tmp_path, outcome, said, capsys):
    def one_bad(file, name, number):
        bad = (file, name, number) == ("test_sharded", "test_sharded_raise", 1)
        return outcome if bad else "passed"

    before = page.read_text(encoding="utf-8")
    bad = report(table, tmp_path / "bad.xml", one_bad)
    if outcome is None:
        (tmp_path / "bad.xml").write_text("<testsuite/>", encoding="utf-8")
    assert table.main([bad, "--page", str(page), "--check"]) == 1
    assert f"| **{said}** |" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == before
    assert table.main([bad, "--page", str(page)]) == 1
    assert f"| **{said}** |" in page.read_text(encoding="utf-8")


def test_a_page_that_says_something_else_is_seen(page, table, tmp_path, monkeypatch):
    """But for the versions of packages, of which one may be missing"""

    def version(name):
        if name == "lightning":
            raise table.metadata.PackageNotFoundError(name)
        return "0"

    good = report(table, tmp_path / "good.xml", passed)
    monkeypatch.setattr(table.metadata, "version", version)
    assert "torch 0, accelerate 0, transformers 0, pytorch-ignite 0" in table.versions()
    assert table.main([good, "--page", str(page), "--check"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("| passed |", "| failed |", 1))
    assert table.main([good, "--page", str(page), "--check"]) == 1


def test_the_documentation_has_every_row_of_tests_that_exist(table, tmp_path):
    for _, rows in table.sections():
        for file, function, _ in rows:
            (path,) = FOLDER.parent.rglob(f"{file}.py")
            assert f"\ndef {function}(" in path.read_text(encoding="utf-8")
    assert table.main([report(table, tmp_path / "good.xml", passed), "--check"]) == 0
