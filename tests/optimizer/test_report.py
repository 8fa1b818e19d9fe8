"""The report of the last window: `opt.last` and `opt.stats()`, by definition."""

from __future__ import annotations

import pytest
import torch
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import (
    adam,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    one_call,
    window_gradient,
    wrapped,
)
from torch import Tensor

from accumext.optimizer._report import WindowReport, named

BATCHES = make_batches(2)


@pytest.mark.parametrize("max_norm", [0.01, None])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_report_of_a_window(norm_type, max_norm):
    model, scaler = make_model(), growing_scaler()
    options = {"window": 2, "max_norm": max_norm, "norm_type": norm_type, "scaler": scaler}
    opt = wrapped(model, adam, **options)
    grads = window_gradient(model, BATCHES, [3.0, 1.0])
    for batch, weight in zip(BATCHES, [3.0, 1.0]):
        one_call(opt, loss_of(model, batch), weight=weight)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), norm_type).item()
    assert opt.stepped
    assert opt.last.total_norm.item() == pytest.approx(norm, rel=1e-12)
    clip_coef = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
    assert opt.last.clip_coef.item() == pytest.approx(clip_coef, rel=1e-12)
    assert (opt.last.weight, opt.last.micro_batches, opt.last.loss_scale) == (4.0, 2, 1024.0)
    assert not opt.last.skipped
    assert opt.last.nonfinite == []
    numbers = ["total_norm", "clip_coef", "loss_scale", "weight", "micro_batches", "skipped"]
    assert opt.stats() == {name: float(getattr(opt.last, name)) for name in numbers}


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise"])
def test_the_report_keeps_the_loss_scale_of_a_window_that_left_grad(policy, weight):
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = wrapped(model, adam, scaler=scaler, on_nonfinite=policy)
    opt.backward(loss_of(model, BATCHES[0]), weight)
    opt.zero_grad()
    opt.flush()
    assert (opt.last.loss_scale, opt.last.weight) == (4.0, weight)


def report_of(skipped):
    """A window whose numbers are on the host, or on a device that the host must not wait for."""

    numbers = {"total_norm": 0.25, "clip_coef": 0.5, "loss_scale": 8.0, "weight": 3.0}
    numbers["micro_batches"] = 2.0
    if isinstance(skipped, Tensor):
        numbers = {name: torch.tensor(value) for name, value in numbers.items()}
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    return WindowReport(skipped=skipped, **numbers, **where)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_a_report_of_a_device_says_what_one_of_the_host_does(skipped):
    host, device = report_of(skipped), report_of(torch.tensor(skipped))
    with cpu_as_device(), DeviceReads() as reads:
        assert not device.known_to_be_skipped
        for report in (host, device):
            assert [report.total_norm.dtype, report.weight.dtype] == [torch.float32, torch.float64]
    assert reads.count == 0
    assert host.known_to_be_skipped == bool(skipped)
    assert device.skipped == host.skipped == bool(skipped)
    assert device.stats() == host.stats()
    assert device.micro_batches == host.micro_batches == 2
    numbers = "total_norm=0.25, clip_coef=0.5, loss_scale=8, weight=3, micro_batches=2"
    expected = f"WindowReport({numbers}, skipped={skipped:g}, nonfinite=[])"
    assert repr(device) == repr(host) == expected


def test_a_message_names_parameters_or_says_how_to_have_names():
    assert named(["encoder.weight", "head.bias"]) == "encoder.weight, head.bias"
    advice = "an optimizer made of model.named_parameters() knows their names"
    assert named([0, 3]) == f"parameters 0, 3 ({advice})"
    assert named([]) == ""
    report = report_of(1.0)
    report.name([1])
    assert repr(report).endswith(f"nonfinite=[parameters 1 ({advice})])")
