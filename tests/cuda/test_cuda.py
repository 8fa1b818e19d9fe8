"""The gradient operations on a GPU: no wait, few launches, any stream, and what torch puts around
them. gpu_checks.py has their values; kernels and launchers run on the host in test_host_*.py."""

import contextlib
import itertools
import math
import threading

import pytest
import torch
from support import oracle
from support.boundary import OPTIMIZERS, Boundaries
from support.gpu import LAUNCHES, launched
from support.optimizer_oracle import assert_close, loss_of, make_batches, make_model
from support.tensors import FLOAT_DTYPES, assert_bits

import accumext

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("compiled_kernels"),
]

GPU = torch.device("cuda")
KERNELS_PER_CALL = 3
SLEEP_CYCLES = 600_000_000  # about 0.3 s: many times what any call here needs on the host
# Two orders of summation in the matrix products of float32, over two steps of Adam.
TRAINING_TOLERANCE = 1e-4

# One row per operation, on lists that it may be called with again.
OPS = {
    "accumulate_": lambda main_grads, grads, scale, found_inf: accumext.accumulate_(
        main_grads, grads, inv_scale=scale, found_inf=found_inf
    ),
    "unscale_check_clip_accumulate_": lambda main_grads, grads, scale, found_inf: (
        accumext.unscale_check_clip_accumulate_(
            main_grads, grads, inv_scale=scale, max_norm=0.5, found_inf=found_inf, if_finite=True
        )
    ),
    "total_norm": lambda main_grads, grads, scale, found_inf: accumext.total_norm(
        grads, inv_scale=scale, found_inf=found_inf
    ),
    "scale_": lambda main_grads, grads, scale, found_inf: accumext.scale_(main_grads, scale),
    "copy_rounded_": lambda main_grads, grads, scale, found_inf: accumext.copy_rounded_(
        main_grads, grads, seed=torch.full((), 7, device=GPU), found_inf=found_inf
    ),
}
DTYPE_PAIRS = list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES))


@pytest.fixture(params=OPS)
def op(request):
    return OPS[request.param]


def mixed(tensors=64):
    """Main gradients, gradients, scale and found_inf on the GPU: arguments of a row of OPS."""
    sizes = [size % 3000 for size in range(7, 7 + 41 * tensors, 41)]
    main_grads = [oracle.random([n], DTYPE_PAIRS[i % 16][0]).to(GPU) for i, n in enumerate(sizes)]
    grads = [oracle.random([n], DTYPE_PAIRS[i % 16][1]).to(GPU) for i, n in enumerate(sizes)]
    return main_grads, grads, torch.tensor(0.37, device=GPU), torch.zeros((), device=GPU)


def copies(arguments, device=GPU):
    """The same arguments again, in memory of their own."""
    main_grads, grads, *rest = arguments
    lists = [[t.to(device, copy=True) for t in tensors] for tensors in (main_grads, grads)]
    return (*lists, *(t.to(device, copy=True) for t in rest))


def results(arguments, norm):
    """Everything that a call may have written."""
    return [*arguments[0], *arguments[1], arguments[3], *([] if norm is None else [norm])]


def test_more_elements_than_32_bits_count():
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 12 * count:
        pytest.skip("needs 26 GB of GPU memory")
    grad = torch.ones(count, dtype=torch.bfloat16, device=GPU)
    main_grad = torch.zeros(count, device=GPU)
    norm = accumext.accumulate_([main_grad], [grad])
    assert norm.item() == pytest.approx(math.sqrt(count), rel=1e-6)
    assert (main_grad == 1.0).all()
    assert accumext.total_norm([grad[:: 2**31]]).item() == pytest.approx(math.sqrt(2), rel=1e-6)


# --- tables that are kept on the GPU --------------------------------------------------------------


