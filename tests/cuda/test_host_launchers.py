"""The launchers with their kernels on the host, on CUDA's runtime of host_cuda/launchers: the
operators' own tests through them, under sanitizers, and what they put on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from host_cuda import launchers
from support.once import once
from support.rnn_oracle import KINDS

from accumext.backend import _build

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
        "ops/test_accumulate.py": "pair or slices or expanded or tensor",
        "ops/test_unscale_check_clip_accumulate.py": "dyadic or tensor or finite_acc",
        "ops/test_norm.py": "any_list or empty or mixed or strided",
        "ops/test_scale.py": "test",
        "ops/test_copy_rounded.py": "pair or strides or stays or same_dtype",
        "optimizer/test_factors.py": "finds_the_norm or (True and backend and 65536)",
    },
    "tables": {TABLES: "test"},
}
# Of upload_cache.cu and enqueue.h, each with the test that it fails and the words of the failure.
MUTANTS = {
    "allocates_in_the_capture": (
        ("upload_cache.cu", "  const RelaxedCapture relaxed;\n  void* memory", "  void* memory"),
        ("a_replay and first_seen and copy_rounded", "cudaErrorStreamCaptureUnsupported"),
    ),
    "waits_in_the_capture": (
        ("upload_cache.cu", "  const RelaxedCapture relaxed;\n  cudaStream_t", "  cudaStream_t"),
        ("a_replay and first_seen and copy_rounded", "heap-use-after-free"),
    ),
    "captures_the_upload": (
        ("upload_cache.cu", "if (captured) {\n", "if (false) {\n"),
        ("a_replay and first_seen and copy_rounded", "an operator of torch has lost its memory"),
    ),
    "a_table_for_graphs_and_calls": (
        ("upload_cache.cu", "captured, id, size", "false, 0, size"),
        ("the_table_of_a_graph and seen_before", "heap-use-after-free"),
    ),
    "a_table_for_all_streams": (
        ("upload_cache.cu", "captured, id, size", "captured, 0, size"),
        ("test_streams_have and True", "AssertionError"),
    ),
    "a_table_for_a_handle": (
        (
            "upload_cache.cu",
            "captured ? 0 : id_of(stream)",
            "captured ? 0 : reinterpret_cast<unsigned long long>(stream)",
        ),
        ("the_handle_of_one_that_is_gone", "AssertionError"),
    ),
    "asks_for_the_stream_in_the_capture": (
        ("upload_cache.cu", "captured ? 0 : id_of(stream)", "id_of(stream)"),
        ("a_replay and first_seen and copy_rounded", "cudaErrorStreamCaptureUnsupported"),
    ),
    "leaves_an_error_behind": (
        ("upload_cache.cu", "cudaGetLastError();", ";"),
        ("no_memory and copy_rounded", "nobody has asked for cudaErrorMemoryAllocation"),
    ),
    "borrows_in_a_capture": (
        ("upload_cache.cu", "memory == nullptr && !captured", "memory == nullptr"),
        ("a_capture_where", "DID NOT RAISE"),
    ),
    "launches_on_the_default_stream": (
        ("enqueue.h", "config.stream = stream_;", "config.stream = nullptr;"),
        ("a_replay and call[scale_-first_seen]", "on another stream than torch's current one"),
    ),
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


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_seen(library, tmp_path, mutant):
    (name, line, instead), (test, words) = MUTANTS[mutant]
    csrc = shutil.copytree(_build.csrc(), tmp_path / "csrc")
    text = (csrc / "cuda" / name).read_text(encoding="utf-8")
    assert text.count(line) == 1
    (csrc / "cuda" / name).write_text(text.replace(line, instead), encoding="utf-8")
    source = csrc / "cuda" / ("scale.cu" if name.endswith(".h") else name)
    changed = launchers.compiled(source, tmp_path, csrc)
    others = [path for path in library.parent.glob("*.o") if path.name != changed.name]
    done = outcome_of(launchers.linked([changed, *others], tmp_path), TABLES, "-k", test)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(library):
    done = launchers.run(library, "-m", "host_cuda.launchers.calls")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bits_depend_on_no_order_of_threads(found):
    assert found["differing"] == []


@pytest.mark.parametrize("dtype", ["wide", "narrow"])
@pytest.mark.parametrize("kind", KINDS)
def test_launches_of_a_step(found, kind, dtype):
    """Three products and three kernels of a decoder of one layer, three more for each further one;
    where inputs are known, a product and a kernel in each layer, and so on the way back."""
    for layers, way, kernels, products in [
        (1, "predicted", 3, 3),
        (3, "predicted", 5, 7),
        (1, "known", 1, 1),
        (3, "known", 3, 3),
        (1, "backward", 1, 1),
    ]:
        two, five = found["counts"][f"{kind} {dtype} {layers} {way}"]
        per_step = {name: (count - two.get(name, 0)) / 3 for name, count in five.items()}
        expected = {"kernels": kernels, "aten::mm": products}
        assert {name: count for name, count in per_step.items() if count} == expected


def test_a_window_is_one_launch(found):
    """Forward and backward, however many steps it has; its results are those of the loop."""
    for two, five in found["whole"].values():
        assert two == five == {"kernels": 1}
    assert found["apart"] == []


def test_a_window_goes_step_by_step_where_its_blocks_do_not_fit(found):
    """Of whose kernel a multiprocessor cannot hold a block."""
    assert found["crowded"]
    for name, counts in found["crowded"].items():
        assert counts == found["counts"][name][0]


def test_launches_of_a_call(found):
    """Besides those of its steps: the state is copied, a row per input is looked up, and inputs
    that are known are multiplied; the last gradient is passed on."""
    for name, (two, _) in found["counts"].items():
        layers = int(name.split()[2])
        if "backward" in name:
            assert two == {"kernels": 3, "aten::mm": 2}
        elif "known" in name:
            expected = {"kernels": 2 * layers + 1, "aten::mm": 3 * layers, "aten::copy_": layers}
            assert two == expected
        else:
            expected = {"kernels": 2 * (2 + layers) + 1, "aten::mm": 2 * (2 * layers + 1)}
            assert two == {**expected, "aten::copy_": layers}
