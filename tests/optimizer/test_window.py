"""An open window as a state dict or a pickle, with numbers that the host may not read."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.device import cpu_as_device
from support.optimizer_oracle import (
    adam,
    assert_equal,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    wrapped,
)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "device"])
def test_a_copy_goes_on_bit_for_bit_with_numbers_on_a_device(as_tensor, window):
    weights = [torch.tensor(w) if as_tensor else w for w in (2.0, 5.0, 1.0)]
    batches = make_batches(3, torch.float32)

    def build():
        model = make_model(torch.float32)
        options = {"window": window, "scaler": growing_scaler(), "max_norm": 0.1}
        return model, wrapped(model, adam, **options)

    with cpu_as_device():
        model, opt = build()
        opt.backward(loss_of(model, batches[0]), weights[0])
        twin = pickle.loads(pickle.dumps((model, opt)))
        other = build()
        other[1].load_accumulation_state_dict(opt.accumulation_state_dict())
        for net, optimizer in ((model, opt), twin, other):
            for batch, weight in zip(batches[1:window], weights[1:]):
                optimizer.backward(loss_of(net, batch), weight)
            optimizer.step()
            assert optimizer.stepped
    for net, _ in (twin, other):
        assert_equal(parameters_of(net), parameters_of(model))
