"""The programs in `examples/programs`: each as it is, beside plain PyTorch."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.filterwarnings("error:AccumulatingOptimizer:UserWarning")

FOLDER = ROOT / "examples" / "programs"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "comparison")
TABLES = {  # program -> how many comparisons it prints
    "attention_seq2seq": 2,
    "lstm_seq2seq": 1,
    "recurrent_forecaster": 1,
    "self_critical_captioner": 1,
    "transformer_decoder": 1,
    "word_language_model": 1,
}
PLAIN = re.compile(r"^plain PyTorch +\d+\.\d+ s +\d+\.\d MB$", re.MULTILINE)
ACCUMEXT = re.compile(
    r"^accumext +\d+\.\d+ s +\d+\.\d MB   \d+\.\d times as fast, \d+\.\d times less memory; "
    r"gradients differ by (\S+)$",
    re.MULTILINE,
)
REWARD = re.compile(r"^reward (\S+) before, (\S+) after", re.MULTILINE)
EXACT = 1e-12  # relatively, in float64


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program(program, capsys, monkeypatch):
    """Each runs with `--quick`, its two ways come to the same gradients, and a reward rises"""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [str(program), "--quick"])
    runpy.run_path(str(program), run_name="__main__")
    text = capsys.readouterr().out
    distances = [float(distance) for distance in ACCUMEXT.findall(text)]
    assert len(distances) == len(PLAIN.findall(text)) == TABLES[program.stem]
    assert max(distances) < EXACT
    rewards = REWARD.findall(text)
    assert len(rewards) == (program.stem == "self_critical_captioner")
    assert all(float(after) > float(before) for before, after in rewards)


def test_programs_are_documented():
    """Every program is in [programs](programs.md), with its command"""
    text = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    assert [path.stem for path in PROGRAMS] == sorted(TABLES)
    for path in PROGRAMS:
        assert f"python examples/programs/{path.name}" in text
