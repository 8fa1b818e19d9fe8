"""chunked_loss against the same loss over the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from torch import nn

import accumext
from accumext.demo.memory import peak_memory

EXACT = 1e-12  # relative, float64: two orders of summation


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5, dtype=dtype)
        self.head = nn.Sequential(
            nn.Linear(5, 16, dtype=dtype), nn.ReLU(), nn.Linear(16, 4, dtype=dtype)
        )
        self.calls = 0

    def loss(
        self, features: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(self.head(features), targets, reduction=reduction)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.parameters()]


def batch(rows: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 6, dtype=torch.float64), torch.randint(4, (rows,))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("slices", "calls"),
    [
        ({"chunks": 1}, 1),
        ({"chunks": 3}, 3),
        ({"chunks": 40}, 10),
        ({"chunk_size": 4}, 3),
        ({"chunk_size": 99}, 1),
    ],
    ids=str,
)
def test_equals_the_whole_batch(slices: dict[str, int], calls: int, reduction: str) -> None:
    model, (x, y) = Model(), batch()
    whole = model.loss(model.trunk(x), y, reduction)
    (whole * 7).backward()
    expected = model.gradients()
    model.zero_grad()
    model.calls = 0
    loss = accumext.chunked_loss(
        model.loss, model.trunk(x), y, *([reduction] if reduction == "sum" else []),
        reduction=reduction, **slices,
    )  # fmt: skip
    assert model.calls == calls
    torch.testing.assert_close(loss, whole, rtol=EXACT, atol=0)
    (loss * 7).backward()  # an upstream factor reaches the parameters too
    assert relative_distance(model.gradients(), expected) < EXACT


def test_one_slice_of_the_graph_exists_at_a_time() -> None:
    """The head's hidden layer is wide: all ten slices of it would take ten times the memory."""
    head = nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 1))
    x = torch.randn(1000, 4)

    def peak(chunks: int) -> int:
        head.zero_grad()

        def run() -> None:
            accumext.chunked_loss(lambda h: head(h).square().mean(), x, chunks=chunks).backward()

        return peak_memory(run)

    assert peak(10) < peak(1) / 6


def test_loss_scale_reaches_the_inside_of_half_precision_slices() -> None:
    """Gradients of 1e-7 lose bits in float16 unless the scale is there from the start."""
    layer = nn.Linear(8, 8).half()
    x = torch.randn(40, 8).half().requires_grad_()

    def fn(part: torch.Tensor) -> torch.Tensor:
        return layer(part).float().mean() * 1e-5

    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(fn(x) * 32768.0, leaves)
    actual = torch.autograd.grad(accumext.chunked_loss(fn, x, chunks=4) * 32768.0, leaves)
    # float16 sums of four slices instead of one: a few units in the last place
    rounding = 8 * torch.finfo(torch.float16).eps
    assert relative_distance(list(actual), list(expected)) < rounding


def test_autocast() -> None:
    trunk, head = nn.Linear(8, 8), nn.Linear(8, 3)
    x, y = torch.randn(10, 8), torch.randint(3, (10,))

    def fn(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(h), t)

    with torch.autocast("cpu", torch.bfloat16):
        whole = fn(trunk(x), y)
        chunked = accumext.chunked_loss(fn, trunk(x), y, chunks=3)
    leaves = [*trunk.parameters(), *head.parameters()]
    expected = list(torch.autograd.grad(whole, leaves))
    actual = list(torch.autograd.grad(chunked, leaves))
    # bfloat16 gradients of three slices, each rounded by itself
    assert relative_distance(actual, expected) < 4 * torch.finfo(torch.bfloat16).eps


def test_a_tensor_with_a_graph_may_be_used_inside() -> None:
    model, (x, y) = Model(), batch()
    shift = model.trunk(x).mean(0)
    loss = accumext.chunked_loss(lambda h, t: model.loss(h + shift, t), model.trunk(x), y, chunks=3)
    loss.backward()
    actual = model.gradients()
    model.zero_grad()
    features = model.trunk(x)
    model.loss(features + features.mean(0), y).backward()
    # ten rows in three slices: means over 3, 3 and 4 rows
    assert relative_distance(actual, model.gradients()) < EXACT


def test_hooks_run_once_on_the_whole_gradient() -> None:
    model, (x, y) = Model(), batch()
    weight = model.head[0].weight
    seen: list[torch.Tensor] = []
    ready: list[int] = []
    weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    weight.register_post_accumulate_grad_hook(lambda p: ready.append(1))
    accumext.chunked_loss(model.loss, model.trunk(x), y, chunks=5).backward()
    assert len(seen) == len(ready) == 1
    assert torch.equal(weight.grad, seen[0] * 2)


