"""Examples, recipes and trainers under an audit that is told neither model nor optimizer."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from support import ROOT
from support.optimizer_oracle import loss_of, make_batches, make_model
from test_from_your_loop import stand_ins, trained  # noqa: F401
from your_loops import LOOPS, SIDES, N

import accumext

pytestmark = [
    pytest.mark.usefixtures("forget_accelerate"),
    # As in tests/conformance, and what a script leaves behind at its end.
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
        "ignore:.*does not have many workers",
        "ignore:GPU available but not used",
        "ignore:.*number of training batches",
        "ignore:.pin_memory. argument is set as true:UserWarning",
    ),
]
FRAMEWORKS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "ignite": "ignite",
    "trainer": "transformers",
}


def names(audit: accumext.Audit) -> set[str]:
    return {found.name for found in audit.findings}


DRIVER = """
import json, os, runpy, sys
import accumext
leave, os._exit = os._exit, print  # at the end of one of them
with accumext.audit() as audit:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
print(json.dumps([[f.name for f in audit.findings], len(audit.to_json()["windows"])]), flush=True)
leave(0)
"""


@pytest.mark.process
@pytest.mark.parametrize("name", ["with_ddp", "with_torchrun_elastic"])
def test_recipe_with_a_process_group(name, tmp_path):
    """A recipe that makes a process group, and has ended it when the block closes"""
    path = ROOT / "examples" / "recipes" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("bfloat16_masters", ["--steps", "3"], set()),
        (
            "is_my_loop_right",
            ["--steps", "2", "--vocabulary", "2000", "--length", "50"],
            {"one graph over many steps"},  # and true
        ),
    ],
)
def test_example(name, arguments, expected, tmp_path, monkeypatch, capsys):
    """An example has windows, and no finding but what it is about"""
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.chdir(tmp_path)
    with accumext.audit() as audit:
        runpy.run_path(str(path), run_name="__main__")
    assert names(audit) == expected, str(audit)
    assert audit.to_json()["windows"]


YOURS = [(name, side) for name in LOOPS if name != "ddp" for side in SIDES]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("name", "side"), YOURS)
def test_both_sides_of_your_loop(name, side, tmp_path, monkeypatch):
    """Accumulation by hand or by the framework before, by the wrapper after: no finding"""
    pytest.importorskip(FRAMEWORKS.get(name, "torch"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with accumext.audit() as audit:
        trained(name, side, LOOPS[name].batches(), tmp_path)
    # tbptt(k1=1) truncates
    expected = {"truncated gradient"} if (name, side) == ("backward_per_token", "after") else set()
    assert names(audit) == expected, str(audit)
    assert audit.to_json()["windows"]


@pytest.mark.parametrize("name", ["tutorial", "accelerate", "lightning"])
def test_a_last_window_of_two(name, tmp_path, monkeypatch):
    """The tutorial loop, Accelerate and Lightning divide it by four as well, `flush` by two"""
    pytest.importorskip(FRAMEWORKS.get(name, "torch"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    batches = LOOPS[name].batches()[: 2 * N + 2]
    audits = {}
    for side in SIDES:
        with accumext.audit() as audits[side]:
            trained(name, side, batches, tmp_path)
    assert names(audits["after"]) == set(), str(audits["after"])
    (found,) = audits["before"].findings
    assert (found.name, found.value) == ("divisor of a full window", pytest.approx(2 / N))


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch", "window=1"])
def test_accelerate_is_named(wrapped):
    """`accelerator.accumulate`; the audit is given what `prepare` returned"""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(
        model, accumext.AccumulatingOptimizer(adam) if wrapped else adam
    )
    with accumext.audit(model, optimizer) as audit:
        for batch in make_batches(12):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert names(audit) == set(), str(audit)
    assert len(audit.to_json()["windows"]) == 4
