"""An open window as a state dict or a pickle: what is refused, and what neither may hold."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.device import cpu_as_device
from support.optimizer_oracle import (
    NAN,
    OP,
    adam,
    loss_of,
    make_batches,
    make_model,
    says,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


def changed(**entries):
    return lambda saved: {**saved, **entries}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda saved: None, TypeError, "state_dict must be a dict, got NoneType"),
        (lambda saved: {}, ValueError, "state_dict must have the keys"),
        (changed(more=1), ValueError, "state_dict must have the keys"),
        (changed(micro_batches=-1), ValueError, "state_dict['micro_batches'] must be an int"),
        (changed(micro_batches=1.0), ValueError, "state_dict['micro_batches'] must be an int"),
        (changed(held_back=1), TypeError, "state_dict['held_back'] must be a bool, got int"),
        (changed(weight=None), TypeError, "state_dict['weight'] must be a number"),
        (changed(weight=NAN), ValueError, "state_dict['weight'] must be finite"),
        (changed(unit_scale="1"), TypeError, "state_dict['unit_scale'] must be a number"),
        (changed(loss_scale=torch.ones(2)), ValueError, "state_dict['loss_scale'] must be a"),
        (changed(norm=1.0), TypeError, "state_dict['norm'] must be a 0-dim tensor or None"),
        (changed(main_grads=[]), TypeError, "state_dict['main_grads'] must be a dict, got list"),
        (
            changed(main_grads={4: torch.zeros(2)}),
            ValueError,
            "state_dict['main_grads'][4] must be one of the 4 parameters, got index 4",
        ),
        (
            changed(main_grads={0: torch.zeros(2, dtype=torch.float64)}),
            ValueError,
            "state_dict['main_grads'][0] must have shape [4, 3], got [2]",
        ),
        (
            changed(main_grads={0: torch.zeros(4, 3, dtype=torch.int64)}),
            TypeError,
            "state_dict['main_grads'][0] must be a torch.float64 tensor, got an int64 tensor",
        ),
        (
            changed(main_grads={0: 1.0}),
            TypeError,
            "state_dict['main_grads'][0] must be a tensor, got float",
        ),
    ],
)
def test_load_accumulation_state_dict(halfway, change, error, text):
    opt = halfway[1]
    with pytest.raises(error, match=says(f"{OP}.load_accumulation_state_dict: {text}")):
        opt.load_accumulation_state_dict(change(opt.accumulation_state_dict()))


def test_a_pickle_holds_no_key_of_this_process():
    """A key names the tensor of a loss scale by its address, which another may have elsewhere."""
    model = make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    fused = adam(model.parameters(), fused=True)
    opt = AccumulatingOptimizer(fused, window=2, scaler=scaler)
    with cpu_as_device():
        opt.backward(loss_of(model, make_batches(1, torch.float32)[0]))
        assert opt._accumulator.window.unit_scale.key is not None
        twin = pickle.loads(pickle.dumps(opt))
    assert twin._accumulator.window.unit_scale.key is None
    assert twin._accumulator.window.unit_scale.value == 64.0
