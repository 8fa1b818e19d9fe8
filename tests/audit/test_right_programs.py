"""Examples, recipes and trainers under an audit that is told neither model nor optimizer."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.optimizer_oracle import loss_of, make_batches, make_model
from test_from_your_loop import stand_ins, trained  # noqa: F401
from torch.utils.data import DataLoader
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

CUT = "truncated gradient"  # of tbptt(k1=1), and true
RECIPES = {  # name -> packages beside torch
    "plain_pytorch": [],
    "with_accelerate": ["accelerate"],
    "with_ddp": [],
    "with_ignite": ["ignite"],
    "with_lightning": ["lightning"],
    "with_lightning_manual": ["lightning"],
    "with_tensorboard": ["tensorboard"],
    "with_torchrun_elastic": [],
    "with_trainer": ["transformers", "accelerate"],
}
GROUPS = {"with_ddp", "with_torchrun_elastic"}
EXAMPLES = {  # name -> arguments, what is true of the first optimizer's first four windows
    "backward_per_token": (["--steps", "2"], set()),
    "bfloat16_masters": (["--steps", "3"], set()),
    "is_my_loop_right": (
        ["--steps", "2", "--vocabulary", "2000", "--length", "50"],
        {"one graph over many steps"},  # and true
    ),
    "rnn_with_amp": (["--steps", "4", "--vocabulary", "500", "--length", "20"], set()),
    "tutorial_loop": (["--steps", "10"], set()),
    "what_accumulation_is": ([], set()),
}
OTHERS = {"head_in_slices"}  # has no optimizer


def run(path: Path, arguments: list[str], folder: Path, monkeypatch) -> accumext.Audit:
    """A script by itself, as `python` runs it, inside the block."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.chdir(folder)
    with accumext.audit() as audit:
        runpy.run_path(str(path), run_name="__main__")
    return audit


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
@pytest.mark.parametrize("name", sorted(GROUPS))
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
@pytest.mark.parametrize("name", sorted(set(RECIPES) - GROUPS))
def test_recipe(name, tmp_path, monkeypatch, capsys):
    """A recipe has four windows, and no finding"""
    for package in RECIPES[name]:
        pytest.importorskip(package)
    path = ROOT / "examples" / "recipes" / f"{name}.py"
    audit = run(path, [], tmp_path, monkeypatch)
    assert names(audit) == set(), str(audit)
    assert len(audit.to_json()["windows"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path, monkeypatch, capsys):
    """An example has windows, and no finding but what it is about"""
    arguments, expected = EXAMPLES[name]
    audit = run(ROOT / "examples" / f"{name}.py", arguments, tmp_path, monkeypatch)
    assert names(audit) == expected, str(audit)
    assert audit.to_json()["windows"]


def test_every_script_is_here():
    """All recipes and examples"""
    assert {path.stem for path in ROOT.glob("examples/recipes/*.py")} == set(RECIPES)
    scripts = {path.stem for path in ROOT.glob("examples/*.py")} - OTHERS
    assert scripts == set(EXAMPLES)


YOURS = [(name, side) for name in LOOPS if name != "ddp" for side in SIDES]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("name", "side"), YOURS)
def test_both_sides_of_your_loop(name, side, tmp_path, monkeypatch):
    """Accumulation by hand or by the framework before, by the wrapper after: no finding"""
    for package in {"trainer": ["transformers"]}.get(name, [name]):
        if name in ("accelerate", "lightning", "ignite", "trainer"):
            pytest.importorskip(package)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with accumext.audit() as audit:
        trained(name, side, LOOPS[name].batches(), tmp_path)
    expected = {CUT} if (name, side) == ("backward_per_token", "after") else set()
    assert names(audit) == expected, str(audit)
    assert audit.to_json()["windows"]


@pytest.mark.parametrize("name", ["tutorial", "accelerate", "lightning"])
def test_a_last_window_of_two(name, tmp_path, monkeypatch):
    """The tutorial loop, Accelerate and Lightning divide it by four as well, `flush` by two"""
    if name != "tutorial":
        pytest.importorskip(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    batches = LOOPS[name].batches()[: 2 * N + 2]
    audits = {}
    for side in SIDES:
        with accumext.audit() as audits[side]:
            trained(name, side, batches, tmp_path)
    assert names(audits["after"]) == set(), str(audits["after"])
    (found,) = audits["before"].findings
    assert (found.name, found.value) == ("divisor of a full window", pytest.approx(2 / N))


# Trainers with `window=1` around their own accumulation, with what they wrap themselves.

BATCHES = make_batches(12)


def around(model, wrapped):
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    return accumext.AccumulatingOptimizer(adam) if wrapped else adam


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch", "window=1"])
def test_accelerate_is_named(wrapped):
    """`accelerator.accumulate`; the audit is given what `prepare` returned"""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = make_model()
    model, optimizer = accelerator.prepare(model, around(model, wrapped))
    with accumext.audit(model, optimizer) as audit:
        for batch in BATCHES:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert names(audit) == set(), str(audit)
    assert len(audit.to_json()["windows"]) == 4


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch", "window=1"])
def test_lightning_accumulates(wrapped, tmp_path):
    """`accumulate_grad_batches` and `gradient_clip_val`"""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return around(self.net, wrapped)

    with accumext.audit() as audit:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=3,
            gradient_clip_val=0.1,
        )
        trainer.fit(Module(), DataLoader(BATCHES, batch_size=None))
    assert names(audit) == set(), str(audit)
    assert len(audit.to_json()["windows"]) == 4


def test_a_sum_that_the_trainer_does_not_divide(tmp_path):
    """A mean over each micro-batch's labels, whose numbers differ: of tokens that weigh unequally

    With `num_items_in_batch` the same labels are one mean over the window."""
    transformers = pytest.importorskip("transformers")
    rows = [row for batch in BATCHES for row in batch]
    data = [
        {"rows": r, "labels": 1 if i % 5 < 1 + i // 5 % 3 else -100} for i, r in enumerate(rows)
    ]

    class Tagger(torch.nn.Module):
        accepts_loss_kwargs = True

        def __init__(self, whole):
            super().__init__()
            self.net, self.whole = make_model(), whole

        def forward(self, rows, labels, num_items_in_batch=None):
            cross_entropy = torch.nn.functional.cross_entropy
            if self.whole:
                loss = cross_entropy(self.net(rows), labels, reduction="sum") / num_items_in_batch
            else:
                loss = cross_entropy(self.net(rows), labels) / 3
            return {"loss": loss}

    def audited(whole):
        with accumext.audit() as audit:
            model = Tagger(whole)
            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path),
                num_train_epochs=1,
                per_device_train_batch_size=5,
                gradient_accumulation_steps=3,
                train_sampling_strategy="sequential",
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
            transformers.Trainer(
                model, arguments, train_dataset=data, optimizers=optimizers
            ).train()
        return audit

    assert names(audited(True)) == set()
    (found,) = audited(False).findings
    assert found.name == "micro-batches weighted equally"
    assert found.value == pytest.approx(3.0)  # micro-batches of 1, 2 and 3 labels
