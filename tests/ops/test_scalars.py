"""Scalars of a window: numbers of the host and 0-dim tensors of a device, alike."""

from __future__ import annotations

import math

import pytest
import torch
from support.device import DeviceReads, cpu_as_device

from accumext import _scalars

NAN, INF = math.nan, math.inf


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def same(got, expected):
    """Whatever holds it, the number; nan is nan."""
    assert float(got) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.fixture(params=["host", "device", "first", "second"])
def pair(request):
    """Two numbers as the host has them, as a device has them, and one of each."""
    first = number if request.param in ("device", "first") else float
    second = number if request.param in ("device", "second") else float

    def of(function, a, b):
        with cpu_as_device(), DeviceReads() as reads:
            result = function(first(a), second(b))
        assert reads.count == 0
        assert isinstance(result, torch.Tensor) == (request.param != "host")
        return result

    return of


def test_division(pair):
    for a, b, expected in [(1.0, 4.0, 0.25), (0.0, 2.0, 0.0), (3.0, 0.0, INF), (0.0, 0.0, NAN)]:
        same(pair(_scalars.divide, a, b), expected)


def test_maximum(pair):
    for a, b in [(1.0, 4.0), (4.0, 1.0), (-2.0, -3.0), (0.0, INF)]:
        same(pair(_scalars.maximum, a, b), max(a, b))


def test_the_host_takes_what_is_free_and_no_more():
    assert _scalars.to_host_if_free(torch.tensor(0.5)) == 0.5
    assert isinstance(_scalars.to_host_if_free(torch.tensor(0.5)), float)
    with cpu_as_device(), DeviceReads() as reads:
        kept = _scalars.to_host_if_free(torch.tensor(0.5))
    assert (reads.count, kept.dtype) == (0, torch.float64)


def test_as_tensor():
    made = _scalars.as_tensor(0.1, torch.float64)
    assert (made.shape, made.dtype, made.item()) == ((), torch.float64, 0.1)
    moved = _scalars.as_tensor(number(0.1), torch.float32, torch.device("meta"))
    assert (moved.device.type, moved.dtype) == ("meta", torch.float32)
    assert _scalars.as_tensor(torch.zeros((), device="meta"), torch.float64).device.type == "meta"


def test_an_operator_on_a_device_takes_numbers_as_they_are():
    meta = torch.device("meta")
    assert _scalars.to_device(meta, 0.5) == 0.5
    assert _scalars.to_device(meta, number(0.5)).device == meta
    compiled = torch.compile(lambda x: _scalars.to_device(x.device, 0.1) * x, backend="eager")
    assert torch.equal(compiled(number(2.0)), number(0.1) * 2)


class Recorded:
    """Stands for a tensor of a device that is asked to move."""

    device = torch.device("cuda")

    def to(self, device, dtype, non_blocking):
        return device.type, non_blocking


@pytest.mark.parametrize(("place", "waits"), [("cpu", True), ("cuda", False)])
def test_what_is_sent_to_the_host_is_waited_for(place, waits):
    """Else torch copies into pinned memory behind the host's back, which would read it too soon."""
    assert _scalars.sent(Recorded(), torch.device(place)) == (place, not waits)
