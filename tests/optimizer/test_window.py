"""An open window as a state dict or a pickle: what is refused, and what neither may hold."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.device import cpu_as_device
from support.optimizer_oracle import (
    NAN,
    OP,
    adam,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    says,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WRONG = [
    (None, TypeError, "state_dict must be a dict, got NoneType"),
    ({}, ValueError, "state_dict must have the keys"),
    ({"more": 1}, ValueError, "state_dict must have the keys"),
    ({"micro_batches": -1}, ValueError, "state_dict['micro_batches'] must be an int"),
    ({"micro_batches": 1.0}, ValueError, "state_dict['micro_batches'] must be an int"),
    ({"held_back": 1}, TypeError, "state_dict['held_back'] must be a bool, got int"),
    ({"weight": None}, TypeError, "state_dict['weight'] must be a number"),
    ({"weight": NAN}, ValueError, "state_dict['weight'] must be finite"),
    ({"unit_scale": "1"}, TypeError, "state_dict['unit_scale'] must be a number"),
    ({"unit_weight": 0.0}, ValueError, "state_dict['unit_weight'] must be positive"),
    ({"loss_scale": torch.ones(2)}, ValueError, "state_dict['loss_scale'] must be a"),
    ({"norm": 1.0}, TypeError, "state_dict['norm'] must be a 0-dim tensor or None"),
    ({"main_grads": []}, TypeError, "state_dict['main_grads'] must be a dict, got list"),
]
WRONG += [
    ({"main_grads": {index: main}}, error, f"state_dict['main_grads'][{index}] must {text}")
    for index, main, error, text in [
        (4, torch.zeros(2), ValueError, "be one of the 4 parameters, got index 4"),
        (0, torch.zeros(2, dtype=torch.float64), ValueError, "have shape [4, 3], got [2]"),
        (
            0,
            torch.zeros(1, dtype=torch.int64),
            TypeError,
            "be a torch.float64 tensor, got an int64",
        ),
        (0, 1.0, TypeError, "be a tensor, got float"),
    ]
]


@pytest.mark.parametrize(("entries", "error", "text"), WRONG, ids=str)
def test_load_accumulation_state_dict(halfway, entries, error, text):
    opt = halfway[1]
    saved = {**opt.accumulation_state_dict(), **entries} if entries else entries
    with pytest.raises(error, match=says(f"{OP}.load_accumulation_state_dict: {text}")):
        opt.load_accumulation_state_dict(saved)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "device"])
def test_a_copy_goes_on_bit_for_bit_with_numbers_on_a_device(as_tensor, window):
    weights = [torch.tensor(w) if as_tensor else w for w in (2.0, 5.0, 1.0)]
    batches = make_batches(3, torch.float32)
    model = make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    opt = AccumulatingOptimizer(
        adam(model.parameters()), window=window, scaler=scaler, max_norm=0.1
    )
    with cpu_as_device():
        opt.backward(loss_of(model, batches[0]), weights[0])
        twin_model, twin = pickle.loads(pickle.dumps((model, opt)))
        other_model = copy.deepcopy(model)
        other = AccumulatingOptimizer(
            adam(other_model.parameters()),
            window=window,
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0),
            max_norm=0.1,
        )
        other.load_accumulation_state_dict(opt.accumulation_state_dict())
        for net, optimizer in ((model, opt), (twin_model, twin), (other_model, other)):
            for batch, weight in zip(batches[1:window], weights[1:]):
                optimizer.backward(loss_of(net, batch), weight)
            optimizer.step()
            assert optimizer.stepped
    for net in (twin_model, other_model):
        assert_equal(parameters_of(net), parameters_of(model))
