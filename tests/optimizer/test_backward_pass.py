"""Backward passes, with accumulate_in_backward and without: the same results, and errors inside."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    ONE_BY_ONE,
    accumulating,
    assert_close,
    assert_equal,
    fail_in_backward,
    hooks_of,
    loss_of,
    make_batches,
    make_model,
    sgd,
    train_by_hand,
)
from torch import nn

from accumext.optimizer import _backward_hooks
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(7)


@pytest.fixture(
    params=[ONE_BY_ONE, 40, _backward_hooks.BUNDLE_BYTES], ids=lambda n: f"bundles-of-{n}"
)
def bundles(request, monkeypatch):
    """Every gradient alone, a few together, and all of the model at the end of the pass."""
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", request.param)


def both_ways(train):
    """Parameters and report, with the option and without: equal bit for bit."""
    (with_it, report), (without, expected) = (train(in_backward) for in_backward in (True, False))
    assert_equal(with_it, without)
    assert report == expected


def step_through(opt, model, batches, weights):
    for batch, weight in zip(batches, weights):
        opt.backward(loss_of(model, batch.to(next(model.parameters()).dtype)), weight)
        opt.step()
    opt.flush()
    return [p.detach() for p in model.parameters()], opt.stats()


WEIGHTS = {
    "equal": [1.0] * 7,
    "unequal": [3.0, 1.0, 7.0, 0.0, 2.0, 5.0, 0.3],
    "tensors": [torch.tensor(w) for w in (3.0, 1.0, 0.0, 2.0, 2.0, 5.0, 0.3)],
}


@pytest.mark.usefixtures("bundles")
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("window", [1, 3])
def test_bit_for_bit_what_it_is_without(dtype, window, weights, scaled):
    def train(in_backward):
        model = make_model(dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
        opt = accumulating(model, in_backward, window=window, scaler=scaler, max_norm=0.05)
        return step_through(opt, model, BATCHES, weights)

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_parts_of_a_micro_batch(dtype):
    def train(in_backward):
        model = make_model(dtype)
        opt = accumulating(model, in_backward, max_norm=0.05)
        for batch in BATCHES[:6]:
            with opt.micro_batch():
                for part in batch.to(dtype).split(2):
                    opt.backward(loss_of(model, part), 2.0)
            opt.step()
        return [p.detach() for p in model.parameters()], opt.stats()

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_parameters_without_gradients_in_some_micro_batches():
    """Which came first in the window must not show in the order of a norm's sum."""

    def train(in_backward):
        model = make_model(torch.bfloat16)
        opt = accumulating(model, in_backward, max_norm=0.05)
        for layer in (model[2], model[0], model):
            opt.backward(sum(p.float().square().sum() for p in layer.parameters()))
            opt.step()
        return [p.detach() for p in model.parameters()], opt.stats()

    both_ways(train)


@pytest.mark.usefixtures("bundles")
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_inf_skips_the_window(bad):
    def train(in_backward):
        model = make_model(torch.bfloat16)
        opt = accumulating(model, in_backward)
        for i, batch in enumerate(BATCHES[:3]):
            opt.backward(loss_of(model, batch.bfloat16()) * (INF if i == bad else 1.0))
            opt.step()
        assert opt.last.skipped
        return [p.detach() for p in model.parameters()], opt.last.nonfinite

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_sparse_gradients():
    def train(in_backward):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            table = nn.Embedding(6, 3, sparse=True, dtype=torch.float32)
        opt = AccumulatingOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1),
            window=3,
            max_norm=0.1,
            accumulate_in_backward=in_backward,
        )
        for tokens in ([1, 1, 4], [0, 4, 4], [2, 1, 0]):
            opt.backward(table(torch.tensor(tokens)).square().sum())
            opt.step()
        return [table.weight.detach()], opt.stats()

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_what_lies_in_grad_already_belongs_to_the_micro_batch():
    def train(in_backward):
        model = make_model(torch.bfloat16)
        opt = accumulating(model, in_backward)
        for batch in BATCHES[:3]:
            loss_of(model, batch.bfloat16()).backward()
            opt.backward(model[2].weight.float().square().sum())
            opt.step()
        return [p.detach() for p in model.parameters()], opt.stats()

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_a_gradient_penalty_differentiates_twice():
    def train(in_backward):
        model = make_model(torch.bfloat16)
        opt = accumulating(model, in_backward)
        for batch in BATCHES[:3]:
            inputs = batch.bfloat16().requires_grad_()
            slope = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0]
            loss = slope.square().sum()
            loss.backward(retain_graph=True)
            opt.zero_grad()
            opt.backward(loss)
            opt.step()
        return [p.detach() for p in model.parameters()], opt.stats()

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_parameters_may_be_added_and_unfrozen():
    def train(in_backward):
        model = make_model(torch.bfloat16)
        model[0].weight.requires_grad_(False)
        opt = accumulating(model, in_backward)
        extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        for i, batch in enumerate(BATCHES[:6]):
            if i == 2:
                opt.add_param_group({"params": [extra]})
                model[0].weight.requires_grad_(True)
            opt.backward((model(batch.bfloat16()) * extra).square().mean())
            opt.step()
        return [p.detach() for p in (*model.parameters(), extra)], opt.stats()

    both_ways(train)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_go_on_from_the_middle_of_a_window(clone, monkeypatch):
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", ONE_BY_ONE)
    model = make_model(torch.bfloat16)
    opt = accumulating(model, max_norm=0.05)
    step_through(opt, model, BATCHES[:3], [1.0] * 3)
    opt.backward(loss_of(model, BATCHES[3].bfloat16()))
    twin_model, twin = clone((model, opt))
    expected, stats = step_through(opt, model, BATCHES[4:], [1.0] * 3)
    actual, twin_stats = step_through(twin, twin_model, BATCHES[4:], [1.0] * 3)
    assert_equal(actual, expected)
    assert twin_stats == stats


