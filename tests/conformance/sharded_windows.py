"""What the ranks of test_sharded_once_per_window.py do: each takes a rank and their number."""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter

import torch
import torch.distributed as dist
from data_parallel import BATCHES, MAX_NORM, WINDOW, adam, own_share
from support.optimizer_oracle import INF, loss_of, make_model
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


def wrapped(model, **kwargs):
    options = {"window": WINDOW, "max_norm": MAX_NORM, "synchronize": "window", **kwargs}
    return AccumulatingOptimizer(adam(model.parameters()), **options)


def run(opt, model, batch, weight=1.0, factor=1.0):
    with opt.micro_batch(model):
        opt.backward(loss_of(model, batch) * factor, weight)
    opt.step()


def train(opt, model, share):
    for i, (batch, weight) in enumerate(share):
        run(opt, model, batch, weight if i % 2 else torch.tensor(weight))


def outcome(model, opt, **more):
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"parameters": [p.detach() for p in full], "stats": opt.stats(), **more}


def once_per_window(rank, world):
    model = sharded()
    opt = wrapped(model)
    train(opt, model, own_share(rank, world))
    return outcome(model, opt)


def in_parts(rank, world):
    model = sharded()
    opt = wrapped(model)
    for batch, weight in own_share(rank, world):
        with opt.micro_batch(model):
            opt.backward(0.25 * loss_of(model, batch), weight)
            opt.backward(0.75 * loss_of(model, batch), weight)
        opt.step()
    return outcome(model, opt)


def every_backward(rank, world):
    """The default, with weights that differ between ranks and between micro-batches."""
    model = sharded()
    opt = wrapped(model, synchronize="backward")
    train(opt, model, own_share(rank, world))
    return outcome(model, opt)


def partial_windows(rank, world):
    """A flush after three of four, and after one."""
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:3])
    opt.flush()
    train(opt, model, share[3:8])
    opt.flush()
    return outcome(model, opt)


def refused(call):
    """The words of an error that is expected before torch 2.15."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def a_partial_window_is_refused(rank, world):
    """Before torch 2.15; then what is held is dropped, and training goes on."""
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:3])
    told = [refused(opt.flush), refused(opt.accumulation_state_dict)]
    held = opt._box.state.window.micro_batches
    opt.discard()
    train(opt, model, share[:8])
    return outcome(model, opt, errors=told, held=held)


def counted(rank, world, synchronize, micro_batches=WINDOW):
    """Collectives of the second window."""
    model = sharded()
    opt = wrapped(model, synchronize=synchronize)
    train(opt, model, own_share(rank, world)[:WINDOW])
    with torch.profiler.profile() as profile:
        train(opt, model, own_share(rank, world)[:micro_batches])
        opt.flush()
    counts = Counter()
    for event in profile.key_averages():
        if event.key in COLLECTIVES:
            counts[COLLECTIVES[event.key]] += event.count
    return {"counts": dict(counts)}


def counted_every_backward(rank, world):
    return counted(rank, world, "backward")


def counted_once_per_window(rank, world):
    return counted(rank, world, "window")


def counted_partial_window(rank, world):
    return counted(rank, world, "window", 3)


def inf_on_one_rank(rank, world):
    model = sharded()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = wrapped(model, window=2, scaler=scaler, max_norm=None)
    skipped = []
    for i, (batch, weight) in enumerate(own_share(rank, world, 4 * world)):
        run(opt, model, batch, weight, INF if i == 0 and rank == 1 else 1.0)
        if opt.stepped:
            skipped.append(opt.last.skipped)
    return outcome(model, opt, skipped=skipped, scale=scaler.get_scale())


def an_exception(rank, world):
    """In the third micro-batch, before its backward pass; the window is dropped."""
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:2])
    notes = []
    try:
        with opt.micro_batch(model):
            loss_of(model, share[2][0])
            raise KeyError
    except KeyError as error:
        notes = error.__notes__
    held = opt._box.state.window.micro_batches
    train(opt, model, share[:8])
    return outcome(model, opt, notes=notes, held=held)


def an_exception_in_backward(rank, world):
    """On the way to the first layer, when the gradients of the last are there."""
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:2])

    def stop(grad):
        raise KeyError

    try:
        with opt.micro_batch(model):
            hidden = model[0](share[2][0])
            hidden.register_hook(stop)
            opt.backward(model[2](hidden).square().mean())
    except KeyError:
        pass
    train(opt, model, share[:8])
    return outcome(model, opt)


def frozen(rank, world):
    whole = make_model()
    whole[0].weight.requires_grad_(False)
    model = sharded(model=whole)
    opt = wrapped(model)
    train(opt, model, own_share(rank, world))
    return outcome(model, opt)


def saved_inside(rank, world):
    """The open window is saved after two of four, and resumed by another model and optimizer."""
    share = own_share(rank, world)
    model = sharded()
    opt = wrapped(model)
    train(opt, model, share[:2])
    saved = copy.deepcopy(opt.accumulation_state_dict())
    train(opt, model, share[2:WINDOW])
    again = sharded()
    resumed = wrapped(again)
    resumed.load_accumulation_state_dict(saved)
    train(resumed, again, share[2:WINDOW])
    return outcome(model, opt, resumed=outcome(again, resumed)["parameters"])


def misuse(rank, world):
    """What is refused in words."""
    model = sharded()
    opt = wrapped(model)
    batch, weight = own_share(rank, world)[0]
    errors = {}

    def told(name, call):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    def outside():
        opt.backward(loss_of(model, batch))

    def by_the_user():
        loss_of(model, batch).backward()
        opt.step()

    def cleared():
        run(opt, model, batch, weight)
        model.zero_grad()
        run(opt, model, batch, weight)

    def empty():
        with opt.micro_batch(model):
            pass

    told("outside", outside)
    told("by the user", by_the_user)
    opt.zero_grad()
    told("unsharded", lambda: opt.micro_batch(nn.Linear(1, 1)).__enter__())
    told("empty", empty)
    told("cleared", cleared)
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
    """What an open window holds, measured after two micro-batches, and what was predicted."""
    found = []
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype, options in (
        (torch.float32, {}),
        (torch.float32, {"mp_policy": half}),
        (torch.bfloat16, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}),
    ):
        for synchronize in ("backward", "window"):
            model = sharded(model=Wide(dtype), **options)
            opt = wrapped(model, synchronize=synchronize)
            batch = torch.randn(2, 301, dtype=dtype)
            before = live_bytes()
            for _ in range(2):
                run(opt, model, batch)
            found.append((live_bytes() - before, accumext.window_memory(model, synchronize)))
            opt.discard()
    return {"memory": found}


def half_precision(rank, world):
    """bfloat16 parameters whose gradients FSDP holds in float32, and their masters."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = sharded(torch.bfloat16, mp_policy=policy)
    masters = accumext.masters(model.parameters())
    sgd = torch.optim.SGD(masters, lr=1.0)
    opt = AccumulatingOptimizer(sgd, window=WINDOW, masters=masters, synchronize="window")
    before = [m.full_tensor().detach() for m in masters]
    for batch, _ in own_share(rank, world)[:WINDOW]:
        run(opt, model, batch.bfloat16())
    after = [m.full_tensor().detach() for m in masters]
    return {"moved": [a - b for a, b in zip(before, after, strict=True)]}