def test_one_address_may_hold_another_tensor_at_the_next_call():
    base = oracle.dyadic([4096], torch.float32).to(GPU)
    views = [
        base,
        base[:100],
        base.view(torch.bfloat16)[:64].fill_(1.0),
        base.view(64, 64).t(),
        base.view(64, 64)[:, :9],
        base[1:],
        base[:100],
    ]
    for view in views:
        norm = accumext.total_norm([view])
        oracle.assert_norm(norm.cpu(), [view.cpu()], rtol=oracle.NORM_RTOL[torch.float32])


def norms_of_many_lists():
    """More lists of 2,000 tensors than tables are kept, and their elements."""
    base = oracle.dyadic([10020], torch.float32).to(GPU)
    slices = [base[start : start + 10000] for start in range(20)]
    return [accumext.total_norm(s.split(5)) for s in slices], slices


def test_more_lists_than_tables_are_kept():
    for _ in range(2):
        for norm, elements in zip(*norms_of_many_lists()):
            oracle.assert_norm(norm.cpu(), [elements.cpu()])


def test_a_list_where_torch_holds_all_memory():
    """Its allocator has plenty; the driver, which tables are asked of, has none."""
    hoard, size = [], 2**30
    while size >= 2**21:
        try:
            hoard.append(torch.empty(size, dtype=torch.uint8, device=GPU))
        except torch.OutOfMemoryError:
            size //= 2
    hoard.clear()
    grads = list(torch.ones(50_000, device=GPU).split(1))  # a table of more than 2 MB
    assert accumext.total_norm(grads).item() == pytest.approx(50_000**0.5)
    accumext.scale_(grads, 2.0)  # no error is left for the next call
    assert accumext.total_norm(grads).item() == pytest.approx(2.0 * 50_000**0.5)
    del grads
    torch.cuda.empty_cache()


# --- the host does not wait, and launches little --------------------------------------------------


@contextlib.contextmanager
def sleeping_gpu():
    """Fails if torch sees the host wait, or if the GPU, which is to sleep, is awake at the end."""
    spare = [torch.empty(2**19, dtype=torch.uint8, device=GPU) for _ in range(8)]
    del spare  # now torch's allocator need not ask the driver, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query(), "the host waited for the GPU"


@pytest.fixture(scope="module")
def driver_waits():
    """Tell whether the driver lets the host wait where torch's allocator asks it for memory, as
    tables do."""
    torch.cuda.empty_cache()
    try:
        with sleeping_gpu():
            torch.empty(2**25, dtype=torch.uint8, device=GPU)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("tensors", [1, 64, 500, 2000])
@pytest.mark.parametrize("seen", [False, True], ids=["first_seen", "seen_before"])
def test_no_call_waits(op, seen, tensors, driver_waits):
    if driver_waits and not seen:
        pytest.skip("not run: on this machine the driver waits for kernels to give memory")
    first, second = mixed(tensors), mixed(tensors)
    op(*first)  # kernels are loaded and memory is taken at the first call
    with sleeping_gpu():
        op(*(first if seen else second))


def train(device, *, scaled, dtype=torch.float32, guard=contextlib.nullcontext):
    """Two windows of three micro-batches, the second under `guard`."""
    model = make_model(dtype).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0) if scaled else None
    opt = accumext.AccumulatingOptimizer(adam, window=3, max_norm=0.1, scaler=scaler)
    batches = [batch.to(device) for batch in make_batches(6, dtype)]
    weight = torch.tensor(3.0, device=device)
    for part, context in ((batches[:3], contextlib.nullcontext()), (batches[3:], guard())):
        with context:
            for batch in part:
                opt.backward(loss_of(model, batch), weight)
                opt.step()
    assert opt.stepped
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_no_window_waits_with_a_fused_optimizer(scaled, dtype):
    train(GPU, scaled=scaled, dtype=dtype, guard=sleeping_gpu)


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_a_window_trains_as_on_the_cpu(scaled):
    expected = train(torch.device("cpu"), scaled=scaled)
    got = [p.cpu() for p in train(GPU, scaled=scaled)]
    assert_close(got, expected, TRAINING_TOLERANCE)


