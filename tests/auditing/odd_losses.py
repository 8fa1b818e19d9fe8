"""Right loops that look odd: losses without labels, several at once, and learning to learn.

Each means what it computes.
"""

import copy
import itertools
import math

import audited
import torch
from audited import N, adam, copy_of, follow, network, of_rows, rows, slopes, stepping, train
from cases import right
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two augmentations of the same inputs."""
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(a, b).mean()


# --- without labels -------------------------------------------------------------------------------


@right()
def moco(watch):
    """Keys come from a momentum encoder that moves before every pass, negatives from a queue; the
    label of each row is 0, where its own key stands."""
    model, queue = network(), F.normalize(torch.randn(64, 8))
    keys_of, optimizer = copy_of(model), torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    with watch(model, optimizer):
        for x, _ in rows(8):
            one, other = two_views(x)
            follow(keys_of, model, 0.001)
            queries, keys = F.normalize(model(one)), F.normalize(keys_of(other))
            own = (queries * keys).sum(1, keepdim=True)
            logits = torch.cat([own, queries @ queue.T], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = torch.cat([keys, queue])[:64]


@right()
def byol(watch):
    """Each view predicts the target's projection of the other, in a pass of its own, so that one
    graph is held at a time; the target moves by a schedule, once a step."""
    model = nn.ModuleDict({"encoder": network(), "predictor": network(8, 8)})
    target, optimizer, steps, rates = copy_of(model["encoder"]), adam(model), 5, itertools.count()

    def after():
        rate = 0.01 * (math.cos(math.pi * next(rates) / steps) + 1) / 2
        follow(target, model["encoder"], rate)

    for x, _ in stepping(watch, model, optimizer, rows(steps * N), every=N, after=after):
        views = two_views(x)
        for seen, hidden in (views, views[::-1]):
            predicted = model["predictor"](model["encoder"](seen))
            (cosine_distance(predicted, target(hidden)) / (2 * N)).backward()


@right()
def dino(watch):
    """A teacher with a centre, many crops, a weight decay that is set at each step, and gradients
    of the last layer that are dropped in the first epoch, to begin calmly."""
    student = network()
    teacher, centre = copy_of(student), torch.zeros(8)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    with watch(student, optimizer, windows=6):
        for step, (x, _) in enumerate(rows(6)):
            optimizer.param_groups[0]["weight_decay"] = 0.04 + 0.06 * step
            crops = [*two_views(x), *[F.dropout(x, 0.5) for _ in range(4)]]
            told = [teacher(crop) for crop in crops[:2]]
            wanted = [((out - centre) / 0.04).softmax(1) for out in told]
            said = [(student(crop) / 0.1).log_softmax(1) for crop in crops]
            terms = [
                -(w * s).sum(1).mean()
                for i, w in enumerate(wanted)
                for j, s in enumerate(said)
                if i != j
            ]
            optimizer.zero_grad()
            (sum(terms) / len(terms)).backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            if step < 3:
                for parameter in student[2].parameters():
                    parameter.grad = None
            optimizer.step()
            follow(teacher, student, 0.004)
            centre = torch.lerp(centre, torch.cat(told).mean(0), 0.1)


@right()
def diffusion_of_velocities(watch):
    """v-prediction with a weight for every time (min-SNR), and an average of the parameters that
    moves once a step and not once a micro-batch."""
    model = network(17, 16)
    average, optimizer = copy_of(model), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model, x, _):
        time = torch.rand(len(x), 1) * 0.98 + 0.01
        signal, spread = (time * math.pi / 2).cos(), (time * math.pi / 2).sin()
        noise = torch.randn_like(x)
        predicted = model(torch.cat([signal * x + spread * noise, time], 1))
        losses = (predicted - (signal * noise - spread * x)).square().mean(1, keepdim=True)
        ratio = (signal / spread).square()
        return (ratio.clamp(max=5) / (ratio + 1) * losses).mean()

    return train(
        watch, model, optimizer, rows(5 * N), loss_of, before=audited.clipping(model, 1.0),
        after=lambda: follow(average, model, 0.001),
    )  # fmt: skip


@right()
def annealed_divergence(watch):
    """A VAE whose divergence weighs more from step to step, with free bits; the weight is the same
    throughout a window."""
    model = nn.ModuleDict({"encoder": network(16, 8), "decoder": network(4, 16)})
    passes = itertools.count()

    def loss_of(model, x, _):
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        rebuilt = F.mse_loss(model["decoder"](code), x, reduction="sum") / len(x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean(0)
        weight = min(1.0, next(passes) // N / 4)
        return rebuilt + weight * divergence.clamp(min=0.05).sum()

    return train(watch, model, adam(model), rows(5 * N), loss_of)


@right()
def mean_teacher(watch):
    """Labelled rows and, with a weight that is ramped up, rows without labels, a pass each; the
    teacher is the student's average, moves once a step, and is the same for a whole window."""
    student = nn.Sequential(network(16, 32), nn.Dropout(0.2), nn.Linear(32, 8))
    teacher, windows = copy_of(student), audited.windows_of(rows(5 * N))
    steps = stepping(watch, student, audited.sgd(student), windows)
    for step, window in enumerate(steps):
        if step > 0:
            follow(teacher, student, max(0.05, 1 / step))
        weight = math.exp(-5 * (1 - min(1, step / 4)) ** 2)
        for x, y in window:
            (of_rows(student, x[:4], y[:4]) / N).backward()
            one, other = two_views(x)
            agreed = F.mse_loss(student(one).softmax(1), teacher(other).softmax(1))
            (weight * agreed / N).backward()


