"""The page of what works says what the run says, and nothing else."""

from xml.etree import ElementTree

import pytest
import table
from support import ROOT


def report(path, outcome_of):
    """Write a JUnit report of two cases of every test, as pytest does."""
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


@pytest.fixture
def page(tmp_path):
    """Write a page from a run that passed."""
    path = tmp_path / "page.md"
    path.write_text(f"Before.\n{table.BEGIN}\n{table.END}\nAfter.\n", encoding="utf-8")
    good = report(tmp_path / "good.xml", lambda *_: "passed")
    assert table.main([good, "--page", str(path)]) == 0
    assert table.main([good, "--page", str(path), "--check"]) == 0
    return path


@pytest.mark.parametrize(
    ("outcome", "said"),
    [("failure", "failed"), ("error", "failed"), ("skipped", "skipped"), (None, "not run")],
)
def test_a_case_that_did_not_pass_is_seen(page, tmp_path, outcome, said, capsys):
    def one_bad(file, name, number):
        bad = (file, name, number) == ("test_sharded", "test_sharded_raise", 1)
        return outcome if bad else "passed"

    before = page.read_text(encoding="utf-8")
    bad = report(tmp_path / "bad.xml", one_bad)
    if outcome is None:
        (tmp_path / "bad.xml").write_text("<testsuite/>", encoding="utf-8")
    assert table.main([bad, "--page", str(page), "--check"]) == 1
    assert f"| **{said}** |" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == before
    assert table.main([bad, "--page", str(page)]) == 1
    assert f"| **{said}** |" in page.read_text(encoding="utf-8")


def test_a_page_that_says_something_else_is_seen(page, tmp_path):
    """But for the versions of packages, and what stands around the table"""
    text = page.read_text(encoding="utf-8")
    good = str(tmp_path / "good.xml")
    page.write_text(text.replace("with Python 3", "with Python 2"), encoding="utf-8")
    assert table.main([good, "--page", str(page), "--check"]) == 0
    page.write_text(text.replace("| passed |", "| failed |", 1), encoding="utf-8")
    assert table.main([good, "--page", str(page), "--check"]) == 1
    assert table.main([good, "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")


def test_the_documentation_has_every_row_of_tests_that_exist(tmp_path):
    for _, rows in table.sections():
        for file, function, _ in rows:
            (path,) = (ROOT / "tests").rglob(f"{file}.py")
            assert f"\ndef {function}(" in path.read_text(encoding="utf-8")
    good = report(tmp_path / "good.xml", lambda *_: "passed")
    assert table.main([good, "--check"]) == 0
