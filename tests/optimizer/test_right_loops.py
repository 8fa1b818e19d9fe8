"""Loops that are right, of which nothing is told."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import INF, loss_of, one_call
from support.watched_loops import (
    RATES,
    Outer,
    counted,
    entropy,
    inside_another,
    quotient,
    scheduled,
    train,
    unscaled_and_clipped,
    warnings_of,
)
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import accumext


class Accelerated(Outer):
    """An optimizer that hands the step on, as Accelerate's does."""


def inside_a_trainers(opt, model, x, number, scaler):
    module = SimpleNamespace(AcceleratedOptimizer=Accelerated)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "accelerate.optimizer", module)
        inside_another(opt, model, x, number, scaler, Accelerated)


def unrolled(model, other, batch):
    """Autograd adds the gradients of several uses in place."""
    (loss_of(model, batch) + loss_of(model, batch + 1) + loss_of(model, batch + 2)).backward()


def norm_is_logged(model, other, batch):
    """Torch multiplies by 1."""
    loss_of(model, batch).backward()
    clip_grad_norm_(model.parameters(), INF)


def zeros_are_left(model, other, batch):
    model.zero_grad(set_to_none=False)
    loss_of(model, batch).backward()


def another_loss_reaches_it(model, other, batch):
    """The generator's, after which the discriminator clears its gradients."""
    model(other(batch)).sum().backward()
    model.zero_grad()
    loss_of(model, batch).backward()


def several_losses(model, other, batch):
    """Some parameters are in one of them alone."""
    loss_of(model, batch).backward()
    model[0](batch).sum().backward()


def a_hook_doubles(model, other, batch):
    handle = model[0].weight.register_hook(lambda grad: 2 * grad)
    loss_of(model, batch).backward()
    handle.remove()


def in_ddp(model, other, batch):
    """It writes the gradients that it has reduced."""
    other.ddp = vars(other).get("ddp") or DistributedDataParallel(model)
    loss_of(other.ddp, batch).backward()


def of_ones_own(backward):
    """A micro-batch of several passes, or of changed gradients."""

    def body(opt, model, x, number, scaler):
        other = vars(opt).setdefault("_other", nn.Linear(3, 3).double())
        backward(model, other, x)
        opt.step()
        if backward is not zeros_are_left:
            opt.zero_grad()

    return body


def usual(loop):
    return lambda opt, model, x, number, scaler: oracle.run(opt, model, [x], loop, None, scaler)


def in_two_parts(opt, model, x, number, scaler):
    with opt.micro_batch():
        for part in (x[:2], x[2:]):
            opt.backward(loss_of(model, part) / 2)
    opt.step()


def of_a_summed_loss(model, x):
    return functional.mse_loss(model(x), -x[:, :2], reduction="sum") / 2


def every_other_micro_batch(opt, model, x, number, scaler):
    if number % 2:
        opt.backward(loss_of(model, x))
    opt.step()


def frozen(opt, model, x, number, scaler):
    model.requires_grad_(False)
    opt.step()


@torch.no_grad()
def swapped(opt, model, x, number, scaler):
    """Averaged weights are evaluated between two micro-batches, and weights clamped."""
    one_call(opt, loss_of_x(model, x))
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.5)
    for p, mine in zip(model.parameters(), before):
        p.copy_(mine).clamp_(-100.0, 100.0)


@torch.enable_grad()
def loss_of_x(model, x):
    return loss_of(model, x)


@torch.no_grad()
def clamped(opt, model, x, number, scaler):
    """As the critic's weights of a Wasserstein GAN."""
    one_call(opt, loss_of_x(model, x))
    for p in model.parameters():
        p.clamp_(-0.01, 0.01)


@torch.no_grad()
def trunk_of_another(opt, model, x, number, scaler):
    """Another loss and optimizer train a part of the model."""
    one_call(opt, loss_of_x(model, x))
    for p in model[0].parameters():
        p.add_(0.1)


