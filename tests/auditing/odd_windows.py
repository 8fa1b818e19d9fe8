"""Right loops whose windows look odd: scalers and passes that optimizers share, gradients that the
loop keeps by itself, and counts of its own. Each means what it computes, as in other odd_*.py."""

import itertools
from collections.abc import Sequence

import audited
import torch
from audited import N, adam, judged, network, of_rows, rows, scaler_of, sgd, stepping
from cases import right
from torch import Tensor, nn
from torch.nn import functional as F

# --- several optimizers, several passes -----------------------------------------------------------


def adversaries(watch, given):
    """A window of each, at once. The judge is frozen while its loss trains the generator."""
    both = nn.ModuleDict({"generator": network(8, 16), "judge": network(16, 1)})
    generator, judge, scaler = both["generator"], both["judge"], scaler_of()
    optimizers = {name: adam(model) for name, model in both.items()}

    def train(name, loss, ends):
        scaler.scale(loss / N).backward()
        if ends:
            scaler.unscale_(optimizers[name])
            nn.utils.clip_grad_norm_(both[name].parameters(), 0.1)
            scaler.step(optimizers[name])
            scaler.update()
            optimizers[name].zero_grad()

    with watch(both, optimizers[given]):
        for i, (x, _) in enumerate(rows(5 * N)):
            ends, fake = (i + 1) % N == 0, generator(torch.randn(8, 8))
            scores = judge(torch.cat([x, fake.detach()]))
            labels = torch.arange(2.0).flip(0).repeat_interleave(8)[:, None]
            train("judge", F.binary_cross_entropy_with_logits(scores, labels), ends)
            judge.requires_grad_(False)
            train("generator", judged(judge(fake), 1), ends)
            judge.requires_grad_(True)


@right()
def generator_with_a_shared_scaler(watch):
    """A GAN with one scaler, which the step of the judge updates before the generator's window is
    complete; no scale changes there."""
    return adversaries(watch, "generator")


@right()
def judge_with_a_shared_scaler(watch):
    """The same, from the other side: the generator's step is in the judge's window."""
    return adversaries(watch, "judge")


def climb(model: nn.Module) -> list[Tensor]:
    """Move along the gradient; how far each parameter went."""
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        ways = [p.grad * (0.05 / norm) for p in model.parameters()]
        for parameter, way in zip(model.parameters(), ways):
            parameter.add_(way)
    return ways


def descend(model: nn.Module, ways: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, way in zip(model.parameters(), ways):
            parameter.sub_(way)


@right()
def sharpness_aware(watch, model, optimizer):
    """SAM: a first pass says where to climb and is cleared; the gradient is that of a second one,
    at the same line, with parameters that have moved."""

    def backward(x, y):
        of_rows(model, x, y).backward()

    for x, y in stepping(watch, model, optimizer, rows(6)):
        backward(x, y)
        ways = climb(model)
        optimizer.zero_grad()
        backward(x, y)
        descend(model, ways)


@right()
def sharpness_aware_of_a_window(watch, model, optimizer):
    """The same with windows: four micro-batches to climb, the same four for the gradient."""
    for window in stepping(watch, model, optimizer, audited.windows_of(rows(5 * N))):
        for ascends in (True, False):
            for x, y in window:
                (of_rows(model, x, y) / len(window)).backward()
            if ascends:
                ways = climb(model)
                optimizer.zero_grad()
        descend(model, ways)


# --- gradients that the loop keeps ----------------------------------------------------------------


def kept(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.grad.flatten() for p in parameters])


def put(parameters: Sequence[Tensor], flat: Tensor) -> None:
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = part.view_as(parameter).clone()


def of_conflicting_tasks(watch, model, optimizer, weight):
    parameters = list(model.parameters())
    with watch(model, optimizer):
        for x, y in rows(6):
            own = []
            for labels in (y, (y + 3) % 8):
                optimizer.zero_grad()
                of_rows(model, x, labels).backward()
                own.append(kept(parameters))
            own[1] = own[1] * weight
            a, b = own
            along = (a @ b).clamp(max=0)
            put(parameters, a - along / b.square().sum() * b + b - along / a.square().sum() * a)
            optimizer.step()
            optimizer.zero_grad()


