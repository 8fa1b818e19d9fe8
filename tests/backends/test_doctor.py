"""`accumext doctor` on a tree with one tiny kernel: what it reports, and its exit status."""

from typing import Any

import pytest
import torch
from torch import Tensor

from accumext.backends import _self_test
from accumext.tensors.torch_private import call_default_kernel, operator


@pytest.mark.build
def test_doctor_passes_on_the_reference_and_says_how_to_leave_it(tree):
    status, report = tree.doctor(ACCUMEXT_BACKEND="reference")
    assert status == 0, report
    assert (report["backend"], report["fix"]) == ("reference", "unset ACCUMEXT_BACKEND")


class Rounded:
    """An operator whose norm, and so its clip coefficient, is rounded in another way."""

    def __init__(self, name: str, error: float) -> None:
        self.real, self.error = operator(name), error
        self._op_dk = self.real._op_dk  # the default kernel

    def __call__(self, **call: Any) -> Tensor:
        if "max_norm" in call:
            call["max_norm"] /= self.error
        return call_default_kernel(self.real, **call) * self.error


@pytest.mark.parametrize(("ulps", "passes"), [(-2, True), (0, True), (2, True), (16, False)])
@pytest.mark.parametrize("name", ["total_norm", "unscale_check_clip_accumulate_"])
def test_a_norm_may_be_rounded_in_another_order_but_not_be_another(name, ulps, passes, monkeypatch):
    """GPUs add in another order, and their `pow` is good to a few units in the last place."""
    error = 1.0 + ulps * torch.finfo(torch.float32).eps
    monkeypatch.setattr(_self_test, "operator", lambda name: Rounded(name, error))
    assert (_self_test.outcome(name, torch.device("cpu")) == _self_test.OK) == passes
