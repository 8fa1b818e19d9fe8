"""Masters where others write parameters: in checkpoints, in copies, in the middle of a run."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from support.masters import BATCHES, adamw, values, with_masters
from support.optimizer_oracle import assert_equal, loss_of, make_model, sgd


@pytest.mark.parametrize("stochastic", [False, True])
def test_masters_follow_parameters_that_others_write(stochastic):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, lambda p: sgd(p, lr=0.0), stochastic=stochastic)

    def step():
        opt.backward(loss_of(model, BATCHES[0].bfloat16()))
        opt.step()

    with torch.no_grad():
        for master in masters:
            master.add_(1e-4)  # what a training run has gathered below half a unit
    gathered = values(masters)
    step()
    rounded = values(model.parameters())
    model.load_state_dict(model.state_dict())  # writes what is there
    step()
    assert_equal(values(masters), gathered)
    if not stochastic:
        assert_equal(values(model.parameters()), rounded)
    with torch.no_grad():
        model[0].weight[0] = 5.0
    step()
    gathered[0][0] = 5.0
    assert_equal(values(masters), gathered)
    assert torch.equal(model[0].weight[0].detach(), torch.full((3,), 5.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_run_resumes_bit_for_bit(order, stochastic):
    def run(model, opt, batches):
        for batch in batches:
            opt.backward(loss_of(model, batch.bfloat16()))
            opt.step()

    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, stochastic=stochastic)
    run(model, opt, BATCHES[:6])
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    run(model, opt, BATCHES[6:])

    again = make_model(torch.bfloat16)
    with torch.no_grad():
        again[0].weight.mul_(2)
    resumed, restored = with_masters(again, stochastic=stochastic)
    loads = [lambda: again.load_state_dict(saved["model"])]
    loads.insert(order == "model first", lambda: resumed.load_state_dict(saved["opt"]))
    for load in loads:
        load()
    run(again, resumed, BATCHES[6:])
    assert_equal(values(restored), values(masters))
    assert_equal(values(again.parameters()), values(model.parameters()))


def test_checkpoints_move_between_runs_with_and_without_masters():
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    assert set(saved["masters"]["parameters"]) == set(range(len(masters)))
    bare = adamw(make_model(torch.bfloat16).parameters())
    bare.load_state_dict(saved)
    assert_equal(
        [state["exp_avg"].float() for state in bare.state.values()],
        [state["exp_avg"].bfloat16().float() for state in opt.state.values()],
    )
    other = make_model(torch.bfloat16)
    with torch.no_grad():
        other[0].weight.fill_(0.5)
    loaded, theirs = with_masters(other)
    loaded.load_state_dict(bare.state_dict())
    assert_equal(values(theirs), [p.detach().float() for p in other.parameters()])
    assert loaded.state[theirs[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["parameters"].pop(0), "be of the parameters [0, 1, 2, 3], got [1, 2, 3]"),
        (lambda m: m.pop("roundings"), "be what the state_dict of an optimizer with masters has"),
        (lambda m: m["parameters"].update({1: torch.zeros(9)}), "have shape [4], got [9]"),
        (lambda m: m.update(roundings="many"), "be an int, got str"),
        (lambda m: m.update(parameters=[]), "be a dict, got list"),
    ],
)
def test_a_checkpoint_of_other_masters_is_refused_before_anything_changes(change, text):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    opt.step()
    before = values([*masters, *model.parameters()])
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    change(saved["masters"])
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.01
    assert_equal(values([*masters, *model.parameters()]), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_model_and_optimizer_trains_by_itself(copied):
    model = make_model(torch.bfloat16)
    opt, masters = with_masters(model, window=2)
    opt.backward(loss_of(model, BATCHES[0].bfloat16()))
    other, its = copied((model, opt))
    for net, optimizer in ((model, opt), (other, its)):
        optimizer.backward(loss_of(net, BATCHES[1].bfloat16()))
        optimizer.step()
    assert its.stepped
    assert its.param_groups[0]["params"][0] is not masters[0]
    assert_equal(values(other.parameters()), values(model.parameters()))
    assert_equal(values(its.param_groups[0]["params"]), values(masters))
    other_before = values(other.parameters())
    opt.backward(loss_of(model, BATCHES[2].bfloat16()))
    opt.flush()
    assert_equal(values(other.parameters()), other_before)


def test_a_window_with_masters_is_saved_and_loaded():
    def train(resume):
        model = make_model(torch.bfloat16)
        opt, masters = with_masters(model, window=3)
        for i, batch in enumerate(BATCHES[:3]):
            if i == 2 and resume:
                saved = copy.deepcopy(opt.accumulation_state_dict())
                opt.discard()
                opt.load_accumulation_state_dict(saved)
            opt.backward(loss_of(model, batch.bfloat16()))
            opt.step()
        return values(masters)

    assert_equal(train(True), train(False))
