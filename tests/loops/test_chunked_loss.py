"""chunked_loss against the same loss over the whole batch."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import relative_distance
from support.device import DeviceReads, cpu_as_device
from support.tensors import assert_equal
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.nn.utils.parametrize import cached

import accumext
from accumext._peak_memory import peak_memory

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
        ({"chunk_size": np.int64(4)}, 3),
        ({"chunk_size": 99}, 1),
    ],
    ids=str,
)
def test_equals_the_whole_batch(slices, calls, reduction):
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


IGNORED = [  # targets of ten rows: some ignored, a slice of nothing else, nothing else at all
    [0, -100, -100, 1, 2, 3, -100, 1, 0, 3],
    [-100, -100, -100, -100, -100, 3, 2, 1, 0, 3],
    [-100] * 10,
]


host_or_device = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])


@contextmanager
def host_waits_for_nothing() -> Iterator[None]:
    with cpu_as_device(), DeviceReads() as reads:
        yield
    assert (reads.count, reads.lists) == (0, 0)


@host_or_device
@pytest.mark.parametrize("chunks", [1, 2, 10])
@pytest.mark.parametrize("y", IGNORED, ids=["some", "slices", "all"])
def test_rows_that_do_not_count(y, chunks, on_device):
    """The mean over what counts, as of the whole batch; zeros where nothing does, never NaN."""
    model, (x, _) = Model(), batch()
    counted = torch.tensor(y) != -100
    shift = torch.randn(5, dtype=torch.float64, requires_grad=True)
    squares = model.head(model.trunk(x) + shift).square().sum(1) * counted
    whole = squares.sum() / max(1, int(counted.sum()))
    leaves = [*model.parameters(), shift]
    expected = torch.autograd.grad(whole * 7, leaves)

    # through a tensor with a graph of its own, and a leaf that is used in every slice
    moved = shift * 1

    def fn(features, counts):
        """A loss by hand whose gradient, too, is 0 / 0 where nothing counts."""
        return (model.head(features + moved).square().sum(1) * counts).sum() / counts.sum()

    call = {"chunks": chunks, "weights": counted}
    with host_waits_for_nothing() if on_device else nullcontext():
        loss = accumext.chunked_loss(fn, model.trunk(x), counted.double(), **call)
    torch.testing.assert_close(loss, whole, rtol=EXACT, atol=0)
    actual = torch.autograd.grad(loss * 7, leaves)
    assert all(g.isfinite().all() for g in actual)
    if counted.any():
        assert relative_distance(list(actual), list(expected)) < EXACT
    else:
        assert loss == 0
        assert not any(g.any() for g in actual)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 9), st.booleans())
def test_weights_of_any_rows(counts, chunks, floats):
    """[N, ...] is summed by row; so many items of a row that fn averages over are one mean."""
    x = torch.randn(len(counts), 3, 2, dtype=torch.float64)
    mask = torch.arange(3) < torch.tensor(counts)[:, None]  # [N, 3]
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def fn(rows: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        return (rows * scale)[some].square().mean()

    weights = mask.double() / 3 if floats else mask
    loss = accumext.chunked_loss(fn, x, mask, chunks=chunks, weights=weights)
    whole = fn(x, mask) if mask.any() else x.new_zeros(())
    torch.testing.assert_close(loss, whole.detach(), rtol=EXACT, atol=EXACT, check_dtype=True)
    (gradient,) = torch.autograd.grad(loss, scale)
    torch.testing.assert_close(gradient, 2 * whole.detach(), rtol=EXACT, atol=EXACT)


@host_or_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_leave_the_dtype_of_the_loss(dtype, on_device):
    """The share is not rounded before the product: five times float16's third is another number."""
    x = torch.tensor([5.0, 5.0, 0.0], dtype=dtype, requires_grad=True)
    with cpu_as_device() if on_device else nullcontext():
        weights = torch.tensor([1, 0, 2])
        loss = accumext.chunked_loss(lambda h: h.sum(), x, chunk_size=1, weights=weights)
    loss.backward()
    assert loss.dtype == dtype
    assert loss == torch.tensor(5 / 3).to(dtype)
    assert torch.equal(x.grad, torch.tensor([1 / 3, 0, 2 / 3]).to(dtype))