def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(rank, world, synchronize="window", **kwargs):
    """HSDP: `fully_shard` on a mesh of two dimensions."""
    model = sharded(mesh=mesh_2d())
    opt = wrapped(model, synchronize=synchronize, **kwargs)
    train(opt, model, own_share(rank, world))
    return outcome(model, opt)


def hybrid_every_backward(rank, world):
    return hybrid(rank, world, "backward")


def shards_of_replicas(rank, world, synchronize="window"):
    """`fully_shard` within pairs, and the optimizer's own group over the replicas."""
    mesh = mesh_2d()
    model = sharded(mesh=mesh["shard"])
    opt = wrapped(model, synchronize=synchronize, process_group=mesh["replicate"].get_group())
    train(opt, model, own_share(rank, world))
    return outcome(model, opt)


def shards_of_replicas_every_backward(rank, world):
    return shards_of_replicas(rank, world, "backward")


def hybrid_counted(rank, world):
    seen = {}
    mesh = mesh_2d()
    for name, options, synchronize in (
        ("usual hybrid", {"mesh": mesh}, "backward"),
        ("hybrid", {"mesh": mesh}, "window"),
        ("shards of replicas", {"mesh": mesh["shard"]}, "window"),
    ):
        model = sharded(**options)
        own = mesh["replicate"].get_group() if name == "shards of replicas" else None
        opt = wrapped(model, process_group=own, synchronize=synchronize)
        train(opt, model, own_share(rank, world)[:WINDOW])
        with torch.profiler.profile() as profile:
            train(opt, model, own_share(rank, world)[:WINDOW])
        counts = Counter()
        for event in profile.key_averages():
            if event.key in COLLECTIVES:
                counts[COLLECTIVES[event.key]] += event.count
        seen[name] = dict(counts)
    return {"counts": seen}


def hybrid_partial_window(rank, world):
    model = sharded(mesh=mesh_2d())
    opt = wrapped(model)
    train(opt, model, own_share(rank, world)[:3])
    told = refused(opt.flush)
    if told is not None:
        opt.discard()
        return {"error": told}
    return outcome(model, opt)


EQUAL = (once_per_window, in_parts, every_backward)
ALONE = (
    *EQUAL,
    counted_every_backward,
    counted_once_per_window,
    inf_on_one_rank,
    frozen,
    misuse,
    memory,
    half_precision,
    an_exception,
    *((an_exception_in_backward,) if RECOVERS else ()),
)
FINALIZING = (partial_windows, counted_partial_window, saved_inside)
SCENARIOS = (*ALONE, *(FINALIZING if FINALIZES else (a_partial_window_is_refused,)))
EQUAL_HYBRIDS = (
    hybrid,
    hybrid_every_backward,
    shards_of_replicas,
    shards_of_replicas_every_backward,
)
HYBRIDS = (
    *EQUAL_HYBRIDS,
    hybrid_counted,
    hybrid_partial_window,
)
assert len(BATCHES) % (WINDOW * 3) == 0
assert dist.is_available()
