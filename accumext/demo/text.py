"""The demo's text: what the running Python's standard library says in docstrings and comments."""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from accumext.demo.progress import Progress
from accumext.demo.prose import END, join_words, paragraphs

UNKNOWN, UNKNOWN_NUMBER, END_NUMBER = "<unk>", 0, 1

_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
# Distinct words read per word kept; the rest is what the unknown word learns from.
_READ_PER_KEPT = 1.2
_MIN_TRAINING_WORDS = 200_000
_MIN_HELD_OUT_WORDS = 250_000


@dataclass(frozen=True)
class Text:
    """Two streams of word numbers and what the numbers stand for."""

    words: list[str]  # the word of each number, most frequent first after UNKNOWN and END
    unigram: Tensor  # float64 [V], probability of each number, add-one smoothed over training
    entropy: float  # of the training words, nats per word
    training: Tensor  # int64 [N]
    held_out: Tensor  # int64 [M], from files that training never sees

    def show(self, numbers: list[int]) -> str:
        """The prose that these numbers stand for."""
        return join_words([self.words[n] if n < len(self.words) else UNKNOWN for n in numbers])

    def beginnings(self, count: int, length: int) -> Tensor:
        """The first words of paragraphs spread over the held-out text, int64 [length, count].

        Only those that go on after them, begin with a capital letter, and in which no word is
        unknown; fewer columns where there are fewer.
        """
        held_out = self.held_out.tolist()
        ends = [n for n, word in enumerate(held_out) if word == END_NUMBER]
        first = [
            begin + 1
            for begin, end in pairwise(ends)
            if end - begin > length + 1
            and UNKNOWN_NUMBER not in held_out[begin + 1 : begin + 1 + length]
            and self.words[held_out[begin + 1]][0].isupper()
        ]
        chosen = [first[n * len(first) // count] for n in range(min(count, len(first)))]
        return windows(self.held_out, torch.tensor(chosen, dtype=torch.int64), length)

    def unigram_loss(self, numbers: Tensor) -> float:
        """Cross-entropy of these words under the training frequencies, nats per word."""
        return -float(self.unigram.log()[numbers].mean())


def is_held_out(path: str) -> bool:
    """Tell whether the file of this relative posix path belongs to the held-out tenth."""
    return zlib.crc32(path.encode()) % 10 == 0


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
        vocabulary: numbers in all, with those of the unknown word and of a paragraph's end. Where
            the library has fewer distinct words, the last numbers stay unused.
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
    unseen: list[str] = []
    seen: set[tuple[str, ...]] = set()
    with Progress("reading", len(paths)) as progress:
        for path in training:
            words = _read(root / path, seen)
            counts.update(words)
            stream += words
            progress.end()
            if len(counts) >= _READ_PER_KEPT * vocabulary and len(stream) >= _MIN_TRAINING_WORDS:
                break
        for path in held_out:
            unseen += _read(root / path, seen)
            progress.end()
            if len(unseen) >= _MIN_HELD_OUT_WORDS:
                break

    del counts[END]
    enough = min(vocabulary - 2, int(len(counts) / _READ_PER_KEPT))
    kept = [UNKNOWN, END, *(word for word, _ in counts.most_common(enough))]
    number = {word: n for n, word in enumerate(kept)}
    numbers = torch.tensor([number.get(word, UNKNOWN_NUMBER) for word in stream])
    frequency = torch.bincount(numbers, minlength=vocabulary).double()
    probability = frequency / frequency.sum()
    return Text(
        words=kept,
        unigram=(frequency + 1) / (frequency.sum() + vocabulary),
        entropy=-sum(p * math.log(p) for p in probability.tolist() if p > 0),
        training=numbers,
        held_out=torch.tensor([number.get(word, UNKNOWN_NUMBER) for word in unseen]),
    )


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """Stretches of the stream as columns: int64 [length, B] from int64 starts [B]."""
    return stream[starts + torch.arange(length).unsqueeze(1)]


def _read(path: Path, seen: set[tuple[str, ...]]) -> list[str]:
    """The words of a file, without paragraphs that were there before, such as licences."""
    words: list[str] = []
    for paragraph in paragraphs(path.read_bytes().decode("utf-8", errors="replace")):
        if paragraph not in seen:
            seen.add(paragraph)
            words += paragraph
    return words