# --- several losses -------------------------------------------------------------------------------


@right()
def weights_by_gradient_norms(watch):
    """GradNorm: the weights of two tasks are learned from the norms of their gradients at the last
    shared layer, by an optimizer of their own, and sum up to 2."""
    model = nn.ModuleDict({"trunk": network(16, 16), "a": network(16, 8), "b": network(16, 16)})
    weights, first = nn.Parameter(torch.ones(2)), None
    optimizer, of_weights = adam(model), torch.optim.Adam([weights], lr=0.025)
    shared = model["trunk"][2].weight
    with watch(model, optimizer):
        for x, y in rows(6):
            features = model["trunk"](x)
            losses = F.cross_entropy(model["a"](features), y), F.mse_loss(model["b"](features), x)
            first = first or [loss.item() for loss in losses]
            optimizer.zero_grad()
            sum(w * loss for w, loss in zip(weights.detach(), losses)).backward(retain_graph=True)
            norms = torch.stack(
                [slopes(w * loss, shared).norm() for w, loss in zip(weights, losses)]
            )
            pace = torch.tensor([loss.item() / start for loss, start in zip(losses, first)])
            wanted = norms.mean().detach() * (pace / pace.mean()) ** 1.5
            (weights.grad,) = torch.autograd.grad((norms - wanted).abs().sum(), weights)
            of_weights.step()
            optimizer.step()
            weights.data.mul_(2 / weights.data.sum())


@right()
def class_weights_of_a_window(watch, model, optimizer):
    """Rare classes weigh more; the sum is divided by the weights of all rows of the window, so that
    a row counts the same in whichever micro-batch it is."""
    weight = torch.linspace(0.5, 4.0, 8)
    for window in stepping(watch, model, optimizer, audited.windows_of(rows(5 * N))):
        total = sum(weight[y].sum() for _, y in window)
        for x, y in window:
            loss = F.cross_entropy(model(x), y, weight=weight, reduction="sum")
            (loss / total).backward()


