"""Hooks."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    adam,
    assert_close,
    loss_of,
    make_batches,
    make_model,
    one_call,
    outer_scaler,
    own_backward,
    parameters_of,
    window_gradient,
    windows_of,
)
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(8)


def wrapped(model, **kwargs):
    return AccumulatingOptimizer(adam(model.parameters()), **{"window": 3, **kwargs})


@pytest.mark.parametrize("loop", [one_call, own_backward, outer_scaler])
@pytest.mark.parametrize("skipped", [False, True], ids=["all-taken", "first-skipped"])
def test_step_hooks_run_once_per_real_step(loop, skipped):
    """Step hooks, local and global, run once per real step, with the wrapped optimizer"""
    model = make_model()
    opt = wrapped(model)
    opt._patch_step_function()  # what torch does to every optimizer it makes or unpickles
    calls = []

    def noting(name):
        return lambda optimizer, args, kwargs: calls.append((name, optimizer))

    handles = [
        opt.register_step_pre_hook(noting("pre")),
        opt.register_step_post_hook(noting("post")),
        register_optimizer_step_pre_hook(noting("global-pre")),
        register_optimizer_step_post_hook(noting("global-post")),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i, batch in enumerate(BATCHES):
        loop(opt, loss_of(model, batch) * (INF if skipped and i == 1 else 1.0), scaler)
    opt.flush()
    for handle in handles:
        handle.remove()
    for batch in BATCHES[:3]:
        loop(opt, loss_of(model, batch), scaler)
    once = ["global-pre", "pre", "post", "global-post"]
    assert sorted(name for name, _ in calls[:4]) == sorted(once)
    assert [name for name, _ in calls] == [name for name, _ in calls[:4]] * (2 if skipped else 3)
    assert all(optimizer is opt.optimizer for _, optimizer in calls)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("window", [1, 3])
def test_a_pre_hook_sees_and_may_change_the_gradient(window, max_norm):
    """A step pre-hook sees the window's gradient in `.grad`, clipped, and may change it"""
    model = make_model()
    parameters = list(model.parameters())
    opt = wrapped(model, window=window, max_norm=max_norm)
    seen = []

    def halve(optimizer, args, kwargs):
        seen.append([p.grad.clone() for p in parameters])
        for parameter in parameters:
            parameter.grad *= 0.5

    opt.register_step_pre_hook(halve)
    reference = make_model()
    optimizer = adam(reference.parameters())
    for some in windows_of(BATCHES[:6], window):
        grads = window_gradient(reference, some, [1.0] * len(some))
        for parameter, grad in zip(reference.parameters(), grads):
            parameter.grad = grad
        if max_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        expected = [p.grad.clone() for p in reference.parameters()]
        for parameter in reference.parameters():
            parameter.grad *= 0.5
        optimizer.step()
        for batch in some:
            one_call(opt, loss_of(model, batch), None)
        assert_close(seen[-1], expected)
    assert_close(parameters_of(model), parameters_of(reference))


def test_state_dict_hooks_are_the_wrapped_optimizers():
    """`state_dict` and `load_state_dict` hooks get the wrapped optimizer and may change a dict"""
    opt = wrapped(make_model())
    seen = []

    def added(optimizer, state):
        seen.append(("saved", optimizer))
        return {**state, "note": 1}

    def removed(optimizer, state):
        seen.append(("to-load", optimizer))
        return {key: value for key, value in state.items() if key != "note"}

    opt.register_state_dict_pre_hook(lambda optimizer: seen.append(("to-save", optimizer)))
    opt.register_state_dict_post_hook(added)
    opt.register_load_state_dict_pre_hook(removed)
    opt.register_load_state_dict_post_hook(lambda optimizer: seen.append(("loaded", optimizer)))
    saved = opt.state_dict()
    assert saved["note"] == 1
    opt.load_state_dict(saved)
    assert [name for name, _ in seen] == ["to-save", "saved", "to-load", "loaded"]
    assert all(optimizer is opt.optimizer for _, optimizer in seen)


@pytest.mark.parametrize("in_backward", [False, True], ids=["afterwards", "in-backward"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("loop", [one_call, own_backward])
def test_hooks_on_a_parameter_run_once_per_micro_batch(loop, window, in_backward):
    """`Tensor.register_hook` on a parameter sees and changes each micro-batch's own gradient"""
    limit = 0.01
    model = make_model()
    opt = wrapped(model, window=window, accumulate_in_backward=in_backward)
    seen = []

    def clamp(grad):
        seen.append(grad.clone())
        return grad.clamp(-limit, limit)

    model[0].weight.register_hook(clamp)
    reference = make_model()
    optimizer = adam(reference.parameters())
    expected_seen = []
    for some in windows_of(BATCHES, window):
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for batch in some:
            grads = window_gradient(reference, [batch], [1.0])
            expected_seen.append(grads[0])
            grads[0] = grads[0].clamp(-limit, limit)
            total = [t + grad / len(some) for t, grad in zip(total, grads)]
        for parameter, grad in zip(reference.parameters(), total):
            parameter.grad = grad
        optimizer.step()
    for batch in BATCHES:
        loop(opt, loss_of(model, batch), None)
    opt.flush()
    assert_close(seen, expected_seen)
    assert any((grad.abs() > limit).any() for grad in seen)
    assert_close(parameters_of(model), parameters_of(reference))


def test_the_profiler_shows_the_work():
    """The profiler shows `accumext::step` per window; in half precision `accumext::accumulate`"""
    model = make_model(torch.bfloat16)
    opt = wrapped(model)
    with torch.profiler.profile() as profile:
        for batch in BATCHES[:6]:
            one_call(opt, loss_of(model, batch.bfloat16()), None)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["accumext::accumulate"] == 6
    assert counts["accumext::step"] == 2
    assert counts["Optimizer.step#Adam.step"] == 2
