"""The built documentation: readable without a network, and its search finds what people paste."""

import json
import re
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import ROOT
from support.once import once
from support.programs import output_of, run_python

import accumext

pytestmark = pytest.mark.process

PHRASES = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
    "Trying to backward through the graph a second time",
    "unscale_() has already been called on this optimizer since the last update()",
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation",
    "loss explodes when I accumulate gradients",
    "last window is wrong",
    "len(loader) not divisible by accumulation steps",
    "gradients are None or 0.0 after backward",
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
    "NaN after some steps",
    "loss is nan",
    "perplexity too high",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the pages, which warns of nothing, and return their folder."""
    for needed in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(needed)

    def build(out: Path) -> None:
        output_of(run_python("-m", "sphinx", "-q", "-W", "-d", out / ".doctrees", "docs", out))

    return once(tmp_path_factory, "site", build)


@pytest.fixture(scope="module")
def pages_with(site):
    """The pages that have every word of a query, in their text or a title, as Sphinx's index says.

    Its `searchtools.js` lists these; words are stemmed, and longer ones may be part of another.
    """
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[len("Search.setIndex(") : text.rindex(")")])
    language = SearchEnglish({})
    entries = [*index["terms"].items(), *index["titleterms"].items()]

    def with_word(stem):
        found: set[int] = set()
        for term, pages in entries:
            if stem == term or (len(stem) > 2 and stem in term):
                found |= set(pages if isinstance(pages, list) else [pages])
        return found

    def search(query):
        words = re.findall(r"\w+", query.lower())
        words = [w for w in words if w not in language.stopwords and not w.isdigit()]
        pages = set.intersection(*(with_word(language.stem(word)) for word in words))
        return {index["docnames"][page] for page in pages}

    return search


@pytest.mark.parametrize("phrase", PHRASES)
def test_search(pages_with, phrase):
    assert "troubleshooting" in pages_with(phrase)
    assert pages_with("zebra") == set()


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


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.glob("*.html"):
        for address in Fetched(page).addresses:
            assert not re.match(r"(\w+:)?//", address), (page.name, address)
    for style in (site / "_static").rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(\w+:)?//", style.read_text()), style.name


def test_formulas_need_no_script(site):
    formulas = (ROOT / "docs/decoder_inside.md").read_text(encoding="utf-8").count("$") // 2
    page = site / "decoder_inside.html"
    assert Fetched(page).formulas > 0
    assert Fetched(page).formulas >= formulas // 2  # two dollars on each side of a block
    assert "\\frac" not in page.read_text(encoding="utf-8")


def test_reference_has_every_public_name(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in dir(accumext):
        if not name.startswith("_") and not isinstance(getattr(accumext, name), types.ModuleType):
            assert f'id="accumext.{name}"' in text, name
            assert text.index(f'href="#accumext.{name}"') < text.index(f'id="accumext.{name}"')
    for fault in ("Alias for field number", "Return type", "title-reference", "accumext.decoder._"):
        assert fault not in text
