"""Losses of whole distributions: the operator against autograd on their definition in float64."""

import pytest
import torch
from support.objective_cases import check, problem
from support.tensors import dtype_id

import accumext
from accumext.decoder import _operators

OPTIONS = [
    {"entropy_weight": 0.3},
    {"soft": "tokens"},
    {"soft": "head"},
    {"soft": "tokens", "temperature": 2.5},
    {"soft": "head", "temperature": 0.5, "entropy_weight": -0.2, "z_loss": 0.1},
    {"soft": "tokens and head", "temperature": 3.0, "entropy_weight": 0.1, "bias": False},
    {"z_loss": 0.2},
    {"soft": "all words", "temperature": 2.0},
    {"soft": "tokens", "size": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9, 16, 17, 33])
def test_statistics_and_gradients_in_double(rows, options):
    torch.manual_seed(rows)
    for words in (1, 2, 13, 480, 961):
        check(problem(rows, words, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
def test_single_and_half_precision(weight, options):
    for rows in (2, 16, 31):
        given = problem(rows, 500, torch.float32, weight, **options)
        check(given)
        if weight == torch.bfloat16:
            check(given, kept=torch.bfloat16)


@pytest.mark.parametrize("logit_rows", [1, 2, 7, 40])
def test_rows_do_not_depend_on_how_many_there_are_at_once(logit_rows):
    given = problem(19, 300, soft="tokens and head", temperature=1.5, entropy_weight=0.2)
    check(given, logit_rows)


@pytest.mark.parametrize("size", [255, 256, 257, 700])
def test_many_words_of_a_teacher_some_of_them_more_than_once(size):
    given = problem(5, 200, soft="tokens and head", size=size, temperature=1.5)
    given.indices[:2] = 7
    check(given)


def test_no_rows():
    tokens, _, gradients = problem(0, 7, soft="tokens and head").run()
    assert tokens.shape == (0,)
    assert gradients.shape == (0, 7)


@pytest.mark.skipif(accumext.backend() == "reference", reason="of the kernel, which is compiled")
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
    ],
)
def test_gradients_in_a_precision_that_is_not_written(dtype, kept):
    rows, words, size = 3, 7, 4
    hidden, weight = torch.randn(rows, size, dtype=dtype), torch.randn(words, size, dtype=dtype)
    targets, share = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=dtype)
    gradients = torch.zeros(words, rows, dtype=kept).t()
    with pytest.raises(RuntimeError):
        _operators.head_objective(
            hidden, weight, None, targets, share, 0.0, 0.1, 1.0, 1.0, None, None, None, None, None,
            gradients, 1, torch.empty_like(targets), hidden.new_empty(5, rows),
        )  # fmt: skip
    assert not gradients.any()


def test_words_that_cannot_be():
    """A mask of words: their probability is 0, and no product with an infinite logit is formed."""
    given = problem(9, 50, soft="head", entropy_weight=0.5)
    assert given.bias is not None
    assert given.teacher is not None
    given.bias[7] = given.teacher[2][7] = -torch.inf
    given.targets.masked_fill_(given.targets == 7, 8)
    _, stats, gradients = given.run()
    assert all(value.isfinite().all() for value in stats.values())
    assert (gradients[:, 7] == 0).all()
    assert gradients.isfinite().all()


def test_a_row_without_a_distribution():
    """Its token is that of argmax, and the others are as they were."""
    given = problem(9, 50, soft="head", entropy_weight=0.5)
    whole = given.run()
    given.hidden[4] = torch.nan
    tokens, stats, gradients = given.run()
    assert stats["logsumexp"][4].isnan()
    assert tokens[4] == 0
    others = torch.arange(9) != 4
    assert torch.equal(tokens[others], whole[0][others])
    assert torch.equal(gradients[others], whole[2][others])
