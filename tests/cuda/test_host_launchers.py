"""The launchers with their kernels on the host, on CUDA's runtime of host_cuda/launchers: the
operators' own tests through them, under sanitizers, and what they put on the device."""

from operator import attrgetter
from pathlib import Path

import pytest
from host_cuda import launchers, mutants
from host_cuda.launchers.table_mutants import MUTANTS
from support.once import once

# The first test compiles all launchers: two minutes of one core.
pytestmark = [pytest.mark.build, pytest.mark.timeout(1200)]

# On a GPU all rows are named, live or not; these tests count those that are.
COUNTS_ROWS = "test_ended_rows_are_not_pushed_through_the_head"
TABLES = "cuda/host_cuda/launchers/tables.py"
# Tests of a file, by pytest's -k; those of a selection run in one process.
SELECTIONS = {
    "steps": {
        # Thousands of rows take ten seconds here for each kind of cell.
        "decoder/test_decode_steps.py": "not known[lstm and not known[gru-F",
        "decoder/test_rnn_backward.py": "test",
        "decoder/test_rnn_path.py": f"not {COUNTS_ROWS}",
    },
    "heads": {
        # Not where the sizes are those around the edges of the CPU's kernels.
        "decoder/test_head_forward.py": "any_shape or ties or ruled or nan or no_rows or no_bit",
        "decoder/test_head_objective.py": "not gradients_in_double",
    },
    "decode_loss": {
        "decoder/test_decode_loss.py": "not cell_and_feedback or gru_cell or lstm",
        "decoder/test_decode_loss_options.py": (
            "(everything_at_once and (lstm or gru_cell)) or one_leaf"
        ),
        "decoder/test_decode_loss_truncation.py": "test",
    },
    # Differences between launchers; every kernel runs in test_host_cuda.py.
    "lists": {
        "ops/test_accumulate.py": "pair or slices or tensor",
        "ops/test_unscale_check_clip_accumulate.py": "finite_acc or nonfinite or overflowed",
        "ops/test_norm.py": "any_list or empty or mixed or strided",
        "ops/test_scale.py": "test",
        "ops/test_copy_rounded.py": "pair or strides or stays or same_dtype",
        "optimizer/test_factors.py": "the_operator",
    },
    "tables": {TABLES: "test"},
    "calls": {"cuda/host_cuda/launchers/calls.py": "test"},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not launchers.available():
        pytest.skip("the compiler has no AddressSanitizer")
    return once(tmp_path_factory, "host-launchers", launchers.build) / "launchers.so"


def outcome_of(library, *arguments):
    """Return the result of pytest on files of tests/ by the launchers, with options behind them;
    -s, because captured output is lost where a fault ends the process."""
    paths = [f"tests/{name}" if name.endswith(".py") else name for name in arguments]
    return launchers.run(
        library, "-m", "pytest", "-q", "-n0", "-s", "-p", "host_cuda.launchers.loaded", "-p",
        "no:cacheprovider", *paths,
    )  # fmt: skip


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_operators_tests_pass(library, selection):
    files = SELECTIONS[selection]
    chosen = (f"({Path(file).name} and ({words}))" for file, words in files.items())
    done = outcome_of(library, *files, "-k", " or ".join(chosen))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=attrgetter("name"))
def test_a_mutant_is_seen(library, monkeypatch, mutant):
    monkeypatch.setenv(mutants.VARIABLE, str(MUTANTS.index(mutant)))
    done = outcome_of(library, TABLES, "-k", mutant.shown_by)
    assert done.returncode != 0
    assert mutant.words in done.stdout + done.stderr
