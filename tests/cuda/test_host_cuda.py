"""The launchers of csrc/cuda and their kernels on the host, by the library of host_cuda: the
operators' own tests, and those of host_cuda/checks, with faults that these have to find.

At their edges the kernels are those that nvcc makes, if there is one, which run in fewer orders of
threads; with HOST_CUDA_ARCH in all tests.
"""

from pathlib import Path

import host_cuda
import pytest
from host_cuda import ARCH, DEFAULT_ARCH, ptx
from support.once import once

# The first test compiles all launchers: minutes.
pytestmark = [pytest.mark.build, pytest.mark.timeout(1800)]

CHECKS = "cuda/host_cuda/checks"
# On a GPU all rows are named, live or not; these tests count those that are.
COUNTS_ROWS = "test_ended_rows_are_not_pushed_through_the_head"
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
        # A gradcheck makes calls of other tests, each some dozens of times.
        "decoder/test_decode_loss.py": (
            "not gradcheck and (not cell_and_feedback or gru_cell or lstm)"
        ),
        "decoder/test_decode_loss_options.py": (
            "(everything_at_once and (lstm or gru_cell)) or one_leaf"
        ),
    },
    "generate": {
        "generation/test_head_top.py": "test",
        # Whole searches of random sizes take minutes here.
        "generation/test_generate.py": (
            "may_write or written_too or ends_where or equals or forbidden or that_are_nan or "
            "counts_every"
        ),
    },
    "lists": {
        "ops/test_accumulate.py": "pair or slices or strided or strides",
        "ops/test_operators.py": "one_element and accumulate",
        "ops/test_unscale_check_clip_accumulate.py": "finite_acc or nonfinite or overflowed",
        "ops/test_norm.py": "any_list or empty or mixed or strided or about_elements",
        "ops/test_scale.py": "test",
        "ops/test_copy_rounded.py": "pair or strides or stays or same_dtype",
        "optimizer/test_factors.py": "the_operator",
    },
    "tables": {f"{CHECKS}/tables.py": "test"},
    "calls": {f"{CHECKS}/calls.py": "test"},
}


@pytest.fixture(scope="module")
def detector(host_compiler, tmp_path_factory):
    """The library under the race detector."""
    if not host_cuda.has_detector():
        pytest.skip("the detector knows what GCC calls, not what clang does")

    def build(folder: Path) -> None:
        host_cuda.build_library(folder, races=True)

    return once(tmp_path_factory, "host-races", build) / "launchers.so"


def outcome_of(library, *arguments, **options):
    """The end of pytest, and its words, on files of tests/ with options behind them."""
    paths = (f"tests/{name}" if name.endswith(".py") else name for name in arguments)
    done = host_cuda.run_checks(library, *paths, **options)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_operators_tests_pass(library, selection):
    files = SELECTIONS[selection]
    chosen = (f"({Path(file).name} and ({words}))" for file, words in files.items())
    code, words = outcome_of(library, *files, "-k", " or ".join(chosen))
    assert code == 0, words


@pytest.mark.parametrize("names", ["lists", "heads", "best_words", "beams windows backward"])
def test_kernels_pass_at_every_edge(request, names):
    of_nvcc = ptx.available()
    library = request.getfixturevalue("nvcc_library" if of_nvcc else "library")
    arch = ARCH or DEFAULT_ARCH if of_nvcc else None
    files = (f"{CHECKS}/{name}.py" for name in names.split())
    code, words = outcome_of(library, *files, arch=arch)
    assert code == 0, words


@pytest.mark.skipif(ARCH is not None, reason="the detector knows the host's compiler alone")
def test_no_threads_race(detector):
    code, words = outcome_of(detector, f"{CHECKS}/races.py", sanitized=False)
    assert code == 0, words
