"""The decoder's launchers with their kernels on the host: its own tests through them, under
sanitizers, and what they put on the device for a step. See host_cuda/launchers."""

from __future__ import annotations

import json

import pytest
from host_cuda import launchers
from support.once import once
from support.rnn_oracle import KINDS

pytestmark = pytest.mark.build  # compiles the launchers

# On a GPU all rows are named, live or not; these tests count those that are.
COUNTS_ROWS = "test_ended_rows_are_not_pushed_through_the_head"
SELECTIONS = {
    "decode_steps": ["test_decode_steps.py"],
    "rnn_backward": ["test_rnn_backward.py"],
    "head_forward": ["test_head_forward.py", "-k", "not frequencies"],
    "decode_loss": ["test_decode_loss.py"],
    "options": ["test_decode_loss_options.py", "-k", "everything_at_once or one_leaf"],
    "truncation": ["test_decode_loss_truncation.py"],
    "rnn_path": ["test_rnn_path.py", "-k", f"not {COUNTS_ROWS}"],
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not launchers.available():
        pytest.skip("the compiler has no AddressSanitizer")
    return once(tmp_path_factory, "host-launchers", launchers.build) / "launchers.so"


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_decoders_tests_pass(library, selection):
    name, *options = SELECTIONS[selection]
    done = launchers.run(
        library, "-m", "pytest", "-q", "-n0", "-p", "host_cuda.launchers.loaded", "-p",
        "no:cacheprovider", f"tests/decoder/{name}", *options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_a_window_of_the_persistent_kernel_is_one_launch(found):
    """However many steps it has; its tokens are those of the loop."""
    for two, five in found["whole"].values():
        assert two == five == {"kernels": 1}
    assert found["apart"] == []


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
