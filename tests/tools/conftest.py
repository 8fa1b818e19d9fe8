"""The modules of benchmarks, and of the table of what works, can be imported; and few objects to
look through."""

import sys

import pytest
from support import ROOT

sys.path[:0] = [str(ROOT / folder) for folder in ("bench", "bench/trainers", "tests/conformance")]


@pytest.fixture(autouse=True)
def few_objects(only_objects_of_the_test):
    """Benchmarks collect garbage before each job."""
