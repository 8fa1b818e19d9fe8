"""The head's operator against its definition in float64: logits, statistics, tokens, samples."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.tensors import dtype_id
from torch import Tensor

import accumext  # noqa: F401  (registers the operators)

head_forward = torch.ops.accumext.head_forward.default

# Around row blocks of 6, 12 and 32, and spans of 480 rows of the weight.
VOCABULARIES = [1, 2, 5, 6, 7, 11, 12, 13, 25, 31, 32, 33, 479, 480, 481, 491, 513, 960, 961, 5000]
DEPTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 129]  # around vectors, cache lines and pairs
ROWS = [*range(1, 10), 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 70]
DTYPES = [  # of hidden and the sums, of the weight
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]
UNTOUCHED = 7.0
# Roundings on the way to an exponential besides those of its argument: its own, within two units
# in the last place, twice as many for good measure.
EXP_ULPS = 8
LARGEST_UNIFORM = 1 - 2.0**-53  # the largest double below 1


@dataclass
class Found:
    """The results that the operator wrote."""

    tokens: Tensor  # [M]
    peak: Tensor  # [M]
    total: Tensor
    target_logit: Tensor
    exps: Tensor | None  # [M, V]


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    uniforms: Tensor | None = None,
    temperature: float = 1.0,
    exps_dtype: torch.dtype | None = None,
    logit_rows: int = 32,
    margins: tuple[int, int] = (0, 0),  # rows of a larger workspace before and behind
) -> Found:
    rows, words = len(hidden), len(weight)
    workspace, exps = None, None
    if exps_dtype is not None:
        wide = (words, margins[0] + rows + margins[1])
        workspace = torch.full(wide, UNTOUCHED, dtype=exps_dtype)
        exps = workspace[:, margins[0] : margins[0] + rows].t()
    tokens = torch.full((rows,), -1)
    stats = hidden.new_full((3, rows), math.nan)
    head_forward(
        hidden, weight, bias, targets, uniforms, temperature, exps, logit_rows, tokens, stats
    )
    if workspace is not None:
        assert (workspace[:, : margins[0]] == UNTOUCHED).all()
        assert (workspace[:, margins[0] + rows :] == UNTOUCHED).all()
    return Found(tokens, *stats, exps)


@dataclass
class Truth:
    """Logits in float64, and the largest error that sums in hidden's dtype can have."""

    z: Tensor  # [M, V]
    error: Tensor  # [M, V]
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Truth":
        h, w = hidden.to(weight.dtype).double(), weight.double()
        b = torch.zeros(len(w)).double() if bias is None else bias.double()
        # n terms in any order: each is rounded no more than n + 1 times
        bound = torch.finfo(hidden.dtype).eps * (hidden.shape[1] + 2)
        return cls(h @ w.t() + b, bound * (h.abs() @ w.abs().t() + b.abs()), hidden.dtype)

    def check(self, found: Found, targets: Tensor, exps_dtype: torch.dtype | None) -> None:
        eps = torch.finfo(self.dtype).eps
        rows = torch.arange(len(targets))
        off = self.error.amax(1)  # of any logit of a row
        peak, _ = self.z.max(1)
        assert ((found.peak - peak).abs() <= off).all()
        assert ((found.target_logit - self.z[rows, targets]).abs() <= off).all()
        picked = self.z[rows, found.tokens]
        assert (picked >= peak - 2 * off).all()
        away = self.z - peak[:, None]
        exact = away.exp()
        relative = 2 * off[:, None] + eps * (away.abs() + EXP_ULPS)
        smallest = torch.finfo(self.dtype).tiny  # below it, 0
        error = exact * relative.expm1() + smallest
        # summed in any order
        in_sum = error.sum(1) + exact.sum(1) * eps * min(len(self.z[0]), 480)
        assert ((found.total - exact.sum(1)).abs() <= in_sum).all()
        if found.exps is not None:
            assert exps_dtype is not None
            exact[rows, targets] = 0
            rounding = torch.finfo(exps_dtype).eps
            assert ((found.exps.double() - exact).abs() <= error + exact * rounding).all()
            assert (found.exps[rows, targets] == 0).all()