@right()
def data_sets_in_turn(watch):
    """Three data sets in turn, heads and losses of their own, a weight for each; all losses go
    through one helper, and a step comes after one batch of each."""
    trunk = network(16, 32)
    heads = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 16), nn.Linear(32, 1)])
    model = nn.ModuleList([trunk, heads])
    losses = [
        lambda out, x, y: F.cross_entropy(out, y),
        lambda out, x, y: F.mse_loss(out, x),
        lambda out, x, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 3).float()),
    ]
    loaders = [itertools.cycle(rows(3 + k)) for k in range(3)]

    def backward(loss):
        loss.backward()

    for k in stepping(watch, model, adam(model), [0, 1, 2] * 5, every=3):
        x, y = next(loaders[k])
        backward((1.0, 0.5, 0.25)[k] * losses[k](heads[k](trunk(x)), x, y))


@right()
def elastic_weights(watch, model, optimizer):
    """EWC: first passes that only measure how much each parameter matters, without a step; then
    training, where the penalty has one pass per window, and is therefore not divided."""
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    with watch(model, optimizer):
        for x, y in rows(6):
            model.zero_grad()
            of_rows(model, x, y).backward()
            for total, parameter in zip(fisher, model.parameters()):
                total += parameter.grad.square() / 6
        model.zero_grad()
        old = [p.detach().clone() for p in model.parameters()]

        def penalty():
            moved = zip(fisher, model.parameters(), old)
            (50 * sum((f * (p - before).square()).sum() for f, p, before in moved)).backward()

        batches = [(x.flip(1), y) for x, y in rows(5 * N)]
        train(audited.unwatched, model, optimizer, batches, before=penalty)


@right()
def dark_replay(watch, model, optimizer):
    """DER++: rows met before are replayed with the logits that they had then, and others with their
    labels; a weight for each, a pass for each, and none as long as nothing is stored."""
    buffer = []
    with watch(model, optimizer):
        for x, y in rows(8):
            optimizer.zero_grad()
            logits = model(x)
            F.cross_entropy(logits, y).backward()
            if buffer:
                seen, _, then = buffer[torch.randint(len(buffer), ())]
                (0.5 * F.mse_loss(model(seen), then)).backward()
                seen, label, _ = buffer[torch.randint(len(buffer), ())]
                (0.5 * of_rows(model, seen, label)).backward()
            optimizer.step()
            buffer.append((x, y, logits.detach()))


@right("parameters.twice")
def physics_with_two_optimizers(watch):
    """A network that solves u' = -u: derivatives for the input in the loss, Adam at first and
    L-BFGS afterwards, on the same parameters."""
    model = network(1, 1)
    first = adam(model)
    second = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    times = torch.linspace(0, 2, 16)[:, None].requires_grad_()

    def closure():
        model.zero_grad()
        solution = model(times)
        residual = (slopes(solution, times) + solution).square().mean()
        loss = residual + 10 * (model(torch.zeros(1, 1)) - 1).square().sum()
        loss.backward()
        return loss

    with watch(model, first, windows=10):
        for _ in range(8):
            closure()
            first.step()
        for _ in range(3):
            second.step(closure)


# --- learning to learn ----------------------------------------------------------------------------


@right()
def reptile(watch, model, optimizer):
    """The step of the outer optimizer goes to where a copy went in five steps of its own; its
    gradients are the ways there."""
    with watch(model, optimizer):
        for task in range(6):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.02)
            for x, y in rows(5):
                inner.zero_grad()
                of_rows(learner, x + task, y).backward()
                inner.step()
            for parameter, learned in zip(model.parameters(), learner.parameters()):
                parameter.grad = (parameter - learned).detach()
            optimizer.step()


@right()
def maml(watch):
    """Two inner steps by `autograd.grad` in the graph, for each of four tasks; the mean of their
    losses afterwards is the loss of the outer step."""

    def loss_of(model, x, y):
        adapted = dict(model.named_parameters())
        for _ in range(2):
            loss = F.cross_entropy(functional_call(model, adapted, x[:4]), y[:4])
            grads = torch.autograd.grad(loss, adapted.values(), create_graph=True)
            adapted = {n: p - 0.1 * g for (n, p), g in zip(adapted.items(), grads)}
        return F.cross_entropy(functional_call(model, adapted, x[4:]), y[4:])

    model = network()
    return train(watch, model, adam(model), rows(5 * N), loss_of)