@pytest.mark.usefixtures("bundles")
@pytest.mark.parametrize("held", [0, 1])
def test_an_error_in_the_backward_pass_drops_the_window(held):
    model = make_model(torch.bfloat16)
    opt = accumulating(model)
    batches = [batch.bfloat16() for batch in BATCHES]
    for batch in batches[:held]:
        opt.backward(loss_of(model, batch))
    with pytest.raises((ZeroDivisionError, RuntimeError)) as raised:
        opt.backward(fail_in_backward(model, batches[1]))
    error = raised.value
    said = "the open window was dropped" in str(error) + "".join(getattr(error, "__notes__", ()))
    assert said == bool(held)
    assert not hooks_of(model)
    assert all(p.grad is None and opt.main_grad(p) is None for p in model.parameters())

    fresh = make_model(torch.bfloat16)
    expected = step_through(accumulating(fresh), fresh, BATCHES[:3], [1.0] * 3)
    assert_equal(step_through(opt, model, BATCHES[:3], [1.0] * 3)[0], expected[0])


@pytest.mark.usefixtures("bundles")
def test_an_error_inside_a_micro_batch_drops_that_one_alone():
    model = make_model(torch.bfloat16)
    opt = accumulating(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    before = [opt.main_grad(p) for p in model.parameters()]

    def interrupted():
        with opt.micro_batch():
            opt.backward(loss_of(model, BATCHES[1].bfloat16()))
            opt.backward(fail_in_backward(model, BATCHES[1].bfloat16()))

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert_equal([opt.main_grad(p) for p in model.parameters()], before)
    assert all(p.grad is None for p in model.parameters())


def test_an_error_in_the_first_backward_pass_leaves_the_window_empty():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2)
    with pytest.raises(ZeroDivisionError):
        opt.backward(fail_in_backward(model, BATCHES[0]))
    assert all(p.grad is None for p in model.parameters())
    assert all(opt.main_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise"])
def test_an_error_in_a_later_backward_pass_leaves_the_window_as_it_was(policy):
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2, on_nonfinite=policy)
    opt.backward(loss_of(model, BATCHES[0]))
    with pytest.raises(ZeroDivisionError):
        opt.backward(fail_in_backward(model, BATCHES[1]))
    opt.backward(loss_of(model, BATCHES[1]))
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[:2], 2))


def test_an_error_while_autograd_adds_in_place_drops_the_window_and_says_so():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2, accumulate_in_backward=True)
    opt.backward(loss_of(model, BATCHES[0]))
    with pytest.raises((ZeroDivisionError, RuntimeError)) as raised:
        opt.backward(fail_in_backward(model, BATCHES[1]))
    error = raised.value
    assert "the open window was dropped" in str(error) + "".join(getattr(error, "__notes__", ()))
    assert all(p.grad is None for p in model.parameters())
    for batch in BATCHES[2:4]:
        opt.backward(loss_of(model, batch))
        opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[2:4], 2))
