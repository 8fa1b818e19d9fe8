"""Examples, recipes and trainers under an audit that is told neither model nor optimizer."""

import json

import pytest
import torch
from support import ROOT
from support.optimizer_oracle import loss_of, make_batches, make_model
from support.programs import run_script
from test_from_your_loop import stand_ins, trained  # noqa: F401
from your_loops import LOOPS, SIDES, N, frameworks

import accumext
from accumext.__main__ import main

pytestmark = frameworks
FRAMEWORKS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "ignite": "ignite",
    "trainer": "transformers",
}


def asked(audit: accumext.Audit) -> set[str]:
    """The questions, without that about the decay of biases; there is no finding."""
    assert audit.findings == (), str(audit)
    return {question.id for question in audit.questions} - {"optimizer.decay"}


DRIVER = """
import json, runpy, sys
import accumext
with accumext.audit() as audit:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
said = audit.to_json()
print(json.dumps([said["findings"], said["questions"], len(said["windows"])]))
"""


@pytest.mark.process
def test_a_recipe_with_a_process_group(tmp_path):
    """Which it makes, and has ended when the block closes"""
    done = run_script("-c", DRIVER, ROOT / "examples" / "recipes" / "with_ddp.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    findings, questions, windows = json.loads(done.stdout.splitlines()[-1])
    assert (findings, [question["id"] for question in questions]) == ([], ["optimizer.decay"])
    assert windows == 4


ASKED = {  # some keep the graphs of all steps of a sentence, others truncate
    ("greedy_decoder", "before"): {"memory.graph"},
    ("backward_once", "before"): {"memory.graph"},
    ("backward_once", "after"): {"memory.graph"},
    ("backward_per_token", "before"): {"truncation.detached"},
    ("backward_per_token", "after"): {"truncation.distance"},
    ("head_slices", "before"): {"memory.retained"},
}
PROGRAMS = {  # examples and recipes of one process, and what those need
    "what_accumulation_is": "torch",
    "backward_per_token": "torch",
    "bfloat16_masters": "torch",
    "recipes/plain_pytorch": "torch",
    "recipes/skipping_large_norms": "torch",
    "recipes/with_accelerate": "accelerate",
    "recipes/with_ignite": "ignite",
    "recipes/with_lightning": "lightning",
    "recipes/with_lightning_manual": "lightning",
    "recipes/with_tensorboard": "tensorboard",
    "recipes/with_trainer": "transformers",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_under_the_command(name, tmp_path, monkeypatch):
    """No finding, and four windows, however the program is made"""
    pytest.importorskip(PROGRAMS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with torch.random.fork_rng():
        assert main(["audit", "--json", "audit.json", str(ROOT / "examples" / f"{name}.py")]) == 0
    said = json.loads((tmp_path / "audit.json").read_text())
    assert {question["id"] for question in said["questions"]} <= {"optimizer.decay"}
    assert len(said["windows"]) == 4 - (name == "what_accumulation_is")  # it has three


YOURS = [(name, side) for name in LOOPS if name != "ddp" for side in SIDES]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("name", "side"), YOURS)
def test_both_sides_of_your_loop(name, side, tmp_path, monkeypatch):
    """Accumulation by hand or by the framework before, by the wrapper after: no finding"""
    pytest.importorskip(FRAMEWORKS.get(name, "torch"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with accumext.audit() as audit:
        trained(name, side, LOOPS[name].batches(), tmp_path)
    assert asked(audit) == ASKED.get((name, side), set()), str(audit)
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
    assert asked(audits["after"]) == set(), str(audits["after"])
    (found,) = audits["before"].findings
    assert (found.id, found.value) == ("accumulation.partial", pytest.approx(2 / N))


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
    assert asked(audit) == set(), str(audit)
    assert len(audit.to_json()["windows"]) == 4
