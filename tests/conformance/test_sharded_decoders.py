"""Decoders, slices and steps over modules of `fully_shard` (FSDP2), 2 processes."""

import warnings
from contextlib import nullcontext
from functools import partial

import decoders
import pytest
import torch
import torch.nn.functional as F
from decoders import gradients, is_resharded, make, micro_batches, one_by_one, sharded
from ranks import across
from shares import whole
from support.optimizer_oracle import assert_close, assert_equal, parameters_of, wrapped
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

import accumext

pytestmark = pytest.mark.process

WINDOW = 2
CHUNKS = 16
CASES = {
    f"{kind}-{feedback}": {"kind": kind, "feedback": feedback}
    for kind in decoders.CELLS
    for feedback in ("teacher", "greedy")
}


@across(2, cases=CASES)
def test_decode_loss_of_sharded_modules(rank, world, kind, feedback):
    """`decode_loss` of modules sharded one by one gathers each twice and reduces it once"""
    model = sharded(kind)
    features, targets = next(micro_batches(rank, world))
    with decoders.collectives() as begun:
        loss = model(features, targets, feedback)
        after_forward = is_resharded(*model.parts()[1:])
        loss.backward()
    mean = decoders.mean_over_ranks(loss)
    seen = decoders.assert_gradients(model, gradients(kind, feedback)[1])
    assert_close([mean], [gradients(kind, feedback)[0]])
    assert begun == decoders.ONCE
    assert after_forward
    assert model.reduced_early
    assert is_resharded(*model.parts())
    return seen


WAYS = {
    f"{kind}-{synchronize}": {"kind": kind, "synchronize": synchronize}
    for kind in decoders.CELLS
    for synchronize in ("backward", "window")
}


@across(2, cases=WAYS)
def test_windows_of_sharded_decoders(rank, world, kind, synchronize):
    """Windows of `decode_loss` of sharded modules, reduced at once or once, equal one process"""
    model = sharded(kind)
    opt = wrapped(model, decoders.momentum, window=WINDOW, synchronize=synchronize)
    for features, targets in micro_batches(rank, world):
        with opt.micro_batch(model):
            opt.backward(model(features, targets, "greedy"))
        opt.step()
    assert_close(whole(parameters_of(model)), decoders.by_hand(kind, WINDOW))


# Other ways to shard a decoder: each returns what is sharded


def in_a_parent(model):
    return fully_shard(model)


def one_by_one_in_a_parent(model):
    return fully_shard(one_by_one(model))


def two_together_in_a_parent(model):
    """Shard embedding and head together, which share a weight."""
    model.head.weight = model.embedding.weight
    fully_shard([model.embedding, model.head])
    return fully_shard(model)


def beside_a_compiled_cell(model):
    """Compile the cell in one graph, without a break or a warning."""
    one_by_one(model, [model.encoder, model.embedding, model.head])
    model.cell = torch.compile(model.cell, backend="eager", fullgraph=True)
    return model


# Other uses of its parts


def several_uses(model, features, targets, loss_of=None):
    """Use head and embedding by themselves between two losses."""
    loss_of = loss_of or model
    with torch.no_grad():  # a call without any backward pass
        loss_of(features, targets, "greedy")
    first = loss_of(features, targets, "teacher")
    between = model.head(model.embedding(targets)).square().mean()
    return first + between + 2 * loss_of(features, targets, "greedy")


def with_a_method_one_by_one(model):
    model.cell.one_step = model.cell.forward
    one_by_one(model)
    register_fsdp_forward_method(model.cell, "one_step")
    return model


def with_a_method(model, features, targets):
    """Call a cell that is a method, known to FSDP as a forward method."""
    parts = model.embedding, model.cell.one_step, model.head
    return accumext.decode_loss(*parts, targets, model.state(features), feedback="greedy").loss


def by_tbptt(model, features, targets):
    """Train by `tbptt`, which runs the backward pass itself."""
    options = {"criterion": F.cross_entropy, "k1": decoders.STEPS, "feedback": "greedy"}
    accumext.tbptt(decoders.step_of(model), targets, model.state(features), **options)


def use(shard, run, *kinds, begun=None):
    """Make cases with these cells; `begun` are the collectives, if they are to be counted."""
    name = f"{run.__name__}-{shard.__name__}"
    options = {"shard": shard, "run": run, "expected": begun}
    return {f"{name}-{kind}": {"kind": kind, **options} for kind in kinds}


USES = {
    **use(in_a_parent, decoders.by_decode_loss, *decoders.CELLS),
    **use(one_by_one_in_a_parent, decoders.by_decode_loss, *decoders.CELLS),
    **use(two_together_in_a_parent, decoders.by_decode_loss, "gru"),
    **use(beside_a_compiled_cell, decoders.by_decode_loss, "module"),
    **use(one_by_one, several_uses, *decoders.CELLS),
    **use(with_a_method_one_by_one, with_a_method, "module", begun=decoders.ONCE),
    **use(one_by_one, decoders.in_slices, "module", begun={"reduce_scatter": 4}),
    **use(one_by_one, decoders.by_rollout, "gru", "lstm_cell", "module", begun=decoders.ONCE),
    **use(one_by_one, by_tbptt, "gru", "lstm_cell", "module", begun=decoders.ONCE),
}


