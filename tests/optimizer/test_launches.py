"""The number of kernels that closing a window launches on a device, beside torch's own loop."""

from __future__ import annotations

import pytest
import torch
from support.boundary import OPTIMIZERS, Boundaries
from support.device import Launches, cpu_as_device

from accumext.optimizer._factors import Normaliser

# Torch's loop, as profiles show it too: (scaler, clip) with a fused AdamW.
STOCK = {(True, True): 20, (True, False): 11, (False, True): 10}

boundaries = pytest.mark.parametrize(("scaled", "clipped"), STOCK, ids=["both", "scaler", "clip"])


def launches(call):
    """Count the kernels that a call launches, by the operator."""
    with Launches() as seen:
        call()
    return seen.calls


@boundaries
def test_the_yardstick(scaled, clipped):
    """Were torch's loop counted too high, ours could hide behind it."""
    stock = Boundaries("fused", scaled, clipped).stock(launches)
    assert stock.total() == STOCK[scaled, clipped]


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


@boundaries
@pytest.mark.parametrize("window", [1, 2])
def test_a_fused_step_adds_no_more_than_the_norm_and_what_follows(scaled, clipped, window):
    """Two kernels beside torch's three and those of the scale."""
    with cpu_as_device():
        mine = Boundaries("fused", scaled, clipped).ours(launches, window)
    fused = {"_foreach_add_": 1, "_fused_adamw_": 1, "_foreach_sub_": 1}
    assert mine == {"window_factors": 2} | fused | ({"_amp_update_scale_": 1} if scaled else {})


@pytest.mark.parametrize("unit", [1.0, 0.5])
def test_the_factor_of_a_scale_is_one_launch(unit):
    """torch forms `unit / scale` in two: of the reciprocal, and of its product with the unit."""
    scale = torch.tensor(8.0, dtype=torch.float64)
    with cpu_as_device():
        assert launches(Normaliser(unit, scale=scale).value) == {"div": 1}
