"""The number of examples: few by default, as many as a test asks for in CI, more at night."""

import itertools
from collections.abc import Iterable
from typing import Any

from hypothesis import settings

from support import matrix

# --hypothesis-profile: "default" is what everybody runs, "ci" what .ci/run does; "nightly" is for
# tests that have a long form: the state machine, the interrupts, those with `combinations`, the
# decoders with caches.
DEFAULT, CI, NIGHTLY = "default", "ci", "nightly"
SHARE = 5


def register() -> None:
    """Tests that ask for no number of examples draw Hypothesis's own, 100, in CI."""
    settings.register_profile(DEFAULT, max_examples=100 // SHARE)
    settings.register_profile(CI, max_examples=100)
    settings.register_profile(NIGHTLY, max_examples=100)


def examples(count: int, nightly: int | None = None) -> int:
    """Of this many, those that run in the profile that was chosen; every night more."""
    profile = settings.get_current_profile_name()
    if profile == NIGHTLY and nightly is not None:
        return nightly
    return max(10, count // SHARE) if profile == DEFAULT else count


def combinations(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Those that between them hold every pair of values, and every night all of them."""
    found = list(itertools.product(*axes))
    if settings.get_current_profile_name() == NIGHTLY:
        return found
    return [found[index] for index in sorted(matrix.covering(found))]
