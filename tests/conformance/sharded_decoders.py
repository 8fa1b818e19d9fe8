"""The scenarios of test_sharded_decoders.py: each takes a rank and the number of ranks."""

from __future__ import annotations

import warnings

import torch
from sharded_modules import (
    CELLS,
    FEEDBACK,
    STEPS,
    VOCABULARY,
    WINDOW,
    collectives,
    full,
    is_resharded,
    make,
    micro_batches,
    sgd,
    sharded,
    tied,
)
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

CASES = [(cell, feedback) for cell in CELLS for feedback in FEEDBACK]


def one_by_one(rank, world):
    """Loss, gradients and trained parameters of every case."""
    seen = {}
    for kind, feedback in CASES:
        model, mine = sharded(kind), slice(rank, None, world)
        features, targets = next(micro_batches())
        with collectives() as begun:
            loss = model(features[mine], targets[:, mine], feedback)
            after_forward = is_resharded(*model.parts()[1:])
            loss.backward()
        case = {"loss": loss.detach(), "grads": full(p.grad for p in model.parameters())}
        resharded = [after_forward, model.reduced_early, is_resharded(*model.parts())]
        opt = AccumulatingOptimizer(sgd(model), window=WINDOW)
        opt.zero_grad()
        for features, targets in micro_batches():
            opt.backward(model(features[mine], targets[:, mine], feedback))
            opt.step()
        case |= {"parameters": full(model.parameters()), "resharded": resharded}
        seen[kind, feedback] = case | {"collectives": dict(begun)}
    return {"cases": seen}


def once_per_window(rank, world):
    """Every cell, reduced once per window."""
    seen = {}
    for kind in CELLS:
        model, mine = sharded(kind), slice(rank, None, world)
        opt = AccumulatingOptimizer(sgd(model), window=WINDOW, synchronize="window")
        for features, targets in micro_batches():
            with opt.micro_batch(model):
                opt.backward(model(features[mine], targets[:, mine], "greedy"))
            opt.step()
        seen[kind] = full(model.parameters())
    return {"cases": seen}


def one_parent(rank, world):
    """One wrapper around the whole decoder, and one with parts of their own inside."""
    seen = {}
    for kind, feedback in CASES:
        for inner in (False, True):
            model, mine = make(kind), slice(rank, None, world)
            for part in model.parts() if inner else []:
                fully_shard(part)
            fully_shard(model)
            features, targets = next(micro_batches())
            loss = model(features[mine], targets[:, mine], feedback)
            loss.backward()
            grads = full(p.grad for p in model.parameters())
            seen[kind, feedback, inner] = {"loss": loss.detach(), "grads": grads}
    return {"cases": seen}


def several_uses(model, loss_of, features, targets):
    """Two losses, and the head and the embedding used by themselves between them."""
    first = loss_of(features, targets, "teacher")
    between = model.head(model.embedding(targets)).square().mean()
    return first + between + 2 * loss_of(features, targets, "greedy")


def several_calls(rank, world):
    """Several calls in one backward pass, after one without any."""
    seen = {}
    for kind in CELLS:
        model, mine = sharded(kind), slice(rank, None, world)
        features, targets = next(micro_batches())
        with torch.no_grad():
            model(features[mine], targets[:, mine], "greedy")
        several_uses(model, model, features[mine], targets[:, mine]).backward()
        seen[kind] = full(p.grad for p in model.parameters())
    return {"cases": seen}


def tied_in_one_group(rank, world):
    """Embedding and head share a weight, and `fully_shard` wraps them together, in a parent."""
    model, mine = tied(), slice(rank, None, world)
    fully_shard([model.embedding, model.head])
    fully_shard(model)
    features, targets = next(micro_batches())
    model(features[mine], targets[:, mine], "greedy").backward()
    return {"grads": full(p.grad for p in model.parameters())}


