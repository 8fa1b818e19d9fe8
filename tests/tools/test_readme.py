"""The README's code runs as it stands, and its links lead somewhere."""

import re

import pytest
from support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_code(capsys):
    (code,) = blocks(README, "python")
    exec(compile(code, "README.md", "exec"), {})
    assert "clip_coef" in capsys.readouterr().out


def test_the_loop_is_that_of_the_page_of_loops():
    """Whose diffs are made of programs that the tests run."""
    (shown,) = blocks(README, "diff")
    page = (ROOT / "docs" / "from_your_loop.md").read_text(encoding="utf-8")
    assert blocks(page, "diff")[0].endswith(shown.partition("\n")[2])


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
