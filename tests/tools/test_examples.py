"""The scripts of `examples/`: each runs, and the wrapper has nothing to say of any."""

import pytest
from support import ROOT
from support.optimizer_oracle import OP
from support.programs import run_script

EXAMPLES = sorted(ROOT.glob("examples/*.py"))
SMALL = ["--steps", "3", "--vocabulary", "2000", "--length", "50"]
ARGUMENTS = {
    "is_my_loop_right": SMALL,
    "rnn_with_amp": SMALL,
    "tutorial_loop": ["--steps", "10"],  # its steps are no windows
}


@pytest.mark.process
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    """More windows than are watched."""
    done = run_script(str(example), *ARGUMENTS.get(example.stem, ["--steps", "3"]))
    assert done.returncode == 0, done.stderr
    assert OP not in done.stderr  # nor at its end, where a warning is no error
