"""Gradients taken while autograd runs: in bundles, one layer in memory, no hook left behind."""

from __future__ import annotations

import copy
import time
from itertools import pairwise
from threading import Thread

import pytest
import torch
from support.optimizer_oracle import (
    ONE_BY_ONE,
    accumulating,
    assert_close,
    assert_equal,
    hooks_of,
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
from accumext.optimizer._backward_hooks import GradCollector

BATCHES = make_batches(7)
MIB = 2**20


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
    opt = accumulating(model)
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
        opt = accumulating(model, in_backward)

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
    opt = accumulating(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    with torch.profiler.profile() as profile:
        opt.backward(loss_of(model, BATCHES[1].bfloat16()))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["accumext::accumulate_"] == 1


def test_hooks_leave_with_the_backward_pass():
    model = make_model(torch.bfloat16)
    opt = accumulating(model)
    for batch in BATCHES[:2]:
        opt.backward(loss_of(model, batch.bfloat16()))
        assert not hooks_of(model)
    loss_of(model, BATCHES[2].bfloat16()).backward()
    assert all(p.grad is not None for p in model.parameters())
    opt.step()
    assert opt.stepped


def test_a_hook_of_the_users_comes_first_and_may_take_the_gradient():
    model = make_model(torch.bfloat16)
    opt = accumulating(model)
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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_may_not_write_a_gradient_after_it_was_taken_in(bucket_view, monkeypatch):
    monkeypatch.setattr(_backward_hooks, "BUNDLE_BYTES", ONE_BY_ONE)
    model = DistributedDataParallel(make_model(torch.bfloat16), gradient_as_bucket_view=bucket_view)
    opt = accumulating(model)
    batch = BATCHES[0].bfloat16()
    text = r"backward: \.grad must be complete when .* Use `with opt\.micro_batch\(model\):`"
    with pytest.raises(RuntimeError, match=text):
        opt.backward(loss_of(model, batch))
    assert all(p.grad is None and opt.main_grad(p) is None for p in model.parameters())
    with opt.micro_batch(model):
        opt.backward(loss_of(model, batch))
    expected = torch.autograd.grad(loss_of(model.module, batch), list(model.parameters()))
    assert_equal([opt.main_grad(p) for p in model.parameters()], [g.float() for g in expected])


def test_threads_of_two_devices_take_turns():
    """A backward pass runs on a thread per device, and the window is one."""
    inside, most = [], []

    def take(grads, foreign):
        inside.append(grads)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()

    intake = GradCollector("op", take)
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    threads = [Thread(target=intake._hand_over, args=([p],)) for p in parameters]
    for parameter, thread in zip(parameters, threads):
        parameter.grad = torch.ones(1)
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]
    assert [p.grad for p in parameters] == [None, None]