@host_or_device
def test_parameters_of_slices_that_count_nothing(on_device):
    """Hooks run once and see zeros, also of sparse gradients and where graphs are retained."""
    table = nn.Embedding(4, 3, sparse=True)
    seen: list[torch.Tensor] = []
    table.weight.register_hook(seen.append)
    words, weights = torch.tensor([0, 1, 2, 3]), torch.zeros(4)

    def fn(w: torch.Tensor) -> torch.Tensor:
        return table(w).sum() / 0.0 * 0.0  # NaN, and so is its gradient

    with cpu_as_device() if on_device else nullcontext():
        loss = accumext.chunked_loss(fn, words, chunks=2, weights=weights)
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert loss == 0
    assert [not g.to_dense().any() for g in seen] == [True, True]


OF_CLASS = torch.tensor([0.0, 1.0, 3.0, 0.5], dtype=torch.float64)
PADDED = torch.tensor(
    [[0, 0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 0, 3, 2, 1, 0], [0] * 8, [1, 2, 3, 1] * 2]
)


def masked(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[y != 0], y[y != 0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile asks it
@host_or_device
@pytest.mark.parametrize(
    "loss_of",
    {
        "ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=0),
        "module": nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1),
        "weighted": partial(F.cross_entropy, weight=OF_CLASS),
        "both": nn.CrossEntropyLoss(OF_CLASS + 1, ignore_index=0, label_smoothing=0.1),
        "log-softmax": lambda z, y: F.nll_loss(z.log_softmax(1), y, OF_CLASS) * 2 + 1,
        "selected": masked,
        "compiled": torch.compile(nn.CrossEntropyLoss(ignore_index=0), backend="eager"),
        "of sequences": lambda z, y: F.cross_entropy(z[..., None], y[:, None], ignore_index=0),
        "probabilities": lambda z, y: F.cross_entropy(z[y != 0], z.detach().softmax(1)[y != 0]),
    }.items(),
    ids=lambda case: case[0],
)
def test_the_divisor_is_that_of_the_loss(loss_of, on_device):
    """Whatever its mean leaves out or weighs: the whole batch's loss, and 0 where that is NaN."""
    model, (x, _), loss_of = Model(), batch(8), loss_of[1]
    reads = host_waits_for_nothing if on_device and loss_of is not masked else nullcontext
    for y, chunks in zip((*PADDED, PADDED[0]), (3, 4, 3, 8, 1), strict=True):
        whole = loss_of(model.head(model.trunk(x)), y)
        expected = [torch.zeros_like(p) for p in model.parameters()]
        if whole.isfinite():
            expected = list(torch.autograd.grad(whole, [*model.parameters()]))
        with reads():
            loss = accumext.chunked_loss(
                lambda h, t: loss_of(model.head(h), t), model.trunk(x), y, chunks=chunks
            )
        actual = list(torch.autograd.grad(loss, [*model.parameters()]))
        torch.testing.assert_close(loss, whole.nan_to_num(0), rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(actual, expected, rtol=EXACT, atol=EXACT)


def test_divisors_that_no_one_weight_can_be():
    """Several means in `fn`, or one that is taken by hand: an error that asks for weights."""
    model, (x, _) = Model(), batch(8)
    y, padded = PADDED[3], PADDED[0]

    def call(*losses: Any, **how: Any) -> torch.Tensor:
        def fn(h: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
            return sum(loss(model.head(h), t) for loss, t in zip(losses, targets, strict=True))

        return accumext.chunked_loss(fn, model.trunk(x), y, padded, chunks=3, **how)

    def by_hand(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(z, t, ignore_index=0, reduction="sum") / (t != 0).sum()

    plain, ignoring = F.cross_entropy, nn.CrossEntropyLoss(ignore_index=0)
    whole = sum(plain(model.head(model.trunk(x)), t) for t in (y, padded))
    torch.testing.assert_close(call(plain, plain), whole, rtol=EXACT, atol=0)
    several = "fn must call one F.cross_entropy in every slice, or several that count all rows"
    for losses, text in [
        ((plain, ignoring), several),
        ((plain, lambda z, t: plain(z, t) if (t == 3).any() else z.sum()), several),
        ((by_hand, by_hand), "fn must not leave targets out of an F.cross_entropy that is no mean"),
    ]:
        with pytest.raises(ValueError, match=f"^chunked_loss: {text}.* Pass weights=, what each"):
            call(*losses)
        call(*losses, weights=padded != 0)
    with cpu_as_device(), pytest.raises(RuntimeError, match=several):
        call(plain, ignoring)


def test_ignored_targets_without_weights():
    model, (x, _) = Model(), batch()
    y = torch.tensor(IGNORED[0])
    text = (
        "chunked_loss: args[1] must have no ignored targets (-100) without weights, got 3 of them. "
        "Pass weights=(args[1] != -100), or weights=torch.ones(len(inputs)) if all count"
    )

    def fn(h: torch.Tensor, scale: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return model.loss(h, t.long(), "sum") / len(t)

    def call(y: torch.Tensor, **how: Any) -> torch.Tensor:
        return accumext.chunked_loss(fn, model.trunk(x), x[:, 0], y, chunks=3, **how)

    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call(y)
    with pytest.raises(ValueError, match=r"args\[1\] must have no ignored targets"):
        call(y.to(torch.int8))
    with cpu_as_device(), pytest.raises(RuntimeError, match=r"args\[1\] must have no ignored"):
        call(y)
    call(y, reduction="sum")  # of which ignored targets are no part
    call(y, weights=torch.ones(10))
    call(y.clamp(min=0))


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1, reduction="sum"),
        lambda z, y: F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z.dtype), reduction="sum"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_sum_is_no_mean(loss, grad):
    """Under "mean" an error that says what to pass; under "sum" the whole batch's loss."""
    model, (x, _) = Model(), batch(8)
    y = PADDED[0]
    text = (
        "chunked_loss: fn must return a mean, got a loss with reduction='sum'. Pass "
        "reduction='sum' to chunked_loss, too, for the sum over the batch"
    )

    def call(by: int = 1, **how: Any) -> torch.Tensor:
        def fn(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            value = loss(model.head(h), t)
            if by > 1:
                value /= by  # in place, and no sum any more
            return value

        with torch.set_grad_enabled(grad):
            return accumext.chunked_loss(fn, model.trunk(x), y, chunks=4, **how)

    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()
    whole = loss(model.head(model.trunk(x)), y)
    torch.testing.assert_close(call(reduction="sum"), whole, rtol=EXACT, atol=0)
    if getattr(loss, "ignore_index", -100) != 0:
        torch.testing.assert_close(call(2), whole / 8, rtol=EXACT, atol=0)  # of equal slices


def test_one_slice_of_the_graph_exists_at_a_time():
    """The head's hidden layer is wide: all ten slices of it would take ten times the memory."""
    head = nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 1))
    x = torch.randn(1000, 4)

    def peak(chunks: int) -> int:
        head.zero_grad()

        def run() -> None:
            accumext.chunked_loss(lambda h: head(h).square().mean(), x, chunks=chunks).backward()

        return peak_memory(run)

    assert peak(10) < peak(1) / 6


def test_loss_scale_reaches_the_inside_of_half_precision_slices():
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


@pytest.mark.parametrize("ignored", [slice(0), slice(0, 2), slice(2, 4), slice(0, 8)])
@host_or_device
def test_what_autocast_casts_in_a_slice_that_counts_nothing(ignored, on_device):
    """Neither other slices nor other losses lose their gradients to it."""
    layer, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    y[ignored] = -100

    def loss_of(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(layer(rows), targets)

    labels = torch.randint(3, (8,))
    found, expected = [], []
    with torch.autocast("cpu", torch.bfloat16):
        with cpu_as_device() if on_device else nullcontext():
            weights = y != -100 if ignored.stop else None
            sliced = accumext.chunked_loss(loss_of, x, y, chunks=4, weights=weights)
        other = loss_of(x, labels)
    for loss in (sliced, other):
        found += torch.autograd.grad(loss, [*layer.parameters()])
    for targets in (y, labels):
        with torch.autocast("cpu", torch.bfloat16):
            whole = F.cross_entropy(layer(x), targets, reduction="sum")
        whole = whole / max(1, int((targets != -100).sum()))
        expected += torch.autograd.grad(whole, [*layer.parameters()])
    for mine, theirs in zip(found, expected, strict=True):
        # sums of 8 rows whose terms are rounded to bfloat16, in two orders
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-7)


@host_or_device
def test_slices_that_share_a_graph_with_one_that_counts_nothing(on_device):
    weight, kept = torch.randn(4, 3, requires_grad=True), []

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(weight * 2)
        return (rows @ kept[0]).square().mean()

    counts = torch.tensor([0, 0, 1, 1])
    within = cpu_as_device() if on_device else nullcontext()
    with within, pytest.raises(RuntimeError, match="fn must make its graph anew for every slice"):
        accumext.chunked_loss(loss_of, torch.randn(4, 4), chunks=2, weights=counts)


def test_hooks_run_once_on_the_whole_gradient():
    model, (x, y) = Model(), batch()
    weight = model.head[0].weight
    seen: list[torch.Tensor] = []
    ready: list[int] = []
    weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    weight.register_post_accumulate_grad_hook(lambda p: ready.append(1))
    accumext.chunked_loss(model.loss, model.trunk(x), y, chunks=5).backward()
    assert len(seen) == len(ready) == 1
    assert torch.equal(weight.grad, seen[0] * 2)


def test_gradients_reach_sliced_arguments_and_parameters_of_some_slices_only():
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


def test_backward_again_on_a_retained_graph():
    model, (x, y) = Model(), batch()
    loss = accumext.chunked_loss(model.loss, model.trunk(x), y, chunks=3)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert_equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_fn_may_take_gradients_of_its_own():
    """Such as a gradient penalty."""
    model, (x, _) = Model(), batch()

    def fn(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().requires_grad_()
        outputs = model.head(model.trunk(rows)).square()
        (slope,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
        return outputs.mean() + slope.square().mean()

    losses = fn(x), accumext.chunked_loss(fn, x, chunks=5)
    gradients = [list(torch.autograd.grad(loss, list(model.parameters()))) for loss in losses]
    assert relative_distance(*gradients) < EXACT


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_a_function_made_inside_of_a_compiled_one():
    """The graph breaks at the call, which looks at the function as it is."""
    head = nn.Linear(4, 7)

    def loss() -> torch.Tensor:
        x = partial(torch.ones, 3, 4, requires_grad=True)
        return accumext.chunked_loss(lambda x: head(x).sum(), x(), chunks=2)

    torch.testing.assert_close(torch.compile(loss, backend="eager")(), loss())


class Keeps(nn.Module):
    """A head that keeps something from one call to the next, in several ways."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.calls, self.number = calls, 0
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.head = spectral_norm(nn.Linear(5, 7, dtype=torch.float64))

    def forward(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.number += 1
        scale = 0.9**self.number if self.calls is None else 0.9 ** next(self.calls)
        return F.cross_entropy(self.head(self.norm(h)) * scale, y)


def test_what_fn_keeps_is_put_back_before_it_is_called_again():
    """Also where the graph is retained, and afterwards."""
    found = []
    h, y = torch.randn(10, 5, dtype=torch.float64, requires_grad=True), torch.randint(7, (10,))
    for chunked in (False, True):
        torch.manual_seed(0)
        fn = Keeps(None)
        leaves = [h, *fn.parameters()]
        slices = [*zip(h.split(5), y.split(5), strict=True)]
        if chunked:
            loss = accumext.chunked_loss(fn, h, y, chunks=2)
        else:
            loss = (fn(*slices[0]) + fn(*slices[1])) / 2
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(loss, leaves)
        assert_equal(gradients, again)
        found.append([loss.detach(), *gradients, *(b.double() for b in fn.buffers())])
        assert fn.number == 2
    assert relative_distance(found[1], found[0]) < EXACT


@pytest.mark.parametrize("backward_inside", [True, False])
def test_weights_that_parametrize_caches(backward_inside):
    found = []
    for chunked in (False, True):
        torch.manual_seed(0)
        layer = orthogonal(nn.Linear(4, 4, dtype=torch.float64))
        x = torch.randn(9, 4, dtype=torch.float64)
        given = list(layer.parameters())

        def fn(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            return layer(x).square().mean()

        with cached():
            loss = accumext.chunked_loss(fn, x, chunks=3) if chunked else fn(x)
            gradients = torch.autograd.grad(loss, given) if backward_inside else ()
        found.append(gradients or torch.autograd.grad(loss, given))
    assert relative_distance(found[1], found[0]) < 1e-12


def test_what_cannot_be_put_back_is_an_error():
    h, y = torch.randn(10, 5, dtype=torch.float64, requires_grad=True), torch.randint(7, (10,))
    loss = accumext.chunked_loss(Keeps(itertools.count()), h, y, chunks=2)
    text = "^chunked_loss: fn must do in its replay, for the backward pass, what it did in the "
    with pytest.raises(RuntimeError, match=text):
        loss.backward()


def test_without_grad_mode_and_without_rows():
    model, (x, y) = Model(), batch()
    with torch.no_grad():
        loss = accumext.chunked_loss(model.loss, model.trunk(x), y, chunks=3)
        torch.testing.assert_close(loss, model.loss(model.trunk(x), y), rtol=EXACT, atol=0)
    assert not loss.requires_grad
    empty = accumext.chunked_loss(model.loss, x[:0].requires_grad_(), y[:0], chunks=3)
    assert empty == 0
    empty.backward()


WEIGHTS = r"weights must be a tensor \[N, ...\] of bools, ints or floats"
WRONG = [  # arguments beside a good call with 10 rows, error and words
    ({"chunks": None}, ValueError, "chunks must be given, or chunk_size, and not both, got neit"),
    ({"chunk_size": 2}, ValueError, "chunks must be given, or chunk_size, and not both, got both"),
    ({"chunks": 0}, ValueError, "chunks must be at least 1, got 0"),
    ({"chunks": None, "chunk_size": 2.0}, TypeError, "chunk_size must be an int, got float"),
    ({"reduction": "none"}, ValueError, "reduction must be one of 'mean', 'sum', got 'none'"),
    ({"inputs": [1]}, TypeError, "inputs must be a tensor"),
    ({"args": [torch.zeros(9)]}, ValueError,
     r"args\[0\] must have the 10 rows of inputs, got \[9\]"),
    ({"fn": torch.zeros(2)}, TypeError, "fn must be callable"),
    ({"fn": lambda h: h[0]}, ValueError, r"fn must return a 0-dim loss, got shape \[3\]"),
    ({"fn": lambda h: 3.0}, TypeError, "fn must return a tensor, got float. Leave out .item()"),
    ({"fn": lambda h: None}, TypeError, "fn must return a tensor, got NoneType. Pass one such"),
    ({"fn": lambda h: SimpleNamespace(loss=h.sum())}, TypeError,
     "fn must return a tensor, got SimpleNamespace. Take the loss that it holds: out.loss"),
    ({"weights": [1] * 10}, TypeError, f"{WEIGHTS}, got list"),
    ({"weights": torch.zeros(10).cfloat()}, TypeError, f"{WEIGHTS}, got a complex64 tensor"),
    ({"weights": torch.ones(())}, ValueError, r"weights must have the 10 rows of inputs, got \[\]"),
    ({"weights": torch.ones(10), "reduction": "sum"}, ValueError,
     "weights must be None unless reduction is 'mean', got a float"),
    ({"weights": torch.ones(10, device="meta")}, ValueError,
     "weights must be on the CPU or on the device of inputs, cpu, got m"),
    *(({"weights": torch.tensor([1.0] * 9 + [value])}, ValueError,
       f"weights must be finite and at least 0, got {value}")
      for value in (-1.0, float("nan"), float("inf"))),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
def test_what_is_refused(wrong, error, text):
    leaf = torch.ones(10, 3, requires_grad=True)
    call = {"fn": lambda h: h.sum(), "inputs": leaf, "args": [], "chunks": 2, **wrong}
    fn, inputs, args = (call.pop(name) for name in ("fn", "inputs", "args"))
    with pytest.raises(error, match=rf"^chunked_loss: {text}"):
        accumext.chunked_loss(fn, inputs, *args, **call)
    if "finite" in text:
        with cpu_as_device(), pytest.raises(RuntimeError, match="weights must be finite and at"):
            accumext.chunked_loss(fn, inputs, *args, **call)
    assert leaf.grad is None
