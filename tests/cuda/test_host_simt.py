"""host_cuda/simt.h, by which CUDA kernels run on the host, and host_cuda/runtime.cpp, the runtime
there, see the faults of host_cuda/faults.cpp."""

import functools
import itertools
import math

import host_cuda
import pytest
from host_cuda import ASCENDING, DESCENDING, ORDERS
from support.once import once

pytestmark = pytest.mark.build  # compiles host_cuda/faults.cpp

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
    "memory_given_back_before": "heap-use-after-free",
    "memory_of_a_later_stream": "use-after-poison",
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
def faults(host_compiler, tmp_path_factory):
    build = functools.partial(host_cuda.build_program, "faults")
    return once(tmp_path_factory, "host-faults", build) / "faults"


@pytest.fixture(scope="module")
def result(faults):
    """fault, order -> what the kernel with that fault gives, where it ends."""
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


USES = {  # of the runtime -> what CUDA makes of them
    "a_right_use": "cudaSuccess",
    "no_blocks": "cudaErrorInvalidConfiguration",
    "shared_memory_not_asked_for": "cudaErrorInvalidValue",
    "more_shared_memory_than_asked_for": "cudaErrorInvalidValue",
    "more_shared_memory_than_there_is": "cudaErrorInvalidValue",
    "blocks_that_do_not_fit": "cudaErrorCooperativeLaunchTooLarge",
    "blocks_that_shared_memory_keeps_out": "cudaErrorCooperativeLaunchTooLarge",
    "blocks_that_cannot_wait": "cudaErrorNotSupported",
    "large_arguments_for_an_old_driver": "cudaErrorNotSupported",
}


def test_the_runtime_refuses_what_cuda_refuses(faults):
    assert {use: host_cuda.execute(faults, use).strip() for use in USES} == USES
