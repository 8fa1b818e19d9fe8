"""`on_nonfinite="step"`: stock PyTorch bit for bit, also with inf and NaN, and nothing is read."""

import pickle

import pytest
import torch
from support import optimizer_oracle as oracle
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import INF, NAN
from support.tensors import assert_bits, assert_equal
from torch.nn.utils import clip_grad_norm_

import accumext

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# What is written into a gradient; `large` is finite, and its square is not.
WRONG = {"finite": None, "inf": INF, "-inf": -INF, "nan": NAN, "large": 1e30}
KINDS = ["sgd-momentum", "adamw", "adamw-foreach", "adamw-fused"]


def spoiled(model, batch, wrong):
    """A loss whose gradient has `wrong` at one place, and is far below any `max_norm` elsewhere."""
    loss = oracle.loss_of(model, batch) / 64
    return loss if wrong is None else loss + model[0].weight[1, 1] * wrong


def train_stock(dtype, kind, wrong, max_norm, norm_type):
    model = oracle.make_model(dtype)
    optimizer = oracle.OPTIMIZERS[kind](model.parameters())
    for i, batch in enumerate(oracle.make_batches(3, dtype)):
        spoiled(model, batch, wrong if i == 1 else None).backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm, norm_type)
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
    return oracle.parameters_of(model), grads


