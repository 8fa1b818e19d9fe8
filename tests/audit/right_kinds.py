"""More right loops: other losses, other orders, other optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from right_loops import Critic, adam, every_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from wrong_loops import (
    IGNORED,
    N,
    Watch,
    network,
    of_labels,
    of_rows,
    rows,
    scaler_of,
    sgd,
    tagged,
)

import accumext

# --- losses and graphs ----------------------------------------------------------------------------


def two_backward_passes(watch: Watch = accumext.audit) -> Any:
    """A loss for the classes and one for the norm of the logits, each with its own pass."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            optimizer.zero_grad()
            of_rows(model, x, y).backward()
            (0.1 * F.mse_loss(model(x), torch.zeros(len(x), 8))).backward()
            optimizer.step()
    return audit


def two_losses_in_one(watch: Watch = accumext.audit) -> Any:
    """Two losses with weights, accumulated."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            logits = model(x)
            loss = F.cross_entropy(logits, y) + 0.1 * F.l1_loss(logits, torch.zeros_like(logits))
            (loss / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def gradient_penalty(watch: Watch = accumext.audit) -> Any:
    """The norm of the gradient for the input, with `create_graph`."""
    model = Critic()
    optimizer = adam(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        score = model(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()

    return every_batch(watch(model, optimizer), model, optimizer, loss_of)


def checkpointed(watch: Watch = accumext.audit) -> Any:
    """A part of the model is computed again in the backward pass; dropout, in-place activations."""
    model = nn.Sequential(network(16, 32), nn.ReLU(inplace=True), nn.Dropout(0.2), network(32, 8))
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            hidden = checkpoint(model[:3], x, use_reentrant=False)
            (F.cross_entropy(model[3](hidden), y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def losses_of_all_kinds(watch: Watch = accumext.audit) -> Any:
    """Smoothed labels, weighted classes, and losses of numbers: a window of each, then a step."""
    model = network()
    optimizer = sgd(model)
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
    with watch(model, optimizer, windows=len(kinds)) as audit:
        for kind in kinds:
            for x, y in rows(N):
                (kind(model(x), y) / N).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def weighted_classes(watch: Watch = accumext.audit) -> Any:
    """`weight=` of the cross entropy, without accumulation."""
    model = network()
    optimizer, weight = sgd(model), torch.linspace(0.5, 2.0, 8)
    loss_of = nn.CrossEntropyLoss(weight=weight)
    audit = watch(model, optimizer)
    return every_batch(audit, model, optimizer, lambda x, y: loss_of(model(x), y))


def gradients_by_hand(watch: Watch = accumext.audit) -> Any:
    """`torch.autograd.grad`, and its results put into `.grad`."""
    model = network()
    optimizer, parameters = sgd(model), list(model.parameters())
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            grads = torch.autograd.grad(of_rows(model, x, y), parameters)
            for parameter, grad in zip(parameters, grads):
                parameter.grad = grad
            optimizer.step()
    return audit


# --- gradients that are more than a sum of passes -------------------------------------------------


def divided_at_the_step(watch: Watch = accumext.audit) -> Any:
    """Sums over tokens, whose gradient is divided by the window's tokens before the step."""
    model = network()
    optimizer, tokens = sgd(model), 0
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(tagged()):
            of_labels(model, x, y, "sum").backward()
            tokens += int((y != IGNORED).sum())
            if (i + 1) % N == 0:
                for parameter in model.parameters():
                    parameter.grad /= tokens
                optimizer.step()
                optimizer.zero_grad()
                tokens = 0
    return audit


