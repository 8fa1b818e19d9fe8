"""AccumulatingOptimizer as an optimizer: what schedulers, hooks and checkpoints rely on."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from optimizer_oracle import (
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from accumext.optimizer import AccumulatingOptimizer

BATCHES = make_batches(12)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def wrapped(model, **kwargs):
    return AccumulatingOptimizer(adam(model.parameters()), **{"window": 3, **kwargs})


def run(opt, model, batches):
    for batch in batches:
        opt.backward(loss_of(model, batch))
        opt.step()


def parameters_of(model):
    return [p.detach() for p in model.parameters()]


def test_it_is_an_optimizer_and_owns_nothing_of_one():
    model = make_model()
    opt = wrapped(model)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is opt.optimizer.param_groups
    assert opt.state is opt.optimizer.state
    assert opt.defaults is opt.optimizer.defaults
    opt.load_state_dict(state_dict=opt.state_dict())
    assert opt.param_groups is opt.optimizer.param_groups
    extra = nn.Parameter(torch.zeros(1))
    opt.add_param_group({"params": [extra], "lr": 0.5})
    assert opt.optimizer.param_groups[1]["lr"] == 0.5
    assert "window=3" in repr(opt)
    assert "Adam" in repr(opt)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    ],
    ids=["step", "lambda", "one-cycle", "cosine", "cyclic"],
)
@pytest.mark.parametrize("reload", [False, True], ids=["fresh", "after-load-state-dict"])
def test_schedulers_reach_the_wrapped_optimizer(make, reload):
    """Warnings are errors, so the scheduler must also see that the optimizer stepped first."""
    reference, model = make_model(), make_model()
    bare, opt = adam(reference.parameters()), wrapped(model, window=2)
    schedules = make(bare), make(opt)
    if reload:
        opt.load_state_dict(opt.state_dict())
        bare.load_state_dict(bare.state_dict())
    for start in range(0, 8, 2):
        sum(loss_of(reference, b) for b in BATCHES[start : start + 2]).div(2).backward()
        bare.step()
        bare.zero_grad()
        schedules[0].step()
        run(opt, model, BATCHES[start : start + 2])
        assert opt.stepped
        schedules[1].step()
    assert opt.optimizer.param_groups[0]["lr"] == bare.param_groups[0]["lr"]
    assert_close(parameters_of(model), parameters_of(reference))


def test_hooks_run_once_per_real_step_with_the_wrapped_optimizer():
    model = make_model()
    opt = wrapped(model)
    opt._patch_step_function()  # what torch does to every optimizer it makes or unpickles
    calls = []
    opt.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", o)))
    opt.register_step_post_hook(lambda o, args, kwargs: calls.append(("post", o)))
    everywhere = register_optimizer_step_post_hook(lambda o, a, k: calls.append(("global", o)))
    run(opt, model, BATCHES[:7])
    everywhere.remove()
    assert [name for name, _ in calls] == ["pre", "post", "global"] * 2
    assert all(o is opt.optimizer for _, o in calls)


def test_state_dict_hooks_are_the_wrapped_optimizers():
    opt = wrapped(make_model())
    seen = []
    opt.register_state_dict_post_hook(lambda o, state: seen.append(o))
    opt.register_load_state_dict_post_hook(lambda o: seen.append(o))
    opt.load_state_dict(opt.state_dict())
    assert seen == [opt.optimizer, opt.optimizer]


def test_checkpoints_move_both_ways():
    first, second, third = make_model(), make_model(), make_model()
    opt = wrapped(first, window=1)
    run(opt, first, BATCHES[:3])
    for model, other in ((second, adam(second.parameters())), (third, wrapped(third, window=1))):
        model.load_state_dict(first.state_dict())
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    bare = adam(second.parameters())
    bare.load_state_dict(copy.deepcopy(opt.state_dict()))
    back = wrapped(third, window=1)
    back.load_state_dict(copy.deepcopy(bare.state_dict()))
    run(opt, first, BATCHES[3:6])
    run(back, third, BATCHES[3:6])
    for batch in BATCHES[3:6]:
        bare.zero_grad()
        loss_of(second, batch).backward()
        bare.step()
    assert_equal(parameters_of(second), parameters_of(first))
    assert_equal(parameters_of(third), parameters_of(first))


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
def test_copies_go_on_from_the_middle_of_a_window(clone, on_nonfinite):
    model = make_model()
    opt = wrapped(model, on_nonfinite=on_nonfinite, max_norm=0.1)
    lr_scheduler.LambdaLR(opt, lambda step: 1.0)  # patches opt.step, which must not travel
    run(opt, model, BATCHES[:5])
    twin_model, twin = clone((model, opt))
    assert "step" not in vars(twin)
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    run(opt, model, BATCHES[5:9])
    expected = parameters_of(model)
    run(twin, twin_model, BATCHES[5:9])
    assert_equal(parameters_of(twin_model), expected)
    assert_close(expected, train_by_hand(adam, BATCHES[:9], 3, max_norm=0.1))


@pytest.mark.parametrize("middle", [0, 1, 2])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_resume_in_the_middle_of_a_window_bit_for_bit(dtype, scaled, on_nonfinite, middle):
    batches = make_batches(9, dtype)
    weights = [1.0, 1.0, 3.0]

    def build():
        model = make_model(dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
        options = {"max_norm": 0.05, "scaler": scaler, "on_nonfinite": on_nonfinite}
        return model, wrapped(model, **options), scaler

    def go(model, opt, start, stop):
        for i in range(start, stop):
            opt.backward(loss_of(model, batches[i]), weights[i % 3])
            opt.step()

    model, opt, scaler = build()
    go(model, opt, 0, 3 + middle)
    buffer = io.BytesIO()
    saved = {
        "model": model.state_dict(),
        "opt": opt.state_dict(),
        "open": opt.accumulation_state_dict(),
        "scaler": scaler.state_dict() if scaled else None,
    }
    torch.save(saved, buffer)
    go(model, opt, 3 + middle, 9)

    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    other, resumed, other_scaler = build()
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["opt"])
    if scaled:
        other_scaler.load_state_dict(loaded["scaler"])
    resumed.load_accumulation_state_dict(loaded["open"])
    go(other, resumed, 3 + middle, 9)
    assert_equal(parameters_of(other), parameters_of(model))
    assert resumed.stats() == opt.stats()


def test_a_resumed_window_is_added_to_in_place_too():
    """The same route as without the break, hence the same memory and the same order of sums."""
    parameter = nn.Parameter(torch.zeros(2))

    def build():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return AccumulatingOptimizer(torch.optim.SGD([parameter]), window=3, scaler=scaler)

    opt, resumed = build(), build()
    opt.backward(parameter.sum())
    resumed.load_accumulation_state_dict(opt.accumulation_state_dict())
    address = resumed._progress.window.main[parameter].data_ptr()
    seen = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    resumed.backward(parameter.sum())
    assert seen == [address]


def test_a_saved_window_is_a_copy():
    model = make_model()
    opt = wrapped(model)
    run(opt, model, BATCHES[:1])
    saved = opt.accumulation_state_dict()
    before = copy.deepcopy(saved["main_grads"])
    run(opt, model, BATCHES[1:2])
    opt.load_accumulation_state_dict(saved)
    run(opt, model, BATCHES[1:3])
    assert_equal(list(saved["main_grads"].values()), list(before.values()))
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES[:3], 3))


@pytest.mark.parametrize("position", [0, 1], ids=["fresh", "mid-window"])
def test_distributed_checkpoint_primes_without_a_trace(position):
    model = make_model()
    opt = wrapped(model)
    for batch in BATCHES[:position]:
        opt.backward(loss_of(model, batch))
    state = get_optimizer_state_dict(model, opt)
    assert opt.optimizer.state  # the priming step reached the wrapped optimizer
    assert not opt.stepped
    assert opt.last is None
    set_optimizer_state_dict(model, opt, state)
    run(opt, model, BATCHES[position:3])
    assert opt.stepped
    assert opt.last.micro_batches == 3


def test_a_warmup_from_zero_is_no_priming():
    model = make_model()
    opt = AccumulatingOptimizer(torch.optim.Adam(model.parameters(), lr=0.0), window=2)
    run(opt, model, BATCHES[:2])
    assert opt.stepped
    loss_of(model, BATCHES[0]).backward()
    opt.step()
    assert opt._progress.window.micro_batches == 1


def test_the_closure_runs_once_per_step():
    model = make_model()
    opt = wrapped(model)
    calls = []
    for batch in BATCHES[:6]:

        def closure(batch=batch):
            opt.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            calls.append(loss.item())
            return loss

        with torch.no_grad():
            assert opt.step(closure).item() == calls[-1]
    assert len(calls) == 6
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES[:6], 3))


def test_lbfgs_is_handed_its_closure():
    def train(make):
        model = make_model()
        opt = make(torch.optim.LBFGS(model.parameters(), max_iter=5))

        def closure():
            opt.zero_grad()
            loss = loss_of(model, BATCHES[0])
            loss.backward()
            return loss

        losses = [opt.step(closure).item() for _ in range(3)]
        return parameters_of(model), losses, opt

    expected, losses, _ = train(lambda optimizer: optimizer)
    actual, own_losses, opt = train(AccumulatingOptimizer)
    assert_equal(actual, expected)
    assert own_losses == losses
    assert opt.stepped
    assert opt.stats()["skipped"] == 0.0


def test_two_optimizers_under_one_outer_scaler():
    one, two = make_model(), make_model()
    opts = wrapped(one), wrapped(two, window=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for batch in BATCHES:
        scaler.scale(loss_of(one, batch) + loss_of(two, batch)).backward()
        for opt in opts:
            scaler.step(opt)
        scaler.update()
        for opt in opts:
            opt.zero_grad()
    assert_close(parameters_of(one), train_by_hand(adam, BATCHES, 3))
    assert_close(parameters_of(two), train_by_hand(adam, BATCHES, 2))


def test_two_optimizers_share_a_scaler_of_their_own():
    one, two = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    opts = wrapped(one, scaler=scaler), wrapped(two, window=2, scaler=scaler)
    for batch in BATCHES:
        for opt, model in zip(opts, (one, two)):
            opt.backward(loss_of(model, batch))
        for opt in opts:
            opt.step()
    assert_close(parameters_of(one), train_by_hand(adam, BATCHES, 3))
    assert_close(parameters_of(two), train_by_hand(adam, BATCHES, 2))


def test_a_disabled_scaler_is_no_scaler():
    model = make_model()
    run(wrapped(model, scaler=torch.amp.GradScaler("cpu", enabled=False)), model, BATCHES[:3])
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES[:3], 3))


def test_a_cloned_class_shares_the_window():
    """Lightning makes a subclass at run time and copies `__dict__`; both must see one window."""
    model = make_model()
    opt = wrapped(model)
    clone = type("Clone", (AccumulatingOptimizer,), {}).__new__(AccumulatingOptimizer)
    clone.__dict__.update(opt.__dict__)
    clone.backward(loss_of(model, BATCHES[0]))
    opt.backward(loss_of(model, BATCHES[1]))
    clone.step()
    assert not opt.stepped
    opt.backward(loss_of(model, BATCHES[2]))
    clone.step()
    assert opt.stepped
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES[:3], 3))


def test_other_attributes_are_the_wrapped_optimizers():
    class ScheduleFree(torch.optim.SGD):
        def train(self):
            return "training"

    model = make_model()
    assert AccumulatingOptimizer(ScheduleFree(model.parameters(), lr=0.1)).train() == "training"
    assert not hasattr(wrapped(model), "train")


def test_the_profiler_shows_the_work():
    model = make_model()
    opt = wrapped(model)
    with torch.profiler.profile() as profile:
        run(opt, model, BATCHES[:3])
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["accumext::accumulate"] == 3
    assert counts["accumext::step"] == 1
