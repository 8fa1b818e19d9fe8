"""Several optimizers, and copies of the weights."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    EXACT,
    INF,
    ByHand,
    adam,
    assert_close,
    assert_equal,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    one_call,
    outer_scaler,
    own_backward,
    parameters_of,
    train_by_hand,
    windows_of,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(12)


def make_scaler():
    return growing_scaler(init_scale=64.0)


def taken_by_hand(window, bad, on_nonfinite):
    """Parameters after stepping on the windows, or what is left of them, without `bad`."""
    kept = [number for number in range(len(BATCHES)) if number != bad]
    if bad is not None and on_nonfinite == "skip_window":
        kept = [number for number in kept if number // window != bad // window]
    model = make_model()
    by_hand = ByHand(model.parameters(), adam)
    for last in range(window - 1, len(BATCHES), window):
        some = [number for number in kept if number // window == last // window]
        for number in some:
            by_hand.add(loss_of(model, BATCHES[number]))
        if some:
            by_hand.step()
    return parameters_of(model)


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("bad", [None, 1, 5], ids=["finite", "inf-in-one", "inf-in-one-later"])
@pytest.mark.parametrize("protocol", ["own", "each", "each-unscaled"])
def test_several_optimizers_under_one_scaler(protocol, bad, on_nonfinite):
    """Two optimizers with windows of their own under one GradScaler, an inf in one alone"""
    models, windows, scaler = (make_model(), make_model()), (3, 2), make_scaler()
    opts = [
        AccumulatingOptimizer(
            adam(model.parameters()),
            window=window,
            scaler=scaler if protocol == "own" else None,
            on_nonfinite=on_nonfinite,
        )
        for model, window in zip(models, windows)
    ]
    for number, batch in enumerate(BATCHES):
        losses = [loss_of(model, batch) for model in models]
        if number == bad:
            losses[0] = losses[0] + models[0][0].weight[0, 0] * INF
        if protocol == "own":
            for opt, loss in zip(opts, losses):
                opt.backward(loss)
            for opt in opts:
                opt.step()
            continue
        for loss in losses:
            scaler.scale(loss).backward()
        for opt in opts:
            if protocol == "each-unscaled":
                scaler.unscale_(opt)
            scaler.step(opt)
        scaler.update()
        for opt in opts:
            opt.zero_grad()
    assert_close(parameters_of(models[0]), taken_by_hand(3, bad, on_nonfinite))
    assert_close(parameters_of(models[1]), taken_by_hand(2, None, on_nonfinite))


@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscale-first"])
def test_a_bare_optimizer_beside_a_wrapped_one(unscale):
    """A bare and a wrapped optimizer under one GradScaler that you call"""
    bare_model, model, scaler = make_model(), make_model(), make_scaler()
    bare = adam(bare_model.parameters())
    opt = AccumulatingOptimizer(adam(model.parameters()), window=3)
    for batch in BATCHES:
        scaler.scale(loss_of(bare_model, batch) + loss_of(model, batch)).backward()
        for some in (bare, opt):
            if unscale:
                scaler.unscale_(some)
            scaler.step(some)
        scaler.update()
        bare.zero_grad()
        opt.zero_grad()
    # Torch divides the bare optimizer's gradients by multiplying with a float32, a power of two.
    assert_close(parameters_of(bare_model), train_by_hand(adam, BATCHES, 1))
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES, 3))


@pytest.mark.parametrize("in_order", [True, False], ids=["step-first", "wrapper-first"])
def test_an_unscaled_optimizer_beside_a_wrapper_with_its_scaler(in_order):
    """`unscale_` of a bare optimizer under a wrapper's own scaler: kept, or refused in words"""
    bare_model, model, scaler = make_model(), make_model(), make_scaler()
    bare = adam(bare_model.parameters())
    opt = AccumulatingOptimizer(adam(model.parameters()), scaler=scaler)
    for batch in BATCHES[:3]:
        scaler.scale(loss_of(bare_model, batch)).backward()
        opt.backward(loss_of(model, batch))
        scaler.unscale_(bare)
        if not in_order:
            before = [p.clone() for p in parameters_of(model)]
            with pytest.raises(RuntimeError) as error:
                opt.step()
            assert str(error.value) == (
                "AccumulatingOptimizer.step: the scaler must have no optimizer that is unscaled "
                "and has not stepped, got one. Call scaler.step for that one first"
            )
            assert_equal(parameters_of(model), before)
        scaler.step(bare)
        opt.step()
        bare.zero_grad()
    for some in (bare_model, model):
        assert_close(parameters_of(some), train_by_hand(adam, BATCHES[:3], 1))


