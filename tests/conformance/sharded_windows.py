"""The scenarios of test_sharded_once_per_window.py: each takes a rank and the number of ranks."""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter
from functools import partial

import ranks
import shares
import torch
from shares import MAX_NORM, WINDOW, error_of, held, inside, outcome, own_share, whole
from support.optimizer_oracle import adam, loss_of, make_model, own_backward, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

# From torch 2.15 on FSDP can be told to reduce what it holds; before, the last backward pass does.
FINALIZES = hasattr(FSDPModule, "finalize_backward")
RECOVERS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on

COLLECTIVES = {
    "c10d::_allgather_base_": "all-gathers",
    "c10d::_reduce_scatter_base_": "reduce-scatters",
    "c10d::allreduce_": "all-reduces",
}


def sharded(dtype=torch.float64, model=None, **kwargs):
    """Two groups of parameters, and a root without any."""
    model = make_model(dtype) if model is None else model
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def wrapped(model, optimizer=adam, **kwargs):
    options = {"window": WINDOW, "max_norm": MAX_NORM, "synchronize": "window", **kwargs}
    return AccumulatingOptimizer(optimizer(model.parameters()), **options)


def training(dtype=torch.float64, model=None, optimizer=adam, shards=None, **options):
    """A sharded model, and a wrapper of it."""
    model = sharded(dtype, model, **(shards or {}))
    return model, wrapped(model, optimizer, **options)


train = partial(shares.train, loop=inside, mixed=True)
trained = partial(shares.trained, make=training, loop=inside, mixed=True)
EQUAL = {
    "once_per_window": trained,
    "in_parts": partial(trained, loop=partial(inside, parts=(0.25, 0.75))),
    "every_backward": partial(trained, synchronize="backward"),
}


def partial_windows(rank, world):
    """A flush after three of four, and after one."""
    model, opt = training()
    share = own_share(rank, world)
    train(opt, model, share[:3])
    opt.flush()
    train(opt, model, share[3:8])
    opt.flush()
    return outcome(model, opt)


def a_partial_window_is_refused(rank, world):
    """Before torch 2.15; then what is held is dropped, and training goes on."""
    model, opt = training()
    share = own_share(rank, world)
    train(opt, model, share[:3])
    told = [error_of(opt.flush), error_of(opt.accumulation_state_dict)]
    dropped = held(opt)
    opt.discard()
    train(opt, model, share[:8])
    return outcome(model, opt, errors=told, dropped=dropped)


def counted(rank, world, make=training, micro_batches=WINDOW, flush=True, **options):
    """Collectives of the second window, and of a flush, which sends nothing where it is full."""
    model, opt = make(**options)
    train(opt, model, own_share(rank, world, WINDOW))
    with torch.profiler.profile() as profile:
        train(opt, model, own_share(rank, world, micro_batches))
        if flush:
            opt.flush()
    counts = Counter()
    for event in profile.key_averages():
        if event.key in COLLECTIVES:
            counts[COLLECTIVES[event.key]] += event.count
    return {"counts": dict(counts)}


def failing(rank, world, fail, count=2, again=0):
    """After so many micro-batches one fails, and the window is dropped; others train on."""
    model, opt = training()
    share = own_share(rank, world)
    train(opt, model, share[:count])
    error = error_of(lambda: fail(opt, model, *share[count]))
    after = {
        "error": error,
        "left": held(opt),
        "grads": [p.grad is not None for p in parameters(opt)],
    }
    train(opt, model, share[again:8])
    return outcome(model, opt, **after)


def parameters(opt):
    return opt.param_groups[0]["params"]


def before_backward(opt, model, batch, weight):
    with opt.micro_batch(model):
        loss_of(model, batch)
        raise KeyError


def in_backward(opt, model, batch, weight, error=KeyError):
    """On the way to the first layer, when the gradients of the last are there."""

    def stop(grad):
        raise error

    with opt.micro_batch(model):
        hidden = model[0](batch)
        hidden.register_hook(stop)
        opt.backward(model[2](hidden).square().mean(), weight)


def frozen(rank, world):
    whole = make_model()
    whole[0].weight.requires_grad_(False)
    model, opt = training(model=whole)
    train(opt, model, own_share(rank, world))
    return outcome(model, opt)


def saved_inside(rank, world):
    """The open window is saved after two of four, and resumed by another model and optimizer."""
    share = own_share(rank, world)
    model, opt = training()
    train(opt, model, share[:2])
    saved = copy.deepcopy(opt.accumulation_state_dict())
    train(opt, model, share[2:WINDOW])
    again, resumed = training()
    resumed.load_accumulation_state_dict(saved)
    train(resumed, again, share[2:WINDOW])
    return outcome(model, opt, resumed=outcome(again, resumed)["parameters"])


