"""Trainings that several processes share, and the one process that they are compared with."""

import torch
import torch.distributed as dist
from support import optimizer_oracle as oracle
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

WINDOW = 4
COUNT = 24  # micro-batches: whole windows for 2 processes and for 3
BATCHES = oracle.make_batches(COUNT)
WEIGHTS = [float(n % 7 + 1) for n in range(COUNT)]
MAX_NORM = 0.02  # clips every window

# From torch 2.15 on FSDP can be told to reduce what it holds; before, the last backward pass does.
FINALIZES = hasattr(FSDPModule, "finalize_backward")
RECOVERS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on


def own_share(rank, world, count=None, dtype=torch.float64, weighted=True):
    """Return a rank's first micro-batches with weights; of `world` in a row each rank has one."""
    batches = [batch.to(dtype) for batch in BATCHES[rank::world]]
    weights = WEIGHTS[rank::world] if weighted else [1.0] * len(batches)
    return list(zip(batches, weights))[:count]


def by_windows(world, *windows, model=None, make=oracle.adam, weights=WEIGHTS, **options):
    """Train one process on the micro-batches of all ranks; return the parameters. `windows` are
    pairs of numbers, from one micro-batch of each rank to another."""
    model = oracle.make_model() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = oracle.ByHand(trained, make, **{"max_norm": MAX_NORM, **options})
    for begin, end in windows:
        for number in range(begin * world, end * world):
            weight = weights[number] if weights else 1.0
            plain.add(oracle.loss_of(model, BATCHES[number]), weight)
        plain.step()
    return oracle.parameters_of(model)


def by_hand(world, begin=0, end=None, window=WINDOW, **options):
    """Do so in windows of one size, the last perhaps partial."""
    end = COUNT // world if end is None else end
    starts = range(begin, end, window)
    return by_windows(world, *((start, min(start + window, end)) for start in starts), **options)


# Models, and their wrappers


def in_group(model, make=oracle.adam, **options):
    """Wrap an optimizer whose windows all processes sum."""
    options = {"window": WINDOW, "process_group": dist.group.WORLD, **options}
    return oracle.wrapped(model, make, **options)


def made(**options):
    model = oracle.make_model()
    return model, in_group(model, **options)


def sharded(dtype=torch.float64, model=None, **kwargs):
    """Shard a model in two groups of parameters, and a root without any."""
    model = oracle.make_model(dtype) if model is None else model
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def once_per_window(model, make=oracle.adam, **options):
    """Wrap shards that are reduced once per window, unless the options say something else."""
    options = {"window": WINDOW, "max_norm": MAX_NORM, "synchronize": "window", **options}
    return oracle.wrapped(model, make, **options)


def training(dtype=torch.float64, model=None, make=oracle.adam, shards=None, **options):
    """Make a sharded model and its wrapper."""
    model = sharded(dtype, model, **(shards or {}))
    return model, once_per_window(model, make, **options)


# One micro-batch, and a step


def called(opt, model, batch, weight=1.0, factor=1.0, scaler=None):
    oracle.one_call(opt, oracle.loss_of(model, batch) * factor, weight=weight)


def of_the_user(opt, model, batch, weight=1.0, factor=1.0, scaler=None):
    """Train as a loop that knows nothing of the wrapper; every weight is 1."""
    loop = oracle.own_backward if scaler is None else oracle.outer_scaler
    loop(opt, oracle.loss_of(model, batch) * factor, scaler)


def inside(opt, model, batch, weight=1.0, factor=1.0, scaler=None, parts=(1.0,)):
    with opt.micro_batch(model):
        for part in parts:
            opt.backward(part * oracle.loss_of(model, batch) * factor, weight)
    opt.step()


def outside(opt, model, batch, weight=1.0, factor=1.0, scaler=None):
    """Run the forward pass outside, at whose end DDP has prepared to synchronise."""
    loss = oracle.loss_of(model, batch) * factor
    with opt.micro_batch(model):
        opt.backward(loss, weight)
    opt.step()


def train(opt, model, share, loop=called, bad=(), scaler=None, mixed=False):
    """Train on the micro-batches of a share; those with a number in `bad` hold an inf.

    Every second weight is a tensor if they are `mixed`. Returns of every step whether it was
    skipped, and the scale after it.
    """
    closed = []
    for i, (batch, weight) in enumerate(share):
        weight = torch.tensor(weight) if mixed and i % 2 == 0 else weight
        loop(opt, model, batch, weight, oracle.INF if i in bad else 1.0, scaler)
        if opt.stepped:
            closed.append((opt.last.skipped, None if scaler is None else scaler.get_scale()))
    return closed


def train_inside(opt, model, share):
    return train(opt, model, share, inside, mixed=True)


# Outcomes


def whole(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def as_expected(model, opt, expected, tolerance=oracle.EXACT):
    """Check the parameters; return all that must be the same on every rank.

    Each rank may have a loss scale of its own.
    """
    parameters = whole(oracle.parameters_of(model))
    found = [p.to(e.dtype) for p, e in zip(parameters, expected)]
    oracle.assert_close(found, expected, tolerance)
    return parameters, {**opt.stats(), "loss_scale": 0.0}


def held(opt):
    """Return the number of micro-batches in the open window."""
    return opt._engine.state.micro_batches


def error_of(call, *args, **kwargs):
    """Return the exception of a call in words, with its notes; "" if there is none."""
    try:
        call(*args, **kwargs)
    except BaseException as error:
        return f"{type(error).__name__}: {oracle.said_by(error)}"
    return ""


def poisoned(rank, world, make, bad_ranks=(1,), bad=0, loop=called, **options):
    """Train with an inf in one micro-batch of some ranks, which skips the window on all of them.

    The window after it is good. Returns the model, its wrapper, and the parameters that they must
    have; scales are equal on all ranks.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    own = None if loop is of_the_user else scaler
    model, opt = make(window=2, scaler=own, **options)
    share = own_share(rank, world, 4, next(model.parameters()).dtype)
    closed = train(opt, model, share, loop, [bad] if rank in bad_ranks else [], scaler)
    assert closed == [(True, 4.0), (False, 4.0)]
    weights = None if loop is of_the_user else WEIGHTS
    return model, opt, by_hand(world, 2, 4, 2, weights=weights, max_norm=None)
