"""decode_loss adds the gradients of its large weights to an optimizer's sums itself, from the
second micro-batch on. In half precision with `accumulate_in_backward`, from the first."""

import copy
import functools
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _operators
from accumext.ops.wgrad_fusion import destination, may_fuse

# float64: the same sums in another order
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
VOCABULARY, SIZE, STEPS, BATCH = 23, 6, 9, 3


class Setup:
    """A decoder under an optimizer with a window of three micro-batches.

    Straight into the sums, or, where a hook is on every parameter, the usual way.
    """

    def __init__(
        self,
        straight: bool,
        vocabulary: int = VOCABULARY,
        size: int = SIZE,
        dtype: torch.dtype = torch.float64,
        tied: bool = False,
        callable_cell: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, size, dtype=dtype, padding_idx=1)
        cell = nn.GRUCell(size, size, dtype=dtype)
        self.head = nn.Linear(size, vocabulary, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight
        self.cell: Any = cell
        if callable_cell:
            self.cell = lambda x, state: (cell(x, state),) * 2
        modules = nn.ModuleList([self.embedding, cell, self.head])
        self.parameters = list(modules.parameters())
        optimizer = torch.optim.SGD(self.parameters, lr=0.5)
        self.opt = accumext.AccumulatingOptimizer(
            optimizer, window=3, accumulate_in_backward=straight, **options
        )
        for parameter in [] if straight else self.parameters:
            parameter.register_hook(lambda gradient: None)
        self.state = torch.zeros(BATCH, size, dtype=dtype)
        generator = torch.Generator().manual_seed(7)
        self.targets = torch.randint(vocabulary, (3, STEPS, BATCH), generator=generator)

    def loss(self, index: int, **call: Any) -> torch.Tensor:
        targets = self.targets[index]
        call = {"feedback": "teacher", "label_smoothing": 0.1, **call}
        out = accumext.decode_loss(
            self.embedding, self.cell, self.head, targets, self.state, **call
        )
        return out.loss

    def train(self, weights: tuple[float, ...] = (1.0, 2.0, 0.5)) -> list[torch.Tensor]:
        for index, weight in enumerate(weights):
            self.opt.backward(self.loss(index) * 3.0, weight=weight)
            self.opt.step()
        return [p.detach().clone() for p in self.parameters]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("callable_cell", [False, True], ids=["module", "callable"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("equal", [False, True], ids=["weights", "equal_weights"])
def test_the_window_is_the_same(tied, callable_cell, scaled, equal):
    weights = (1.0, 1.0, 1.0) if equal else (1.0, 2.0, 0.5)
    results = []
    for straight in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        setup = Setup(straight, tied=tied, callable_cell=callable_cell, scaler=scaler)
        results.append(setup.train(weights))
    assert_close(*results)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_gradient_of_the_weights_size_is_made(dtype, tied):
    """The first micro-batch makes the float32 sums alone, a later one nothing of their size."""
    words, size = 20000, 64
    setup = Setup(True, vocabulary=words, size=size, dtype=dtype, tied=tied)
    workspace = 2 * 4 * words * BATCH  # logits of a step, and their gradients

    def micro_batch(index: int) -> None:
        loss = setup.loss(index, memory_budget=workspace, label_smoothing=0.0)
        setup.opt.backward(loss)

    gradient = 4 * words * size
    first, second = (peak_memory(lambda i=i: micro_batch(i)) for i in range(2))
    assert gradient < first < gradient * (1.5 if tied else 2.5) + workspace
    assert second < gradient / 2 + workspace


def test_a_hook_behind_accumulation_finds_the_gradient():
    """`register_post_accumulate_grad_hook`: the optimizer puts hooks of that kind there itself."""
    setup, other = Setup(True), Setup(False)
    weights = [setup.head.weight, setup.embedding.weight]
    seen: dict[torch.Tensor, torch.Tensor] = {}
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad.clone()}))
    expected = torch.autograd.grad(other.loss(0), [other.head.weight, other.embedding.weight])
    for count in (1, 2):  # the sum so far, as without an optimizer around
        setup.opt.backward(setup.loss(0))
        for weight, gradient in zip(weights, expected, strict=True):
            found = seen.pop(weight)
            assert_close(found, count * gradient)


def test_outside_the_optimizers_backward_pass_gradients_are_autograds():
    setup = Setup(True)
    gradients = torch.autograd.grad(setup.loss(0), setup.parameters)
    other = Setup(False)
    assert_close(gradients, torch.autograd.grad(other.loss(0), other.parameters))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("callable_cell", [False, True], ids=["module", "callable"])
