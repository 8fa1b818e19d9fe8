"""The demo's text: docstrings of the running Python's standard library, as numbers of words."""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

OPENING = 8  # words that the encoder reads

_WORD = re.compile(r"\w+(?:['.-]\w+)*|[^\w\s]")
_DOCSTRING = re.compile(r'^[ \t]*[rRuU]?"""(.*?)"""', re.M | re.S)
_PROSE = re.compile(r"[A-Za-z]+(?:['-][a-z]+)*|[.,;:()]")
_MIN_PLAIN = 0.9  # share of words that are plain; code and tables have fewer
_NOT_STANDARD = {"site-packages", "dist-packages"}


class Refused(Exception):
    """The options cannot be used; one sentence says why."""


class Text(NamedTuple):
    """Beginnings of docstrings, no two of which open alike, and the words behind the numbers."""

    words: list[str]  # by number; first those of the docstrings, then the most frequent
    used: int  # number of words that the docstrings use
    docstrings: Tensor  # int64 [OPENING + length, count]

    def show(self, numbers: list[int]) -> str:
        """Return the text for these numbers; a number without a word is a "?"."""
        shown = " ".join(self.words[n] if n < len(self.words) else "?" for n in numbers)
        return re.sub(r"(?<=\() | (?=[.,;:)])", "", shown)


def load_text(
    vocabulary: int, length: int, count: int, seed: int = 0, root: Path | None = None
) -> Text:
    """Read all Python source under `root` (default: the standard library); pick prose docstrings.

    Raises:
        Refused: there are fewer docstrings of that length, or a smaller vocabulary, than asked.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    counts: Counter[str] = Counter()
    found: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        if _NOT_STANDARD.intersection(path.relative_to(root).parts):
            continue
        source = path.read_bytes().decode("utf-8", errors="replace")
        counts.update(_WORD.findall(source))
        for docstring in _DOCSTRING.findall(source):
            words = _WORD.findall(docstring)[: OPENING + length]
            plain = sum(_PROSE.fullmatch(word) is not None for word in words)
            if len(words) == OPENING + length and plain >= _MIN_PLAIN * len(words):
                found.setdefault(tuple(words[:OPENING]), words)
    if len(found) < count:
        raise Refused(
            f"demo: --batch and --length must leave {count} docstrings of so many words, "
            f"got {len(found)} under {root}"
        )
    chosen = random.Random(seed).sample(list(found.values()), count)
    used = dict.fromkeys(word for words in chosen for word in words)
    if len(used) > vocabulary:
        raise Refused(
            f"demo: --vocab must be at least {len(used)}, the words used, got {vocabulary}"
        )
    frequent = (word for word, _ in counts.most_common(vocabulary))
    known = list(dict.fromkeys([*used, *frequent]))[:vocabulary]
    number = {word: n for n, word in enumerate(known)}
    return Text(
        known, len(used), torch.tensor([[number[word] for word in words] for words in chosen]).T
    )
