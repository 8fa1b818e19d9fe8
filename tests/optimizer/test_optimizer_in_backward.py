"""accumulate_in_backward: the same results from less memory, and no trace outside opt.backward."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from support.optimizer_oracle import (
    INF,
    assert_close,
    assert_equal,
    fail_in_backward,
    loss_of,
    make_batches,
    make_model,
)
from support.tensors import dtype_id
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import accumext
from accumext.demo.memory import peak_memory
from accumext.optimizer import _backward_hooks
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(7)
MIB = 2**20
ONE_BY_ONE = 1  # bytes in a bundle


@pytest.fixture(
    params=[ONE_BY_ONE, 40, _backward_hooks.BUNDLE_BYTES], ids=lambda n: f"bundles-of-{n}"
)
def bundles(request, monkeypatch):
    """Every gradient alone, a few together, and all of the model at the end of the pass."""
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", request.param)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrapped(model, in_backward=True, **kwargs):
    options = {"window": 3, "accumulate_in_backward": in_backward, **kwargs}
    return AccumulatingOptimizer(sgd(model.parameters()), **options)


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
        opt = wrapped(model, in_backward, window=window, scaler=scaler, max_norm=0.05)
        return step_through(opt, model, BATCHES, weights)

    both_ways(train)


@pytest.mark.usefixtures("bundles")
def test_parts_of_a_micro_batch(dtype):
    def train(in_backward):
        model = make_model(dtype)
        opt = wrapped(model, in_backward, max_norm=0.05)
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
        opt = wrapped(model, in_backward, max_norm=0.05)
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
        opt = wrapped(model, in_backward)
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
        opt = wrapped(model, in_backward)
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
        opt = wrapped(model, in_backward)
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


def test_a_parameter_whose_parts_come_one_by_one(monkeypatch):
    """Reentrant checkpoints run backward passes of their own; each hands over what it has."""
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", ONE_BY_ONE)
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
    assert_close([opt.main_grad(model.weight)], [expected], tolerance=2.0**-4)


def test_every_gradient_is_free_before_the_next_layers_is_made(monkeypatch):
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", ONE_BY_ONE)
    model = make_model(torch.bfloat16)
    opt = wrapped(model)
    for batch in BATCHES[:2]:
        freed = []
        hidden = model[0](batch.bfloat16())
        hidden.register_hook(lambda _, seen=freed: seen.append(model[2].weight.grad is None))
        opt.backward(model[2](model[1](hidden)).square().mean())
        assert freed == [True]


def layers(dtype):
    """Each of one bundle: 4 MiB of half gradients."""
    sizes = [1024, 2048] * 4 + [1024]
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=dtype) for a, b in pairwise(sizes)))


def scratch(dtype):
    """What torch's products of such layers take beside a gradient: some processors repack."""

    def of(inputs, outputs):
        layer = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        x = torch.ones(2, inputs, dtype=dtype, requires_grad=True)
        return peak_memory(lambda: layer(x).float().square().mean().backward()) - 4 * MIB

    return max(of(1024, 2048), of(2048, 1024))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_memory_peaks_at_the_main_gradients_and_one_layer(dtype):
    def peak(in_backward):
        model = layers(dtype)
        opt = wrapped(model, in_backward)

        def two_micro_batches():
            for _ in range(2):
                opt.backward(model(torch.ones(2, 1024, dtype=dtype)).float().square().mean())

        return peak_memory(two_micro_batches)

    main_grads, layer = 8 * 8 * MIB, 4 * MIB
    slack = MIB // 4 + scratch(dtype)  # activations
    if accumext.backend() == "reference":
        slack += 2 * 8 * MIB  # plain PyTorch makes a product and a sum of the layer in float32
    assert peak(in_backward=True) < main_grads + layer + slack
    assert peak(in_backward=False) > main_grads + 8 * layer


def test_small_gradients_share_a_call():
    """All of this model's wait until the end of the pass, and are taken in at once."""
    model = make_model(torch.bfloat16)
    opt = wrapped(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    with torch.profiler.profile() as profile:
        opt.backward(loss_of(model, BATCHES[1].bfloat16()))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["accumext::accumulate_"] == 1


def hooks_of(model):
    return [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {})]


def test_hooks_leave_with_the_backward_pass():
    model = make_model(torch.bfloat16)
    opt = wrapped(model)
    for batch in BATCHES[:2]:
        opt.backward(loss_of(model, batch.bfloat16()))
        assert not hooks_of(model)
    loss_of(model, BATCHES[2].bfloat16()).backward()
    assert all(p.grad is not None for p in model.parameters())
    opt.step()
    assert opt.stepped


def test_a_hook_of_the_users_comes_first_and_may_take_the_gradient():
    model = make_model(torch.bfloat16)
    opt = wrapped(model)
    taken = []

    def take(parameter):
        taken.append(parameter.grad)
        parameter.grad = None

    model[0].bias.register_post_accumulate_grad_hook(take)
    for batch in BATCHES[:2]:
        opt.backward(loss_of(model, batch.bfloat16()))
    assert len(taken) == 2
    assert opt.main_grad(model[0].bias) is None
    assert opt.main_grad(model[2].bias) is not None


@pytest.mark.usefixtures("bundles")
def test_parameters_may_be_added_and_unfrozen():
    def train(in_backward):
        model = make_model(torch.bfloat16)
        model[0].weight.requires_grad_(False)
        opt = wrapped(model, in_backward)
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
    opt = wrapped(model, max_norm=0.05)
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
    opt = wrapped(model)
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
    expected = step_through(wrapped(fresh), fresh, BATCHES[:3], [1.0] * 3)
    assert_equal(step_through(opt, model, BATCHES[:3], [1.0] * 3)[0], expected[0])


@pytest.mark.usefixtures("bundles")
def test_an_error_inside_a_micro_batch_drops_that_one_alone():
    model = make_model(torch.bfloat16)
    opt = wrapped(model)
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


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_may_not_write_a_gradient_after_it_was_taken_in(bucket_view, monkeypatch):
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", ONE_BY_ONE)
    model = DistributedDataParallel(make_model(torch.bfloat16), gradient_as_bucket_view=bucket_view)
    opt = wrapped(model)
    batch = BATCHES[0].bfloat16()
    text = r"backward: \.grad must be complete when .* Use `with opt\.micro_batch\(model\):`"
    with pytest.raises(RuntimeError, match=text):
        opt.backward(loss_of(model, batch))
    assert all(p.grad is None and opt.main_grad(p) is None for p in model.parameters())
    with opt.micro_batch(model):
        opt.backward(loss_of(model, batch))
    expected = torch.autograd.grad(loss_of(model.module, batch), list(model.parameters()))
    assert_equal([opt.main_grad(p) for p in model.parameters()], [g.float() for g in expected])
