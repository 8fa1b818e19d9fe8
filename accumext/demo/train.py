"""The demo's training loop, and its loss on words it has not seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from accumext.demo.memory import process_peak
from accumext.demo.model import Batch, WordModel
from accumext.demo.progress import Progress
from accumext.demo.record import HeldOut, Record, Settings, Step, megabytes
from accumext.demo.text import Text, windows
from accumext.optimizer import AccumulatingOptimizer

WINDOW = 2  # micro-batches per optimizer step
MAX_NORM = 1.0
LEARNING_RATE = 0.04  # high, for a run of few steps
CONTEXT = 32  # words before the targets
LAST_TEACHER_SHARE = 0.9  # of "scheduled", which starts at 1

_PROBE_STEPS = 8
_WORTHWHILE = 1.3  # times faster; less is within the noise of a probe


@dataclass(frozen=True)
class Precision:
    """The dtype that autocast rounds to, and the reason."""

    device: torch.device
    dtype: torch.dtype | None  # None: no autocast
    reason: str

    def autocast(self) -> AbstractContextManager[None]:
        """Around every forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


def training_batches(text: Text, settings: Settings) -> Iterator[Batch]:
    """Stretches of the training text from random places, without end."""
    generator = torch.Generator().manual_seed(settings.seed)
    length = CONTEXT + settings.length
    while True:
        last = len(text.training) - length
        starts = torch.randint(last + 1, (settings.batch,), generator=generator)
        yield _batch(text.training, starts, settings)


def held_out_batches(text: Text, settings: Settings, count: int) -> list[Batch]:
    """Stretches evenly spread over the held-out text."""
    last = len(text.held_out) - CONTEXT - settings.length
    starts = torch.linspace(0, last, count * settings.batch).long()
    return [_batch(text.held_out, starts[i::count], settings) for i in range(count)]


def teacher_share(settings: Settings, progress: float) -> float:
    """Share of targets among the tokens fed, the rest being argmaxes; `progress` is in [0, 1]."""
    if settings.feedback == "scheduled":
        return 1 - (1 - LAST_TEACHER_SHARE) * progress
    return 1.0 if settings.feedback == "teacher" else 0.0


def choose_precision(model: WordModel, batch: Batch, device: torch.device) -> Precision:
    """fp16 with a loss scale on a GPU; on a CPU bf16 if a few steps are clearly faster in it."""
    if device.type == "cuda":
        return Precision(device, torch.float16, "float16 autocast with a loss scale")
    short = Batch(batch.context, batch.targets[:_PROBE_STEPS])
    seconds = []
    for dtype in (None, torch.bfloat16):
        precision = Precision(device, dtype, "")
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            with precision.autocast():
                out = model.decode(short, "greedy", 0.0, torch.Generator())
            out.loss.backward()
            model.zero_grad()
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    ratio = seconds[0] / seconds[1]
    measured = f"bfloat16 autocast measured {ratio:.2f} times as fast here"
    if ratio >= _WORTHWHILE:
        return Precision(device, torch.bfloat16, measured)
    return Precision(device, None, f"float32 ({measured})")


def train(model: WordModel, text: Text, settings: Settings, record: Record) -> None:
    """Train for `settings.steps` optimizer steps, each in the record as soon as it is done."""
    device = torch.device(settings.device)
    batches = training_batches(text, settings)
    precision = choose_precision(model, next(batches).to(device), device)
    record.precision = precision.reason
    generator = torch.Generator(device).manual_seed(settings.seed)
    optimizer = AccumulatingOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99)),
        window=WINDOW,
        max_norm=MAX_NORM,
        scaler=torch.amp.GradScaler() if device.type == "cuda" else None,
    )
    warm_up = max(1, settings.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warm_up, 1 - done / settings.steps)
    )
    losses: list[Tensor] = []
    with Progress("training", settings.steps) as progress:
        begin = time.perf_counter()
        while len(record.training) < settings.steps:
            batch = next(batches).to(device)
            share = teacher_share(settings, len(record.training) / settings.steps)
            with precision.autocast():
                out = model.decode(batch, settings.feedback, share, generator)
            optimizer.backward(out.loss)
            optimizer.step()
            losses.append(out.loss.detach())
            if optimizer.stepped:
                schedule.step()
                loss = float(torch.stack(losses).mean())  # waits for the device: once per window
                now = time.perf_counter()
                step = Step(
                    loss=loss,
                    gradient_norm=optimizer.stats()["total_norm"],
                    teacher_share=share,
                    words_per_second=WINDOW * batch.targets.numel() / (now - begin),
                    peak_memory=process_peak(device),
                )
                record.training.append(step)
                progress.end(
                    f"loss {step.loss:.3f}",
                    f"{step.words_per_second:,.0f} words/s",
                    f"gradient norm {step.gradient_norm:.3f}",
                    f"peak memory {megabytes(step.peak_memory)}",
                )
                losses.clear()
                begin = now


@torch.no_grad()
def evaluate(model: WordModel, text: Text, settings: Settings, count: int) -> HeldOut:
    """Teacher-forced loss of the held-out words, and the unigram loss of the same words."""
    device, generator = torch.device(settings.device), torch.Generator()
    batches = held_out_batches(text, settings, count)
    losses = []
    with Progress("evaluating", count) as progress:
        for batch in batches:
            out = model.decode(batch.to(device), "teacher", 1.0, generator)
            losses.append(float(out.loss))
            progress.end()
    words = torch.cat([batch.targets.flatten() for batch in batches])
    return HeldOut(
        words=len(words), loss=sum(losses) / count, unigram_loss=text.unigram_loss(words)
    )


def _batch(stream: Tensor, starts: Tensor, settings: Settings) -> Batch:
    columns = windows(stream, starts, CONTEXT + settings.length)
    return Batch(columns[:CONTEXT], columns[CONTEXT:])
