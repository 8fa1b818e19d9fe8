"""The launchers with their kernels on the host, on CUDA's runtime of host_cuda/launchers: the
operators' own tests through them, under sanitizers, and what they put on the device."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import pytest
from host_cuda import launchers, mutants
from host_cuda.launchers.table_mutants import MUTANTS
from support.once import once

# The first test compiles all launchers: five minutes of one core.
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
        "decoder/test_head_forward.py": "not frequencies",
        "decoder/test_head_objective.py": "test",
    },
    "decode_loss": {
        "decoder/test_decode_loss.py": "test",
        "decoder/test_decode_loss_options.py": "everything_at_once or one_leaf",
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
    done = outcome_of(library, TABLES, "-k", mutant.test)
    assert done.returncode != 0
    assert mutant.words in done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(library):
    done = launchers.run(library, "-m", "host_cuda.launchers.calls")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bits_depend_on_no_order_of_threads(found):
    assert found["differing"] == []


def budget(way, layers, steps):
    """Of a call. Each step of one layer takes three products and three kernels where tokens are
    predicted, two and one more for each further layer; else a product and a kernel in each layer.
    Once, the state is copied, the inputs are looked up, and those that are known are multiplied;
    backward the last gradient is passed on."""
    once, in_step = {
        "predicted": ((1, 0, layers), (2 + layers, 1 + 2 * layers)),
        "known": ((1, layers, layers), (layers, layers)),
        "backward": ((1, 0, 0), (1, 1)),
    }[way]
    kernels, products = (a + b * steps for a, b in zip(once, in_step))
    return {"kernels": kernels, "aten::mm": products, "aten::copy_": once[2]}


def test_launches_of_a_call(found):
    for name, counts in found["counts"].items():
        _, _, layers, way, steps = name.split()
        allowed = budget(way, int(layers), int(steps))
        assert all(count <= allowed.get(op, 0) for op, count in counts.items()), (name, counts)


def test_a_window_is_one_launch(found):
    """Forward and backward, however many steps it has; its results are those of the loop."""
    assert len(found["whole"]) > 20
    for name, counts in found["whole"].items():
        assert counts == {"kernels": 1}, name
    assert found["apart"] == []


def test_a_window_goes_step_by_step_where_its_blocks_do_not_fit(found):
    """Of whose kernel a multiprocessor cannot hold a block."""
    assert len(found["crowded"]) == 2
    for name, counts in found["crowded"].items():
        assert counts == found["counts"][name]
