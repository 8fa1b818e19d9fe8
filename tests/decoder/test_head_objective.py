"""Losses of whole distributions: the operator against autograd on their definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.tensors import dtype_id
from torch import Tensor

import accumext  # noqa: F401  the operator

head_objective = torch.ops.accumext.head_objective.default

STATS = ("logsumexp", "target_logit", "entropy", "divergence", "target_gradient")
# Relative to the largest value. In float64 sums over the vocabulary are in another order; in
# float32 a divergence is a difference of logarithms near 10, with an ulp of 1e-6 each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Problem:
    """Rows of a head, and what their loss is made of."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    share: Tensor
    z_loss: float
    entropy_weight: float
    soft_scale: float
    temperature: float
    probabilities: Tensor | None
    indices: Tensor | None
    teacher: tuple[Tensor, Tensor, Tensor | None] | None  # hidden, weight, bias

    def loss(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of logits [M, V] the losses, entropies and divergences [M], by definition."""
        lse, log_p = z.logsumexp(1), z.log_softmax(1)
        entropy = torch.distributions.Categorical(logits=z).entropy()
        tempered = (z / self.temperature).log_softmax(1)
        divergence = torch.zeros_like(lse)
        if self.teacher is not None:
            hidden, weight, bias = (None if t is None else t.double() for t in self.teacher)
            u = torch.nn.functional.linear(hidden, weight, bias) / self.temperature
            divergence = torch.nn.functional.kl_div(
                tempered, u.log_softmax(1), reduction="none", log_target=True
            ).nan_to_num(0.0).sum(1)  # fmt: skip
        if self.probabilities is not None:
            at = tempered.gather(1, self.indices)
            q = self.probabilities.double()
            divergence = divergence + torch.nn.functional.kl_div(at, q, reduction="none").sum(1)
        assert log_p.shape == z.shape
        loss = self.share.double() * lse + self.z_loss * lse**2 - self.entropy_weight * entropy
        return loss + self.soft_scale * self.temperature * divergence, entropy, divergence

    def expected(self) -> tuple[dict[str, Tensor], Tensor]:
        """The statistics, and the gradient by the logits, 0 at the targets."""
        bias = None if self.bias is None else self.bias.double()
        rounded = self.hidden.to(self.weight.dtype).double()
        z = torch.nn.functional.linear(rounded, self.weight.double(), bias).requires_grad_()
        loss, entropy, divergence = self.loss(z)
        (d_z,) = torch.autograd.grad(loss.sum(), z)
        at = self.targets[:, None]
        found = z.logsumexp(1), z.gather(1, at)[:, 0], entropy, divergence, d_z.gather(1, at)[:, 0]
        stats = dict(zip(STATS, (f.detach() for f in found), strict=True))
        return stats, d_z.scatter(1, at, 0.0)

    def run(self, logit_rows: int, kept: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        rows, words = len(self.hidden), len(self.weight)
        memory = torch.full((words, rows + 3), float("nan"), dtype=kept)
        gradients, tokens = memory[:, :rows].t(), torch.full((rows,), -1)
        stats = torch.full((5, rows), float("nan"), dtype=self.hidden.dtype)
        teacher = self.teacher or (None, None, None)
        head_objective(
            self.hidden, self.weight, self.bias, self.targets, self.share, self.z_loss,
            self.entropy_weight, self.soft_scale, self.temperature, self.probabilities,
            self.indices, *teacher, gradients, logit_rows, tokens, stats,
        )  # fmt: skip
        assert memory[:, rows:].isnan().all()
        return tokens, dict(zip(STATS, stats, strict=True)), gradients


def problem(
    rows: int, words: int, dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None, *, entropy_weight: float = 0.0,
    soft: str = "none", temperature: float = 1.0,
    z_loss: float = 0.0, bias: bool = True,
) -> Problem:  # fmt: skip
    depth, size = 17, min(words, 5)
    weight_dtype = weight_dtype or dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    probabilities = indices = teacher = None
    if "tokens" in soft:
        probabilities = normal(rows, size).softmax(1).to(dtype)
        probabilities[:, 0] = 0.0
        indices = torch.randint(words, (rows, size))  # some of them twice
    if "head" in soft:
        u_bias = normal(words)
        u_bias[0] = -torch.inf
        hidden, weight = normal(rows, 9).to(dtype), normal(words, 9).to(weight_dtype)
        hidden = hidden.to(weight_dtype).to(dtype)
        teacher = hidden, weight, u_bias.to(dtype)
    return Problem(
        normal(rows, depth).to(dtype), normal(words, depth).div(2).to(weight_dtype),
        normal(words).to(dtype) if bias else None, torch.randint(words, (rows,)),
        torch.rand(rows, dtype=torch.float64).to(dtype), z_loss, entropy_weight,
        0.8 if soft != "none" else 0.0, temperature, probabilities, indices, teacher,
    )  # fmt: skip


def check(given: Problem, logit_rows: int = 32, kept: torch.dtype | None = None) -> None:
    dtype = given.hidden.dtype
    tokens, stats, gradients = given.run(logit_rows, kept or dtype)
    expected, d_z = given.expected()
    for name, value in stats.items():
        scale = max(1.0, float(expected[name].abs().max()))
        error = float((value.double() - expected[name]).abs().max())
        assert error <= TOLERANCE[dtype] * scale, (name, error)
    rounding = 0.0 if kept is None else torch.finfo(kept).eps
    error = (gradients.double() - d_z).abs() - rounding * d_z.abs()
    assert float(error.max()) <= TOLERANCE[dtype]
    bias = 0.0 if given.bias is None else given.bias.double()
    z = given.hidden.to(given.weight.dtype).double() @ given.weight.double().t() + bias
    assert torch.equal(tokens, z.argmax(1))


OPTIONS = [
    {"entropy_weight": 0.3},
    {"soft": "tokens"},
    {"soft": "head"},
    {"soft": "tokens", "temperature": 2.5},
    {"soft": "head", "temperature": 0.5, "entropy_weight": -0.2, "z_loss": 0.1},
    {"soft": "tokens and head", "temperature": 3.0, "entropy_weight": 0.1, "bias": False},
    {"z_loss": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9, 16, 17, 33])
def test_statistics_and_gradients_in_double(rows: int, options: dict[str, object]) -> None:
    torch.manual_seed(rows)
    for words in (2, 13, 480, 961):
        check(problem(rows, words, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
def test_single_and_half_precision(weight: torch.dtype, options: dict[str, object]) -> None:
    for rows in (2, 16, 31):
        given = problem(rows, 500, torch.float32, weight, **options)
        check(given)
        if weight == torch.bfloat16:
            check(given, kept=torch.bfloat16)


@pytest.mark.parametrize("logit_rows", [1, 2, 7, 40])
def test_rows_do_not_depend_on_how_many_there_are_at_once(logit_rows: int) -> None:
    given = problem(19, 300, soft="tokens and head", temperature=1.5, entropy_weight=0.2)
    check(given, logit_rows)


def test_words_that_cannot_be() -> None:
    """A mask of words: their probability is 0, and no product with an infinite logit is formed."""
    given = problem(9, 50, soft="head", entropy_weight=0.5)
    assert given.bias is not None
    assert given.teacher is not None
    given.bias[7] = given.teacher[2][7] = -torch.inf
    given.targets.masked_fill_(given.targets == 7, 8)
    _, stats, gradients = given.run(32, torch.float64)
    assert all(value.isfinite().all() for value in stats.values())
    assert (gradients[:, 7] == 0).all()
    assert gradients.isfinite().all()


def test_a_row_without_a_distribution() -> None:
    """Its token is that of argmax, and the others are as they were."""
    given = problem(9, 50, soft="head", entropy_weight=0.5)
    whole = given.run(32, torch.float64)
    given.hidden[4] = torch.nan
    tokens, stats, gradients = given.run(32, torch.float64)
    assert stats["logsumexp"][4].isnan()
    assert tokens[4] == 0
    others = torch.arange(9) != 4
    assert torch.equal(tokens[others], whole[0][others])
    assert torch.equal(gradients[others], whole[2][others])
