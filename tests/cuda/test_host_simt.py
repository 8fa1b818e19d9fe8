"""host_cuda/simt.h, by which CUDA kernels run on the host, sees the faults that it is to see."""

from __future__ import annotations

import math

import host_cuda
import pytest
from host_cuda import ASCENDING, DESCENDING, ORDERS

pytestmark = pytest.mark.build  # compiles host_cuda/faults.cpp

FAULTS = {
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


@pytest.fixture(scope="module")
def result(host_executable):
    """fault, order -> what the kernel with that fault gives, where it ends."""
    faults = host_executable("faults")
    return lambda fault, order: float(host_cuda.execute(faults, fault, str(order)))


@pytest.mark.parametrize("order", ORDERS)
def test_threads_meet(result, order):
    assert result("none", order) == sum(range(128))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["blocks_meet", "blocks_have_their_shared_memory", "copies"])
def test_blocks_meet_and_copies_arrive(result, name, order):
    assert result(name, order) == 6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process(result, fault, order):
    with pytest.raises(RuntimeError, match=FAULTS[fault]):
        result(fault, order)


@pytest.mark.parametrize("fault", ["a_barrier_left_out", "blocks_that_race", "blocks_do_not_wait"])
def test_a_race_gives_other_results_in_another_order(result, fault):
    assert result(fault, ASCENDING) != result(fault, DESCENDING)


@pytest.mark.parametrize("order", ORDERS)
def test_shared_memory_that_nobody_wrote_is_seen(result, order):
    assert math.isnan(result("shared_memory_not_written", order))


@pytest.mark.parametrize(
    "fault",
    [
        "copies_without_waiting",
        "copies_in_no_group",
        "copies_of_which_one_is_not_awaited",
        "copies_that_come_too_early",
    ],
)
def test_copies_that_are_not_there_yet_are_seen(result, fault):
    assert math.isnan(result(fault, ASCENDING))