def test_a_loss_from_before_the_optimizer(callable_cell, tied):
    """Its gradients were formed in the forward pass, when nobody had offered a main gradient."""
    results = []
    for straight in (False, True):
        setup = Setup(straight, tied=tied, callable_cell=callable_cell)
        losses = [setup.loss(index) for index in range(3)]
        opt = accumext.AccumulatingOptimizer(torch.optim.SGD(setup.parameters, lr=0.5), window=4)
        for index, loss in enumerate(losses):
            opt.backward(loss, weight=1.0 + index)
        opt.flush()
        results.append([p.detach() for p in setup.parameters])
    assert_close(*results)


def test_a_weight_of_another_optimizer_has_its_gradient_there():
    """It is kept for `accumulate` of that one."""
    setup = Setup(True)
    theirs = accumext.AccumulatingOptimizer(torch.optim.SGD([setup.head.weight]), window=3)
    own = [p for p in setup.parameters if p is not setup.head.weight]
    opt = accumext.AccumulatingOptimizer(
        torch.optim.SGD(own, lr=0.5), window=3, accumulate_in_backward=True
    )
    opt.backward(setup.loss(0))
    other = Setup(False)
    (expected,) = torch.autograd.grad(other.loss(0), [other.head.weight])
    assert setup.head.weight.grad is None
    theirs.accumulate()
    found = theirs.main_grad(setup.head.weight)
    assert_close(found, expected)


def test_a_sparse_gradient_stays_sparse():
    """SparseAdam refuses any other."""
    results = []
    for straight in (False, True):
        setup = Setup(straight)
        setup.embedding = nn.Embedding(VOCABULARY, SIZE, dtype=torch.float64, sparse=True)
        with torch.no_grad():
            setup.embedding.weight.copy_(setup.parameters[0])
        optimizer = torch.optim.SparseAdam([setup.embedding.weight])
        setup.opt = accumext.AccumulatingOptimizer(optimizer, window=3)
        setup.train()
        results.append(setup.embedding.weight.detach())
    assert_close(*results)


def test_without_an_optimizer_the_logits_are_formed_once(monkeypatch):
    loss = Setup(False).loss(0)
    monkeypatch.delattr(_operators, "head_forward")
    loss.backward()


def logits_formed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the runs of the head over the rows of a loss, forward and backward, without `opt`."""
    calls = []
    operator = _operators.head_forward

    def counting(*args: Any) -> None:
        calls.append(1)
        operator(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_operators, "head_forward", counting)
        setup.loss(0).backward()
    return len(calls)


def test_an_optimizer_that_is_gone_leaves_no_attribute(monkeypatch):
    setup = Setup(True)
    first = logits_formed(setup, monkeypatch)  # no sum is there yet
    setup.opt.zero_grad()
    setup.opt.backward(setup.loss(0))
    assert logits_formed(setup, monkeypatch) > first
    del setup.opt
    gc.collect()
    assert not any(vars(p) for p in setup.parameters)
    assert logits_formed(setup, monkeypatch) == first


def test_a_copied_or_pickled_model_belongs_to_no_optimizer(monkeypatch):
    setup = Setup(True)
    setup.opt.backward(setup.loss(0))
    waiting = logits_formed(setup, monkeypatch)
    for copied in (copy.deepcopy(setup.head), pickle.loads(pickle.dumps(setup.head))):
        setup.head = copied
        assert logits_formed(setup, monkeypatch) < waiting


def test_another_operator_adds_its_gradient_to_the_sum():
    """Where it is offered one; the first gradient, and one of another dtype, it returns."""
    offered = []

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
            ctx.parameter = parameter
            return parameter.sum()

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor | None:
            gradient = upstream.expand(ctx.parameter.shape)
            assert destination(ctx.parameter, torch.float64) is None
            main = destination(ctx.parameter, torch.float32)
            offered.append(main is not None)
            if main is None:
                return gradient.clone()
            main.add_(gradient)
            return None

    parameter = nn.Parameter(torch.zeros(3))
    opt = accumext.AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=3)
    assert not may_fuse(parameter)
    for weight in (1.0, 3.0, 2.0):
        opt.backward(Summed.apply(parameter) * weight, weight=weight)
        assert may_fuse(parameter)
        assert destination(parameter, torch.float32) is None  # outside a backward pass
    opt.step()
    assert offered == [False, True, True]
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -(1 + 9 + 4) / 6))
