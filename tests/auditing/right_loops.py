"""Right loops: those of torch's documentation, written anew, those that look like mistakes, and
loops of the wrapper. Beside them, both sides of examples/from_your_loop are right, too."""

import contextlib

import audited
import torch
from audited import N, adam, judged, network, of_rows, rows, scaler_of, sgd, stepping, train
from cases import right
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from accumext import AccumulatingOptimizer

# --- mixed precision ------------------------------------------------------------------------------


def with_amp(model, optimizer, scaler):
    def clip():
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)

    return {"scaler": scaler, "before": clip}


@right()
def amp_with_clipping(watch, model, optimizer):
    """As in the recipe; `unscale_`, then the clip."""

    def in_bfloat16(*of):
        with torch.autocast("cpu", torch.bfloat16):
            return of_rows(*of)

    options = with_amp(model, optimizer, scaler_of(growth_interval=2))
    return train(watch, model, optimizer, rows(6), in_bfloat16, n=1, **options)


@right()
def amp_with_an_overflow(watch, model, optimizer):
    """A first scale that is too large for a sum over rows: one step is skipped, and the scale
    halved."""

    def loss_of(model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum")

    scaler = scaler_of(init_scale=2.0**127)
    return train(watch, model, optimizer, rows(6), loss_of, n=1, scaler=scaler)


@right("accumulation.divided_by_more")
def amp_switched_off(watch):
    """A GradScaler with `enabled=False`, and a loss that weighs half."""
    model = network()
    optimizer = adam(model)
    options = with_amp(model, optimizer, scaler_of(enabled=False))
    return train(watch, model, optimizer, divisor=2 * N, **options)


# --- losses, graphs and windows -------------------------------------------------------------------


@right()
def windows_that_grow(watch, model, optimizer):
    """A larger batch later in the training: windows of 1, 2, 4 and 8, each divided by its own."""
    for window in stepping(watch, model, optimizer, audited.in_windows(1, 2, 4, 8)):
        for x, y in window:
            (of_rows(model, x, y) / len(window)).backward()


@right()
def discriminator(watch):
    """A GAN: real, fake and generator; three backward passes, two optimizers."""
    both = nn.ModuleDict({"g": network(8, 16), "d": network(16, 1)})
    g, d = both["g"], both["d"]
    of_g, of_d = (adam(model, betas=(0.5, 0.999)) for model in (g, d))
    noise = torch.Generator().manual_seed(4)
    with watch(both, of_d):
        for x, _ in rows(6):
            d.zero_grad()
            judged(d(x), 1).backward()
            fake = g(torch.randn(len(x), 8, generator=noise))
            judged(d(fake.detach()), 0).backward()
            of_d.step()
            g.zero_grad()
            judged(d(fake), 1).backward()
            of_g.step()


@right()
def variational_autoencoder(watch):
    """The sum of a reconstruction and of a divergence over the batch, undivided; it draws."""

    def loss_of(model, x, _):
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        rebuilt = F.mse_loss(model["decoder"](code), x, reduction="sum")
        return rebuilt - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()

    model = nn.ModuleDict({"encoder": network(16, 8), "decoder": network(4, 16)})
    return train(watch, model, adam(model), rows(6), loss_of, n=1)


@right()
def gradient_penalty(watch):
    """The norm of the gradient for the input, with `create_graph`."""

    def loss_of(model, x, _):
        x = x.clone().requires_grad_()
        score = model(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()

    model = network(16, 1)
    return train(watch, model, adam(model), rows(6), loss_of, n=1)


@right()
def checkpointed(watch):
    """A part of the model is computed again in the backward pass; dropout, in-place activations."""

    def loss_of(model, x, y):
        return F.cross_entropy(model[3](checkpoint(model[:3], x, use_reentrant=False)), y)

    model = nn.Sequential(network(16, 32), nn.ReLU(inplace=True), nn.Dropout(0.2), network(32, 8))
    return train(watch, model, sgd(model), loss_of=loss_of)


@right()
def losses_of_all_kinds(watch, model, optimizer):
    """Smoothed labels, weighted classes, and losses of numbers: a window of each, then a step."""
    weight = torch.linspace(0.5, 2.0, 8)
    kinds = [
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
        lambda z, y: F.cross_entropy(z, F.one_hot(y, 8).float() * 0.9 + 0.0125, weight=weight),
        lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 8).float()),
        lambda z, y: F.mse_loss(z, F.one_hot(y, 8).float()),
        lambda z, y: F.smooth_l1_loss(z, F.one_hot(y, 8).float()),
        lambda z, y: F.kl_div(z.log_softmax(1), F.one_hot(y, 8).float(), reduction="batchmean"),
        lambda z, y: -(z.log_softmax(1).gather(1, y[:, None]) * 0.7).mean(),  # of a policy
    ]
    each = iter([kind for kind in kinds for _ in range(N)])

    def loss_of(model, x, y):
        return next(each)(model(x), y)

    return train(watch, model, optimizer, rows(N) * len(kinds), loss_of, windows=len(kinds))


