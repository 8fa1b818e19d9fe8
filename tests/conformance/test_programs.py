"""The programs in `examples/programs`: each as it is, beside plain PyTorch."""

import re
import runpy
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.filterwarnings("error:AccumulatingOptimizer:UserWarning")

FOLDER = ROOT / "examples" / "programs"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "comparison")
EXACT = 1e-12  # relatively, in float64


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program(program, capsys, monkeypatch):
    """Each runs with `--quick`, its two ways come to the same gradients, and a reward rises"""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [str(program), "--quick"])
    runpy.run_path(str(program), run_name="__main__")
    text = capsys.readouterr().out
    distances = [float(distance) for distance in re.findall(r"gradients differ by (\S+)", text)]
    assert len(distances) == (2 if program.stem == "attention_seq2seq" else 1)
    assert max(distances) < EXACT
    rewards = re.findall(r"^reward (\S+) before, (\S+) after", text, re.MULTILINE)
    assert len(rewards) == (program.stem == "self_critical_captioner")
    assert all(float(after) > float(before) for before, after in rewards)
