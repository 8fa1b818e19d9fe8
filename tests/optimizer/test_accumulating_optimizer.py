"""The training loops of AccumulatingOptimizer give one result: the window's gradient by hand."""

import pytest
import torch
from support import optimizer_oracle as oracle

BATCHES = oracle.make_batches(12)
WEIGHTS = [3.0, 1.0, 7.0, 2.0, 2.0, 5.0, 1.0, 1.0, 4.0, 9.0, 0.0, 6.0]

WEIGHTED_LOOPS = [oracle.one_call, oracle.accumulated, oracle.in_parts]
LOOPS = [*WEIGHTED_LOOPS, oracle.own_backward, oracle.outer_scaler, oracle.outer_scaler_unscaled]


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise", "step"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_equals_oracle(loop, window, max_norm, on_nonfinite):
    model = oracle.make_model()
    options = {"window": window, "max_norm": max_norm, "on_nonfinite": on_nonfinite}
    opt = oracle.wrapped(model, oracle.adam, **options)
    weights = WEIGHTS if loop in WEIGHTED_LOOPS else None
    oracle.run(opt, model, BATCHES, loop, weights, oracle.growing_scaler())
    opt.flush()  # of five, the last window is partial: it is divided by what it holds
    expected = oracle.train_by_hand(
        oracle.adam, BATCHES, window, weights=weights, max_norm=max_norm
    )
    oracle.assert_close(oracle.parameters_of(model), expected)


def test_it_prints_its_settings_its_scaler_and_how_full_the_window_is():
    model, scaler = oracle.make_model(), torch.amp.GradScaler("cpu")
    opt = oracle.wrapped(model, window=4, scaler=scaler, accumulate_in_backward=True)
    for _ in range(2):
        opt.backward(oracle.loss_of(model, BATCHES[0]))
    settings = "window=4, max_norm=None, norm_type=2.0, scaler=GradScaler(), "
    settings += "on_nonfinite='skip_window', reduction='mean', accumulate_in_backward=True"
    expected = f"AccumulatingOptimizer({opt.optimizer!r}, {settings}, 2/4 micro-batches)"
    assert repr(opt) == expected
    opt.discard()
    bare = repr(oracle.wrapped(model, oracle.sgd))
    assert "scaler=None" in bare
    assert bare.endswith("reduction='mean', 0/1 micro-batches)")
    assert opt.stats() == {}
