"""host_cuda/simt.h, by which CUDA kernels run on the host, and host_cuda/launchers/runtime.cpp, the
runtime of CUDA there, see the faults that they are to see."""

from __future__ import annotations

import itertools
import math

import host_cuda
import pytest
from host_cuda import ASCENDING, DESCENDING, ORDERS

pytestmark = pytest.mark.build  # compiles host_cuda/faults.cpp and host_cuda/runtime_faults.cpp

ENDS = {  # what ends the process
    "barrier_in_a_branch": "a thread has left the kernel where others wait for it",
    "two_barriers": "threads wait for one another at different places",
    "a_lane_has_left": "a thread has left the kernel where others wait for it",
    "a_lane_at_a_barrier": "threads wait for one another at different places",
    "some_lanes": "a warp operation of some lanes only",
    "beyond_shared_memory": "out of bounds",
    "beyond_the_buffer": "heap-buffer-overflow",
    "misaligned_vector": "misaligned address",
    "a_block_stays_away": "blocks wait for one another for ever",
    "a_block_does_not_wait": "a block has left the kernel where others meet",
    "blocks_meet_at_two_places": "blocks meet at different places",
    "copies_under_way_at_the_end": "a thread has left the kernel with copies under way",
    "a_misaligned_copy": "a misaligned copy",
}
RIGHT = {"none": sum(range(128))} | dict.fromkeys(
    ("blocks_meet", "blocks_have_their_shared_memory", "copies"), 6
)
NOT_A_NUMBER = (
    "shared_memory_not_written",
    "copies_without_waiting",
    "copies_in_no_group",
    "copies_of_which_one_is_not_awaited",
    "copies_that_come_too_early",
)


@pytest.fixture(scope="module")
def result(host_executable):
    """fault, order -> what the kernel with that fault gives, where it ends."""
    faults = host_executable("faults")
    return lambda fault, order=ASCENDING: float(host_cuda.execute(faults, fault, str(order)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RIGHT)
def test_threads_and_blocks_meet_and_copies_arrive(result, name, order):
    assert result(name, order) == RIGHT[name]


@pytest.mark.parametrize(("fault", "order"), list(zip(ENDS, itertools.cycle(ORDERS))))
def test_a_fault_ends_the_process(result, fault, order):
    with pytest.raises(RuntimeError, match=ENDS[fault]):
        result(fault, order)


@pytest.mark.parametrize("fault", ["a_barrier_left_out", "blocks_that_race", "blocks_do_not_wait"])
def test_a_race_gives_other_results_in_another_order(result, fault):
    assert result(fault, ASCENDING) != result(fault, DESCENDING)


@pytest.mark.parametrize("fault", NOT_A_NUMBER)
def test_what_is_not_there_is_no_number(result, fault):
    assert math.isnan(result(fault))


ERRORS = {  # of the runtime, as CUDA's
    "none": "cudaSuccess",
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
    "wait_for_the_captured_stream": "cudaErrorStreamCaptureUnsupported",
    "wait_in_a_capture": "cudaErrorStreamCaptureUnsupported",
    "launch_in_an_invalid_capture": "cudaErrorStreamCaptureInvalidated",
}
MEMORY = {
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


@pytest.mark.parametrize("fault", ERRORS)
def test_the_runtime_refuses_it(last_error, fault):
    assert last_error(fault) == ERRORS[fault]


@pytest.mark.parametrize("fault", MEMORY)
def test_memory_that_is_not_there_ends_the_process(last_error, fault):
    with pytest.raises(RuntimeError, match=MEMORY[fault]):
        last_error(fault)