def problem(
    rows: int, words: int, depth: int, dtypes: tuple[torch.dtype, torch.dtype], bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden = torch.randn(rows, depth, dtype=torch.float64).to(dtypes[0])
    weight = (torch.randn(words, depth, dtype=torch.float64) * 2 / depth**0.5).to(dtypes[1])
    shift = torch.randn(words, dtype=dtypes[0]) if bias else None
    return hidden, weight, shift, torch.randint(words, (rows,))


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: dtype_id(d[1]))
def test_every_vocabulary(dtypes):
    for words in VOCABULARIES:
        for rows, depth in ((1, 17), (13, 64)):
            hidden, weight, bias, targets = problem(rows, words, depth, dtypes, True)
            found = forward(hidden, weight, bias, targets, exps_dtype=dtypes[0])
            Truth.of(hidden, weight, bias).check(found, targets, dtypes[0])


@settings(max_examples=examples(150), deadline=None)
@given(
    rows=st.sampled_from(ROWS),
    words=st.sampled_from(VOCABULARIES[:-1]),
    depth=st.sampled_from(DEPTHS),
    dtypes=st.sampled_from(DTYPES),
    bias=st.booleans(),
    stride=st.integers(0, 3),
    stored=st.sampled_from(["none", "accumulation", "bfloat16"]),
    logit_rows=st.integers(1, 33),
    margins=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 2**20),
)
def test_any_shape(rows, words, depth, dtypes, bias, stride, stored, logit_rows, margins, seed):
    torch.manual_seed(seed)
    hidden, weight, shift, targets = problem(rows, words, depth, dtypes, bias)
    wide = weight.new_full((words, depth + stride), math.nan)
    wide[:, :depth] = weight
    exps_dtype = {"none": None, "accumulation": dtypes[0], "bfloat16": torch.bfloat16}[stored]
    if dtypes[0] == torch.float64 and stored == "bfloat16":
        exps_dtype = torch.float64
    found = forward(
        hidden, wide[:, :depth], shift, targets, None, 1.0, exps_dtype, logit_rows, margins
    )
    Truth.of(hidden, weight, shift).check(found, targets, exps_dtype)
    own = forward(hidden, wide[:, :depth], shift, None, None, 1.0, exps_dtype, logit_rows, margins)
    Truth.of(hidden, weight, shift).check(own, own.tokens, exps_dtype)


