"""Scalars of a window: numbers of the host and of a device alike, and what waits for it."""

import itertools
import math

import pytest
import torch
from support.device import DeviceReads, cpu_as_device

from accumext.tensors import scalars


def number(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("function", [scalars.divide, scalars.maximum])
def test_numbers_of_the_host_and_of_a_device_are_alike(function):
    """Whichever of two operands are on the device, which nothing reads."""
    for a, b in itertools.product((0.0, 1.0, 4.0, math.inf), repeat=2):
        with cpu_as_device(), DeviceReads() as reads:
            results = [
                function(*pair) for pair in itertools.product((a, number(a)), (b, number(b)))
            ]
        assert reads.count == 0
        assert [isinstance(result, torch.Tensor) for result in results] == [False, True, True, True]
        truth = torch.true_divide if function is scalars.divide else torch.maximum
        expected = [truth(number(a), number(b)).item()] * 4
        assert list(map(float, results)) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_the_host_takes_what_is_free_and_no_more():
    assert scalars.to_host_if_free(torch.tensor(0.5)) == 0.5
    assert isinstance(scalars.to_host_if_free(torch.tensor(0.5)), float)
    with cpu_as_device(), DeviceReads() as reads:
        kept = scalars.to_host_if_free(torch.tensor(0.5))
    assert (reads.count, kept.dtype) == (0, torch.float64)


def test_an_operator_on_a_device_takes_numbers_as_they_are():
    meta = torch.device("meta")
    assert scalars.to_device(meta, 0.5) == 0.5
    assert scalars.to_device(meta, number(0.5)).device == meta
    compiled = torch.compile(lambda x: scalars.to_device(x.device, 0.1) * x, backend="eager")
    assert torch.equal(compiled(number(2.0)), number(0.1) * 2)


class Recorded:
    """Stands for a tensor of a device that is asked to move."""

    device = torch.device("cuda")

    def to(self, device, dtype, non_blocking):
        return device.type, non_blocking


@pytest.mark.parametrize(("place", "waits"), [("cpu", True), ("cuda", False)])
def test_what_is_sent_to_the_host_is_waited_for(place, waits):
    """Else torch copies into pinned memory behind the host's back, which would read it too soon."""
    assert scalars.sent(Recorded(), torch.device(place)) == (place, not waits)
