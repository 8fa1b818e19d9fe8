"""The loops and processes of tests/conformance, which are run here under an audit; and few objects
to look through."""

import sys

import pytest
from support import ROOT

sys.path.append(str(ROOT / "tests" / "conformance"))
from your_loops import forget_accelerate as forget_accelerate


@pytest.fixture(autouse=True)
def few_objects(only_objects_of_the_test):
    """An audit looks for modules and optimizers among all objects."""
