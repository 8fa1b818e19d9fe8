"""The scripts of `examples/`: each runs, and the wrapper has nothing to say of any."""

import pytest
from support import ROOT
from support.programs import output_of, run_script

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
    output_of(run_script(example, *ARGUMENTS.get(example.stem, ["--steps", "3"])))