# --- gradients that are more than a sum of passes -------------------------------------------------


@right()
def gradients_by_hand(watch, model, optimizer):
    """`torch.autograd.grad`, and its results put into `.grad`."""
    parameters = list(model.parameters())
    with watch(model, optimizer):
        for x, y in rows(6):
            grads = torch.autograd.grad(of_rows(model, x, y), parameters)
            for parameter, grad in zip(parameters, grads):
                parameter.grad = grad
            optimizer.step()


@right()
def a_pass_that_fails(watch, model, optimizer):
    """A micro-batch whose backward pass raises half way, and a loop that goes on."""
    for i, (x, y) in enumerate(stepping(watch, model, optimizer, rows(), every=N)):
        hidden = model[1](model[0](x))
        if i % N == 2:
            hidden.register_hook(lambda grad: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            (F.cross_entropy(model[2](hidden), y) / (N - 1)).backward()


# --- optimizers and schedules ---------------------------------------------------------------------


@right()
def lbfgs(watch):
    """An optimizer that calls a closure as often as it likes."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = of_rows(model, *rows(1)[0])
        loss.backward()
        return loss

    with watch(model, optimizer):
        for _ in range(5):
            optimizer.step(closure)


@right()
def step_in_backward(watch):
    """An optimizer for every parameter, which steps as soon as its gradient is there."""
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with watch(model, optimizers[model[0].weight]):
        for x, y in rows(6):
            of_rows(model, x, y).backward()


@right()
def one_cycle(watch, model, optimizer):
    """A schedule in steps, made inside the block, whose first rate torch sets by a step."""
    with watch(model, optimizer):
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        train(audited.unwatched, model, optimizer, after=lambda: schedule.step())


@right()
def fused(watch):
    """SGD in one kernel, with momentum, zeros instead of None, and two groups."""
    model = network()
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}]
    groups += [{"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    return train(watch, model, optimizer, clear=lambda: optimizer.zero_grad(set_to_none=False))


class Both(torch.optim.Optimizer):
    """Several optimizers that step together, on the groups of each."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([group for o in optimizers for group in o.param_groups], {})

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


@right()
def two_optimizers_in_one(watch):
    """Matrices and the rest have an optimizer each."""
    model = network()
    kinds = [[p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False)]
    optimizer = Both(torch.optim.SGD(kinds[0], lr=0.1), torch.optim.AdamW(kinds[1]))
    return train(watch, model, optimizer)


@right()
def sparse_gradients(watch):
    """An embedding whose gradients are sparse."""
    table = nn.Embedding(100, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    return train(watch, table, optimizer, loss_of=lambda table, x, y: F.mse_loss(table(y), x))


# --- the wrapper ----------------------------------------------------------------------------------


@right()
def window_of_the_wrapper(watch, model, optimizer):
    """Scaled, weighted by tokens, clipped, and the rest flushed."""
    options = {"max_norm": 0.1, "scaler": scaler_of(growth_interval=2)}
    optimizer = AccumulatingOptimizer(optimizer, window=N, **options)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with watch(model, optimizer):
        for x, y in audited.tagged(3 * N + 2):
            optimizer.backward(audited.of_labels(model, x, y), weight=(y != audited.IGNORED).sum())
            optimizer.step()
            if optimizer.stepped:
                schedule.step()
        optimizer.flush()


@right()
def half_precision_in_the_wrapper(watch):
    """Parameters in bfloat16, summed in float32."""
    model = network().bfloat16()
    optimizer = AccumulatingOptimizer(sgd(model), window=16)
    with watch(model, optimizer):
        for x, y in rows(32):
            optimizer.backward(of_rows(model, x.bfloat16(), y))
            optimizer.step()
            optimizer.zero_grad()
