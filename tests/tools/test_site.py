"""The built documentation: readable without a network, and its search finds what people paste."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import accumext

pytestmark = pytest.mark.process

PHRASES = [
    "CUDA out of memory",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
    "Trying to backward through the graph a second time",
    "unscale_() has already been called on this optimizer since the last update()",
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation",
    "loss explodes when I accumulate gradients",
    "last window is wrong",
    "len(loader) not divisible by accumulation steps",
    "gradients are None",
    "gradients are None or 0.0 after backward",
    "lr_scheduler.step() before optimizer.step()",
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
    "NaN after some steps",
    "loss is nan",
    "perplexity",
    "perplexity too high",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages; building them warns of nothing."""
    for needed in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(needed)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-d", str(out / ".doctrees"), "docs"]
    built = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


class Search:
    """The search of Sphinx's `searchtools.js` in the index: the same words, matches and scores."""

    TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
    OBJECT, PARTIAL_OBJECT = 11 + 5, 6 + 5  # with the priority that objects of Python have

    def __init__(self, site: Path) -> None:
        from sphinx.search.en import SearchEnglish

        text = (site / "searchindex.js").read_text(encoding="utf-8")
        self.index: dict[str, Any] = json.loads(text[len("Search.setIndex(") : text.rindex(")")])
        self.language = SearchEnglish({})

    def pages(self, query: str) -> list[str]:
        """The pages of the results, best first, each once."""
        results = [*self._titles(query), *self._objects(query), *self._texts(query)]
        results.sort(key=lambda result: (-result[0], result[1].lower()))
        return list(dict.fromkeys(self.index["docnames"][page] for *_, page in results))

    def _titles(self, query: str) -> list[tuple[float, str, int]]:
        query, found = query.lower().strip(), []
        for title, places in self.index["alltitles"].items():
            if query in title.lower().strip() and len(query) >= len(title) / 2:
                for page, _ in places:
                    above, share = self.index["titles"][page], len(query) / len(title)
                    shown = title if above == title else f"{above} > {title}"
                    found.append((round(self.TITLE * share) + (above == title), shown, page))
        return found

    def _objects(self, query: str) -> list[tuple[float, str, int]]:
        terms, found = set(re.findall(r"\w+", query.lower())), []
        for prefix, objects in self.index["objects"].items():
            for page, kind, _, _, name in objects:
                full = f"{prefix}.{name}".lower().strip(".")
                what = self.index["objnames"][str(kind)][2]
                around = f"{prefix} {name} {what} {self.index['titles'][page]}".lower()
                for term in terms:
                    if term in full and all(other in around for other in terms - {term}):
                        last = full.split(".")[-1]
                        score = self.OBJECT if term in (full, last) else self.PARTIAL_OBJECT
                        found.append((score, f"{prefix}.{name}", page))
        return found

    def _texts(self, query: str) -> list[tuple[float, str, int]]:
        words = re.findall(r"\w+", query.lower())
        words = [w for w in words if w not in self.language.stopwords and not w.isdigit()]
        stems = {self.language.stem(word) for word in words}
        scores: dict[int, dict[str, int]] = {}
        for stem in stems:
            for score, pages in self._matches(stem):
                for page in pages:
                    scores.setdefault(page, {})[stem] = score  # the last one, as in the script
        needed = {len(stems), sum(len(stem) > 2 for stem in stems)}
        titles = self.index["titles"]
        found = [(page, of) for page, of in scores.items() if len(of) in needed]
        return [(max(of.values()), titles[page], page) for page, of in found]

    def _matches(self, stem: str) -> list[tuple[int, list[int]]]:
        found = []
        for table, exact, partial in (
            ("terms", self.TERM, self.PARTIAL_TERM),
            ("titleterms", self.TITLE, self.PARTIAL_TITLE),
        ):
            entries = self.index[table]
            if stem in entries:
                found.append((exact, entries[stem]))
            elif len(stem) > 2:
                found += [(partial, pages) for term, pages in entries.items() if stem in term]
        return [(score, pages if isinstance(pages, list) else [pages]) for score, pages in found]


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    return Search(site)


@pytest.mark.parametrize("phrase", PHRASES)
def test_search(search: Search, phrase: str) -> None:
    assert "troubleshooting" in search.pages(phrase)[:3]


def test_search_of_nothing_and_of_names(search: Search) -> None:
    assert search.pages("zebra") == []
    assert search.pages("decode_loss")[0] == "api"
    assert search.pages("torchtitan")[0] == "recipes"


class Fetched(HTMLParser):
    """Addresses that a browser fetches to show a page, and the text of the page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.formulas = 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.formulas += tag == "math"
        if tag == "link" and given.get("rel") not in ("index", "search", "next", "prev"):
            self.addresses.append(given.get("href") or "")
        if tag != "a":
            named = (given.get(name) for name in ("src", "srcset", "data", "poster"))
            self.addresses += [address for address in named if address]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        for address in Fetched(page).addresses:
            assert not re.match(r"(\w+:)?//", address), (page.name, address)
    for style in (site / "_static").rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(\w+:)?//", style.read_text()), style.name


def test_formulas_need_no_script(site: Path) -> None:
    formulas = (ROOT / "docs/decoder_inside.md").read_text(encoding="utf-8").count("$") // 2
    page = site / "decoder_inside.html"
    assert Fetched(page).formulas > 0
    assert Fetched(page).formulas >= formulas // 2  # two dollars on each side of a block
    assert "\\frac" not in page.read_text(encoding="utf-8")


def test_long_code_in_tables_may_break(site: Path) -> None:
    text = (site / "decoder.html").read_text(encoding="utf-8")
    code = r'<code class="{}docutils literal notranslate"><span class="pre">{}</span>'
    assert re.search(code.format("long ", "soft_temperature"), text)
    assert re.search(code.format("", "temperature"), text)


def test_reference_has_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in dir(accumext):
        if not name.startswith("_") and not isinstance(getattr(accumext, name), types.ModuleType):
            assert f'id="accumext.{name}"' in text, name
            assert text.index(f'href="#accumext.{name}"') < text.index(f'id="accumext.{name}"')
    for fault in ("Alias for field number", "Return type", "title-reference", "accumext.decoder._"):
        assert fault not in text