TIES = [
    [(0, 1)], [(1, 5), (5, 6)], [(11, 12)], [(479, 480)], [(0, 960), (480, 961)], [(959, 960)],
    [(3, 4), (3, 484), (3, 963)],
]  # fmt: skip


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: dtype_id(d[1]))
@pytest.mark.parametrize("ties", TIES, ids=str)
def test_ties_go_to_the_lowest_index(ties, dtypes):
    """Exactly representable logits, at every position of a column within a vector."""
    words, rows, depth = 964, 33, 3
    weight = torch.zeros(words, depth, dtype=dtypes[1])
    weight[:, 0] = -1
    for pair in ties:
        weight[list(pair), 0] = 2
    hidden = torch.ones(rows, depth, dtype=dtypes[0])
    found = forward(hidden, weight, None, torch.zeros(rows, dtype=torch.int64))
    assert (found.tokens == min(min(pair) for pair in ties)).all()
    # and of each column its own
    hidden[::2, 0] = -1
    found = forward(hidden, weight, None, torch.zeros(rows, dtype=torch.int64))
    tied = {word for pair in ties for word in pair}
    lowest = next(word for word in range(words) if word not in tied)
    assert (found.tokens[::2] == lowest).all()
    assert (found.tokens[1::2] == min(tied)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_words_ruled_out_by_the_bias(dtype):
    hidden, weight, bias, _ = problem(9, 485, 16, (dtype, dtype), True)
    assert bias is not None
    allowed = torch.tensor([3, 200, 481])
    bias[[v for v in range(485) if v not in allowed.tolist()]] = -math.inf
    targets = allowed[torch.arange(9) % 3]
    found = forward(hidden, weight, bias, targets, exps_dtype=dtype)
    z = (hidden @ weight.t() + bias)[:, allowed]
    assert torch.equal(found.tokens, allowed[z.argmax(1)])
    expected = (z - z.amax(1, keepdim=True)).exp().sum(1)
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=0)
    assert found.exps is not None
    assert (found.exps[:, bias.isinf()] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_huge_logits_neither_overflow_nor_lose_the_peak(dtype):
    hidden = torch.tensor([[1e4], [-1e4], [1.0]], dtype=dtype)
    weight = torch.linspace(-1, 1, 501, dtype=dtype)[:, None].contiguous()
    targets = torch.tensor([0, 0, 250])
    found = forward(hidden, weight, None, targets, exps_dtype=dtype)
    assert found.tokens.tolist() == [500, 0, 500]
    assert found.peak.tolist() == [1e4, 1e4, 1.0]
    assert found.total[0] == found.total[1] == 1
    assert found.exps is not None
    assert found.exps.isfinite().all()
    assert found.exps[0, 500] == 1


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sample"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: dtype_id(d[1]))
def test_a_nan_stays_in_its_row(dtypes, sampled):
    hidden, weight, bias, targets = problem(19, 965, 8, dtypes, True)
    uniforms = torch.rand(19, dtype=torch.float64) if sampled else None
    clean = forward(hidden, weight, bias, targets, uniforms)
    broken = [0, 7, 16]
    hidden[broken, 3] = math.nan
    found = forward(hidden, weight, bias, targets, uniforms, exps_dtype=dtypes[0])
    assert ((found.tokens >= 0) & (found.tokens < 965)).all()
    whole = [i for i in range(19) if i not in broken]
    for name in ("tokens", "peak", "total", "target_logit"):
        assert torch.equal(getattr(found, name)[whole], getattr(clean, name)[whole])
    assert found.total[broken].isnan().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: dtype_id(d[1]))
@pytest.mark.parametrize("words", [1, 3, 481, 1500])
def test_rows_that_are_no_distribution(words, dtypes, temperature):
    """torch.argmax says the token, also where it was to be drawn: of NaN, inf, -inf the first."""
    some = [(x, y) for x in (math.inf, -math.inf, math.nan, 0.5) for y in (math.inf, math.nan)]
    uniforms, hidden = torch.tensor([0.1, 0.5, 0.98]).double(), torch.ones(3, 2, dtype=dtypes[0])
    weight = torch.zeros(words, 2, dtype=dtypes[1])
    for row in [*some, (-math.inf, -math.inf)]:
        bias = torch.randn(words, dtype=dtypes[0])
        bias[torch.randperm(words)[:2]] = bias.new_tensor(row[-words:])
        if row[1] == -math.inf:
            bias[:] = row[1]
        call = hidden, weight, bias
        expected = bias.argmax().expand(3)
        for drawn in (None, uniforms):
            found = forward(*call, None, drawn, temperature)
            assert torch.equal(found.tokens, expected)
            torch.testing.assert_close(found.peak, bias[expected], equal_nan=True)
            assert found.total.isnan().all()
        tokens, stats = torch.empty(3, dtype=torch.int64), hidden.new_empty(3, 3)
        for top_k, top_p in (words, 0.9), (min(2, words), 1.0), (min(2, words), 0.5):
            torch.ops.accumext.head_sample(
                *call, uniforms, temperature, top_k, top_p, 2, tokens, stats
            )
            assert torch.equal(tokens, expected)
        top = min(3, words)
        best, tokens = hidden.new_empty(3, top), torch.empty(3, top, dtype=torch.int64)
        torch.ops.accumext.head_top(*call, 2, best, tokens, stats[:2])
        order = bias.sort(descending=True, stable=True)
        assert torch.equal(tokens, order.indices[:top].expand(3, top))
        torch.testing.assert_close(best, order.values[:top].expand(3, top), equal_nan=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: dtype_id(d[1]))