def flushed(opt, model, x, number, scaler, every=3, at=2):
    """Epochs of 3 batches, the last of which, or the first, is alone in its window of two."""
    one_call(opt, loss_of(model, x))
    if number % every == at:
        opt.flush()


def a_penalty_of_its_own(opt, model, x, number, scaler, penalty):
    """A pass of the loop's own that is part of the micro-batch."""
    penalty(model, x).backward()
    opt.backward(loss_of(model, x))
    opt.step()


def two_losses_of_one_graph(opt, model, x, number, scaler):
    """Two micro-batches, as the documentation says."""
    out = model(x)
    opt.backward(out.square().mean(), retain_graph=True)
    opt.backward(out.abs().mean())
    opt.step()


def step_after_all_of_a_window(opt, model, x, number, scaler):
    opt.backward(loss_of(model, x))
    if number % opt.window == opt.window - 1:
        opt.step()


def sometimes_two(opt, model, x, number, scaler):
    for _ in range(1 + (number == 0)):
        opt.backward(loss_of(model, x))
    opt.step()


def by_turns(opt, model, x, number, scaler):
    """A GAN's two optimizers, and an evaluation in between."""
    generator = vars(opt).setdefault("_model", nn.Linear(3, 3).double())
    other = vars(opt).setdefault("_other", oracle.wrapped(generator, window=4))
    opt.backward(loss_of(model, generator(x).detach()))
    opt.step()
    with torch.no_grad():
        loss_of(model, x)
    other.backward(loss_of(model, generator(x)))
    other.step()


def weighted_sum(opt, model, x, number, scaler, rows, weight, more):
    """By something else than its rows."""
    loss = entropy(model, x[:rows], reduction="sum")
    opt.backward(loss, weight=weight + more * number)
    opt.step()


def mostly_one_row(opt, model, x, number, scaler):
    """Of one loss alone nothing is known."""
    rows = 1 + 2 * (number % 4 == 0)
    weighted_sum(opt, model, x, number, scaler, rows, float(rows), 0)


def one_row(opt, model, x, number, scaler):
    """Without a dimension of rows, and of as many classes as it counts."""
    loss = functional.cross_entropy(model(x)[0], torch.tensor(0), reduction="sum")
    one_call(opt, loss, weight=2.0)


def without_synchronisation(opt, model, x, number, scaler):
    """Two passes of one micro-batch, which DDP leaves to the wrapper."""
    ddp = vars(opt).get("_ddp") or DistributedDataParallel(model)
    opt._ddp = ddp
    with opt.micro_batch(ddp):
        for part in (x[:2], x[2:]):
            opt.backward(loss_of(ddp, part) / 2)
    opt.step()


def checkpointed(opt, model, x, number, scaler):
    opt.backward(checkpoint(entropy, model, x, use_reentrant=False, reduction="sum"), weight=2.0)
    opt.step()


def token_by_token(opt, model, x, number, scaler):
    with opt.micro_batch():
        accumext.tbptt(
            lambda token, state: (model(token), state),
            x[:, None].expand(-1, 2, -1)[..., :2],
            torch.zeros(2, 1),
            inputs=x[:, None].expand(-1, 2, -1),
            criterion=functional.mse_loss,
            feedback="teacher",
            backward=opt.backward,
        )
    opt.step()


def resumed(opt, model, x, number, scaler):
    """A checkpoint of the open window is loaded into a new wrapper, which goes on."""
    now = vars(opt).get("_now", opt)
    one_call(now, loss_of(model, x))
    saved = now.accumulation_state_dict()
    opt._now = oracle.wrapped(model, window=opt.window)
    opt._now.load_state_dict(now.state_dict())
    opt._now.load_accumulation_state_dict(saved)
    now.discard()


def renormed(opt, model, x, number, scaler):
    """An embedding writes the rows that it looks up."""
    rows = vars(opt).setdefault("_rows", nn.Embedding(5, 3, max_norm=1.0, dtype=torch.float64))
    if number == 0:
        opt.add_param_group({"params": rows.weight})
    one_call(opt, loss_of(model, x * rows(torch.tensor(number % 5))))


