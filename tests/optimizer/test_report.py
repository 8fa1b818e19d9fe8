"""The report of the last window, with numbers of the host and of a device, and its words."""

import pytest
import torch
from support.device import DeviceReads, cpu_as_device
from torch import Tensor

from accumext.optimizer._report import WindowReport, named


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
