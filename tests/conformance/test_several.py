"""Several optimizers, and copies of the weights."""

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import adam, assert_close, loss_of, make_model, parameters_of, wrapped
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCHES = oracle.make_batches(12)


def make_scaler():
    return oracle.growing_scaler(init_scale=64.0)


def taken_by_hand(window, bad, on_nonfinite):
    """Return the parameters after steps on the windows, or what is left of them, without `bad`."""
    model = make_model()
    by_hand = oracle.ByHand(model.parameters(), adam)
    for numbers in oracle.windows_of(range(len(BATCHES)), window):
        if bad in numbers and on_nonfinite == "skip_window":
            continue
        for number in numbers:
            if number != bad:
                by_hand.add(loss_of(model, BATCHES[number]))
        by_hand.step()
    return parameters_of(model)


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("bad", [None, 1, 5], ids=["finite", "inf-in-one", "inf-in-one-later"])
@pytest.mark.parametrize("protocol", ["own", "each", "each-unscaled"])
def test_several_optimizers_under_one_scaler(protocol, bad, on_nonfinite):
    """Two optimizers with windows of their own under one GradScaler, an inf in one alone"""
    models, windows, scaler = (make_model(), make_model()), (3, 2), make_scaler()
    options = {"scaler": scaler if protocol == "own" else None, "on_nonfinite": on_nonfinite}
    opts = [
        wrapped(model, adam, window=window, **options) for model, window in zip(models, windows)
    ]
    for number, batch in enumerate(BATCHES):
        losses = [loss_of(model, batch) for model in models]
        if number == bad:
            losses[0] = losses[0] + models[0][0].weight[0, 0] * oracle.INF
        for opt, loss in zip(opts, losses):
            opt.backward(loss) if protocol == "own" else scaler.scale(loss).backward()
        for opt in opts:
            if protocol == "each-unscaled":
                scaler.unscale_(opt)
            opt.step() if protocol == "own" else scaler.step(opt)
        if protocol != "own":
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
    opt = wrapped(model, adam, window=3)
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
    assert_close(parameters_of(bare_model), oracle.train_by_hand(adam, BATCHES, 1))
    assert_close(parameters_of(model), oracle.train_by_hand(adam, BATCHES, 3))


@pytest.mark.parametrize("in_order", [True, False], ids=["step-first", "wrapper-first"])
def test_an_unscaled_optimizer_beside_a_wrapper_with_its_scaler(in_order):
    """`unscale_` of a bare optimizer under a wrapper's own scaler: kept, or refused in words"""
    bare_model, model, scaler = make_model(), make_model(), make_scaler()
    bare = adam(bare_model.parameters())
    opt = wrapped(model, adam, scaler=scaler)
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
            oracle.assert_equal(parameters_of(model), before)
        scaler.step(bare)
        opt.step()
        bare.zero_grad()
    for some in (bare_model, model):
        assert_close(parameters_of(some), oracle.train_by_hand(adam, BATCHES[:3], 1))


def gan():
    """A discriminator and a generator, in the order in which they play, each with its loss
    (Goodfellow et al., 2014)."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        discriminator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def judged(batch, real):
        verdict = discriminator(batch)
        truth = torch.full_like(verdict, real)
        return nn.functional.binary_cross_entropy_with_logits(verdict, truth)

    def tells_apart(batch):
        return judged(batch, 1.0) + judged(generator(batch.flip(0)).detach(), 0.0)

    return (discriminator, tells_apart), (generator, lambda b: judged(generator(b.flip(0)), 1.0))


@pytest.mark.parametrize(
    ("windows", "freeze"), [((1, 1), False), ((3, 3), True), ((2, 3), False), ((2, 3), True)]
)
@pytest.mark.parametrize("protocol", ["none", "raw", "own", "each"])
def test_a_gan_with_two_wrappers(protocol, windows, freeze):
    """A GAN with a wrapper for each side: the other side's gradients count nowhere"""
    sides, plain, scaler = gan(), gan(), make_scaler()
    own = scaler if protocol == "own" else None
    loops = {"raw": oracle.own_backward, "each": oracle.outer_scaler}
    loop = loops.get(protocol, oracle.one_call)
    # By autograd.grad, so that nothing leaks
    by_hand = [oracle.ByHand(network.parameters(), adam) for network, _ in plain]
    opts = [
        wrapped(network, adam, window=window, scaler=own)
        for (network, _), window in zip(sides, windows)
    ]
    discriminator = sides[0][0]
    for number, batch in enumerate(BATCHES, 1):
        for side, (_, loss), window in zip(by_hand, plain, windows):
            side.add(loss(batch))
            if number % window == 0:
                side.step()
        for opt, (network, loss) in zip(opts, sides):
            discriminator.requires_grad_(network is discriminator or not freeze)
            if loop is not oracle.one_call:  # a pass of one's own leaves gradients, as in torch
                opt.zero_grad()
            loop(opt, loss(batch), scaler)
    for (network, _), (expected, _) in zip(sides, plain):
        assert_close(parameters_of(network), parameters_of(expected))


@pytest.mark.parametrize("skip", [None, 4], ids=["finite", "inf"])
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"])
@pytest.mark.parametrize("window", [1, 3])
def test_averages_of_the_weights(window, average, skip):
    """`AveragedModel`, mean or EMA, updated once per step by `if opt.stepped`"""
    reference, model = make_model(), make_model()
    averages = [AveragedModel(some, multi_avg_fn=average) for some in (reference, model)]
    by_hand, opt = oracle.ByHand(reference.parameters(), adam), wrapped(model, adam, window=window)
    for numbers in oracle.windows_of(range(12), window):
        for number in numbers:
            opt.backward(loss_of(model, BATCHES[number]) * (oracle.INF if number == skip else 1.0))
            opt.step()
            if opt.stepped and not opt.last.skipped:
                averages[1].update_parameters(model)
        if skip not in numbers:
            for number in numbers:
                by_hand.add(loss_of(reference, BATCHES[number]))
            by_hand.step()
            averages[0].update_parameters(reference)
    assert averages[0].n_averaged == averages[1].n_averaged
    assert_close(parameters_of(averages[1].module), parameters_of(averages[0].module))