@pytest.mark.parametrize("words", [1, 2, 480, 481, 1500])
def test_samples_invert_the_running_sum(words, dtypes, temperature):
    rows = 70
    hidden, weight, bias, targets = problem(rows, words, 17, dtypes, True)
    uniforms = torch.rand(rows, dtype=torch.float64)
    uniforms[0] = 0.0
    found = forward(hidden, weight, bias, targets, uniforms, temperature, dtypes[0])
    truth = Truth.of(hidden, weight, bias)
    share = (truth.z / temperature).softmax(1).cumsum(1)
    # rounding moves a border of the running sum by less than this
    border = 1e-4 if dtypes[0] == torch.float32 else 1e-12
    expected = torch.searchsorted(share, uniforms[:, None], right=True)[:, 0]
    clear = ((share - uniforms[:, None]).abs() > border).all(1)
    clear |= uniforms == 0
    assert clear.sum() > rows / 2
    assert torch.equal(found.tokens[clear], expected.clamp(max=words - 1)[clear])
    own = forward(hidden, weight, bias, None, uniforms, temperature, dtypes[0])
    assert torch.equal(own.tokens, found.tokens)
    logits = truth.z.gather(1, own.tokens[:, None])[:, 0]
    assert ((own.target_logit - logits).abs() <= truth.error.amax(1)).all()
    assert own.exps is not None
    assert not own.exps.gather(1, own.tokens[:, None]).any()
    # the statistics are those at temperature 1
    exact = (truth.z - truth.z.amax(1, keepdim=True)).exp().sum(1)
    torch.testing.assert_close(found.total.double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize(("words", "first"), [(24, 5), (480, 5), (960, 5), (1000, 5), (965, 481)])
def test_no_sample_has_probability_zero(words, first, dtype, temperature):
    """Words that the bias rules out, first and last and at the ends of spans, and a whole first
    span, at both ends of the uniform numbers' range."""
    rows = 64
    hidden, weight, bias, targets = problem(rows, words, 8, (dtype, dtype), True)
    assert bias is not None
    bias[:first], bias[-5:], bias[470:480] = -math.inf, -math.inf, -math.inf
    for extreme in (0.0, LARGEST_UNIFORM):
        uniforms = torch.full((rows,), extreme, dtype=torch.float64)
        found = forward(hidden, weight, bias, targets, uniforms, temperature)
        assert bias[found.tokens].isfinite().all()
        if extreme == 0:
            assert (found.tokens == first).all()


def test_a_span_that_rounding_has_made_too_wide_gives_no_impossible_word():
    """Uniform numbers just below a border between spans, behind which nothing is possible."""
    words, rows = 960, 256
    hidden, weight, bias, targets = problem(rows, words, 8, (torch.float32,) * 2, True)
    assert bias is not None
    bias[440:480] = -math.inf
    share = Truth.of(hidden, weight, bias).z.softmax(1)[:, :480].sum(1)
    for near in (-1e-7, -3e-8, 0.0):
        found = forward(hidden, weight, bias, targets, share * (1 + near))
        assert bias[found.tokens].isfinite().all()


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sample"])
def test_threads_and_logit_rows_change_no_bit(sampled, two_threads):
    hidden, weight, bias, targets = problem(37, 2000, 33, (torch.float32,) * 2, True)
    uniforms = torch.rand(37, dtype=torch.float64) if sampled else None
    results = []
    for threads in two_threads:
        torch.set_num_threads(threads)
        results.append(forward(hidden, weight, bias, targets, uniforms, 0.7, torch.float32))
    one, two = results
    assert torch.equal(one.tokens, two.tokens)
    for name in ("peak", "total", "target_logit", "exps"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=1e-6, atol=1e-6)
    for logit_rows in (1, 5):
        few = forward(hidden, weight, bias, targets, uniforms, 0.7, torch.float32, logit_rows)
        assert torch.equal(few.tokens, one.tokens)
        torch.testing.assert_close(few.total, one.total, rtol=1e-5, atol=0)


def test_no_rows_are_no_work():
    for rows in (1, 32):
        none = torch.zeros(0, dtype=torch.int64)
        call = torch.randn(0, 4), torch.randn(9, 4), None, none
        found = forward(*call, exps_dtype=torch.float32, logit_rows=rows, margins=(2, 2))
        assert found.tokens.numel() == 0
