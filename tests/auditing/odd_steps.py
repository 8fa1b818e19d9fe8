"""Right loops that look odd: optimizers, mixed precision, schedules and epochs.

Each means what it computes.
"""

import copy
import math
import warnings

import audited
import torch
from audited import N, adam, network, of_rows, rows, scaler_of, sgd, stepping, train, unwatched
from cases import right
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

# --- optimizers and parameters --------------------------------------------------------------------


@right()
def adapter_in_a_frozen_backbone(watch):
    """Fine-tuning of an adapter and a head; `model.train()` turns on dropout, and the frozen
    BatchNorm is put back to eval, so that its statistics stay those of the pretraining."""
    backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
    adapter, head = network(32, 32), nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 8))
    nn.init.zeros_(adapter[2].weight)
    model = nn.ModuleList([backbone, adapter, head])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    backbone[1].eval()

    def loss_of(_, x, y):
        features = backbone(x)
        return F.cross_entropy(head(features + adapter(features)), y)

    return train(watch, model, optimizer, rows(5 * N), loss_of)


@right()
def thawed_from_the_top(watch):
    """ULMFiT: rates that fall from layer to layer, no decay of biases, a warm-up by LambdaLR, and a
    layer more that is thawed in every epoch; the optimizer has all of them from the start."""
    model = nn.Sequential(network(16, 32), network(32, 32), nn.Linear(32, 8))
    groups = [
        {
            "params": [p for p in layer.parameters() if (p.ndim == 2) == decayed],
            "lr": 1e-2 * 0.4 ** (2 - depth),
            "weight_decay": 0.01 * decayed,
        }
        for depth, layer in enumerate(model)
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    with watch(model, optimizer, windows=6):
        for epoch in range(3):
            for depth, layer in enumerate(model):
                layer.requires_grad_(depth >= 2 - epoch)
            train(unwatched, model, optimizer, rows(2 * N), after=schedule.step)


class Lookahead(torch.optim.Optimizer):
    """After every k steps of the inner optimizer, half way back to where they began."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for parameter, start in zip(group["params"], slow):
                    start.lerp_(parameter, self.alpha)
                    parameter.copy_(start)
        return loss


@right()
def lookahead(watch):
    """An optimizer written by hand around one of torch, which moves parameters after the steps."""
    model = network()
    optimizer = Lookahead(adam(model))
    return train(watch, model, optimizer, rows(5 * N))


class Around(torch.optim.Optimizer):
    """Steps another optimizer; its constructor calls torch's, so that hooks run for both."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


@right()
def optimizer_around_another(watch):
    """As packages of optimizers write them."""
    model = network()
    return train(watch, model, Around(adam(model)), rows(5 * N))


@right()
def as_many_rows_as_micro_batches(watch):
    """A mean of one's own, of four rows, divided by four micro-batches."""
    model, batches = network(), [(x[:N], y[:N]) for x, y in rows(5 * N)]
    return train(watch, model, adam(model), batches, lambda model, x, _: model(x).square().mean())


@right()
def sparse_and_dense(watch):
    """SparseAdam for the embedding, whose gradient is sparse, and Adam for the rest: two optimizers
    of one model that step together."""
    model = audited.LanguageModel(sparse=True)
    table = list(model.embedding.parameters())
    sparse = torch.optim.SparseAdam(table, lr=1e-2)
    dense = torch.optim.Adam([p for p in model.parameters() if p is not table[0]], lr=1e-3)
    with watch(model, dense):
        for i, (tokens, targets) in enumerate(audited.pairs(5 * N)):
            (audited.of_tokens(model(tokens)[0], targets) / N).backward()
            if (i + 1) % N == 0:
                for optimizer in (sparse, dense):
                    optimizer.step()
                    optimizer.zero_grad()


@right()
def centred_gradients(watch, model, optimizer):
    """Hooks take the mean off every row of a weight's gradient, in each pass, which is the same as
    off their sum; norms are logged by a clip that never clips; gradients are cleared first."""
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
    norms = []
    with watch(model, optimizer):
        for i, (x, y) in enumerate(rows(5 * N)):
            if i % N == 0:
                optimizer.zero_grad()
            (of_rows(model, x, y) / N).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=float("inf")))
            if i % N == N - 1:
                optimizer.step()


# --- mixed precision, schedules and epochs --------------------------------------------------------


@right()
def schedule_that_waits_for_the_scaler(watch):
    """The GradScaler skips the first steps and another; the schedule steps only if the
    scale did not fall, which is how one sees that the optimizer did step."""
    model, scaler = network(), scaler_of(init_scale=2.0**23)
    optimizer = adam(model)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    with watch(model, optimizer, windows=8):
        for i, (x, y) in enumerate(rows(8 * N)):
            with torch.autocast("cpu", torch.float16):
                loss = of_rows(model, x, y)
            scaler.scale(loss / N).backward()
            if (i + 1) % N == 0:
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= before:
                    schedule.step()
                optimizer.zero_grad()


@right()
def scaler_of_two_optimizers(watch):
    """An encoder and a decoder with an optimizer and a clip each, one loss and one scaler: both are
    unscaled, clipped by their own norms and stepped before the one update."""
    model = nn.ModuleDict({"encoder": network(16, 4), "decoder": network(4, 16)})
    optimizers = {"encoder": adam(model["encoder"]), "decoder": sgd(model["decoder"])}
    scaler = scaler_of(growth_interval=2)
    with watch(model, optimizers["encoder"]):
        for i, (x, _) in enumerate(rows(5 * N)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model["decoder"](model["encoder"](x)).float(), x)
            scaler.scale(loss / N).backward()
            if (i + 1) % N == 0:
                for (name, optimizer), norm in zip(optimizers.items(), (0.01, 0.1)):
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model[name].parameters(), norm)
                    scaler.step(optimizer)
                scaler.update()
                model.zero_grad()


@right()
def best_of_a_plateau(watch):
    """Validation in eval mode after every step, the rate lowered when its loss does not fall, and
    the best parameters loaded at the end."""
    model = nn.Sequential(network(16, 32), nn.Dropout(0.2), nn.Linear(32, 8))
    optimizer, held_out = sgd(model, lr=2.0), rows(6 * N + 2)[-2:]
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    best, kept = math.inf, model.state_dict()

    def validate():
        nonlocal best, kept
        model.eval()
        with torch.no_grad():
            loss = sum(of_rows(model, x, y).item() for x, y in held_out) / len(held_out)
        schedule.step(loss)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
        model.train()

    with watch(model, optimizer):
        train(unwatched, model, optimizer, rows(6 * N), after=validate)
        model.load_state_dict(kept)


@right("schedule.before_first_step")
def resumed(watch, model, optimizer):
    """From the middle of an epoch: batches that were seen are skipped, and a schedule that was not
    saved is stepped to where it was, before any step of the optimizer."""
    done = 3
    with watch(model, optimizer):
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no step came first
            for _ in range(done):
                schedule.step()
        train(unwatched, model, optimizer, rows(8 * N)[done * N :], after=schedule.step)


@right()
def guarded_against_nan(watch, model, optimizer):
    """A micro-batch whose loss is not finite has no pass and does not count; a window is full when
    it has four that are."""
    good = 0
    with watch(model, optimizer):
        for i, (x, y) in enumerate(rows(7 * N)):
            loss = of_rows(model, x * float("nan") if i % 7 == 3 else x, y)
            if not torch.isfinite(loss):
                continue
            (loss / N).backward()
            good += 1
            if good % N == 0:
                optimizer.step()
                optimizer.zero_grad()


class Trainer:
    """Takes steps after `n` micro-batches; what an epoch leaves open it drops."""

    def __init__(self, model, optimizer, schedule, n):
        self.model, self.optimizer, self.schedule, self.n = model, optimizer, schedule, n

    def train_step(self, batch):
        loss = of_rows(self.model, *batch)
        (loss / self.n).backward()
        return loss.detach()

    def train_epoch(self, batches):
        self.model.train()
        self.optimizer.zero_grad()  # what the last epoch left open
        total = torch.zeros(())
        for i, batch in enumerate(batches, start=1):
            total += self.train_step(batch)
            if i % self.n == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.schedule.step()
        return total.item() / len(batches)


@right("accumulation.dropped")
def trainer_that_drops_the_rest(watch, model, optimizer):
    """A class that trains; ten micro-batches an epoch, windows of four, and the two that are left
    are dropped on purpose by `zero_grad`, like `drop_last`."""
    trainer = Trainer(model, optimizer, lr_scheduler.StepLR(optimizer, 1, gamma=0.5), N)
    with watch(model, optimizer, windows=6):
        for _ in range(3):
            trainer.train_epoch(rows(2 * N + 2))


@right()
def rest_divided_by_what_it_holds(watch, model, optimizer):
    """Ten micro-batches an epoch; the last two make a window of their own and are divided by two;
    the schedule steps once an epoch."""
    schedule, batches = lr_scheduler.ExponentialLR(optimizer, 0.9), rows(2 * N + 2)
    with watch(model, optimizer, windows=9):
        for _ in range(3):
            for window in stepping(unwatched, model, optimizer, audited.windows_of(batches)):
                for x, y in window:
                    (of_rows(model, x, y) / len(window)).backward()
            schedule.step()
