"""The pybind11 module: the chunk planner against its definition, and the facts of the build."""

from __future__ import annotations

import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumext.backend import _libraries

bindings = _libraries.bindings()
if bindings is None:
    pytest.skip("the bindings are not installed", allow_module_level=True)

sizes = st.lists(st.integers(0, 40), max_size=8)


@given(sizes, st.integers(1, 12))
def test_chunks_are_the_tensors_in_order_cut_every_chunk_size(
    numels: list[int], chunk_size: int
) -> None:
    expected = [
        (tensor, begin, min(begin + chunk_size, numel))
        for tensor, numel in enumerate(numels)
        for begin in range(0, numel, chunk_size)
    ]
    assert bindings.plan_chunks(numels, chunk_size) == expected


def test_chunks_of_a_tensor_beyond_32_bits() -> None:
    numel = 2**33 + 1
    assert bindings.plan_chunks([numel], 2**33) == [(0, 0, 2**33), (0, 2**33, numel)]


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        bindings.plan_chunks([1], 0)


def test_build_facts() -> None:
    facts = bindings.build_facts()
    assert facts["cplusplus"] >= 202002
    assert facts["python"].startswith(".".join(platform.python_version_tuple()[:2]))
