"""English prose in Python source: docstrings and comments, as words, and words as prose again."""

from __future__ import annotations

import re
from collections.abc import Iterator

END = "\n"  # of a paragraph
OPEN, CLOSE = "“", "”"  # what a quotation mark is, by where it stands

# A docstring, comment lines, or another long string, which is passed over. A string counts as a
# docstring if nothing but its prefix stands before it on its line.
_DOCSTRING_OR_COMMENT = re.compile(
    r"""^[ \t]*[rRuU]?(\"{3}|'{3})(.*?)\1|^((?:[ \t]*\#[^\n]*\n)+)|(\"{3}|'{3}).*?\4""", re.M | re.S
)
_COMMENT_SIGNS = re.compile(r"^[ \t]*#+[:!]?", re.M)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,2})(\w[\w.]*)\1(?!\w)")
_OPENING = re.compile(r"(?<![^\s(\[{<=])(\"|'+)(?=\S)")
_CLOSING = re.compile(r"\"|(?<!\w)'+|'+(?!\w)")

# With what belongs to a name: os.path.join(), *args, don't, built-in.
_WORD = re.compile(r"\*{0,2}\w+(?:[.'-]\w+)*(?:\(\))?|\.{3}|-{2,}|[^\w\s]")
_PLAIN = re.compile(r"(?:[A-Za-z]?[a-z]*(?:['-][a-z]+)*|[A-Z]+|[.,;:?!])\Z")
_MIN_WORDS = 6
_MIN_PLAIN = 0.75  # of the words; code and tables have fewer

_NO_BLANK_BEFORE = {*".,;:!?)]}%/", "...", CLOSE}
_NO_BLANK_AFTER = {*"([{/", OPEN}


def paragraphs(source: str) -> Iterator[tuple[str, ...]]:
    """The words of each paragraph of prose in a source text, END last."""
    for found in _DOCSTRING_OR_COMMENT.finditer(source):
        _, docstring, comment, _ = found.groups()
        text = docstring or _COMMENT_SIGNS.sub("", comment or "")
        for paragraph in _BLANK_LINE.split(text):
            words = split_words(paragraph)
            plain = sum(_PLAIN.match(word) is not None for word in words)
            if len(words) >= _MIN_WORDS and plain >= _MIN_PLAIN * len(words):
                yield (*words, END)


def split_words(text: str) -> list[str]:
    """Words and marks; quotation marks say where they open, and those of markup are gone."""
    text = _EMPHASIS.sub(
        r"\2", text.replace("`", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    )
    return _WORD.findall(_CLOSING.sub(CLOSE, _OPENING.sub(OPEN, text)))


def join_words(words: list[str]) -> str:
    """Words and marks as a reader expects them, without blanks before commas; END is a blank."""
    text, before = "", END
    for word in words:
        if word == END:
            before = END
            continue
        if text and (before == END or not (word in _NO_BLANK_BEFORE or before in _NO_BLANK_AFTER)):
            text += " "
        text += word
        before = word
    return text