@pytest.mark.parametrize("loop", [oracle.one_call, oracle.own_backward])
@pytest.mark.parametrize(("max_norm", "norm_type"), [(None, 2.0), (8.0, 2.0), (8.0, INF), (8.0, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_stock_pytorch_bit_for_bit(dtype, wrong, kind, max_norm, norm_type, loop):
    """The finite gradients are below `max_norm`. So no product is rounded: the clip multiplies by
    1, 0 or NaN."""
    value = WRONG[wrong]
    if wrong == "large" and dtype in (torch.float16, torch.float64):
        value = None if dtype == torch.float16 else 1e200  # no float16 has a square beyond float32
    expected, grads = train_stock(dtype, kind, value, max_norm, norm_type)
    model, left = oracle.make_model(dtype), []
    options = {"max_norm": max_norm, "norm_type": norm_type, "on_nonfinite": "step"}
    opt = oracle.wrapped(model, oracle.OPTIMIZERS[kind], **options)
    opt.optimizer.register_step_post_hook(
        lambda *_: left.append([p.grad.clone() for p in model.parameters()])
    )
    for i, batch in enumerate(oracle.make_batches(3, dtype)):
        loop(opt, spoiled(model, batch, value if i == 1 else None))
        assert opt.stepped
        assert not opt.last.skipped
        assert opt.last.nonfinite == []
    assert_bits(oracle.parameters_of(model), expected)
    assert_bits(left[-1], grads)


def in_half_with_masters(**options):
    model = oracle.make_model(torch.bfloat16)
    masters = accumext.masters(model.parameters())
    opt = accumext.AccumulatingOptimizer(oracle.adam(masters), masters=masters, **options)
    return model, opt


def in_double(**options):
    model = oracle.make_model()
    return model, oracle.wrapped(model, oracle.adam, **options)


def with_a_closure(opt, model, batch, factor):
    def closure():
        opt.zero_grad()
        (oracle.loss_of(model, batch) * factor).backward()

    opt.step(closure)


def in_a_micro_batch(opt, model, batch, factor):
    with opt.micro_batch():
        opt.backward(oracle.loss_of(model, batch) * factor)
        (oracle.loss_of(model, batch) * factor).backward()
    opt.step()


def through(loop):
    return lambda opt, model, batch, factor: loop(opt, oracle.loss_of(model, batch) * factor)


WAYS = {
    "backward": through(oracle.one_call),
    "own backward": through(oracle.own_backward),
    "accumulate": through(oracle.accumulated),
    "closure": with_a_closure,
    "micro-batch": in_a_micro_batch,
}


@pytest.mark.parametrize("make", [in_double, in_half_with_masters])
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_only_an_inf_makes_a_difference_to_the_default(way, window, max_norm, make):
    """In one run of windows without any, and in another with one."""
    runs = []
    for policy in ("skip_window", "step"):
        model, opt = make(window=window, max_norm=max_norm)
        opt.on_nonfinite = policy
        for batch in oracle.make_batches(4 * window):
            WAYS[way](opt, model, batch.to(model[0].weight.dtype), 1.0)
        assert opt.stepped
        numbers = opt.stats()
        if max_norm is None and policy == "step":
            assert numbers.pop("total_norm") != numbers["clip_coef"] == 1.0  # NaN, not measured
        runs.append((oracle.parameters_of(model), numbers))
    (expected, told), (found, numbers) = runs
    assert_equal(found, expected)
    assert numbers.items() <= told.items()
    model, opt = pickle.loads(pickle.dumps((model, opt)))
    for p in model.parameters():
        p.grad = torch.full_like(p, INF)
    opt.window = 1
    opt.step()
    assert opt.stepped
    assert not opt.last.skipped
    assert not any(p.isfinite().any() for p in model.parameters())


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw-fused"])
@pytest.mark.parametrize("protocol", ["own", "outer"])
def test_a_scaler_looks_for_itself(protocol, kind, max_norm):
    """And leaves the step out, as in stock PyTorch, as it does by default."""
    runs = []
    for policy in ("skip_window", "step"):
        model, scaler = oracle.make_model(torch.float32), oracle.growing_scaler()
        options = {"max_norm": max_norm, "on_nonfinite": policy}
        own = scaler if protocol == "own" else None
        opt = oracle.wrapped(model, oracle.OPTIMIZERS[kind], scaler=own, **options)
        loop, seen = oracle.outer_scaler if own is None else oracle.one_call, []
        for i, batch in enumerate(oracle.make_batches(6, torch.float32)):
            loop(opt, oracle.loss_of(model, batch) * (INF if i == 2 else 1.0), scaler)
            seen.append((opt.last.skipped, scaler.get_scale()))
        runs.append((seen, oracle.parameters_of(model)))
    assert [skipped for skipped, _ in runs[1][0]] == [False, False, True, False, False, False]
    assert runs[1][0] == runs[0][0]
    assert_equal(runs[1][1], runs[0][1])


@cpu_as_device()
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw-fused"])
@pytest.mark.parametrize("weight", [1.0, torch.tensor(3.0)], ids=["number", "device"])
def test_nothing_is_read(weight, kind, max_norm, window):
    model = oracle.make_model(torch.float32)
    options = {"window": window, "max_norm": max_norm, "on_nonfinite": "step"}
    opt = oracle.wrapped(model, oracle.OPTIMIZERS[kind], **options)
    with DeviceReads() as reads:
        for i, batch in enumerate(oracle.make_batches(6, torch.float32)):
            opt.backward(oracle.loss_of(model, batch) * (INF if i > 2 else 1.0), weight)
            opt.step()
    assert (reads.count, reads.lists, reads.made) == (0, 0, 0)
    assert opt.stepped
    assert not any(p.isfinite().any() for p in model.parameters())


@cpu_as_device()
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_processes_that_share_a_window_read_nothing(groups, max_norm):
    """But in the first window, in which they compare their settings."""

    def read(rank):
        parameter, opt = oracle.wrapped_zeros(
            2, shape=2, max_norm=max_norm, on_nonfinite="step", process_group=groups[rank]
        )
        for factor in (1.0, INF):
            with DeviceReads() as reads:
                for _ in range(2):
                    opt.backward(parameter.sum() * (factor if rank else 1.0))
                    opt.step()
        assert opt.stepped
        assert not opt.last.skipped
        assert not parameter.isfinite().any()
        return reads.count

    assert oracle.on_both(read) == [0, 0]
