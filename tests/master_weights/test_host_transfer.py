"""Masters in the host's memory, of parameters on a device: here the CPU plays both."""

import pytest
import torch
from support import optimizer_oracle as oracle
from support.masters import BATCHES, adamw, with_masters
from torch import nn

import accumext
from accumext.master_weights import SteppedTensors, _masters
from accumext.optimizer import _collecting
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


@pytest.fixture
def on_a_device(monkeypatch):
    """Every parameter counts as one of a device, and every gradient that is sent is counted."""
    sent, send = [], SteppedTensors.send

    def counting(target, grads):
        sent.extend(grad for grad in grads if grad is not None)
        return send(target, grads)

    monkeypatch.setattr(_masters, "_crossing", lambda parameters, masters: [True for _ in masters])
    monkeypatch.setattr(SteppedTensors, "send", counting)
    monkeypatch.setattr(_masters, "BUNDLE_BYTES", 30)  # two parameters or three
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", 1)
    return sent


@pytest.mark.parametrize("loop", [oracle.one_call, oracle.own_backward, oracle.in_parts])
@pytest.mark.parametrize(
    ("policy", "in_backward"),
    [("skip_window", False), ("skip_window", True), ("skip_micro_batch", False), ("raise", False)],
)
def test_masters_on_the_host(on_a_device, loop, policy, in_backward):
    options = {"accumulate_in_backward": in_backward, "on_nonfinite": policy}
    model, opt, masters = with_masters(window=2, max_norm=0.1, **options)
    oracle.run(opt, model, BATCHES[:4], loop)
    assert len(on_a_device) >= 4 * len(masters)
    assert all(p.grad is None for p in [*model.parameters(), *masters])
    options = {"max_norm": 0.1, "dtype": torch.bfloat16, "wide": torch.float32}
    by_hand = oracle.train_by_hand(adamw, BATCHES[:4], 2, **options)
    # The clip, and AdamW's quotient of a gradient and its size where both are small.
    for master, wide in zip(masters, by_hand, strict=True):
        torch.testing.assert_close(master.detach(), wide, rtol=1e-5, atol=1e-6)


def test_masters_on_the_host_are_rounded_stochastically_too(on_a_device):
    """The same steps: 0.1 lies between 0.09961 and 0.10010, a fifth of the way from the latter."""
    weight = nn.Parameter(torch.full((3, 1000), 0.125, dtype=torch.bfloat16))
    masters = accumext.masters([weight], stochastic_rounding=True)
    opt = AccumulatingOptimizer(oracle.sgd(masters, lr=0.025), masters=masters)
    opt.backward(weight.sum())
    opt.step()
    below, above = 0.099609375, 0.10009765625
    assert set(weight.detach().flatten().tolist()) == {below, above}
    share = (weight.detach() == above).float().mean().item()
    assert share == pytest.approx(0.8, abs=0.05)  # seven standard deviations of 3000 draws


def test_gradients_leave_for_the_host_while_backward_runs(on_a_device):
    """Three of four are on their way before the last one, the first layer's weight's, is there."""
    model, opt, _ = with_masters(window=2)
    model[0].weight.register_hook(lambda grad: seen.append(len(on_a_device)))
    seen = []
    opt.backward(oracle.loss_of(model, BATCHES[0]))
    assert seen == [3]
    assert all(p.grad is None for p in model.parameters())


def test_a_window_of_masters_on_the_host_is_dropped_with_its_backward_pass(on_a_device):
    model, opt, _ = with_masters(window=2)
    opt.backward(oracle.loss_of(model, BATCHES[0]))
    handle = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        opt.backward(oracle.loss_of(model, BATCHES[0]))
    handle.remove()
    assert "the open window was dropped" in oracle.said_by(caught.value)
    assert all(p.grad is None for p in model.parameters())
    assert opt.main_grad(model[0].weight) is None
