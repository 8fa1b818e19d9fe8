"""Hooks."""

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import adam, assert_close, loss_of, make_model, parameters_of
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

BATCHES = oracle.make_batches(8)


@pytest.mark.parametrize("loop", [oracle.one_call, oracle.own_backward, oracle.outer_scaler])
@pytest.mark.parametrize("skipped", [False, True], ids=["all-taken", "first-skipped"])
def test_step_hooks_run_once_per_real_step(loop, skipped):
    """Step hooks, local and global, run once per real step, with the wrapped optimizer"""
    model = make_model()
    opt = oracle.wrapped(model, adam, window=3)
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
        loop(opt, loss_of(model, batch) * (oracle.INF if skipped and i == 1 else 1.0), scaler)
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
    reference, model = make_model(), make_model()
    opt = oracle.wrapped(model, adam, window=window, max_norm=max_norm)
    seen = []

    def halve(optimizer, args, kwargs):
        seen.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad *= 0.5

    opt.register_step_pre_hook(halve)
    by_hand = oracle.ByHand(reference.parameters(), adam, max_norm=max_norm)
    by_hand.optimizer.register_step_pre_hook(halve)
    for some in oracle.windows_of(BATCHES[:6], window):
        for batch in some:
            oracle.one_call(opt, loss_of(model, batch))
            by_hand.add(loss_of(reference, batch))
        by_hand.step()
        assert_close(seen[-2], seen[-1])
    assert_close(parameters_of(model), parameters_of(reference))


def test_state_dict_hooks_are_the_wrapped_optimizers():
    """`state_dict` and `load_state_dict` hooks get the wrapped optimizer and may change a dict"""
    opt = oracle.wrapped(make_model(), adam)
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
@pytest.mark.parametrize("loop", [oracle.one_call, oracle.own_backward])
def test_hooks_on_a_parameter_run_once_per_micro_batch(loop, window, in_backward):
    """`Tensor.register_hook` on a parameter sees and changes each micro-batch's own gradient"""
    limit = 0.01
    reference, model = make_model(), make_model()
    opt = oracle.wrapped(model, adam, window=window, accumulate_in_backward=in_backward)
    by_hand = oracle.ByHand(reference.parameters(), adam)
    seen, expected = [], []
    for net, gradients in ((model, seen), (reference, expected)):

        def clamp(grad, gradients=gradients):
            gradients.append(grad.clone())
            return grad.clamp(-limit, limit)

        net[0].weight.register_hook(clamp)
    for some in oracle.windows_of(BATCHES, window):
        for batch in some:
            by_hand.add(loss_of(reference, batch))
            loop(opt, loss_of(model, batch))
        by_hand.step()
    opt.flush()
    assert_close(seen, expected)
    assert any((grad.abs() > limit).any() for grad in seen)
    assert_close(parameters_of(model), parameters_of(reference))


def test_the_profiler_shows_the_work():
    """The profiler shows `accumext::step` per window; in half precision `accumext::accumulate`"""
    model = make_model(torch.bfloat16)
    opt = oracle.wrapped(model, adam, window=3)
    with torch.profiler.profile() as profile:
        for batch in BATCHES[:6]:
            oracle.one_call(opt, loss_of(model, batch.bfloat16()))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["accumext::accumulate"] == 6
    assert counts["accumext::step"] == 2
    assert counts["Optimizer.step#Adam.step"] == 2