def misuse(rank, world):
    """Misuse the wrapper, and record the words in which it refuses."""
    model, opt = training()
    batch, weight = own_share(rank, world)[0]

    def cleared():
        inside(opt, model, batch, weight)
        model.zero_grad()
        inside(opt, model, batch, weight)

    def empty():
        with opt.micro_batch(model):
            pass

    errors = {
        "outside": error_of(lambda: opt.backward(loss_of(model, batch))),
        "by the user": error_of(lambda: own_backward(opt, loss_of(model, batch))),
    }
    opt.zero_grad()
    errors["unsharded"] = error_of(opt.micro_batch(nn.Linear(1, 1)).__enter__)
    errors |= {"empty": error_of(empty), "cleared": error_of(cleared)}
    opt.discard()
    train(opt, model, own_share(rank, world))
    return outcome(model, opt, errors=errors)


class Wide(nn.Sequential):
    """Of layers that no number of processes here divides."""

    def __init__(self, dtype):
        super().__init__(*(nn.Linear(301, 301, dtype=dtype) for _ in range(3)))


def live_bytes():
    """Of all tensors that Python can find. The least of several looks: a thread of the group may
    hold what it has sent for a moment longer than the collective takes."""
    gc.collect()
    looks = []
    for _ in range(5):
        looks.append(bytes_found())
        time.sleep(0.02)
    return min(looks)


def bytes_found():
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            tensor = found._local_tensor if isinstance(found, DTensor) else found
            for part in (tensor, tensor.grad):
                if part is not None:
                    part = part._local_tensor if isinstance(part, DTensor) else part
                    storage = part.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory(rank, world):
    """Measure the memory of an open window after two micro-batches, and predict it."""
    found = []
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype, options in (
        (torch.float32, {}),
        (torch.float32, {"mp_policy": half}),
        (torch.bfloat16, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}),
    ):
        for synchronize in ("backward", "window"):
            model, opt = training(model=Wide(dtype), shards=options, synchronize=synchronize)
            batch = torch.randn(2, 301, dtype=dtype)
            before = live_bytes()
            for _ in range(2):
                inside(opt, model, batch)
            found.append((live_bytes() - before, accumext.window_memory(model, synchronize)))
            opt.discard()
    return {"memory": found}


def half_precision(rank, world):
    """bfloat16 parameters whose gradients FSDP holds in float32, and their masters."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = sharded(torch.bfloat16, mp_policy=policy)
    masters = accumext.masters(model.parameters())
    opt = AccumulatingOptimizer(sgd(masters), window=WINDOW, masters=masters, synchronize="window")
    before = [m.detach().clone() for m in whole(masters)]
    train(opt, model, own_share(rank, world, WINDOW, torch.bfloat16))
    return {"moved": [a - b.detach() for a, b in zip(before, whole(masters), strict=True)]}


def hybrid(replicated=False, **options):
    """HSDP: `fully_shard` on a mesh of two dimensions; or shards in pairs, whose replicas the
    optimizer's own group sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if replicated:
        options["process_group"] = mesh["replicate"].get_group()
    return training(shards={"mesh": mesh["shard"] if replicated else mesh}, **options)


def hybrid_partial_window(rank, world):
    model, opt = hybrid()
    train(opt, model, own_share(rank, world, 3))
    error = error_of(opt.flush)
    if error:
        opt.discard()
        return {"error": error}
    return outcome(model, opt)


SCENARIOS = {
    **EQUAL,
    "counted_every_backward": partial(counted, synchronize="backward"),
    "counted_once_per_window": counted,
    "inf_on_one_rank": partial(shares.poisoned, make=training, loop=inside, max_norm=None),
    "an_exception": partial(failing, fail=before_backward),
    **ranks.named(frozen, misuse, memory, half_precision),
}
if RECOVERS:
    SCENARIOS["an_exception_in_backward"] = partial(failing, fail=in_backward)
if FINALIZES:
    SCENARIOS["counted_partial_window"] = partial(counted, micro_batches=3)
    SCENARIOS |= ranks.named(partial_windows, saved_inside)
else:
    SCENARIOS |= ranks.named(a_partial_window_is_refused)
EQUAL_HYBRIDS = {
    f"{kind}-{synchronize}": partial(
        trained, make=hybrid, replicated=replicated, synchronize=synchronize
    )
    for kind, replicated in (("hybrid", False), ("shards_of_replicas", True))
    for synchronize in ("backward", "window")
}
HYBRIDS = {
    **EQUAL_HYBRIDS,
    "usual": partial(counted, make=hybrid, synchronize="backward"),
    "once": partial(counted, make=hybrid),
    "replicas": partial(counted, make=hybrid, replicated=True, flush=False),
    "hybrid_partial_window": hybrid_partial_window,
}
