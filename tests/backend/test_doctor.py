"""`accumext doctor` on a tree with one tiny kernel: what it reports, and its exit status."""

from __future__ import annotations

import json
import types

import pytest
import torch
from support.source_tree import Tree

from accumext import reference
from accumext.backend import _doctor


@pytest.mark.build
def test_doctor_fails_when_a_kernel_computes_wrongly(tree: Tree) -> None:
    done = tree.run("import sys; from accumext.__main__ import main; sys.exit(main(['doctor']))")
    assert done.returncode == 1, done.stderr
    assert "self-test scale_ on cpu" in done.stdout
    assert done.stdout.rstrip().endswith("self-test FAILED")


@pytest.mark.build
def test_doctor_passes_on_the_reference_and_says_how_to_leave_it(tree: Tree) -> None:
    code = "import sys; from accumext.__main__ import main; sys.exit(main(['doctor', '--json']))"
    done = tree.run(code, ACCUMEXT_BACKEND="reference")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "reference"
    assert report["fix"] == "unset ACCUMEXT_BACKEND"


@pytest.mark.parametrize(("ulps", "passes"), [(-2, True), (0, True), (2, True), (16, False)])
@pytest.mark.parametrize("name", ["total_norm", "unscale_check_clip_accumulate_"])
def test_a_norm_may_be_rounded_in_another_order_but_not_be_another(name, ulps, passes) -> None:
    """GPUs add in another order, and their `pow` is good to a few units in the last place."""
    error = 1.0 + ulps * torch.finfo(torch.float32).eps

    def total_norm(grads, **options):
        return reference.total_norm(grads, **options) * error

    def clipped(main_grads, grads, *, inv_scale, max_norm):
        norm = total_norm(grads, inv_scale=inv_scale)
        factor = inv_scale * reference.clip_coef(norm, max_norm)
        reference.accumulate_(main_grads, grads, inv_scale=factor)
        return norm

    def call(ops, *lists):
        op = {"total_norm": total_norm, "unscale_check_clip_accumulate_": clipped}[name]
        rounded = types.SimpleNamespace(**{name: op})
        return _doctor._GRADIENT_OPS[name](ops if ops is reference else rounded, *lists)

    if passes:
        _doctor._test_gradient_op(call, "cpu")
    else:
        with pytest.raises(AssertionError):
            _doctor._test_gradient_op(call, "cpu")
