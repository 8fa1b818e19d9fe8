"""Right loops with a pass for each of several losses, and optimizers that step at different times.

Each means what it computes, as in other odd_*.py.
"""

import audited
import torch
from audited import N, adam, copy_of, in_windows, judged, network, of_rows, rows, sgd, stepping
from cases import BOTH, right
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, StepLR

from accumext import AccumulatingOptimizer

# --- a pass for each loss -------------------------------------------------------------------------


@right()
def pseudo_labels_in_epochs_of_five(watch, model, optimizer):
    """FixMatch: the loss of labels and half of that of pseudo-labels, both divided by what the
    window holds: two micro-batches, and one at the end of an epoch."""
    for window in stepping(watch, model, optimizer, in_windows(2, 2, 1, 2, 2, 1), windows=6):
        for x, y in window:
            (of_rows(model, x, y) / len(window)).backward()
            (0.5 * of_rows(model, x + 0.1, model(x).argmax(1)) / len(window)).backward()


@right()
def consistency_in_a_window_of_one(watch, model, optimizer):
    """Semi-supervised: a second loss weighs 0.3; the last window has one micro-batch, and is
    divided by one."""
    for window in stepping(watch, model, optimizer, in_windows(2, 2, 2, 1)):
        for x, y in window:
            (of_rows(model, x, y) / len(window)).backward()
            consistency = F.mse_loss(model(x + 0.1), model(x).detach())
            (0.3 * consistency / len(window)).backward()


@right()
def halves_of_a_discriminator(watch):
    """Half of the loss of real rows and half of that of others: their mean in every window, also
    in that of one micro-batch."""
    judge = network(16, 1)
    for window in stepping(watch, judge, adam(judge), in_windows(3, 3, 1, 3)):
        for x, _ in window:
            (0.5 * judged(judge(x), 1) / len(window)).backward()
            (0.5 * judged(judge(torch.randn(8, 16)), 0) / len(window)).backward()


@right()
def critic_of_two_signs(watch):
    """WGAN with clamped weights: the difference of two means, with a pass for each at one line."""
    critic = network(16, 1)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-4)
    with watch(critic, optimizer):
        for x, _ in rows(5):
            optimizer.zero_grad()
            for batch, sign in ((torch.randn(8, 16), 1), (x, -1)):
                (sign * critic(batch).mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.01, 0.01)


@right()
def last_micro_batch_at_a_line_of_its_own(watch, model, optimizer):
    """DDP's `no_sync` around all but the last; each loss is divided by what its window holds."""
    return audited.at_two_lines(watch, model, optimizer, (4, 4, 2, 4))


@right()
def last_of_four_at_a_line_of_its_own(watch, model, optimizer):
    """The same, where all windows have four micro-batches."""
    return audited.at_two_lines(watch, model, optimizer, (4, 4, 4, 4))


@right()
def boxes_in_some_micro_batches(watch):
    """Detection: every micro-batch has a loss of classes, and those with boxes one more, in a pass
    of its own; both are divided by the micro-batches of the window, which are four."""
    trunk, classes, boxes = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 1)
    model = nn.ModuleList([trunk, classes, boxes])
    with_boxes = (1, 1, 1, 1), (1, 0, 1, 0), (0, 0, 1, 0), (1, 1, 1, 0)
    batches = zip(sum(with_boxes, ()), rows(), strict=True)
    for has_boxes, (x, y) in stepping(watch, model, sgd(model), batches, every=N):
        features = trunk(x).relu()
        (F.cross_entropy(classes(features), y) / N).backward(retain_graph=True)
        if has_boxes:
            (F.mse_loss(boxes(features)[:, 0], x[:, 0]) / N).backward()


@right()
def two_heads_by_targets(watch):
    """Two heads with a pass each; sums, divided by the rows of the window, whose micro-batches have
    all sizes. The second loss weighs 0.5."""
    trunk, first, second = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 1)
    model, batches = nn.ModuleList([trunk, first, second]), iter(rows(11))
    windows = (3, 8), (5,), (2, 8, 6, 4), (8, 4), (7, 7)
    for sizes in stepping(watch, model, adam(model), windows):
        for size in sizes:
            x, y = (part[:size] for part in next(batches))
            loss = F.cross_entropy(first(trunk(x)), y, reduction="sum") / sum(sizes)
            loss.backward()
            loss = F.mse_loss(second(trunk(x))[:, 0], x[:, 0], reduction="sum") / sum(sizes)
            (0.5 * loss).backward()


