"""Backward passes and `micro_batch()`: autograd adds to the sums, or half precision is taken in
while it runs, in bundles, with one layer in memory; the same results, and no hook is left."""

import copy
import time
import weakref
from threading import Thread

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import INF, OP
from support.tensors import HALF_DTYPES, dtype_id
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accumext.optimizer import _collecting
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from accumext.optimizer._collecting import GradCollector

BATCHES = oracle.make_batches(2, torch.bfloat16)


def gradients_seen(opt, parameter, factors, weights, dtype=torch.float32):
    """The gradients that reach an activation, which is 0, in passes of `factor * activation`."""
    seen = []
    for factor, weight in zip(factors, weights, strict=True):
        activation = (parameter * torch.ones(())).to(dtype)
        activation.register_hook(lambda grad: seen.append(grad.item()))
        opt.backward(activation * factor, weight)
    return seen


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
def test_a_loss_is_never_multiplied_by_more_than_its_scale(scaled, reduction, as_tensor):
    """A weight larger than all before it makes the sums smaller instead."""
    weights = [2.0, 8.0, 1.0, 32.0, 32.0]
    scale = 1024.0 if scaled else 1.0
    scaler = oracle.growing_scaler(init_scale=scale) if scaled else None
    parameter, opt = oracle.wrapped_zeros(5, scaler=scaler, reduction=reduction)
    given = [torch.tensor(w) for w in weights] if as_tensor else weights
    seen = gradients_seen(opt, parameter, [3.0] * 5, given)
    assert seen == [3.0 * scale * unit for unit in (1.0, 1.0, 1 / 8, 1.0, 1.0)]
    assert opt.main_grad(parameter).item() == 3.0 * sum(weights)
    opt.step()
    assert parameter.item() == -3.0 * (sum(weights) if reduction == "sum" else 1.0)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
def test_a_loss_of_half_precision_does_not_round_its_weight(dtype):
    """Its gradient is 1 exactly; 257 / 1000 is no number of half precision."""
    (parameter, opt), weights = oracle.wrapped_zeros(3, reduction="sum"), [1000.0, 257.0, 3.0]
    gradients_seen(opt, parameter, [1.0] * 3, weights, dtype)
    assert opt.main_grad(parameter).item() == pytest.approx(sum(weights), rel=1e-6)


@pytest.mark.parametrize("half_first", [True, False])
def test_parts_of_a_micro_batch_may_be_losses_of_several_dtypes(half_first):
    """A loss of half precision cannot carry its weight; the first part decides for all of them."""
    parameter, opt = oracle.wrapped_zeros(2, shape=2)
    opt.backward(parameter.sum() * 4.0, weight=3.0)
    with opt.micro_batch():
        for half in (half_first, not half_first):
            loss = parameter.sum() * 8.0
            opt.backward(loss.bfloat16() if half else loss, weight=1.0)
    opt.step()
    assert opt.last.micro_batches == 2
    # The weight over the unit, 1/3, is rounded once where the loss of half precision carries it.
    expected = torch.full((2,), -(3.0 * 4.0 + 1.0 * 16.0) / 4.0)
    torch.testing.assert_close(parameter.detach(), expected, rtol=2.0**-8, atol=0.0)


@pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. 2 calls of step found no gradient")
def test_micro_batches_without_gradients_and_without_passes():
    """One counts of which nothing reaches the parameters; one without a backward pass does not."""
    used, unused = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    opt = AccumulatingOptimizer(oracle.sgd([used]), window=2)
    for leaf in (unused, None, used):
        with opt.micro_batch():
            if leaf is not None:
                opt.backward(leaf.sum())
        opt.step()
        assert opt.stepped == (leaf is used)
    assert opt.last.micro_batches == 2
    assert used.tolist() == [0.5, 0.5]


def test_a_micro_batch_of_plain_passes_after_one_that_is_in_grad():
    """Its sum lies in `.grad`, where a plain pass would add to it."""
    parameter, opt = oracle.wrapped_zeros()
    opt.backward(parameter * 2)
    opt.window = 2
    with opt.micro_batch():
        (parameter * 4).backward()
    opt.step()
    assert parameter.item() == -3.0


