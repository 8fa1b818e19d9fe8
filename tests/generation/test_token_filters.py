"""The tokens that are sampled from, against sorting all of them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.samples import assert_drawn, kept_shares

from accumext.generation import _token_filters
from accumext.generation._token_filters import TokenFilter, fewest, largest


@settings(max_examples=examples(150), deadline=None)
@given(
    words=st.sampled_from([1, 2, 13, 64, 65, 700]),
    top_k=st.sampled_from([None, 1, 3, 64, 1000]),
    top_p=st.sampled_from([None, 0.0507, 0.503, 0.951, 1.0]),
    levels=st.sampled_from([2, 5, 10**6]),  # few make equals
    flat=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_samples_invert_the_running_sum_of_what_is_kept(words, top_k, top_p, levels, flat, seed):
    torch.manual_seed(seed)
    logits = torch.randint(levels, (words, 5)).double() * (0.01 if flat else 3) / levels
    uniforms = torch.rand(5, dtype=torch.float64)
    uniforms[0] = 0.0
    tokens = TokenFilter(1.0, top_k, top_p).sample(logits.t(), uniforms)
    assert_drawn(tokens, kept_shares(logits.t(), top_k, top_p), uniforms, 1e-12)


def test_nothing_impossible_is_drawn():
    logits = torch.full((700, 3), -torch.inf, dtype=torch.float64)
    logits[[3, 600]] = 0.0
    largest = torch.full((3,), 1 - 2**-53, dtype=torch.float64)
    for token_filter in (TokenFilter(1.0, 5, None), TokenFilter(1.0, None, 1.0)):
        assert (token_filter.sample(logits.t(), largest) == 600).all()
        assert (token_filter.sample(logits.t(), largest * 0) == 3).all()


def test_the_temperature_comes_first():
    """At a temperature near 0 the likeliest token is more than any share of the whole."""
    logits = torch.randn(50, 4).double()
    tokens = TokenFilter(1e-3, None, 0.99).sample(logits.t(), torch.rand(4).double())
    assert torch.equal(tokens, logits.argmax(0))


@pytest.mark.parametrize("part", [0.05, 0.6, 0.95, 1.0])
def test_a_gpu_sorts_and_keeps_the_same(part):
    logits = torch.randn(7, 90).double().mul(4).round().div(4)  # some are equal
    logits[0, 5:] = -torch.inf
    shares = logits.softmax(1)
    assert torch.equal(_token_filters._fewest_by_sorting(shares, part), fewest(shares, part))


def test_the_largest_and_of_equals_the_first():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    assert largest(logits, 2).tolist() == [[1, 3], [0, 1]]
    assert largest(logits, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    on_meta = largest(logits.to("meta"), 2)  # as on a GPU: nothing is read
    assert on_meta.shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 1000])
def test_a_gpu_finds_the_largest_that_a_stable_sort_puts_first(width, dtype):
    for count, words in itertools.product({1, 2, width // 2, width} - {0}, (1, 4, 1000)):
        logits = torch.randint(words, (8, width)).to(dtype)  # many are equal
        logits[1], logits[2] = torch.inf, -torch.inf
        logits[3, ::2], logits[4, ::3], logits[5, ::2] = -torch.inf, -0.0, torch.inf
        logits[6, width // 2], logits[7] = torch.nan, torch.nan
        order = logits.sort(dim=1, descending=True, stable=True).indices
        expected = order[:, : min(count, width)].sort(1).values
        found = _token_filters._first_of_the_largest(logits, min(count, width))
        assert torch.equal(found, expected)
