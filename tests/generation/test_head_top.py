"""The operators of the largest logits and of filtered samples, against sorting in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.samples import assert_drawn, kept_shares
from support.tensors import dtype_id
from torch import Tensor

import accumext  # noqa: F401  (registers the operators)

head_top = torch.ops.accumext.head_top.default
head_sample = torch.ops.accumext.head_sample.default

# Around spans of 480 rows of the weight, and 32 rows of logits at once.
VOCABULARIES = [1, 2, 7, 31, 479, 480, 481, 961, 5000]
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 40]
DTYPES = [  # of hidden and the sums, of the weight
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
LARGEST_UNIFORM = 1 - 2.0**-53


def top(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int, logit_rows: int = 32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = hidden.new_full((len(hidden), count), 7.0)
    tokens, stats = torch.full(logits.shape, -1), hidden.new_full((2, len(hidden)), 7.0)
    head_top(hidden, weight, bias, logit_rows, logits, tokens, stats)
    return logits, tokens, stats


def sample(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, uniforms: Tensor, top_k: int, top_p: float,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, stats = torch.full((len(hidden),), -1), hidden.new_full((3, len(hidden)), 7.0)
    head_sample(hidden, weight, bias, uniforms, temperature, top_k, top_p, 32, tokens, stats)
    return tokens, stats


@given(
    vocabulary=st.sampled_from(VOCABULARIES),
    rows=st.sampled_from(ROWS),
    count=st.sampled_from([1, 2, 5, 64, 10**6]),
    dtypes=st.sampled_from(DTYPES),
    logit_rows=st.sampled_from([1, 3, 32, 100]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_largest_logits(vocabulary, rows, count, dtypes, logit_rows, seed):
    torch.manual_seed(seed)
    count = min(count, vocabulary)
    hidden, weight = torch.randn(rows, 9, dtype=dtypes[0]), torch.randn(vocabulary, 9).to(dtypes[1])
    bias = torch.randn(vocabulary, dtype=dtypes[0])
    z = hidden.to(dtypes[1]).double() @ weight.double().t() + bias.double()
    tolerance = TOLERANCE[dtypes[0]]
    logits, tokens, stats = top(hidden, weight, bias, count, logit_rows)
    close = {"rtol": tolerance, "atol": 10 * tolerance, "check_dtype": False}
    torch.testing.assert_close(logits, z.sort(1, descending=True).values[:, :count], **close)
    torch.testing.assert_close(z.gather(1, tokens).to(logits.dtype), logits, **close)
    assert (tokens.sort(1).values.diff(dim=1) > 0).all()  # none twice
    shifted = z - z.amax(1, keepdim=True)
    torch.testing.assert_close(stats[0], z.amax(1), **close)
    torch.testing.assert_close(stats[1], shifted.exp().sum(1), **close)


@pytest.mark.parametrize("count", [1, 3, 500, 1500])
def test_ties_go_to_the_first(count):
    bias = torch.zeros(1500)
    bias[700], bias[1400] = 1.0, -1.0
    _, tokens, _ = top(torch.ones(3, 2), torch.zeros(1500, 2), bias, count)
    order = [700, *(v for v in range(1500) if v not in (700, 1400)), 1400]
    assert tokens.tolist() == [order[:count]] * 3


def test_a_word_that_cannot_be_said_and_no_number():
    bias = torch.full((1000,), float("-inf"))
    bias[[3, 999]] = 0.0
    logits, tokens, stats = top(torch.ones(2, 2), torch.zeros(1000, 2), bias, 3)
    assert tokens[:, :2].tolist() == [[3, 999]] * 2
    assert (logits[:, 2] == float("-inf")).all()
    assert (stats[1] == 2).all()
    for top_k in (1000, 900, 3):  # whatever comes, it comes
        top(torch.full((2, 2), float("nan")), torch.zeros(1000, 2), bias, top_k)
        nothing = torch.full((2, 2), float("nan")), torch.zeros(1000, 2), bias
        tokens, _ = sample(*nothing, torch.rand(2).double(), top_k, 0.5)
        assert ((tokens >= 0) & (tokens < 1000)).all()


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: dtype_id(pair[1]))
@pytest.mark.parametrize("top_k", [1, 7, 1100])
@pytest.mark.parametrize("top_p", [1e-9, 0.405, 1.0])
def test_samples_are_of_what_is_kept(dtypes, top_k, top_p):
    words, rows, temperature = 1100, 40, 1.5
    hidden, weight = torch.randn(rows, 9, dtype=dtypes[0]), torch.randn(words, 9).to(dtypes[1])
    bias = torch.randn(words, dtype=dtypes[0])
    z = hidden.to(dtypes[1]).double() @ weight.double().t() + bias.double()
    uniforms = torch.rand(rows, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, LARGEST_UNIFORM
    tokens, stats = sample(hidden, weight, bias, uniforms, top_k, top_p, temperature)
    shares = kept_shares(z, top_k, top_p, temperature)
    tolerance = TOLERANCE[dtypes[0]]
    assert_drawn(tokens, shares, uniforms, tolerance)
    torch.testing.assert_close(
        stats[2], z.gather(1, tokens[:, None])[:, 0], rtol=tolerance, atol=10 * tolerance,
        check_dtype=False,
    )  # fmt: skip
    total = (z - z.amax(1, keepdim=True)).exp().sum(1)
    torch.testing.assert_close(
        stats[1], total, rtol=10 * tolerance, atol=tolerance, check_dtype=False
    )
