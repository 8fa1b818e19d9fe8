"""host_cuda/launchers/runtime.cpp, the runtime of CUDA on the host, sees its faults."""

from __future__ import annotations

import host_cuda
import pytest

pytestmark = pytest.mark.build  # compiles host_cuda/runtime_faults.cpp

ERRORS = {
    "no_blocks": "cudaErrorInvalidConfiguration",
    "too_many_blocks": "cudaErrorInvalidConfiguration",
    "no_threads": "cudaErrorInvalidConfiguration",
    "too_many_threads": "cudaErrorInvalidConfiguration",
    "shared_memory_not_asked_for": "cudaErrorInvalidValue",
    "shared_memory_asked_for_elsewhere": "cudaErrorInvalidValue",
    "more_shared_memory_than_asked_for": "cudaErrorInvalidValue",
    "more_shared_memory_than_there_is": "cudaErrorInvalidValue",
    "blocks_that_do_not_fit": "cudaErrorCooperativeLaunchTooLarge",
    "blocks_that_shared_memory_keeps_out": "cudaErrorCooperativeLaunchTooLarge",
    "blocks_that_cannot_wait": "cudaErrorNotSupported",
    "stream_of_another_device": "cudaErrorInvalidResourceHandle",
    "a_stream_that_is_gone": "cudaErrorInvalidResourceHandle",
    "allocation_in_a_capture": "cudaErrorStreamCaptureUnsupported",
    "wait_for_the_captured_stream": "cudaErrorStreamCaptureUnsupported",
    "id_of_the_captured_stream": "cudaErrorStreamCaptureUnsupported",
    "wait_in_a_capture": "cudaErrorStreamCaptureUnsupported",
    "launch_in_an_invalid_capture": "cudaErrorStreamCaptureInvalidated",
    "out_of_memory": "cudaErrorMemoryAllocation",
}
FAULTS = {
    "not_the_current_stream": "on another stream than torch's current one",
    "an_error_that_nobody_asks_for": "nobody has asked for cudaErrorInvalidConfiguration",
    "memory_given_back_before": "heap-use-after-free",
    "memory_of_a_later_stream": "use-after-poison",
    "host_memory_that_goes_too_early": "heap-use-after-free",
    "memory_of_a_graph_given_back_before": "use-after-poison",
}


@pytest.fixture(scope="module")
def last_error(host_executable):
    """fault -> the error that is left behind a use with that fault, where it ends."""
    faults = host_executable("runtime_faults")
    return lambda fault: host_cuda.execute(faults, fault).decode()


def test_no_error(last_error):
    assert last_error("none") == "cudaSuccess"


@pytest.mark.parametrize("fault", ERRORS)
def test_cuda_refuses_it(last_error, fault):
    assert last_error(fault) == ERRORS[fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process(last_error, fault):
    with pytest.raises(RuntimeError, match=FAULTS[fault]):
        last_error(fault)