def tied_apart(rank, world):
    """Embedding and head share a weight, and `fully_shard` wraps each: it makes two of the one."""
    model, mine = tied(), slice(rank, None, world)
    for part in model.parts():
        fully_shard(part)
    features, targets = next(micro_batches())
    model(features[mine], targets[:, mine], "greedy").backward()
    shared = model.head.weight is model.embedding.weight
    return {"shared": shared, "grads": full([model.embedding.weight.grad, model.head.weight.grad])}


def sharded_outside(rank, world):
    """A parent is sharded, and its parts are used outside its forward."""
    model = make("gru")
    fully_shard(model)
    _, targets = next(micro_batches())
    try:
        accumext.decode_loss(model.embedding, model.cell, model.head, targets, feedback="teacher")
    except TypeError as error:
        return {"error": str(error)}
    return {"error": ""}


def without_synchronisation(rank, world):
    """Two backward passes, of which the first sends nothing."""
    model, mine = sharded("module"), slice(rank, None, world)
    batches = list(micro_batches())[:2]
    counts = []
    for synchronises, (features, targets) in zip((False, True), batches, strict=True):
        for part in model.parts():
            part.set_requires_gradient_sync(synchronises)
        with collectives() as begun:
            model(features[mine], targets[:, mine], "greedy").backward()
        counts.append(begun["reduce_scatter"])
    return {"counts": counts, "grads": full(p.grad for p in model.parameters())}


