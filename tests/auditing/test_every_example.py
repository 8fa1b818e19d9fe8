"""`python -m accumext audit` of every script in `examples/`: its status, and what it says.

The loops of `examples/from_your_loop`, which are functions, are in `test_right_programs.py`.
"""

import re

import pytest
from support import ROOT
from support.programs import run_script

from accumext.auditing._words import KINDS

SMALL = ("--vocabulary", "500", "--length", "24")
DECAY, GRAPH, NOTHING = "optimizer.decay", "memory.graph", "nothing"
OTHERS = "parameters.no_optimizer"  # of the model that it is compared with
# Script: packages beside torch, the ids of what is said, arguments. Status 1: `accumulation.*`.
SAID: dict[str, tuple[tuple[str, ...], set[str], tuple[str, ...]]] = {
    "backward_per_token": ((), set(), ()),
    "bfloat16_masters": ((), {DECAY}, ()),
    "head_in_slices": ((), {NOTHING}, ()),  # processes that it starts have the steps
    "is_my_loop_right": ((), {GRAPH, DECAY}, SMALL),
    "rnn_with_amp": ((), {GRAPH, "truncation.distance", DECAY}, SMALL),
    "tutorial_loop": ((), {"accumulation.partial"}, ()),  # the tutorial's way, to be compared
    "what_accumulation_is": ((), set(), ()),
    "auditing/with_lightning": (("lightning",), {"accumulation.partial"}, ()),  # is its point
    "auditing/with_trainer": (("transformers",), {"accumulation.divisor_missing"}, ()),
    "programs/attention_seq2seq": ((), {NOTHING}, ()),  # gradients are compared, without a step
    "programs/comparison": ((), {NOTHING}, ()),
    "programs/lstm_seq2seq": ((), {NOTHING}, ()),
    "programs/recurrent_forecaster": ((), {NOTHING}, ()),
    "programs/self_critical_captioner": ((), {OTHERS, GRAPH}, ()),
    "programs/transformer_decoder": ((), {NOTHING}, ()),
    "programs/word_language_model": ((), {OTHERS, "memory.logits"}, ()),
    "recipes/plain_pytorch": ((), {DECAY}, ()),
    "recipes/skipping_large_norms": ((), {DECAY}, ()),
    "recipes/with_accelerate": (("accelerate",), {DECAY}, ()),
    "recipes/with_ddp": ((), {DECAY}, ()),
    "recipes/with_fabric": (("lightning",), set(), ()),
    "recipes/with_ignite": (("ignite",), {DECAY}, ()),
    "recipes/with_lightning": (("lightning",), {DECAY}, ()),
    "recipes/with_lightning_manual": (("lightning",), {DECAY}, ()),
    "recipes/with_tensorboard": (("tensorboard",), {DECAY}, ()),
    "recipes/with_torchrun_elastic": ((), {DECAY}, ()),
    "recipes/with_trainer": (("transformers",), {DECAY}, ()),
}
NO_EXTRA_OF_OURS = {  # `bench/trainers --audit` runs these packages under the auditor
    f"recipes/with_{name}"
    for name in ("composer", "darts", "deepspeed", "fastai", "neuralforecast", "skorch",
                 "speechbrain", "stable_baselines3", "timm")
}  # fmt: skip


def test_no_script_is_left_out():
    folder = ROOT / "examples"
    there = {
        str(path.relative_to(folder).with_suffix(""))
        for where in (".", "auditing", "programs", "recipes")
        for path in (folder / where).glob("*.py")
    }
    assert there == SAID.keys() | NO_EXTRA_OF_OURS


@pytest.mark.process
@pytest.mark.parametrize("name", SAID)
def test_what_the_command_says(name, tmp_path):
    packages, ids, arguments = SAID[name]
    for package in packages:
        pytest.importorskip(package)
    script = ROOT / "examples" / f"{name}.py"
    done = run_script("-m", "accumext", "audit", script, *arguments, cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    if ids == {NOTHING}:
        assert done.returncode == 2
        assert "nothing was judged: 0 steps after" in done.stderr
        return
    is_finding = any(id.startswith("accumulation.partial") for id in ids)
    assert done.returncode == int(is_finding), done.stdout
    report = done.stdout[done.stdout.index("accumext audit: ") :]
    listed = set(re.findall(r"^(?:\?|\d\.) .*  ([a-z]+\.[a-z_]+)$", report, re.MULTILINE))
    more = re.search(r"^and: (.*)$", report, re.MULTILINE)
    assert listed | ({DECAY} if more and "decay" in more[1] else set()) == ids, report
    assert re.search(r"gradient: (1|[\d.]+) times the mean of", report), report
    assert len(report.strip().splitlines()) <= 30


PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


@pytest.mark.process
def test_the_page_shows_what_is_printed():
    """The report of question 1, and every id of a finding in the table"""
    command = "python -m accumext audit --windows 2 examples/is_my_loop_right.py"
    shown = PAGE.split(f"$ {command}\n")[1].split("```")[0]
    done = run_script(*command.split()[1:])
    assert (done.stdout, done.returncode) == (shown, 0)


@pytest.mark.process
def test_the_page_shows_a_finding_as_it_is_printed():
    """That of question 5, out of its report"""
    command = "python -m accumext audit examples/tutorial_loop.py"
    before, shown, after = PAGE.split(f"$ {command}\n")[1].split("```")[0].split("[...]\n")
    done = run_script(*command.split()[1:])
    assert (before, after, done.returncode) == ("", "", 1)
    assert f"\n{shown}\n" in done.stdout


def test_every_id_is_in_the_table_of_the_page():
    rows = [line.split(" | ") for line in PAGE.split("| id | what it is")[1].splitlines()]
    listed = set()
    for cells in rows[2:]:
        if not cells[0].startswith("| `"):
            break
        first, *more = re.findall(r"`([a-z_.]+)`", cells[0])
        listed |= {first, *(first.split(".")[0] * one.startswith(".") + one for one in more)}
    assert listed == set(KINDS)
