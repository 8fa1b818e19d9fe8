"""Masters where others write parameters: in checkpoints, in copies, in the middle of a run."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from support.masters import BATCHES, adamw, train, values, with_masters
from support.optimizer_oracle import assert_equal, loss_of, make_model, sgd, train_by_hand


@pytest.mark.parametrize("stochastic", [False, True])
def test_masters_follow_parameters_that_others_write(stochastic):
    model, opt, masters = with_masters(partial(sgd, lr=0.0), stochastic=stochastic)
    with torch.no_grad():
        for master in masters:
            master.add_(1e-4)  # what a training run has gathered below half a unit
    gathered = values(masters)
    train(opt, model)
    rounded = values(model.parameters())
    model.load_state_dict(model.state_dict())  # writes what is there
    train(opt, model)
    assert_equal(values(masters), gathered)
    if not stochastic:
        assert_equal(values(model.parameters()), rounded)
    with torch.no_grad():
        model[0].weight[0] = 5.0
    train(opt, model)
    gathered[0][0] = 5.0
    assert_equal(values(masters), gathered)
    assert torch.equal(model[0].weight[0].detach(), torch.full((3,), 5.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_run_resumes_bit_for_bit(order, stochastic):
    model, opt, masters = with_masters(stochastic=stochastic)
    train(opt, model, BATCHES[:6])
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    train(opt, model, BATCHES[6:])

    again, resumed, restored = with_masters(stochastic=stochastic)
    with torch.no_grad():
        again[0].weight.mul_(2)
    loads = [lambda: again.load_state_dict(saved["model"])]
    loads.insert(order == "model first", lambda: resumed.load_state_dict(saved["opt"]))
    for load in loads:
        load()
    train(resumed, again, BATCHES[6:])
    assert_equal(values(restored), values(masters))
    assert_equal(values(again.parameters()), values(model.parameters()))


def test_checkpoints_move_between_runs_with_and_without_masters():
    model, opt, masters = with_masters()
    train(opt, model)
    saved = copy.deepcopy(opt.state_dict())
    assert set(saved["masters"]["parameters"]) == set(range(len(masters)))
    bare = adamw(make_model(torch.bfloat16).parameters())
    bare.load_state_dict(saved)
    assert_equal(
        [state["exp_avg"] for state in bare.state.values()],
        [state["exp_avg"].bfloat16() for state in opt.state.values()],
    )
    other, loaded, theirs = with_masters()
    with torch.no_grad():
        other[0].weight.fill_(0.5)
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
    model, opt, masters = with_masters()
    train(opt, model)
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
    model, opt, masters = with_masters(window=2)
    opt.backward(loss_of(model, BATCHES[0]))
    other, its = copied((model, opt))
    for net, optimizer in ((model, opt), (other, its)):
        train(optimizer, net, BATCHES[1:2])
    assert its.stepped
    its_masters = its.param_groups[0]["params"]
    assert its_masters[0] is not masters[0]
    assert_equal(values(other.parameters()), values(model.parameters()))
    assert_equal(values(its_masters), values(masters))
    before = values(its_masters)
    train(opt, model, BATCHES[2:4])
    assert_equal(values(its_masters), before)


def test_a_window_with_masters_is_saved_and_loaded():
    model, opt, masters = with_masters(window=4)
    train(opt, model, BATCHES[:2])
    saved = copy.deepcopy(opt.accumulation_state_dict())
    opt.discard()
    opt.load_accumulation_state_dict(saved)
    train(opt, model, BATCHES[2:4])
    assert opt.stepped
    expected = train_by_hand(adamw, BATCHES[:4], 4, dtype=torch.bfloat16, wide=torch.float32)
    assert_equal(values(masters), expected)
