"""The number of kernels that closing a window launches on a device, beside torch's own loop."""

import pytest
import torch
from support.boundary import OPTIMIZERS, Boundaries
from support.device import Launches, cpu_as_device

STOCK = [(True, True), (True, False), (False, True)]  # a scaler, a clip


def launches(call):
    """Count the kernels that a call launches, by the operator."""
    with Launches() as seen:
        call()
    return seen.calls


HALF = torch.bfloat16  # gradients are kept in float32, and rounded in a pass of ours
WEIGHT = torch.tensor(3.0)  # on the device
CASES = [
    *(
        (Boundaries(o, *both), window, {})
        for o in OPTIMIZERS
        for both in STOCK
        for window in (1, 3)
    ),
    *((Boundaries(o, False, True, HALF), window, {}) for o in OPTIMIZERS for window in (1, 2)),
    *(
        (Boundaries("fused", *both), window, {"weight": WEIGHT, "on_nonfinite": policy})
        for both in STOCK
        for policy in ("skip_window", "skip_micro_batch")
        for window in (1, 2)
    ),
]


@pytest.mark.parametrize(("pair", "window", "options"), CASES)
def test_closing_a_window_launches_no_more_than_torch(pair, window, options):
    theirs = pair.stock(launches)
    with cpu_as_device():
        mine = pair.ours(launches, window, **options)
    assert mine.total() <= theirs.total(), (mine, theirs)
