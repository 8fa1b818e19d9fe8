"""Losses of whole distributions: what `head_objective` is to find, by autograd on their definition
in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from support.objectives import divergence, entropy

STATS = ("logsumexp", "target_logit", "entropy", "divergence", "target_gradient")
# Relative to the largest value. In float64 sums over the vocabulary are in another order; in
# float32 a divergence is a difference of logarithms near 10, with an ulp of 1e-6 each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def operator(*arguments: object, **options: object) -> None:
    torch.ops.accumext.head_objective.default(*arguments, **options)


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
        lse, own = z.logsumexp(1), entropy(z)
        distance = torch.zeros_like(lse)
        if self.teacher is not None:
            hidden, weight, bias = (None if t is None else t.double() for t in self.teacher)
            head = (weight, bias, hidden)
            distance = distance + divergence(z, head, slice(None), self.temperature)
        if self.probabilities is not None:
            some = (self.probabilities.double(), self.indices)
            distance = distance + divergence(z, some, slice(None), self.temperature)
        loss = self.share.double() * lse + self.z_loss * lse**2 - self.entropy_weight * own
        return loss + self.soft_scale * self.temperature * distance, own, distance

    def expected(self) -> tuple[dict[str, Tensor], Tensor]:
        """The statistics, and the gradient by the logits, 0 at the targets."""
        bias = None if self.bias is None else self.bias.double()
        rounded = self.hidden.to(self.weight.dtype).double()
        z = torch.nn.functional.linear(rounded, self.weight.double(), bias).requires_grad_()
        loss, own, distance = self.loss(z)
        (d_z,) = torch.autograd.grad(loss.sum(), z)
        at = self.targets[:, None]
        found = z.logsumexp(1), z.gather(1, at)[:, 0], own, distance, d_z.gather(1, at)[:, 0]
        stats = dict(zip(STATS, (f.detach() for f in found), strict=True))
        return stats, d_z.scatter(1, at, 0.0)

    def run(
        self, logit_rows: int = 32, kept: torch.dtype | None = None,
        op: Callable[..., None] = operator, along: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:  # fmt: skip
        """Tokens, statistics and gradients, whose rows are next to each other in memory, or, with
        `along`, whose columns are."""
        rows, words = len(self.hidden), len(self.weight)
        shape = (rows, words + 3) if along else (words, rows + 3)
        memory = self.hidden.new_full(shape, torch.nan, dtype=kept)
        gradients = memory[:, :words] if along else memory[:, :rows].t()
        tokens = torch.full_like(self.targets, -1)
        stats = self.hidden.new_full((5, rows), torch.nan)
        teacher = self.teacher or (None, None, None)
        op(
            self.hidden, self.weight, self.bias, self.targets, self.share, self.z_loss,
            self.entropy_weight, self.soft_scale, self.temperature, self.probabilities,
            self.indices, *teacher, gradients, logit_rows, tokens, stats,
        )  # fmt: skip
        assert memory[:, words if along else rows :].isnan().all()
        return tokens, dict(zip(STATS, stats, strict=True)), gradients


def problem(
    rows: int, words: int, dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None, *, entropy_weight: float = 0.0,
    soft: str = "none", temperature: float = 1.0,
    z_loss: float = 0.0, bias: bool = True, size: int = 5, depth: int = 17,
) -> Problem:  # fmt: skip
    """With a teacher of `soft`: of "none", "all words", "tokens", `size` of them, and "head"."""
    weight_dtype = weight_dtype or dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    probabilities = indices = teacher = None
    if "tokens" in soft:
        probabilities = normal(rows, size).softmax(1).to(dtype)
        probabilities[:, :1] = 0.0
        indices = torch.randint(words, (rows, size))  # some of them twice
    if "all words" in soft:
        probabilities = normal(rows, words).softmax(1).to(dtype)
        indices = torch.arange(words).expand(rows, -1)
    if "head" in soft:
        u_bias = normal(words)
        u_bias[: min(1, words - 1)] = -torch.inf
        hidden, weight = normal(rows, 9).to(dtype), normal(words, 9).to(weight_dtype)
        hidden = hidden.to(weight_dtype).to(dtype)
        teacher = hidden, weight, u_bias.to(dtype)
    return Problem(
        normal(rows, depth).to(dtype), normal(words, depth).div(2).to(weight_dtype),
        normal(words).to(dtype) if bias else None, torch.randint(words, (rows,)),
        torch.rand(rows, dtype=torch.float64).to(dtype), z_loss, entropy_weight,
        0.8 if soft != "none" else 0.0, temperature, probabilities, indices, teacher,
    )  # fmt: skip


def check(
    given: Problem, logit_rows: int = 32, kept: torch.dtype | None = None,
    op: Callable[..., None] = operator, along: bool = False,
) -> None:  # fmt: skip
    dtype = given.hidden.dtype
    tokens, stats, gradients = given.run(logit_rows, kept, op, along)
    expected, d_z = given.expected()
    for name, value in stats.items():
        scale = max(1.0, float(expected[name].abs().max()))
        error = float((value.double() - expected[name]).abs().max())
        assert error <= TOLERANCE[dtype] * scale, (name, error)
    info = torch.finfo(kept or dtype)
    error = (gradients.double() - d_z).abs() - info.eps * (d_z.abs() + info.tiny)
    assert float(error.max()) <= TOLERANCE[dtype]
    bias = 0.0 if given.bias is None else given.bias.double()
    z = given.hidden.to(given.weight.dtype).double() @ given.weight.double().t() + bias
    assert torch.equal(tokens, z.argmax(1))
