"""More wrong loops: of clips, of loss scales, of schedules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR
from wrong_loops import N, Watch, network, of_rows, rows, scaler_of, sgd

import accumext


def clip_of_scaled_gradients(watch: Watch = accumext.audit) -> Any:
    """AMP: clipped without `unscale_` before."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of()
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return audit


def clip_after_every_backward(watch: Watch = accumext.audit) -> Any:
    """Clipped with every micro-batch, not once for the window."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) / N).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def clip_of_the_teacher(watch: Watch = accumext.audit) -> Any:
    """Distillation: the parameters of the teacher are clipped, whom nobody trains."""
    student, teacher = network(), copy.deepcopy(network())
    optimizer = sgd(student)
    with watch(student, optimizer) as audit:
        for x, _ in rows(4):
            with torch.no_grad():
                wanted = teacher(x) + 1.0
            mse_loss(student(x), wanted).backward()
            nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return audit


def update_with_every_micro_batch(watch: Watch = accumext.audit) -> Any:
    """AMP: `unscale_` for the log and `update` with every micro-batch, `step` once per window."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of()
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            scaler.scale(of_rows(model, x, y) / N).backward()
            scaler.unscale_(optimizer)
            if (i + 1) % N == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    return audit


def scale_set_inside_the_window(watch: Watch = accumext.audit) -> Any:
    """AMP: the scale is halved by hand between two micro-batches whose gradients add up."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of()
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if i % N == 1:
                scaler.update(scaler.get_scale() / 2)
            if (i + 1) % N == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return audit


def step_past_the_scaler(watch: Watch = accumext.audit) -> Any:
    """AMP: `optimizer.step()` on scaled gradients, which Adam's normalisation hides."""
    model = network()
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-3), scaler_of()
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def step_on_nan(watch: Watch = accumext.audit) -> Any:
    """One broken row in the second window, no scaler, and nobody looks at the loss."""
    model, batches = network(), rows()
    batches[N + 1][0][0, 0] = float("nan")
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(batches):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def broken_feature(watch: Watch = accumext.audit) -> Any:
    """AMP: a feature that is NaN in all rows; the scaler skips every step, and nothing is said."""
    model, batches = network(), rows()
    for x, _ in batches:
        x[:, 3] = float("nan")
    optimizer, scaler = sgd(model), scaler_of()
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(batches):
            scaler.scale(of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return audit


def schedule_with_every_micro_batch(watch: Watch = accumext.audit) -> Any:
    """The schedule goes on with every batch, the optimizer with every fourth."""
    model = network()
    optimizer = sgd(model)
    schedule = ExponentialLR(optimizer, gamma=0.99)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    return audit


def schedule_first(watch: Watch = accumext.audit) -> Any:
    """`schedule.step()` above the step, as before torch 1.1: the first rate is never used."""
    model = network()
    optimizer = sgd(model)
    schedule = ExponentialLR(optimizer, gamma=0.9)
    with watch(model, optimizer) as audit:
        for x, y in rows(4):
            of_rows(model, x, y).backward()
            schedule.step()
            optimizer.step()
            optimizer.zero_grad()
    return audit
