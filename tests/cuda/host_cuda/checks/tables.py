"""Lists of tensors on streams of the runtime on the host: what waits, tables and captures.

pytest runs this with the launchers loaded: test_host_cuda.py.
"""

import functools
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import pytest
import torch
from support import oracle
from support.tensors import FLOAT_DTYPES, assert_bits, shifted
from torch import Tensor

import accumext
from accumext.ops import reference
from host_cuda import loaded, mutants
from host_cuda.loaded import DRIVER, H100, SMALLER, STEP_BY_STEP

DTYPE_PAIRS = list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES))
OLD_DRIVER = 12000  # for which the arguments of a kernel are small
MANY = 20  # lists: more than there are tables
# The most elements of which a list of one each has a table among small arguments, and large ones.
SMALL, LARGE = 98, 814
NO_LIMIT = 2**62


class Lists(NamedTuple):
    """Arguments of an operation, of every pair of dtypes."""

    main_grads: list[Tensor]
    grads: list[Tensor]
    scale: Tensor
    found_inf: Tensor
    seed: Tensor

    def to(self, other: "Lists") -> None:
        """Write these values there."""
        for target, value in zip(other.written, self.written, strict=True):
            target.copy_(value)

    def copy(self) -> "Lists":
        lists = ([t.clone() for t in tensors] for tensors in (self.main_grads, self.grads))
        return Lists(*lists, *(t.clone() for t in self[2:]))

    @property
    def written(self) -> list[Tensor]:
        return [*self.main_grads, *self.grads, self.found_inf]


def lists(length: int = 128) -> Lists:
    """Of the gradients a third is not aligned as the main gradients are, and a third transposed."""
    main_grads, grads = [], []
    for i, (main, grad) in zip(range(length), itertools.cycle(DTYPE_PAIRS)):
        n = 7 + 41 * (i % 16)
        main_grads.append(oracle.dyadic([n, 2], main))
        flat = oracle.dyadic([n * 2], grad)
        grads.append((shifted(flat, 1) if i % 3 == 1 else flat).view(n, 2))
        if i % 3 == 2:
            grads[-1] = flat.view(2, n).t()
    return Lists(main_grads, grads, torch.tensor(0.5), torch.zeros(()), torch.tensor(7))


OPS: dict[str, Callable[..., Tensor | None]] = {
    "accumulate_": lambda by, a: by.accumulate_(
        a.main_grads, a.grads, inv_scale=a.scale, found_inf=a.found_inf
    ),
    "unscale_check_clip_accumulate_": lambda by, a: by.unscale_check_clip_accumulate_(
        a.main_grads, a.grads, inv_scale=a.scale, max_norm=1e9, found_inf=a.found_inf
    ),
    "total_norm": lambda by, a: by.total_norm(a.grads, inv_scale=a.scale, found_inf=a.found_inf),
    "scale_": lambda by, a: by.scale_(a.main_grads, a.scale),
    "copy_rounded_": lambda by, a: by.copy_rounded_(
        a.main_grads, a.grads, seed=a.seed, found_inf=a.found_inf
    ),
}


@pytest.fixture(autouse=True)
def work_waits():
    loaded.wait_for_operators(False)
    yield
    loaded.synchronize(False)
    loaded.wait_for_operators(True)
    loaded.set_free_memory(NO_LIMIT)
    loaded.set_driver_version(DRIVER)
    loaded.use_device(STEP_BY_STEP)


@pytest.fixture
def old_driver():
    loaded.set_driver_version(OLD_DRIVER)


@pytest.fixture(params=["small", "large", "uploaded"])
def length(request):
    """Of lists whose tables are among small or large arguments of kernels, or uploaded."""
    if request.param == "uploaded":
        loaded.set_driver_version(OLD_DRIVER)
    return 16 if request.param == "small" else 128


@pytest.fixture(params=OPS)
def op(request):
    return OPS[request.param]


def assert_results(op, got: Lists, norm: Tensor | None, before: Lists, times: int = 1) -> None:
    for _ in range(times):
        expected = op(reference, before)
    assert_bits(got.written, before.written)
    if norm is not None:
        torch.testing.assert_close(norm, expected)


