"""Rules where the host may not look: no value is read, and skips are known only when asked."""

import pickle

import pytest
import torch
from support import optimizer_oracle as oracle
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import INF

BATCHES = oracle.make_batches(6, torch.float32)
# One multiplication by the clip coefficient more or less in float32, over two Adam steps of 0.05.
ROUNDING = 1e-6
FUSED = oracle.OPTIMIZERS["adamw-fused"]


def train(bad=(), *, make=FUSED, window=3, scaled=True, policy="skip_window", outer=False):
    model = oracle.make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    own = None if outer else scaler
    opt = oracle.wrapped(model, make, window=window, max_norm=0.1, scaler=own, on_nonfinite=policy)
    loop, weight = oracle.outer_scaler if outer else oracle.one_call, torch.tensor(3.0)
    with DeviceReads() as reads:
        for i, batch in enumerate(BATCHES):
            loss = oracle.loss_of(model, batch) * (INF if i in bad else 1.0)
            loop(opt, loss, scaler, weight)
    assert reads.made == 0
    return model, opt, reads.count


@cpu_as_device()
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("protocol", ["none", "own", "outer"])
def test_nothing_is_read_with_a_fused_optimizer(protocol, policy, window):
    outer = protocol == "outer" and window > 1
    _, opt, reads = train(window=window, scaled=protocol != "none", policy=policy, outer=outer)
    assert opt.stepped
    assert reads == 0


@cpu_as_device()
@pytest.mark.parametrize("window", [1, 3])
def test_one_value_is_read_per_window_with_any_other_optimizer(window):
    """The value tells whether to skip. Adam would read its step counts too; SGD reads nothing."""
    assert train(make=oracle.sgd, window=window, scaled=False)[2] == len(BATCHES) // window


@pytest.mark.parametrize("bad", [{0}, {4}, {3, 4, 5}], ids=str)
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_the_device_decides_as_the_host_would(policy, bad):
    with cpu_as_device():
        model, opt, reads = train(bad, policy=policy)
    assert reads == 0
    expected_model, expected, _ = train(bad, policy=policy)
    oracle.assert_close(oracle.parameters_of(model), oracle.parameters_of(expected_model), ROUNDING)
    assert opt.last.skipped == expected.last.skipped
    assert opt.last.micro_batches == expected.last.micro_batches
    assert opt.scaler.get_scale() == expected.scaler.get_scale()


@cpu_as_device()
@pytest.mark.parametrize("window", [1, 2])
def test_names_are_found_when_asked(window):
    model = oracle.make_model(torch.float32)
    opt = oracle.wrapped(model, FUSED, window=window, max_norm=0.1)

    def skip():
        for batch in BATCHES[:window]:
            opt.backward(oracle.loss_of(model, batch) + (model[2].bias * INF).sum())
        opt.step()

    skip()
    assert opt.last.nonfinite == [3]
    assert opt.last.nonfinite == [3]
    for clear in (opt.zero_grad, lambda: opt.backward(oracle.loss_of(model, BATCHES[0]))):
        skip()
        clear()
        assert opt.last.skipped
        assert opt.last.nonfinite == []  # too late: the gradients are gone
        opt.discard()


@cpu_as_device()
@pytest.mark.parametrize(
    "weights", [[0.5, 3.0, 0.25], [0.0, 0.5, 3.0], [2.0, 0.0, 0.0], [0.0] * 3], ids=str
)
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [None, 64.0])
def test_weights_of_a_window_on_the_device(scale, reduction, policy, weights):
    """The first one sets the unit, also where only the device knows whether it is zero."""
    model, batches = oracle.make_model(), oracle.make_batches(3)
    total = oracle.window_gradient(model, batches, weights, "sum")
    scaler = None if scale is None else oracle.growing_scaler(init_scale=scale)
    options = {"window": 3, "reduction": reduction, "scaler": scaler, "on_nonfinite": policy}
    opt = oracle.wrapped(model, oracle.sgd, **options)
    for batch, weight in zip(batches, weights):
        opt.backward(oracle.loss_of(model, batch), torch.tensor(weight))
    oracle.assert_close([opt.main_grad(p) for p in model.parameters()], total)
    opt.step()
    assert opt.stats()["weight"] == sum(weights)
    expected = oracle.train_by_hand(oracle.sgd, batches, 3, weights=weights, reduction=reduction)
    oracle.assert_close(oracle.parameters_of(model), expected)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "device"])
def test_a_copy_goes_on_bit_for_bit_with_numbers_on_a_device(as_tensor, window):
    weights = [torch.tensor(w) if as_tensor else w for w in (2.0, 5.0, 1.0)]
    batches = oracle.make_batches(3, torch.float32)

    def build():
        model = oracle.make_model(torch.float32)
        options = {"window": window, "scaler": oracle.growing_scaler(), "max_norm": 0.1}
        return model, oracle.wrapped(model, oracle.adam, **options)

    with cpu_as_device():
        model, opt = build()
        opt.backward(oracle.loss_of(model, batches[0]), weights[0])
        twin = pickle.loads(pickle.dumps((model, opt)))
        other = build()
        other[1].load_accumulation_state_dict(opt.accumulation_state_dict())
        for net, optimizer in ((model, opt), twin, other):
            for batch, weight in zip(batches[1:window], weights[1:]):
                optimizer.backward(oracle.loss_of(net, batch), weight)
            optimizer.step()
            assert optimizer.stepped
    for net, _ in (twin, other):
        oracle.assert_equal(oracle.parameters_of(net), oracle.parameters_of(model))