def decayed(opt, model, x, number, scaler):
    one_call(opt, loss_of(model, x))
    if opt.stepped:
        opt.param_groups[0]["weight_decay"] += 0.1


def beside_a_scaler(opt, model, x, number, scaler, own):
    """Another model's optimizer has it, and steps after several windows of this one alone."""
    other = vars(opt).setdefault("_model", nn.Linear(3, 3).double())
    bare = vars(opt).setdefault("_bare", oracle.sgd(other.parameters()))
    scaler.scale(loss_of(other, x)).backward()
    if number % 9 == 8:
        scaler.step(bare)
        scaler.update()
    (oracle.own_backward if own else one_call)(opt, loss_of(model, x))


def products(opt, model, x, number, scaler, own, steps=True):
    """After a scaler has done its work, or has begun to."""
    if number == 0:
        other = vars(opt).setdefault("_model", nn.Linear(3, 3).double())
        if steps:
            oracle.outer_scaler(oracle.sgd(other.parameters()), loss_of(other, x), scaler)
        else:
            scaler.scale(loss_of(other, x)).backward()
    (oracle.own_backward if own else one_call)(opt, 0.5 * loss_of(model, x))


def beside_a_disabled_scaler(opt, model, x, number, scaler):
    """Which has no scale."""
    vars(opt).setdefault("_disabled", torch.amp.GradScaler("cpu", enabled=False))
    one_call(opt, 0.5 * loss_of(model, x))


def unscaled_by_hand(opt, model, x, number, scaler):
    """A scaler that only keeps a constant."""
    scaler.scale(loss_of(model, x)).backward()
    for p in model.parameters():
        p.grad /= scaler.get_scale()
    opt.step()
    opt.zero_grad()


def unscaled_and_stepped(opt, model, x, number, scaler):
    scaler.scale(loss_of(model, x)).backward()
    scaler.unscale_(opt)
    opt.step()
    opt.zero_grad()
    scaler.update()


OWN = [in_ddp, unrolled, norm_is_logged, zeros_are_left, another_loss_reaches_it, several_losses]
USUAL = [
    one_call,
    oracle.own_backward,
    oracle.accumulated,
    oracle.outer_scaler,
    oracle.outer_scaler_unscaled,
    oracle.in_parts,
]
RIGHT = {
    **{backward.__name__: of_ones_own(backward) for backward in (*OWN, a_hook_doubles)},
    **{loop.__name__: usual(loop) for loop in USUAL},
    "half of a sum": quotient(lambda model, x: model(x).square().sum() / 2),
    "half of a summed loss": quotient(of_a_summed_loss),
    "half of a mean": quotient(lambda model, x: loss_of(model, x) / 2),
    "half of a squared error": quotient(lambda m, x: functional.mse_loss(m(x), -x[:, :2]) / 2),
    "half of a cross-entropy": quotient(lambda model, x: entropy(model, x) / 2),
    "half": quotient(lambda model, x: 0.5 * loss_of(model, x)),
    "halves of a micro-batch": in_two_parts,
    "every other micro-batch": every_other_micro_batch,
    "frozen": frozen,
    **{
        use.__name__: use
        for use in (swapped, clamped, trunk_of_another, flushed, renormed, decayed)
    },
    "in a trainer's": inside_a_trainers,
    "a norm that is logged after a scaler": partial(unscaled_and_clipped, max_norm=INF),
    "NaN that an outer scaler knows of": lambda opt, model, x, number, scaler: oracle.outer_scaler(
        opt, loss_of(model, x) * (INF if number < 2 else 1.0), scaler
    ),
}