def test_launches_do_not_grow_with_the_list(op):
    if not launched(lambda: torch.ones(5, device=GPU)):
        pytest.skip("torch.profiler sees no kernels on this machine")
    one, many, new = mixed(1), mixed(2000), mixed(2000)
    for arguments in (one, many):
        op(*arguments)
    names = launched(lambda: op(*many))
    assert len(names) == len(launched(lambda: op(*one)))
    assert len(names) <= KERNELS_PER_CALL, names
    names = launched(lambda: op(*new))
    copied = sum("Memcpy" in name for name in names)
    assert copied <= 2, names  # a clip has a table of the gradients besides that of the pairs
    assert len(names) - copied <= KERNELS_PER_CALL, names


@pytest.mark.parametrize("tensors", [1, 64, 500])
def test_no_table_is_copied_that_arguments_hold(tensors):
    if not launched(lambda: torch.ones(5, device=GPU)):
        pytest.skip("torch.profiler sees no kernels on this machine")
    arguments = mixed(tensors)
    names = launched(lambda: OPS["accumulate_"](*arguments))
    assert not any("Memcpy" in name for name in names), names


@pytest.mark.parametrize(("scaled", "clipped"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 2])
def test_closing_a_window_launches_no_more_than_torch(scaled, clipped, optimizer, window):
    """Kernels; a table is copied where gradients have moved, and torch copies scalars."""
    if not launched(lambda: torch.ones(5, device=GPU)):
        pytest.skip("torch.profiler sees no kernels on this machine")
    pair = Boundaries(optimizer, scaled, clipped, device="cuda")
    theirs = pair.stock(lambda call: launched(call, LAUNCHES))
    mine = pair.ours(lambda call: launched(call, LAUNCHES), window)
    assert len(mine) <= len(theirs), (mine, theirs)


# --- streams, captures, devices -------------------------------------------------------------------


def test_a_call_is_in_order_with_its_stream(op):
    source, arguments = mixed(), mixed()
    op(*arguments)  # the default stream has used these tensors
    expected = copies(source)
    expected_norm = op(*expected)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        for to, values in zip(results(arguments, None), results(source, None)):
            to.copy_(values)
        norm = op(*arguments)
        got = [t.clone() for t in results(arguments, norm)]
    torch.cuda.synchronize()
    assert_bits(got, results(expected, expected_norm))


def test_threads_with_streams_of_their_own():
    def work(arguments, norms):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                norms.append(accumext.total_norm(arguments[1]))
            torch.cuda.current_stream().synchronize()

    lists = [mixed(10 + i) for i in range(4)]
    expected = [accumext.total_norm(arguments[1]) for arguments in lists]
    found = [[] for _ in lists]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(lists, found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for norms, want in zip(found, expected):
        assert len(norms) == 50
        assert all(torch.equal(norm, want) for norm in norms)


@pytest.mark.parametrize("seen", [False, True], ids=["first_seen", "seen_before"])
def test_a_replayed_graph_has_the_bits_of_eager_calls(op, seen):
    arguments = mixed()
    op(*mixed())  # kernels are not loaded in a capture
    if seen:
        op(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = op(*arguments)
    for _ in range(3):
        values = mixed()
        for to, value in zip(results(arguments, None), results(values, None)):
            to.copy_(value)
        expected_norm = op(*values)
        norms_of_many_lists()
        graph.replay()
        assert_bits(results(arguments, norm), results(values, expected_norm))


def test_the_device_is_that_of_the_tensors(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    here = mixed()
    there = copies(here, "cuda:1")
    norm = op(*there)
    assert torch.cuda.current_device() == 0
    assert_bits(results(there, norm), results(here, op(*here)))


def test_norms_of_several_devices_meet_on_the_first():
    ours, theirs = (
        [torch.nn.Parameter(torch.zeros(n, device=d)) for n, d in ((2049, "cpu"), (91, GPU))]
        for _ in range(2)
    )
    for parameter in ours + theirs:
        parameter.grad = torch.ones_like(parameter)
    norm = accumext.clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    for got, want in zip(ours, theirs):
        torch.testing.assert_close(got.grad, want.grad)
