"""Parameters."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support import optimizer_oracle as oracle
from support.optimizer_oracle import assert_close, loss_of, make_model, one_call, parameters_of
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = oracle.make_batches(9)
POLICIES = ["skip_window", "skip_micro_batch", "raise"]
LOOPS = [one_call, oracle.own_backward, oracle.outer_scaler]
every_loop = pytest.mark.parametrize("loop", LOOPS)


def sgd(parameters):
    """Make SGD that tells no gradient from one of zero: with that, a parameter decays."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def assert_as_by_hand(loop, reference, model, losses, weights=(1.0,) * 9, **options):
    """Compare after each step. `losses(model)` yields losses, and may change the model before."""
    max_norm, make = options.get("max_norm"), options.pop("make", sgd)
    by_hand = oracle.ByHand(reference.parameters(), make, max_norm=max_norm)
    opt, scaler = oracle.wrapped(model, make, **options), oracle.growing_scaler()
    for expected, loss, weight in zip(losses(reference), losses(model), weights):
        by_hand.add(expected, weight)
        loop(opt, loss, scaler, weight)
        if opt.stepped:
            by_hand.step()
            assert_close(parameters_of(model), parameters_of(reference))
    assert opt.stepped


@pytest.mark.parametrize("in_backward", [False, True], ids=["afterwards", "in-backward"])
@pytest.mark.parametrize("frozen", [{3, 4, 5}, {1, 4, 5, 6}], ids=["a-window", "inside-windows"])
@pytest.mark.parametrize("window", [1, 3])
@every_loop
def test_parameters_may_freeze_and_thaw(loop, window, frozen, in_backward):
    """Parameters frozen and unfrozen during the run, between windows or inside one"""

    def losses(model):
        for i, batch in enumerate(BATCHES):
            model[0].requires_grad_(i not in frozen)
            yield loss_of(model, batch)

    options = {"window": window, "accumulate_in_backward": in_backward}
    assert_as_by_hand(loop, make_model(), make_model(), losses, **options)


class Tied(nn.Module):
    """A language model of one word of context, with one weight for both ends."""

    def __init__(self, sparse):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.embedding = nn.Embedding(6, 3, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.embedding(tokens[:-1])), tokens[1:])


TEXTS = [torch.tensor(text) for text in ([1, 2, 3, 1], [0, 4, 4, 5], [2, 1, 0, 3])] * 2


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("window", [1, 3])
@every_loop
def test_tied_parameters(loop, window, sparse):
    """One weight at both ends of a model, also with a sparse gradient from one end"""
    assert_as_by_hand(loop, Tied(False), Tied(sparse), lambda m: map(m, TEXTS), window=window)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(("window", "on_nonfinite"), [*product([3], POLICIES), (1, "skip_window")])
@every_loop
def test_sparse_gradients(loop, window, max_norm, on_nonfinite):
    """`nn.Embedding(sparse=True)` trains as a dense one, with clipping and scalers"""

    def plain_sgd(parameters):  # weight decay would touch rows that a sparse gradient leaves out
        return torch.optim.SGD(parameters, lr=0.1)

    def losses(model):
        return (model.embedding(text).square().sum() for text in TEXTS)

    options = {"window": window, "max_norm": max_norm, "on_nonfinite": on_nonfinite}
    if loop is one_call:
        options["scaler"] = oracle.growing_scaler()
    assert_as_by_hand(loop, Tied(False), Tied(True), losses, make=plain_sgd, **options)


@pytest.mark.parametrize("order", [1, -1], ids=["sparse-first", "dense-first"])
@pytest.mark.parametrize("on_nonfinite", POLICIES)
@every_loop
def test_sparse_and_dense_gradients_by_turns(loop, on_nonfinite, order):
    """A parameter with a sparse gradient in one micro-batch and a dense one in the next"""

    def losses(model):
        looked_up = model.embedding(torch.tensor([1, 1, 4])).square().sum()
        projected = model.head(torch.ones(3, dtype=torch.float64)).square().sum()
        yield from [looked_up, projected][::order]

    def twice(model):
        yield from losses(model)
        yield from losses(model)

    weights = [2.0, 3.0, 0.0, 0.5] if loop is one_call else [1.0] * 4
    options = {"window": 4, "on_nonfinite": on_nonfinite}
    assert_as_by_hand(loop, Tied(False), Tied(True), twice, weights, **options)