FOUR = {"window": 4}
WITH_OPTIONS = {  # what is right for the optimizer that it is made with
    **{
        f"{name} over a window of {size}": (quotient(partial(of, by=size)), {"window": size})
        for size in (3, 4)
        for name, of in {
            "a mean": lambda model, x, by: loss_of(model, x) / by,
            "a squared error": lambda model, x, by: functional.mse_loss(model(x), -x[:, :2]) / by,
            "a sum of losses": lambda model, x, by: (
                sum(entropy(model, x + i) for i in range(by)) / by
            ),
            "a summed loss": lambda model, x, by: entropy(model, x, reduction="sum") / by,
            "a share": lambda model, x, by: 1 / by * entropy(model, x),
            "another number": lambda model, x, by: entropy(model, x) / (by + 1),
            "a tensor": lambda model, x, by: entropy(model, x) / torch.tensor([by]),
        }.items()
    },
    **{
        use.__name__: (use, FOUR)
        for use in (two_losses_of_one_graph, step_after_all_of_a_window, sometimes_two, by_turns)
    },
    **{
        f"an own pass of {name}": (partial(a_penalty_of_its_own, penalty=penalty), FOUR)
        for name, penalty in {
            "another loss": lambda model, x: model(x).abs().mean(),
            "twice the loss": lambda model, x: 2 * loss_of(model, x),
            "zeros": lambda model, x: 0 * loss_of(model, x),
            "some parameters": lambda model, x: sum(p.sum() for p in [*model.parameters()][1:]),
        }.items()
    },
    **{use.__name__: (use, FOUR) for use in (in_two_parts, checkpointed, token_by_token, resumed)},
    **{
        f"{use.__name__}, {'own' if own else 'opt.backward'}": (partial(use, own=own), FOUR)
        for use in (beside_a_scaler, products)
        for own in (True, False)
    },
    "products, a scaler has begun": (partial(products, own=True, steps=False), FOUR),
    "beside_a_disabled_scaler": (beside_a_disabled_scaler, FOUR),
    "unscaled_by_hand": (unscaled_by_hand, FOUR),
    "unscaled_and_stepped": (unscaled_and_stepped, FOUR),
    "without_synchronisation": (without_synchronisation, FOUR),
    "with a scaler of the wrapper's": (
        usual(one_call),
        {**FOUR, "scaler": oracle.growing_scaler()},
    ),
    "one_row": (one_row, FOUR),
    "mostly_one_row": (mostly_one_row, FOUR),
    "one row that counts 2": (partial(weighted_sum, rows=1, weight=1.0, more=1), FOUR),
    "a flush after every two of four": (partial(flushed, every=2, at=1), FOUR),
    "a flush after the first of three": (partial(flushed, at=0), {}),
    "means of what their weights count": (partial(counted, ignored=1), FOUR),
    "sums of what their weights count": (
        partial(counted, reduction="sum"),
        {**FOUR, "reduction": "sum"},
    ),
    **{
        f"a sum of {rows} that counts {weight}, and {more} more each time": (
            partial(weighted_sum, rows=rows, weight=weight, more=more),
            FOUR,
        )
        for rows, weight, more in (
            *((5, weight, 0) for weight in (0.5, 1.0, 2.0, 6.0)),
            *((5, 6.0, 1), (5, 1.5, 1), (5, 0.0, 1), (1, 1.0, 0)),
        )
    },
    "halves of losses that are summed": (
        quotient(lambda model, x: loss_of(model, x) / 2),
        {"reduction": "sum"},
    ),
    **{
        f"a rate that is a {name} and changes between windows": (
            partial(scheduled, whenever=False),
            {"make": partial(torch.optim.Adam, lr=rate), "window": 4},
        )
        for name, rate in RATES.items()
    },
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_a_right_loop_is_told_nothing(body, window):
    assert warnings_of(lambda: train(body, window=window)) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("body", "options"), WITH_OPTIONS.values(), ids=WITH_OPTIONS)
def test_a_loop_that_is_right_with_its_options_is_told_nothing(body, options):
    assert warnings_of(lambda: train(body, **{"window": 2, **options})) == []
