"""The pybind11 module: the chunk planner against its definition, and the instruction set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import cpp_extension

from accumext.backends import load_arguments

pytestmark = pytest.mark.build

sizes = st.lists(st.integers(0, 40), max_size=8)


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """Compile the module as anyone can."""
    folder = tmp_path_factory.mktemp("bindings")
    return cpp_extension.load(**load_arguments("bind"), build_directory=str(folder))


@given(numels=sizes, chunk_size=st.integers(1, 12))
def test_chunks_are_the_tensors_in_order_cut_every_chunk_size(bindings, numels, chunk_size):
    expected = [
        (tensor, begin, min(begin + chunk_size, numel))
        for tensor, numel in enumerate(numels)
        for begin in range(0, numel, chunk_size)
    ]
    assert bindings.plan_chunks(numels, chunk_size) == expected


def test_chunks_of_a_tensor_beyond_32_bits(bindings):
    numel = 2**33 + 1
    assert bindings.plan_chunks([numel], 2**33) == [(0, 0, 2**33), (0, 2**33, numel)]


def test_chunk_size_must_be_positive(bindings):
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        bindings.plan_chunks([1], 0)


def test_the_instruction_set_is_the_one_that_torch_uses(bindings):
    names = {"DEFAULT": "portable", "AVX2": "AVX2", "AVX512": "AVX-512"}
    assert bindings.instruction_set() == names[torch.backends.cpu.get_cpu_capability()]