def mixed_precision(rank, world):
    """bfloat16 weights and float32 shards, whose gradients are summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = {}
    for kind in ("gru", "module"):
        model, mine = make(kind).float(), slice(rank, None, world)
        for part in model.parts():
            fully_shard(part, mp_policy=policy)
        features, targets = next(micro_batches())
        loss = model(features[mine].float(), targets[:, mine], "teacher")
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        dtypes = {g.dtype for g in grads}
        seen[kind] = {"loss": loss.detach(), "dtypes": dtypes, "grads": full(grads)}
    return {"cases": seen}


def generated(rank, world):
    """Tokens of sharded and of plain modules, by every search."""
    seen = {}
    for kind in CELLS:
        with torch.no_grad():
            for search in ("greedy", "sample", "beam"):
                found = []
                for model in (make(kind), sharded(kind)):
                    torch.manual_seed(1)
                    features, _ = next(micro_batches())
                    with collectives() as begun:
                        out = accumext.generate(
                            model.embedding,
                            model.called(),
                            model.head,
                            model.state(features),
                            max_length=STEPS,
                            search=search,
                        )
                    found.append((out.tokens, out.log_probs))
                resharded = is_resharded(*model.parts()[1:])
                seen[kind, search] = {"found": found, "resharded": resharded, "begun": dict(begun)}
    return {"cases": seen}


def fails_at_the_third_call(cell):
    calls = []

    def failing(x, state):
        calls.append(x)
        if len(calls) == 3:
            raise ZeroDivisionError("in the cell")
        return cell(x, state)

    return failing


def failing_calls(model, features, targets):
    """Calls that raise after they have gathered modules: in the cell, and in the checks."""
    state = model.state(features)
    cell = fails_at_the_third_call(model.called())
    parts = model.embedding, cell, model.head
    yield lambda: accumext.decode_loss(*parts, targets, state, feedback="greedy")
    cell = fails_at_the_third_call(model.called())
    others = model.embedding, cell, model.head
    yield lambda: accumext.generate(*others, state, max_length=STEPS)
    last = fails_at_the_third_call(model.called())
    yield lambda: accumext.chunked_loss(lambda h: last(h, h)[0].sum(), state, chunks=4)
    yield lambda: model(features, targets, "a typo")


def failing(rank, world):
    seen = []
    features, targets = next(micro_batches())
    for kind in ("module", "function"):
        for number in range(4):
            model = sharded(kind)
            call, raised = list(failing_calls(model, features, targets))[number], False
            try:
                call()
            except (ZeroDivisionError, ValueError):
                raised = True
            gathered = [part for part in model.parts()[1:] if was_gathered(part)]
            resharded = len(gathered) > 0 and is_resharded(*gathered)
            model(features, targets, "greedy").backward()
            grads = full(p.grad for p in model.parameters())
            seen.append({"raised": raised, "resharded": resharded, "grads": grads, "kind": kind})
    return {"seen": seen}


def failing_backward(rank, world):
    """The cell raises where the backward pass runs it again; what the next call says; a reset."""
    model, fails = sharded("function"), [False]
    features, targets = next(micro_batches())

    def cell(x, state):
        if fails[0]:
            raise ZeroDivisionError("in the cell")
        state = model.cell(x, state)
        return state, state

    parts = model.embedding, cell, model.head
    options = {"feedback": "greedy", "memory_budget": VOCABULARY * 8}  # no graph is kept
    loss = accumext.decode_loss(*parts, targets, model.state(features), **options).loss
    fails[0], errors = True, []
    for call in (loss.backward, lambda: model(features, targets, "greedy")):
        try:
            call()
        except (ZeroDivisionError, RuntimeError) as error:
            errors.append(str(error))
    if not hasattr(FSDPModule, "reset_iter_state"):
        return {"errors": errors}
    for part in model.parts():
        part.zero_grad()  # what the failed pass has left in gathered parameters
        part.reset_iter_state()
    resharded = is_resharded(*model.parts())
    model(features, targets, "greedy").backward()
    grads = full(p.grad for p in model.parameters())
    return {"errors": errors, "resharded": resharded, "grads": grads}


def was_gathered(module):
    groups = module._get_fsdp_state()._fsdp_param_groups
    return all(hasattr(p, "_unsharded_param") for g in groups for p in g.fsdp_params)


def freed(rank, world):
    """A setting says that the backward pass does not read the embedding."""
    model = sharded("gru")
    model.embedding.set_unshard_in_backward(False)
    features, targets = next(micro_batches())
    loss = model(features, targets, "greedy")
    try:
        loss.backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def methods(rank, world):
    """A cell that is a method, known to FSDP as a forward method."""
    model, mine = make("module"), slice(rank, None, world)
    model.cell.one_step = model.cell.forward
    for part in model.parts():
        fully_shard(part)
    register_fsdp_forward_method(model.cell, "one_step")
    features, targets = next(micro_batches())
    parts = model.embedding, model.cell.one_step, model.head
    state = model.state(features[mine])
    with collectives() as begun:
        accumext.decode_loss(*parts, targets[:, mine], state, feedback="greedy").loss.backward()
    return {"grads": full(p.grad for p in model.parameters()), "collectives": dict(begun)}


def compiled(rank, world):
    """A cell that is compiled as one graph, beside modules that are sharded."""
    model = make("module")
    for part in (model.encoder, model.embedding, model.head):
        fully_shard(part)
    model.cell = torch.compile(model.cell, backend="eager", fullgraph=True)
    features, targets = next(micro_batches())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks")
        model(features, targets, "greedy").backward()
    grads = (p.grad for p in model.parameters())
    return {"grads": [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]}


def renormalised(rank, world):
    """An embedding whose lookups write into its weight."""
    model = make("gru")
    model.embedding.max_norm = 1.0
    fully_shard(model.embedding)
    _, targets = next(micro_batches())
    try:
        accumext.decode_loss(model.embedding, model.cell, model.head, targets, feedback="teacher")
    except ValueError as error:
        return {"error": str(error), "resharded": is_resharded(model.embedding)}
    return {"error": ""}


SCENARIOS = (
    one_by_one,
    once_per_window,
    one_parent,
    several_calls,
    tied_in_one_group,
    tied_apart,
    sharded_outside,
    without_synchronisation,
    mixed_precision,
    generated,
    failing,
    failing_backward,
    freed,
    methods,
    compiled,
    renormalised,
)