@right()
def two_losses_of_a_wrapped_micro_batch(watch, model, optimizer):
    """AccumulatingOptimizer with windows of two: `micro_batch()` holds the passes of two losses,
    the second of weight 0.5; epochs have three micro-batches, and end with `flush()`."""
    optimizer = AccumulatingOptimizer(optimizer, window=2)
    with watch(model, optimizer):
        for _ in range(2):
            for x, y in rows(3):
                with optimizer.micro_batch():
                    optimizer.backward(of_rows(model, x, y))
                    consistency = F.mse_loss(model(x + 0.1), model(x).detach())
                    optimizer.backward(0.5 * consistency)
                optimizer.step()
            optimizer.flush()


# --- what a window is divided by ------------------------------------------------------------------


@right()
def terms_of_weight_one(watch, model, optimizer):
    """Weights from a configuration, which are 1; windows of three lengths, divided by them."""
    for window in stepping(watch, model, optimizer, in_windows(4, 2, 4, 1)):
        for x, y in window:
            logits = model(x)
            loss = 1.0 * F.cross_entropy(logits, y) + 1.0 * logits.square().mean()
            (loss / len(window)).backward()


def over_all_elements(watch, sum_of):
    """Reconstruction: sums over elements, divided by those of the whole window; micro-batches and
    windows have all sizes."""
    model = network(16, 16)
    for window in stepping(watch, model, sgd(model), in_windows(3, 1, 4, 2)):
        inputs = [x[: 8 - i] for i, (x, _) in enumerate(window)]
        elements = sum(x.numel() for x in inputs)
        for x in inputs:
            (sum_of(model(x), x) / elements).backward()


@right()
def sum_over_all_elements(watch):
    return over_all_elements(watch, lambda out, x: F.mse_loss(out, x, reduction="sum"))


@right()
def own_sum_over_all_elements(watch):
    return over_all_elements(watch, lambda out, x: (out - x).square().sum())


# --- optimizers that step at different times ------------------------------------------------------


def five_steps_of_the_critic(watch, detaches=True):
    """A step of the generator, by SGD, after five of the critic, by Adam."""
    generator, critic = network(8, 16), network(16, 1)
    of_generator, of_critic = sgd(generator), adam(critic)
    with watch(nn.ModuleList([generator, critic]), of_critic) as audit:
        for i, (x, _) in enumerate(rows(3 * 5)):
            fake = generator(torch.randn(8, 8))
            of_critic.zero_grad()
            scores = critic(fake.detach() if detaches else fake)
            (judged(critic(x), 1) + judged(scores, 0)).backward()
            of_critic.step()
            if i % 5 == 4:
                judged(critic(generator(torch.randn(8, 8))), 1).backward()
                of_generator.step()
                of_generator.zero_grad()
    return audit


@right(told=BOTH)
def generator_after_five_steps(watch):
    """The generator's parameters are reached by its own pass alone, after the first windows of the
    critic."""
    return five_steps_of_the_critic(watch)


@right(told=BOTH)
def trunk_with_every_fourth_step(watch, model, _):
    """The head steps with every batch, the trunk on the mean of four; each clears its own."""
    of_trunk, of_head = sgd(model[0], lr=0.01), sgd(model[2])
    with watch(model, of_head):
        for i, batch in enumerate(rows()):
            of_head.zero_grad()
            of_rows(model, *batch).backward()
            of_head.step()
            if (i + 1) % N == 0:
                for parameter in model[0].parameters():
                    parameter.grad /= N
                of_trunk.step()
                of_trunk.zero_grad()


@right("parameters.twice", told=BOTH)
def schedule_for_each_phase(watch, model, optimizer):
    """Three phases, each with an optimizer of its own and a schedule, which moves after its
    steps."""
    with watch(model, optimizer, windows=9):
        for phase in range(3):
            schedule = CosineAnnealingLR(optimizer, 3)
            for x, y in rows(3):
                optimizer.zero_grad()
                of_rows(model, x, y).backward()
                optimizer.step()
                schedule.step()
            optimizer = sgd(model, lr=0.1 / (phase + 2))