@across(2, cases=USES)
def test_every_way_to_shard_and_to_use_a_decoder(rank, world, kind, shard, run, expected):
    """Parents, shared weights, methods, compiled cells, slices, `rollout`, `tbptt`: one process"""
    reference = make(kind)
    if shard is two_together_in_a_parent:
        reference.head.weight = reference.embedding.weight
    if run is several_uses:
        loss = several_uses(reference, *next(micro_batches()), reference.by_the_book)
    else:
        loss = reference.by_the_book(*next(micro_batches()), "greedy")
    loss.backward()
    model = shard(make(kind))
    # Nobody averages the gradients of a cell that is not sharded.
    mine = (0, 1) if shard is beside_a_compiled_cell else (rank, world)
    with decoders.collectives() if expected else nullcontext() as begun, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks")
        loss = run(model, *next(micro_batches(*mine)))
        if loss is not None:
            loss.backward()
    seen = decoders.assert_gradients(model, [p.grad for p in reference.parameters()])
    assert not expected or {kind: begun[kind] for kind in expected} == expected
    assert shard is not one_by_one or is_resharded(*model.parts())
    return seen


@across(2)
def test_a_shared_weight_that_is_sharded_twice_is_two_weights(rank, world):
    """Embedding and head of one weight, each in a `fully_shard` of its own, share it no more"""
    reference, model = make("gru"), make("gru")
    for one in (reference, model):
        one.head.weight = one.embedding.weight
    one_by_one(model)
    reference.by_the_book(*next(micro_batches()), "greedy").backward()
    decoders.by_decode_loss(model, *next(micro_batches(rank, world))).backward()
    both = sum(whole([model.head.weight.grad, model.embedding.weight.grad]))
    assert model.head.weight is not model.embedding.weight
    assert_close([both], [reference.head.weight.grad])


@across(2)
def test_sharded_modules_without_synchronisation(rank, world):
    """`set_requires_gradient_sync(False)` holds gradients of `decode_loss` back"""
    model, counts = sharded("module"), []
    for synchronises, batch in zip((False, True), micro_batches(rank, world)):
        for part in model.parts():
            part.set_requires_gradient_sync(synchronises)
        with decoders.collectives() as begun:
            decoders.by_decode_loss(model, *batch).backward()
        counts.append(begun["reduce_scatter"])
    assert counts == [0, 4]
    return decoders.assert_gradients(model, gradients("module", "greedy", batches=2)[1])


@across(2, cases={kind: {"kind": kind} for kind in ("gru", "module")})
def test_sharded_modules_in_mixed_precision(rank, world, kind):
    """Mixed-precision policies of sharded modules reach `decode_loss`"""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = one_by_one(make(kind).float(), mp_policy=policy)
    features, targets = next(micro_batches(rank, world))
    loss = model(features.float(), targets, "teacher")
    loss.backward()
    grads = whole(p.grad for p in model.parameters())
    seen = [decoders.mean_over_ranks(loss.float()), *grads]
    loss, grads = gradients(kind, "teacher", dtype=torch.float32)
    # Weights and activations are rounded to 8 bits, and errors of 0.4 % add up over 5 steps.
    torch.testing.assert_close(seen, [loss, *grads], rtol=0.05, atol=0.02)
    return seen


SEARCHES = {
    f"{kind}-{search}": {"kind": kind, "search": search}
    for kind, search in zip(decoders.CELLS, ("greedy", "sample", "beam", "beam"))
}


@across(2, cases=SEARCHES)
def test_generate_with_sharded_modules(rank, world, kind, search):
    """`generate` with sharded modules gives the tokens of plain ones, and gathers each once"""
    found = []
    for model in (make(kind), sharded(kind)):
        torch.manual_seed(1)
        with torch.no_grad(), decoders.collectives() as begun:
            state = model.state(next(micro_batches())[0])
            parts = model.embedding, model.called(), model.head
            out = accumext.generate(*parts, state, max_length=decoders.STEPS, search=search)
        found.append((out.tokens, out.log_probs))
    assert_equal([found[1][0]], [found[0][0]])
    assert_close([found[1][1]], [found[0][1]])
    assert is_resharded(*model.parts()[1:])
    assert begun == {"allgather": 4}  # with the encoder's
    return list(found[1])


def trunk_and_head():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(4, decoders.SIZE).double(), nn.Linear(
            decoders.SIZE, decoders.VOCABULARY
        ).double()


def rows_of(rank):
    generator = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(4 * CHUNKS, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(11, (len(x),), generator=generator)


HEADS = {
    "default-behind_a_trunk": {"detached": False, "options": {}},
    "default-alone": {"detached": True, "options": {}},
    "reshards-behind_a_trunk": {"detached": False, "options": {"reshard_after_forward": True}},
}


@across(2, cases=HEADS)
def test_chunked_loss_of_a_sharded_head(rank, world, detached, options):
    """`chunked_loss` gathers a sharded head once forward and once backward, and reduces it once"""

    def modules():
        return [head] if detached else [head, trunk]

    trunk, head = trunk_and_head()
    fully_shard(trunk)
    fully_shard(head, **options)
    x, y = rows_of(rank)
    features, resharded = trunk(x).tanh(), []
    if detached:
        features = features.detach()
    else:
        features.register_hook(lambda grad, head=head: resharded.append(is_resharded(head)))
    with decoders.collectives() as begun:
        part = partial(lambda head, h, t: F.cross_entropy(head(h), t), head)
        loss = accumext.chunked_loss(part, features, y, chunks=CHUNKS)
        resharded.append(is_resharded(head))
        loss.backward()
    resharded.append(is_resharded(head))
    grads = whole(p.grad for m in modules() for p in m.parameters())
    seen = [decoders.mean_over_ranks(loss), *grads]

    trunk, head = trunk_and_head()
    x, y = (torch.cat(parts) for parts in zip(*map(rows_of, range(world)), strict=True))
    loss = F.cross_entropy(head(trunk(x).tanh()), y)
    loss.backward()
    assert_close(seen, [loss.detach(), *(p.grad for m in modules() for p in m.parameters())])
    # The trunk is gathered before, and reduced too.
    assert begun == {"allgather": 2, "reduce_scatter": len(modules())}
    assert all(resharded)
    return seen