@right()
def projected_gradients(watch, model, optimizer):
    """PCGrad: each task's gradient loses its part against the other's; `zero_grad` between them,
    since the loop keeps both by itself."""
    return of_conflicting_tasks(watch, model, optimizer, 1.0)


@right()
def projected_gradients_of_unequal_tasks(watch, model, optimizer):
    """The same, where one task weighs three times as much."""
    return of_conflicting_tasks(watch, model, optimizer, 3.0)


@right()
def private_gradients(watch, model, optimizer):
    """DP-SGD: every row has a pass, a clip and a `zero_grad`; the loop adds the clipped gradients
    up by itself, and then noise."""
    parameters = list(model.parameters())
    with watch(model, optimizer):
        for x, y in rows(5):
            total = torch.zeros(sum(p.numel() for p in parameters))
            for row, label in zip(x, y):
                optimizer.zero_grad()
                of_rows(model, row[None], label[None]).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                total += kept(parameters)
            put(parameters, (total + 0.01 * torch.randn_like(total)) / len(x))
            optimizer.step()


@right()
def norms_of_each_loss(watch, model, optimizer):
    """For the log: a pass of each loss alone, with `retain_graph`, whose gradients are cleared;
    then one of their sum, from the same graph."""
    norms = []
    with watch(model, optimizer):
        for x, y in rows(6):
            logits = model(x)
            parts = F.cross_entropy(logits, y), 0.1 * logits.square().mean()
            for part in parts:
                optimizer.zero_grad()
                part.backward(retain_graph=True)
                norms.append(kept(list(model.parameters())).norm())
            optimizer.zero_grad()
            sum(parts).backward()
            optimizer.step()


# --- counts and terms of one's own ----------------------------------------------------------------


@right()
def counts_of_at_least_one(watch, model, optimizer):
    """A micro-batch without a label would be 0 / 0: its count is clamped to 1, its loss is 0."""
    batches = rows(5 * N)
    batches[N + 1][1].fill_(audited.IGNORED)

    def loss_of(model, x, y):
        total = F.cross_entropy(model(x), y, reduction="sum")
        return total / (y != audited.IGNORED).sum().clamp(min=1)

    return audited.train(watch, model, optimizer, batches, loss_of)


@right()
def windows_of_many_rows(watch, model, optimizer):
    """A window ends as soon as it has twelve rows; sums, and gradients divided by their number."""
    held = 0
    with watch(model, optimizer):
        for i, (x, y) in enumerate(rows(6 * N)):
            x, y = x[: 1 + 3 * i % 8], y[: 1 + 3 * i % 8]
            F.cross_entropy(model(x), y, reduction="sum").backward()
            held += len(y)
            if held >= 12:
                for parameter in model.parameters():
                    parameter.grad /= held
                optimizer.step()
                optimizer.zero_grad()
                held = 0


@right()
def penalty_of_every_fourth(watch):
    """A penalty of gradients for the input in every fourth micro-batch alone, four times as heavy,
    added to the loss of that micro-batch."""
    model, passes = network(16, 1), itertools.count()

    def loss_of(model, x, _):
        x = x.clone().requires_grad_()
        scores = model(x)
        loss = F.softplus(-scores).mean()
        if next(passes) % N == 0:
            loss = loss + N * 5 * audited.slopes(scores, x).square().sum(1).mean()
        return loss

    return audited.train(watch, model, adam(model), rows(5 * N), loss_of)


class Repeating(nn.Module):
    """One layer, used so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.layer, self.head = times, network(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.layer(x)
        return self.head(x)


@right("memory.graph")
def layer_used_24_times(watch):
    """ALBERT: the layers of a network share their parameters; no step of time among them."""
    model = Repeating(24)
    return audited.train(watch, model, sgd(model, lr=0.01), rows(6), n=1)


@right("memory.losses_summed")
def twenty_views(watch, model, optimizer):
    """The losses of twenty views of the same rows have one pass."""

    def loss_of(model, x, y):
        views = (x + 0.1 * torch.randn_like(x) for _ in range(20))
        return sum(of_rows(model, view, y) for view in views) / 20

    return audited.train(watch, model, optimizer, rows(5), loss_of, n=1)
