"""The demo's text: the source code of the running Python's own standard library, as words."""

from __future__ import annotations

import math
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

UNKNOWN = "<unk>"

# A word, a single mark, or the end of a line: about 8 million words of 5.5 nats each.
_WORD = re.compile(r"\w+|[^\w\s]|\n")
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
# Distinct words read per word kept; the rest is what the unknown word learns from.
_READ_PER_KEPT = 1.2
_MIN_TRAINING_WORDS = 200_000
_MIN_HELD_OUT_WORDS = 250_000


@dataclass(frozen=True)
class Text:
    """Two streams of word numbers and what the numbers stand for."""

    words: list[str]  # the word of each number, most frequent first after UNKNOWN (number 0)
    unigram: Tensor  # float64 [V], probability of each number, add-one smoothed over training
    entropy: float  # of the training words, nats per word
    training: Tensor  # int64 [N]
    held_out: Tensor  # int64 [M], from files that training never sees

    def show(self, numbers: list[int]) -> str:
        """The words of these numbers as one line, ends of lines written `\\n`."""
        return " ".join(self.words[n] if n < len(self.words) else UNKNOWN for n in numbers).replace(
            "\n", "\\n"
        )

    def unigram_loss(self, numbers: Tensor) -> float:
        """Cross-entropy of these words under the training frequencies, nats per word."""
        return -float(self.unigram.log()[numbers].mean())


def is_held_out(path: str) -> bool:
    """Whether the file of this relative posix path belongs to the held-out tenth."""
    return zlib.crc32(path.encode()) % 10 == 0


def split_words(source: str) -> list[str]:
    """The words, marks and line ends of a source text, in order."""
    return _WORD.findall(source)


def source_paths(root: Path) -> list[str]:
    """Python files relative to `root`, in an order that mixes the library's packages."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STANDARD]
        here = Path(folder).relative_to(root)
        paths += [(here / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(paths, key=lambda path: (zlib.crc32(path.encode()), path))


def load_text(vocabulary: int, root: Path | None = None) -> Text:
    """Read as many files as a vocabulary of this size needs, and number their words.

    Args:
        vocabulary: numbers in all, with that of the unknown word. Where the library has fewer
            distinct words, the last numbers stay unused.
        root: folder of the source files; the running Python's standard library if None.

    Raises:
        RuntimeError: no Python source under `root`.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = source_paths(root)
    training = [path for path in paths if not is_held_out(path)]
    held_out = [path for path in paths if is_held_out(path)]
    if not training or not held_out:
        raise RuntimeError(
            f"demo: the standard library must be there as .py files, got none under {root}"
        )

    counts: Counter[str] = Counter()
    stream: list[str] = []
    for words in _read(root, training):
        counts.update(words)
        stream += words
        if len(counts) >= _READ_PER_KEPT * vocabulary and len(stream) >= _MIN_TRAINING_WORDS:
            break
    unseen: list[str] = []
    for words in _read(root, held_out):
        unseen += words
        if len(unseen) >= _MIN_HELD_OUT_WORDS:
            break

    kept = [UNKNOWN] + [word for word, _ in counts.most_common(vocabulary - 1)]
    number = {word: n for n, word in enumerate(kept)}
    numbers = torch.tensor([number.get(word, 0) for word in stream])
    frequency = torch.bincount(numbers, minlength=vocabulary).double()
    probability = frequency / frequency.sum()
    return Text(
        words=kept,
        unigram=(frequency + 1) / (frequency.sum() + vocabulary),
        entropy=-sum(p * math.log(p) for p in probability.tolist() if p > 0),
        training=numbers,
        held_out=torch.tensor([number.get(word, 0) for word in unseen]),
    )


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """Stretches of the stream as columns: int64 [length, B] from int64 starts [B]."""
    return stream[starts + torch.arange(length).unsqueeze(1)]


def _read(root: Path, paths: list[str]) -> Iterator[list[str]]:
    for path in paths:
        yield split_words((root / path).read_bytes().decode("utf-8", errors="replace"))