@pytest.mark.parametrize("second", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_a_micro_batch_has_one_weight(second, policy):
    parameter, opt = oracle.wrapped_zeros(2, on_nonfinite=policy)

    def two_weights():
        with opt.micro_batch():
            opt.backward(parameter * 1, 1.0)
            opt.backward(parameter * 1, second)

    text = f"{OP}.backward: weight must be that of the whole micro-batch, 1, got 2.0"
    with pytest.raises(ValueError, match=oracle.says(text)):
        two_weights()


@pytest.fixture(params=[oracle.ONE_BY_ONE, 40], ids=lambda n: f"bundles-of-{n}")
def bundles(request, monkeypatch):
    """Every gradient alone, and a few together, of which the last wait for the end of the pass."""
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", request.param)


def weighted(weights):
    """A micro-batch of the weight with its number."""

    def micro_batch(opt, model, batch, number):
        opt.backward(oracle.loss_of(model, batch), weights[number])

    return micro_batch


def in_parts(opt, model, batch, number):
    with opt.micro_batch():
        for part in batch.split(2):
            opt.backward(oracle.loss_of(model, part), 2.0)


def of_one_layer(opt, model, batch, number):
    """The order of a norm's sum must not show which layer came first in the window."""
    layer = (model[2], model[0], model)[number % 3]
    opt.backward(sum(p.float().square().sum() for p in layer.parameters()))


def with_inf_in_the_second(opt, model, batch, number):
    opt.backward(oracle.loss_of(model, batch) * (INF if number % 3 == 1 else 1.0))


def beside_the_users(opt, model, batch, number):
    """A gradient already in `.grad` belongs to the micro-batch."""
    oracle.loss_of(model, batch).backward()
    opt.backward(model[2].weight.float().square().sum())


MICRO_BATCHES = {
    "weights": weighted([3.0, 1.0, 7.0, 0.0, 2.0, 5.0, 0.3]),
    "tensors": weighted([torch.tensor(w) for w in (3.0, 1.0, 0.0, 2.0, 2.0, 5.0, 0.3)]),
    "in parts": in_parts,
    "of one layer": of_one_layer,
    "with inf in the second": with_inf_in_the_second,
    "beside the user's": beside_the_users,
}


@pytest.mark.usefixtures("bundles")
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("micro_batch", MICRO_BATCHES.values(), ids=MICRO_BATCHES)
@pytest.mark.parametrize("window", [1, 3])
def test_bit_for_bit_what_it_is_without(dtype, window, micro_batch, scaled):
    results = []
    for in_backward in (True, False):
        model = oracle.make_model(dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
        opt = oracle.accumulating(model, in_backward, window=window, scaler=scaler, max_norm=0.05)
        for number, batch in enumerate(oracle.make_batches(7, dtype)):
            micro_batch(opt, model, batch, number)
            opt.step()
        opt.flush()
        # NaN is NaN as a text.
        results.append((oracle.parameters_of(model), f"{opt.stats()}, {opt.last.nonfinite}"))
    (with_it, report), (without, expected) = results
    oracle.assert_equal(with_it, without)
    assert report == expected


@pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. one more micro-batch")
def test_a_parameter_whose_parts_come_one_by_one(monkeypatch):
    """Reentrant checkpoints run backward passes of their own; each hands over what it has."""
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", oracle.ONE_BY_ONE)
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    opt = AccumulatingOptimizer(torch.optim.SGD(model.parameters()), accumulate_in_backward=True)
    opt.backward(model.weight.sum())  # from the second on, hooks are at work
    inputs = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    twice = checkpoint(model, checkpoint(model, inputs, use_reentrant=True), use_reentrant=True)
    opt.backward(twice.float().square().sum())
    twin = copy.deepcopy(model).float()
    twin(twin(inputs.detach().float())).square().sum().backward()
    expected = twin.weight.grad + 1
    # Both passes, their inputs and outputs are rounded to bfloat16.
    oracle.assert_close([opt.main_grad(model.weight)], [expected], tolerance=2.0**-4)


@pytest.mark.parametrize("in_backward", [True, False])
def test_every_gradient_is_free_before_the_next_layers_is_made(monkeypatch, in_backward):
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", oracle.ONE_BY_ONE)
    model, made = oracle.make_model(torch.bfloat16), []
    opt = oracle.accumulating(model, in_backward)
    last = model[2].weight
    last.register_post_accumulate_grad_hook(lambda p: made.append(weakref.ref(p.grad)))
    for batch in BATCHES[:2]:
        freed = []
        hidden = model[0](batch)
        hidden.register_hook(lambda _, seen=freed: seen.append(made[-1]() is None))
        opt.backward(model[2](model[1](hidden)).square().mean())
        assert freed == [in_backward]


def test_a_hook_of_the_users_comes_first_and_may_take_the_gradient():
    model = oracle.make_model(torch.bfloat16)
    opt = oracle.accumulating(model)
    taken = []

    def take(parameter):
        taken.append(parameter.grad)
        parameter.grad = None

    model[0].bias.register_post_accumulate_grad_hook(take)
    for batch in BATCHES[:2]:
        opt.backward(oracle.loss_of(model, batch))
    assert len(taken) == 2
    assert opt.main_grad(model[0].bias) is None
    assert opt.main_grad(model[2].bias) is not None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_may_not_write_a_gradient_after_it_was_taken_in(bucket_view, monkeypatch):
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", oracle.ONE_BY_ONE)
    model = DistributedDataParallel(
        oracle.make_model(torch.bfloat16), gradient_as_bucket_view=bucket_view
    )
    opt = oracle.accumulating(model)
    batch = BATCHES[0]
    text = r"backward: \.grad must be complete when .* Use `with opt\.micro_batch\(model\):`"
    with pytest.raises(RuntimeError, match=text):
        opt.backward(oracle.loss_of(model, batch))
    assert all(p.grad is None and opt.main_grad(p) is None for p in model.parameters())
    with opt.micro_batch(model):
        opt.backward(oracle.loss_of(model, batch))
    expected = torch.autograd.grad(oracle.loss_of(model.module, batch), list(model.parameters()))
    oracle.assert_equal(
        [opt.main_grad(p) for p in model.parameters()], [g.float() for g in expected]
    )


def test_threads_of_two_devices_take_turns(monkeypatch):
    """A backward pass runs on a thread per device, and the window is one."""
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", oracle.ONE_BY_ONE)
    inside, most = [], []

    def take(indices):
        inside.append(indices)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()
        for i in indices:
            parameters[i].grad = None

    parameters = [oracle.scalar() for _ in range(2)]
    with GradCollector("op", parameters, take).watching(range(2)):
        threads = [Thread(target=(p * 1).backward) for p in parameters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1, 1]
    assert [p.grad for p in parameters] == [None, None]