class Gan:
    """A generator and a discriminator, with the losses of Goodfellow et al. (2014)."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
            self.discriminator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def judge(self, batch, real):
        verdict = self.discriminator(batch)
        return nn.functional.binary_cross_entropy_with_logits(
            verdict, torch.full_like(verdict, float(real))
        )

    def discriminator_loss(self, batch):
        fake = self.generator(batch.flip(0)).detach()
        return self.judge(batch, True) + self.judge(fake, False)

    def generator_loss(self, batch):
        return self.judge(self.generator(batch.flip(0)), True)

    def sides(self):
        """Each network with its loss, in the order in which they play."""
        discriminator = self.discriminator, self.discriminator_loss
        return discriminator, (self.generator, self.generator_loss)


@pytest.mark.parametrize("freeze", [False, True], ids=["leaking", "frozen-meanwhile"])
@pytest.mark.parametrize("windows", [(1, 1), (3, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("protocol", ["none", "raw", "own", "each"])
def test_a_gan_with_two_wrappers(protocol, windows, freeze):
    """A GAN with a wrapper for each side: the other side's gradients count nowhere"""
    gan, plain, scaler = Gan(), Gan(), make_scaler()
    own = scaler if protocol == "own" else None
    # By autograd.grad, so that nothing leaks
    by_hand = [ByHand(network.parameters(), adam) for network, _ in plain.sides()]
    opts = [
        AccumulatingOptimizer(adam(network.parameters()), window=window, scaler=own)
        for (network, _), window in zip(gan.sides(), windows)
    ]

    def play(opt, loss):
        opt.zero_grad()
        if protocol in ("none", "own"):
            one_call(opt, loss)
        elif protocol == "raw":
            own_backward(opt, loss)
        else:
            outer_scaler(opt, loss, scaler)

    for number, batch in enumerate(BATCHES, 1):
        for side, (_, loss), window in zip(by_hand, plain.sides(), windows):
            side.add(loss(batch))
            if number % window == 0:
                side.step()
        for opt, (network, loss) in zip(opts, gan.sides()):
            gan.discriminator.requires_grad_(network is gan.discriminator or not freeze)
            play(opt, loss(batch))
    for (network, _), (expected, _) in zip(gan.sides(), plain.sides()):
        assert_close(parameters_of(network), parameters_of(expected))


@pytest.mark.parametrize("skip", [None, 4], ids=["finite", "inf"])
@pytest.mark.parametrize("average", ["mean", "ema"])
@pytest.mark.parametrize("window", [1, 3])
def test_averages_of_the_weights(window, average, skip):
    """`AveragedModel`, mean or EMA, updated once per step by `if opt.stepped`"""
    decay = 0.9
    function = get_ema_multi_avg_fn(decay) if average == "ema" else None
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=window)
    averaged = AveragedModel(model, multi_avg_fn=function)
    trace = []
    for number, batch in enumerate(BATCHES):
        opt.backward(loss_of(model, batch) * (INF if number == skip else 1.0))
        opt.step()
        if opt.stepped and not opt.last.skipped:
            averaged.update_parameters(model)
            trace.append([p.clone() for p in parameters_of(model)])

    taken = [some for some in windows_of(range(12), window) if skip not in some]
    batches = [BATCHES[number] for some in taken for number in some]
    assert len(trace) == len(taken)
    expected = None
    for count in range(1, len(taken) + 1):
        weights = train_by_hand(adam, batches[: count * window], window)
        share = 1.0 if expected is None else (1 - decay if average == "ema" else 1 / count)
        expected = weights if expected is None else expected
        expected = [e + share * (w - e) for e, w in zip(expected, weights)]
    assert averaged.n_averaged == len(taken)
    assert_close([p.detach() for p in averaged.module.parameters()], expected, EXACT)