def elements() -> list[Tensor]:
    """A list too long for small arguments."""
    return list(torch.ones(SMALL + 1).split(1))


def assert_all(tensors: list[Tensor], value: float) -> None:
    assert torch.equal(torch.cat(tensors), torch.full([len(tensors)], value))


def scale_many() -> None:
    """Lists of which none is what it was when a table was kept for it."""
    many = [elements() for _ in range(MANY)]
    for some in many:
        accumext.scale_(some, 2.0)
    loaded.synchronize(False)
    for some in many:
        assert_all(some, 2.0)


@pytest.mark.parametrize("mutant", mutants.TABLES, ids=attrgetter("name"))
def test_a_mutant_is_seen(mutant):
    """By tests of this file, where no table is kept yet."""
    tests = ["-q", "-n0", "-s", "-p", "no:cacheprovider", __file__, "-k", mutant.shown_by]
    run = functools.partial(pytest.main, tests)
    assert mutant.words in loaded.words_with_mutant(mutants.ALL.index(mutant), run)


@pytest.mark.parametrize(
    ("driver", "count", "uploads", "argument_bytes"),
    [
        (OLD_DRIVER, SMALL, 0, 4096),
        (OLD_DRIVER, SMALL + 1, 1, 4096),
        (DRIVER, SMALL, 0, 4096),
        (DRIVER, SMALL + 1, 0, 32764),
        (DRIVER, LARGE, 0, 32764),
        (DRIVER, LARGE + 1, 1, 4096),
    ],
)
def test_how_a_table_travels(driver, count, uploads, argument_bytes):
    loaded.set_driver_version(driver)
    before, some = loaded.allocations(), list(torch.ones(count).split(1))
    for _ in range(2):
        accumext.scale_(some, 2.0)
        assert argument_bytes - 200 < loaded.argument_bytes() <= argument_bytes
    assert loaded.allocations() == before + uploads
    loaded.synchronize(False)
    assert_all(some, 4.0)


def test_work_waits_and_is_done_in_order(op, length):
    arguments = lists(length)
    before = arguments.copy()
    for _ in range(2):
        norm = op(accumext, arguments)
        assert_bits(arguments.written, before.written)
    loaded.synchronize(False)
    assert_results(op, arguments, norm, before, times=2)


def test_a_table_is_uploaded_once(old_driver):
    arguments = lists()
    before = loaded.allocations()
    norms = [accumext.total_norm(arguments.grads) for _ in range(3)]
    assert loaded.allocations() == before + 1
    loaded.synchronize(False)
    assert len({norm.item() for norm in norms}) == 1
    oracle.assert_norm(norms[0], arguments.grads)


def test_more_lists_than_tables_are_kept(old_driver):
    """Their work waits while tables are written again."""
    before = loaded.allocations()
    many = [elements() for _ in range(MANY)]
    for _ in range(2):
        for some in many:
            accumext.scale_(some, 2.0)
    assert loaded.allocations() <= before + 16
    loaded.synchronize(False)
    for some in many:
        assert_all(some, 4.0)


@pytest.mark.parametrize("last_first", [False, True])
def test_streams_have_tables_of_their_own(last_first, old_driver):
    grads = lists().grads
    norms = []
    for stream in (loaded.Stream(), loaded.Stream()):
        with stream:
            norms.append(accumext.total_norm(grads))
    loaded.synchronize(last_first)
    for norm in norms:
        oracle.assert_norm(norm, grads)


def test_a_stream_may_have_the_handle_of_one_that_is_gone(old_driver):
    """Whose work, and what it reads, is still to be done."""
    gone, some = loaded.Stream(), elements()
    with gone:
        accumext.scale_(some, 2.0)
        loaded.synchronize(False)  # the table is there
        accumext.scale_(some, 2.0)
    handle = gone.destroy()
    later, many = loaded.Stream(), [elements() for _ in range(MANY)]
    with later:
        for others in many:
            accumext.scale_(others, 2.0)
    assert later.destroy() == handle
    loaded.synchronize(True)
    assert_all(some, 4.0)
    for others in many:
        assert_all(others, 2.0)