def windows_that_grow(watch: Watch = accumext.audit) -> Any:
    """A larger batch later in the training: windows of 1, 2, 4 and 8, each divided by its own."""
    model, batches = network(), iter(rows(15))
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for n in (1, 2, 4, 8):
            for _ in range(n):
                (of_rows(model, *next(batches)) / n).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def noise_on_the_gradient(watch: Watch = accumext.audit) -> Any:
    """Noise is added to the accumulated gradient, and its values are clipped."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                for parameter in model.parameters():
                    parameter.grad += 0.01 * torch.randn_like(parameter)
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    return audit


def adversarial_inputs(watch: Watch = accumext.audit) -> Any:
    """A first pass for the inputs' gradient, whose other gradients are cleared."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            x.requires_grad_()
            of_rows(model, x, y).backward()
            worse = (x + 0.01 * x.grad.sign()).detach()
            optimizer.zero_grad()
            of_rows(model, worse, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def sharpness_aware(watch: Watch = accumext.audit) -> Any:
    """A first pass says where to go for the second, whose gradient is stepped on from before."""
    model = network()
    optimizer, parameters = sgd(model), list(model.parameters())
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            of_rows(model, x, y).backward()
            away = [0.05 * p.grad for p in parameters]
            with torch.no_grad():
                torch._foreach_add_(parameters, away)
            optimizer.zero_grad()
            of_rows(model, x, y).backward()
            with torch.no_grad():
                torch._foreach_sub_(parameters, away)
            optimizer.step()
            optimizer.zero_grad()
    return audit


def learned_weights_of_losses(watch: Watch = accumext.audit) -> Any:
    """Two tasks whose losses are weighted by a learned uncertainty."""
    model = nn.ModuleDict({"net": network(), "s": nn.ParameterList([torch.zeros(2)])})
    optimizer = sgd(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits, s = model["net"](x), model["s"][0]
        losses = torch.stack([F.cross_entropy(logits, y), logits.square().mean()])
        return (losses * (-s).exp() + s).sum()

    return every_batch(watch(model, optimizer), model, optimizer, loss_of)


def step_in_backward(watch: Watch = accumext.audit) -> Any:
    """An optimizer for every parameter, which steps as soon as its gradient is there."""
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with watch(model, optimizers[model[0].weight]) as audit:
        for x, y in rows(6):
            of_rows(model, x, y).backward()
    return audit


def amp_with_a_fused_optimizer(watch: Watch = accumext.audit) -> Any:
    """The scaler leaves the division by the scale to the optimizer's kernel."""
    model = network()
    optimizer, scaler = adam(model, fused=True), scaler_of(growth_interval=1)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return audit


def amp_switched_off(watch: Watch = accumext.audit) -> Any:
    """A GradScaler with `enabled=False`, and a loss that weighs half."""
    model = network()
    optimizer, scaler = adam(model), scaler_of(enabled=False)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows(3 * N)):
            scaler.scale(0.5 * of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return audit


# --- optimizers and schedules ---------------------------------------------------------------------


def one_cycle(watch: Watch = accumext.audit) -> Any:
    """A schedule in steps, made inside the block, whose first rate torch sets by a step."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return audit


def warm_up_and_plateau(watch: Watch = accumext.audit) -> Any:
    """A sequence of two schedules in steps, and one that looks at the loss of an epoch."""
    model = network()
    optimizer = sgd(model)
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with watch(model, optimizer) as audit:
        for _ in range(3):
            for x, y in rows(2):
                optimizer.zero_grad()
                of_rows(model, x, y).backward()
                optimizer.step()
                schedule.step()
            with torch.no_grad():
                plateau.step(of_rows(model, *rows(1)[0]))
    return audit


def kernels_of_sgd(watch: Watch = accumext.audit, **options: Any) -> Any:
    """SGD one by one, foreach or fused; with momentum, zeros instead of None, and two groups."""
    model = network()
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1},
        {"params": model[2].parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return audit


def foreach(watch: Watch = accumext.audit) -> Any:
    """SGD on lists of tensors."""
    return kernels_of_sgd(watch, foreach=True)


def fused(watch: Watch = accumext.audit) -> Any:
    """SGD in one kernel."""
    return kernels_of_sgd(watch, fused=True)


def frozen_trunk(watch: Watch = accumext.audit) -> Any:
    """The trunk is frozen on purpose, and the optimizer has the head alone; an average beside."""
    model = network()
    model[0].requires_grad_(False)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            optimizer.zero_grad()
            of_rows(model, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters()):
                    a.lerp_(p, 0.1)
                of_rows(average.eval(), x, y)
    return audit


def an_optimizer_for_each_half(watch: Watch = accumext.audit) -> Any:
    """Encoder and decoder have an optimizer each, which step together."""
    model = nn.ModuleDict({"encoder": network(16, 32), "decoder": network(32, 8)})
    optimizer, other = sgd(model["encoder"]), adam(model["decoder"])
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            optimizer.zero_grad()
            other.zero_grad()
            F.cross_entropy(model["decoder"](model["encoder"](x)), y).backward()
            optimizer.step()
            other.step()
    return audit


def sparse_gradients(watch: Watch = accumext.audit) -> Any:
    """An embedding whose gradients are sparse."""
    torch.manual_seed(1)
    table = nn.Embedding(100, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    with watch(table, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (F.mse_loss(table(y), x) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit
