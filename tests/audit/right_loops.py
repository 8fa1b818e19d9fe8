"""Right loops: those of torch's documentation, written anew, and of the wrapper.

As in wrong_loops.py, `watch` stands around each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
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


def adam(model: nn.Module, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, **options)


def every_batch(audit: Any, model: nn.Module, optimizer: Any, loss_of: Any) -> Any:
    """The loop of a tutorial: a step with every batch."""
    with audit as opened:
        for x, y in rows(6):
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()
    return opened


def amp(watch: Watch = accumext.audit) -> Any:
    """Mixed precision, as in the recipe."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of()
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = of_rows(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return audit


def amp_with_clipping(watch: Watch = accumext.audit) -> Any:
    """`unscale_`, then the clip."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of(growth_interval=2)
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = of_rows(model, x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            scaler.step(optimizer)
            scaler.update()
    return audit


def amp_with_accumulation(watch: Watch = accumext.audit) -> Any:
    """Scaled and divided losses, and the scaler once per window."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of(growth_interval=1)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = of_rows(model, x, y) / N
            scaler.scale(loss).backward()
            if (i + 1) % N == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return audit


def amp_with_an_overflow(watch: Watch = accumext.audit) -> Any:
    """A first scale that is too large: one step is skipped, and the scale halved."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of(init_scale=2.0**127)
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            optimizer.zero_grad()
            scaler.scale(of_rows(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return audit


def accumulation(watch: Watch = accumext.audit) -> Any:
    """Every loss divided by n, a step every n batches, clipped."""
    model = network()
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            loss = of_rows(model, x, y) / N
            loss.backward()
            if (i + 1) % N == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return audit


def accumulation_to_the_end(watch: Watch = accumext.audit) -> Any:
    """The last window holds two batches, and is divided by two."""
    model, batches = network(), rows(2 * N + 2)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for begin in range(0, len(batches), N):
            window = batches[begin : begin + N]
            optimizer.zero_grad()
            for x, y in window:
                (of_rows(model, x, y) / len(window)).backward()
            optimizer.step()
    return audit


def mean_over_tokens(watch: Watch = accumext.audit) -> Any:
    """Sums over tokens, divided by the tokens of the window."""
    model, batches = network(), tagged()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for begin in range(0, len(batches), N):
            window = batches[begin : begin + N]
            tokens = sum((y != IGNORED).sum() for _, y in window)
            for x, y in window:
                (of_labels(model, x, y, "sum") / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*network(16, 1))


def gan(watch: Watch, audited: str) -> Any:
    """Real, fake and generator: three backward passes, two optimizers."""
    both = nn.ModuleDict({"g": network(8, 16), "d": Critic()})
    g, d = both["g"], both["d"]
    optimizers = {name: adam(model, betas=(0.5, 0.999)) for name, model in both.items()}
    noise = torch.Generator().manual_seed(4)
    with watch(both, optimizers[audited]) as audit:
        for x, _ in rows(6):
            ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            d.zero_grad()
            F.binary_cross_entropy_with_logits(d(x), ones).backward()
            fake = g(torch.randn(len(x), 8, generator=noise))
            F.binary_cross_entropy_with_logits(d(fake.detach()), zeros).backward()
            optimizers["d"].step()
            g.zero_grad()
            F.binary_cross_entropy_with_logits(d(fake), ones).backward()
            optimizers["g"].step()
    return audit


def generator(watch: Watch = accumext.audit) -> Any:
    """A GAN, whose generator is looked at."""
    return gan(watch, "g")


def discriminator(watch: Watch = accumext.audit) -> Any:
    """A GAN, whose discriminator is looked at."""
    return gan(watch, "d")


def variational_autoencoder(watch: Watch = accumext.audit) -> Any:
    """The sum of a reconstruction and of a divergence over the batch, undivided."""
    model = nn.ModuleDict({"encoder": network(16, 8), "decoder": network(4, 16)})
    optimizer = adam(model)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        rebuilt = F.mse_loss(model["decoder"](code), x, reduction="sum")
        return rebuilt - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()

    return every_batch(watch(model, optimizer), model, optimizer, loss_of)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(11, 16), nn.LSTM(16, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.rnn(self.embedding(tokens), state)
        return self.head(output).flatten(0, 1), state


def language_model(watch: Watch = accumext.audit) -> Any:
    """An LSTM that goes on with its state, which is detached between the batches."""
    torch.manual_seed(1)
    model = LanguageModel()
    text = torch.randint(11, (6 * 20 + 1, 4), generator=torch.Generator().manual_seed(2))
    optimizer, state = sgd(model), None
    with watch(model, optimizer) as audit:
        for begin in range(0, len(text) - 1, 20):
            optimizer.zero_grad()
            logits, state = model(text[begin : begin + 20], state)
            state = tuple(s.detach() for s in state)
            F.cross_entropy(logits, text[begin + 1 : begin + 21].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    return audit


def lbfgs(watch: Watch = accumext.audit) -> Any:
    """An optimizer that calls a closure as often as it likes."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = rows(1)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = of_rows(model, x, y)
        loss.backward()
        return loss

    with watch(model, optimizer) as audit:
        for _ in range(5):
            optimizer.step(closure)
    return audit


def window_of_the_wrapper(watch: Watch = accumext.audit) -> Any:
    """Scaled, weighted by tokens, clipped, and the rest flushed."""
    model, batches = network(), tagged(3 * N + 2)
    scaler = scaler_of(growth_interval=2)
    optimizer = accumext.AccumulatingOptimizer(sgd(model), window=N, max_norm=0.1, scaler=scaler)
    schedule = ExponentialLR(optimizer, 0.9)
    with watch(model, optimizer) as audit:
        for x, y in batches:
            optimizer.backward(of_labels(model, x, y), weight=(y != IGNORED).sum())
            optimizer.step()
            if optimizer.stepped:
                schedule.step()
        optimizer.flush()
    return audit


def half_precision_in_the_wrapper(watch: Watch = accumext.audit) -> Any:
    """Parameters in bfloat16, summed in float32."""
    model = network().bfloat16()
    optimizer = accumext.AccumulatingOptimizer(sgd(model), window=16)
    with watch(model, optimizer) as audit:
        for x, y in rows(32):
            optimizer.backward(of_rows(model, x.bfloat16(), y))
            optimizer.step()
            optimizer.zero_grad()
    return audit
