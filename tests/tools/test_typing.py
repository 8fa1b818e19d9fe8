"""The package in an editor or a type checker: its public names and their types."""

import pytest
from support.programs import run_python

import accumext

# Lines with a comment must have the error that it names; other lines must have none.
USE = """
import torch
import accumext
from torch import nn

e, c, h = nn.Embedding(9, 4), nn.GRUCell(4, 4), nn.Linear(4, 9)
targets = torch.zeros(5, 2, dtype=torch.int64)
out = accumext.decode_loss(e, c, h, targets, feedback="greedy", reduction="none")
out = accumext.decode_loss(e, c, h, targets, feedback=targets > 0, draw="sample")
out = accumext.decode_loss(e, c, h, targets, feedback="gready")  # "feedback"
out = accumext.decode_loss(e, c, h, targets, feedback="greedy", draw="max")  # "draw"
out = accumext.decode_loss(e, c, h, targets, feedback="greedy", reduction="avg")  # "reduction"
out = accumext.decode_loss(e, c, h, targets, feedback="greedy", truncation="no")  # "truncation"
loss: torch.Tensor = out.loss
peak: int = accumext.decode_memory(e, c, h, targets=(5, 2), feedback="greedy", k2=3)
accumext.decode_memory(e, c, h, (5, 2), feedback="gready")  # "feedback"
accumext.decode_memory(e, c, h, (5, 2), feedback="greedy", draws="sample")  # "draws"
accumext.decode_memory(e, c, h, (5, 2))  # "feedback"
accumext.generate(e, c, h, max_length=3, search="beams")  # "search"
accumext.chunked_loss(lambda x: x.sum(), torch.ones(4), reduction="none")  # "reduction"
adam = torch.optim.Adam(h.parameters())
opt = accumext.AccumulatingOptimizer(adam, on_nonfinite="raise", synchronize="window")
opt = accumext.AccumulatingOptimizer(adam, on_nonfinite="skip")  # "on_nonfinite"
opt = accumext.AccumulatingOptimizer(adam, reduction="none")  # "reduction"
opt = accumext.AccumulatingOptimizer(adam, synchronize="step")  # "synchronize"
accumext.window_memory(h, "windows")  # "window_memory"
names: list[str | int] = opt.last.nonfinite if opt.last is not None else []
"""


def test_dir_lists_public_names_alone():
    names = dir(accumext)
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    assert {*names} - {"__version__"} == {*accumext.__all__}
    assert all(hasattr(accumext, name) for name in names)


@pytest.mark.process
def test_a_type_checker_knows_the_words_that_arguments_choose_from(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "use.py"
    file.write_text(USE)
    done = run_python("-m", "mypy", file)  # by pyproject.toml: strict, with the cache of `mypy`
    found = {
        int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line
    }
    expected = {
        number: line.rpartition("# ")[2]
        for number, line in enumerate(USE.splitlines(), 1)
        if "  # " in line
    }
    assert {*found} == {*expected}, done.stdout
    for number, argument in expected.items():
        assert argument in found[number]