def test_gradients_reach_sliced_arguments_and_parameters_of_some_slices_only() -> None:
    model, (x, y) = Model(), batch()
    extra = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    late = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def fn(
        features: torch.Tensor, targets: torch.Tensor, more: torch.Tensor, scale: float
    ) -> torch.Tensor:
        logits = model.head(features) + more * scale
        if targets[0] == y[-1]:
            logits = logits + late
        return F.cross_entropy(logits, targets, reduction="sum")

    y[:] = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 2, 2])
    accumext.chunked_loss(fn, model.trunk(x), y, extra, 3.0, chunks=5, reduction="sum").backward()
    expected = torch.autograd.grad(
        sum(
            fn(model.trunk(x)[i : i + 2], y[i : i + 2], extra[i : i + 2], 3.0)
            for i in range(0, 10, 2)
        ),
        [*model.parameters(), extra, late],
    )
    actual = [*model.gradients(), extra.grad, late.grad]
    assert relative_distance(actual, list(expected)) < EXACT


def test_backward_again_on_a_retained_graph() -> None:
    model, (x, y) = Model(), batch()
    loss = accumext.chunked_loss(model.loss, model.trunk(x), y, chunks=3)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradcheck() -> None:
    head = nn.Linear(3, 4, dtype=torch.float64)
    y = torch.randint(4, (5,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return accumext.chunked_loss(lambda h, t: F.cross_entropy(head(h), t), x, y, chunk_size=2)

    assert torch.autograd.gradcheck(
        loss, torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    )


def test_without_grad_mode_and_without_rows() -> None:
    model, (x, y) = Model(), batch()
    with torch.no_grad():
        loss = accumext.chunked_loss(model.loss, model.trunk(x), y, chunks=3)
        torch.testing.assert_close(loss, model.loss(model.trunk(x), y), rtol=EXACT, atol=0)
    assert not loss.requires_grad
    empty = accumext.chunked_loss(model.loss, x[:0].requires_grad_(), y[:0], chunks=3)
    assert empty == 0
    empty.backward()


def test_errors() -> None:
    model, (x, y) = Model(), batch()
    features = model.trunk(x)

    def call(**kwargs: Any) -> torch.Tensor:
        return accumext.chunked_loss(model.loss, features, y, **kwargs)

    def raises(kind: type[Exception], text: str) -> Any:
        return pytest.raises(kind, match=rf"^chunked_loss: {text}")

    with raises(ValueError, "chunks must be given, or chunk_size, and not both, got neither"):
        call()
    with raises(ValueError, "chunks must be given, or chunk_size, and not both, got both"):
        call(chunks=2, chunk_size=2)
    with raises(ValueError, "chunks must be at least 1, got 0"):
        call(chunks=0)
    with raises(TypeError, "chunk_size must be an int, got float"):
        call(chunk_size=2.0)
    with raises(ValueError, "reduction must be one of 'mean', 'sum', got 'none'"):
        call(chunks=2, reduction="none")
    with raises(ValueError, r"args\[0\] must have the 10 rows of inputs, got \[9\]"):
        accumext.chunked_loss(model.loss, features, y[:9], chunks=2)
    with raises(TypeError, "inputs must be a tensor"):
        accumext.chunked_loss(model.loss, [1], chunks=2)
    with raises(TypeError, "fn must be callable, got Tensor|fn must be callable"):
        accumext.chunked_loss(features, features, chunks=2)
    with raises(ValueError, r"fn must return a 0-dim loss, got shape \[2, 4\]"):
        accumext.chunked_loss(model.head, features, chunk_size=2)
    with raises(TypeError, "fn must return a tensor, got float"):
        accumext.chunked_loss(lambda h: 3.0, features, chunks=2)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["chunks", "chunk_size"])
def test_chunked_loss_with_integers_of_numpy(name: str) -> None:
    rows = torch.randn(7, 3, requires_grad=True)
    sizes: list[int] = []

    def loss(some: torch.Tensor) -> torch.Tensor:
        sizes.append(len(some))
        return some.square().sum()

    accumext.chunked_loss(loss, rows, **{name: np.int64(3)})
    expected, sizes = sizes, []
    accumext.chunked_loss(loss, rows, **{name: 3})
    assert sizes == expected
    with pytest.raises(TypeError, match=rf"^chunked_loss: {name} must be an int, got bool$"):
        accumext.chunked_loss(loss, rows, **{name: True})