def test_devices_have_tables_of_their_own(old_driver):
    grads = lists().grads
    before = loaded.allocations()
    for device in (H100, SMALLER):
        loaded.use_device(device)
        norm = accumext.total_norm(grads)
        loaded.synchronize(False)
        oracle.assert_norm(norm, grads)
    assert loaded.allocations() == before + 2


@pytest.mark.parametrize("seen", [False, True], ids=["first_seen", "seen_before"])
def test_a_replay_has_the_bits_of_the_call(op, seen, length):
    arguments, graph = lists(length), loaded.Graph()
    if seen:
        op(accumext, arguments)
        loaded.synchronize(False)
    with graph:
        norm = op(accumext, arguments)
    for _ in range(2):
        values = lists(length)
        values.to(arguments)
        graph.replay()
        loaded.synchronize(False)
        assert_results(op, arguments, norm, values)


@pytest.mark.parametrize("seen", [False, True], ids=["first_seen", "seen_before"])
def test_the_table_of_a_graph_is_not_written_again(seen, old_driver):
    graph, some = loaded.Graph(), elements()
    if seen:
        with graph.stream:
            accumext.scale_(some, 2.0)
        loaded.synchronize(False)
    with graph:
        accumext.scale_(some, 2.0)
    with graph.stream:
        scale_many()
    for element in some:
        element.fill_(3.0)
    graph.replay()
    loaded.synchronize(False)
    assert_all(some, 6.0)


def test_graphs_share_a_table(old_driver):
    """Nothing overwrites a table of graphs."""
    graphs, some = [loaded.Graph(), loaded.Graph()], elements()
    before = loaded.allocations()
    for graph in graphs:
        with graph:
            accumext.scale_(some, 2.0)
    assert loaded.allocations() == before + 1
    for graph in graphs:
        graph.replay()
    loaded.synchronize(False)
    assert_all(some, 4.0)


def test_a_list_where_the_device_has_no_memory(op, old_driver):
    loaded.set_free_memory(0)
    arguments = lists()
    before = arguments.copy()
    for _ in range(2):
        norm = op(accumext, arguments)
    loaded.synchronize(False)
    assert_results(op, arguments, norm, before, times=2)


def test_a_capture_where_the_device_has_no_memory(old_driver):
    loaded.set_free_memory(0)
    some, graph = elements(), loaded.Graph()
    with graph, pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        accumext.scale_(some, 2.0)
    loaded.set_free_memory(NO_LIMIT)
    accumext.scale_(some, 2.0)  # no error is left for it
    loaded.synchronize(False)
    assert_all(some, 2.0)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.zeros(5, 7, dtype=torch.float64)},
        {"weight": torch.zeros(5, 6)},
        {"weight": torch.zeros(0, 7), "bias": None},
        {"bias": torch.zeros(5, dtype=torch.float16)},
        {"bias": torch.zeros(4)},
        {"targets": torch.zeros(3, dtype=torch.int32)},
        {"targets": torch.zeros(2, dtype=torch.int64)},
        {"uniforms": torch.zeros(3)},
        {"exps": torch.zeros(3, 6)},
        {"exps": torch.zeros(3, 1).expand(3, 5)},
        {"temperature": 0.0},
        {"logit_rows": 0},
        {"tokens": torch.zeros(1, dtype=torch.int64).expand(3)},
        {"stats": torch.zeros(2, 3)},
        {"stats": torch.zeros(3, 3, dtype=torch.float64)},
        {"hidden": torch.zeros(3, 7, dtype=torch.float16)},
    ],
    ids=lambda change: "-".join(change),
)
def test_broken_contracts_of_a_head(change):
    good = {
        "hidden": torch.zeros(3, 7), "weight": torch.zeros(5, 7), "bias": torch.zeros(5),
        "targets": torch.zeros(3, dtype=torch.int64), "uniforms": None, "temperature": 1.0,
        "exps": None, "logit_rows": 2, "tokens": torch.zeros(3, dtype=torch.int64),
        "stats": torch.zeros(3, 3),
    }  # fmt: skip
    torch.ops.accumext.head_forward(*good.values())
    loaded.synchronize(False)
    with pytest.raises(RuntimeError):
        torch.ops.accumext.head_forward(*(good | change).values())