@pytest.mark.parametrize("on_nonfinite", POLICIES[:2])
@pytest.mark.parametrize("before", ["frozen", "trainable"])
@pytest.mark.parametrize("added_at", [3, 4], ids=["between-windows", "inside-a-window"])
@every_loop
def test_a_parameter_group_is_added(loop, added_at, before, on_nonfinite):
    """`add_param_group` between windows or inside one, with a learning rate of its own"""
    reference, model = make_model(), make_model()
    by_hand = oracle.ByHand(reference[2].parameters(), sgd)
    opt = oracle.wrapped(model[2], sgd, window=3, on_nonfinite=on_nonfinite)
    scaler = oracle.growing_scaler()
    for some in (reference, model):
        some[0].requires_grad_(before == "trainable")
    for i, batch in enumerate(BATCHES):
        if i == added_at:
            for some, its in ((reference, by_hand.optimizer), (model, opt)):
                some[0].requires_grad_(True).zero_grad()
                its.add_param_group({"params": list(some[0].parameters()), "lr": 0.5})
        by_hand.add(loss_of(reference, batch))
        loop(opt, loss_of(model, batch), scaler)
        if opt.stepped:
            by_hand.step()
    assert opt.optimizer.param_groups[1]["lr"] == 0.5
    assert_close(parameters_of(model), parameters_of(reference))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("loop", [one_call, oracle.own_backward])
def test_the_gradients_of_others_are_left_alone(loop, window):
    """An optimizer over a part of the model leaves the other gradients in `.grad`"""
    reference, model = make_model(), make_model()
    by_hand = oracle.ByHand(reference[2].parameters(), sgd)
    opt = oracle.wrapped(model[2], sgd, window=window)
    for batch in BATCHES:
        by_hand.add(loss_of(reference, batch))
        loss_of(reference, batch).backward(inputs=list(reference[0].parameters()))
        loop(opt, loss_of(model, batch))
        if opt.stepped:
            by_hand.step()
    pairs = zip(model[0].parameters(), reference[0].parameters())
    assert_close(*zip(*((p.grad, r.grad) for p, r in pairs)))
    assert_close(parameters_of(model), parameters_of(reference))


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("window", [1, 3])
def test_parameters_of_several_dtypes(window, fused, max_norm):
    """Parameters in bfloat16, float32 and float64 under one optimizer, clipped as one vector"""
    dtypes = [torch.bfloat16, torch.float32, torch.float64]
    factors = [1.0, 2.0, -3.0, 5.0, 0.25, 2.0]

    def gradients(factor):  # of few bits, so that sums of them are exact in every dtype
        return [torch.tensor([1.0, -2.0, 0.5 * k], dtype=torch.float64) * factor for k in (1, 2, 3)]

    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    inner = torch.optim.SGD(parameters, lr=0.125, fused=fused)
    opt = AccumulatingOptimizer(inner, window=window, max_norm=max_norm)
    truth = [torch.ones(3, dtype=torch.float64) for _ in dtypes]
    for some in oracle.windows_of(factors, window):
        mean = [sum(g) / len(some) for g in zip(*(gradients(factor) for factor in some))]
        norm = torch.cat(mean).norm()
        coef = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
        truth = [t - 0.125 * coef * m for t, m in zip(truth, mean)]
        for factor in some:
            losses = [(p.double() * g).sum() for p, g in zip(parameters, gradients(factor))]
            one_call(opt, sum(losses))
    for parameter, expected in zip(parameters, truth):
        # The gradient and the parameter are rounded once per step, and the norm of the float32
        # gradients, which clips all, to float32.
        tolerance = 2 * len(factors) * torch.finfo(parameter.dtype).eps
        if max_norm is not None:
            tolerance += torch.finfo(torch.float32).eps
        assert_close([parameter.detach().double()], [expected], tolerance)
