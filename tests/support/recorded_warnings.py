"""Warnings of a piece of code, and of nothing else."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_as(action: str) -> Iterator[list[warnings.WarningMessage]]:
    """Record every warning in this context ("always", "default"), or raise it ("error").

    The garbage of earlier tests is not collected in it, because an optimizer that ends inside a
    window warns when it is collected.
    """
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter(action)
            yield said
    finally:
        gc.enable()