@right("schedule.per_micro_batch")
def one_cycle_in_micro_batches(watch, model, optimizer):
    """The length of the cycle is counted in micro-batches, as `len(loader)` is, and so are its
    steps: it ends with the training."""
    batches = rows(6 * N)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=len(batches))
    return audited.train(watch, model, optimizer, batches, end=lambda _: schedule.step(), windows=6)


@right("parameters.twice", told=BOTH)
def two_optimizers_of_an_encoder(watch):
    """An adversarial autoencoder: two optimizers have the encoder and take turns. Each has a
    `zero_grad`, a pass and a step, and a schedule that moves once an iteration."""
    encoder, decoder = nn.Linear(16, 8), nn.Linear(8, 16)
    critic = nn.Linear(8, 1).requires_grad_(False)
    model = nn.ModuleList([encoder, decoder, critic])
    of_both, of_encoder = adam(nn.ModuleList([encoder, decoder])), adam(encoder)
    schedules = [StepLR(optimizer, 3) for optimizer in (of_both, of_encoder)]
    with watch(model, of_both):
        for x, _ in rows(4):
            of_both.zero_grad()
            F.mse_loss(decoder(encoder(x)), x).backward()
            of_both.step()
            of_encoder.zero_grad()
            F.softplus(-critic(encoder(x))).mean().backward()
            of_encoder.step()
            for schedule in schedules:
                schedule.step()


@right(told=BOTH)
def actor_that_starts_later(watch):
    """TD3: the actor is trained after the critic's first step; a copy of the whole agent follows
    both from the start."""
    actor, critic = nn.Linear(16, 16), nn.Linear(16, 16)
    agent = nn.ModuleList([actor, critic])
    target, of_critic, of_actor = copy_of(agent), adam(critic), adam(actor)
    with watch(agent, of_critic):
        for i, (x, _) in enumerate(rows(10)):
            of_critic.zero_grad()
            F.mse_loss(critic(x), x).backward()
            of_critic.step()
            if i > 0:
                of_actor.zero_grad()
                (-critic(actor(x)).mean()).backward()
                of_actor.step()
            audited.follow(target, agent, 0.1)


@right(told=BOTH)
def one_layer_after_the_other(watch):
    """Layer-wise pretraining, with an optimizer for each; a copy of the stack keeps the initial
    parameters."""
    layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    initial, (x, _) = copy_of(layers), rows(1)[0]
    first, second = (adam(layer) for layer in layers)
    with watch(layers, first, windows=20):
        for layer, optimizer in zip(layers, (first, second)):
            for _ in range(4):
                optimizer.zero_grad()
                F.mse_loss(layer(x), x).backward()
                optimizer.step()
            x = layer(x).detach()
    del initial  # which is kept as long as the audit looks


@right(
    "parameters.no_gradient", told=("model",)
)  # It is asked of the optimizer of the backbone, which nobody names
def backbone_thawed_after_an_epoch(watch, model, _):
    """The optimizer of the backbone steps from the start, which does nothing while that is frozen:
    during the whole first epoch."""
    backbone, head = model[0], model[2]
    of_backbone, of_head = sgd(backbone, lr=0.01), sgd(head)
    with watch(model, of_backbone):
        for epoch in range(3):
            backbone.requires_grad_(epoch > 0)
            for x, y in rows(5):
                of_backbone.zero_grad()
                of_head.zero_grad()
                of_rows(model, x, y).backward()
                of_backbone.step()
                of_head.step()


@right("parameters.twice", told=BOTH)
def lbfgs_after_adam(watch, model, _):
    """PINNs: Adam with a schedule, then LBFGS without one."""
    x, y = rows(1)[0]
    of_adam = adam(model)
    schedule = ExponentialLR(of_adam, 0.9)
    with watch(model, of_adam, windows=20):
        for _ in range(5):
            of_adam.zero_grad()
            of_rows(model, x, y).backward()
            of_adam.step()
            schedule.step()
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            lbfgs.zero_grad()
            loss = of_rows(model, x, y)
            loss.backward()
            return loss

        for _ in range(4):
            lbfgs.step(closure)
