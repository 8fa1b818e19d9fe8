"""Decoders of `fully_shard` modules after errors and misuse, 2 processes."""

import threading

import decoders
import pytest
from decoders import assert_gradients, gradients, is_resharded, make, micro_batches, sharded
from ranks import across
from shares import error_of
from torch.distributed.fsdp import FSDPModule, fully_shard

import accumext

pytestmark = pytest.mark.process


def fails_at_the_third_call(cell):
    calls = []

    def failing(x, state):
        calls.append(x)
        if len(calls) == 3:
            raise ZeroDivisionError("in the cell")
        return cell(x, state)

    return failing


def decoding(model, cell, state, targets):
    accumext.decode_loss(model.embedding, cell, model.head, targets, state, feedback="greedy")


def generating(model, cell, state, targets):
    accumext.generate(model.embedding, cell, model.head, state, max_length=decoders.STEPS)


def in_chunks(model, cell, state, targets):
    accumext.chunked_loss(lambda h: cell(h, h)[0].sum(), state, chunks=4)


def in_the_checks(model, cell, state, targets):
    accumext.decode_loss(model.embedding, cell, model.head, targets, state, feedback="a typo")


FAILING = {
    f"{call.__name__}-{kind}": {"call": call, "kind": kind}
    for call in (decoding, generating, in_chunks, in_the_checks)
    for kind in ("module", "function")
}


def was_gathered(module):
    return all(hasattr(record, "_unsharded_param") for record in decoders.records(module))


@across(2, cases=FAILING)
def test_an_exception_leaves_modules_sharded(rank, world, call, kind):
    """After an exception sharded modules are sharded again, and the next call is right"""
    features, targets = next(micro_batches())
    model = sharded(kind)
    failing, state = fails_at_the_third_call(model.called()), model.state(features)
    error = error_of(call, model, failing, state, targets)
    gathered = [part for part in model.parts()[1:] if was_gathered(part)]
    resharded = is_resharded(*gathered)
    model(features, targets, "greedy").backward()
    seen = assert_gradients(model, gradients(kind, "greedy")[1])
    assert error.startswith(("ZeroDivisionError: in the cell", "ValueError: "))
    assert gathered
    assert resharded
    return seen


@across(2)
def test_an_exception_in_a_backward_pass(rank, world):
    """After a backward pass that raised, the next call asks for FSDP's `reset_iter_state()`"""
    model, fails = sharded("function"), threading.Event()  # which a replay does not put back
    features, targets = next(micro_batches())

    def cell(x, state):
        if fails.is_set():
            raise ZeroDivisionError("in the cell")
        state = model.cell(x, state)
        return state, state

    parts = model.embedding, cell, model.head
    options = {"feedback": "greedy", "memory_budget": decoders.VOCABULARY * 8}  # no graph is kept
    loss = accumext.decode_loss(*parts, targets, model.state(features), **options).loss
    fails.set()
    assert error_of(loss.backward) == "ZeroDivisionError: in the cell"
    assert error_of(model, features, targets, "greedy") == (
        "RuntimeError: decode_loss: modules must be reset after a backward pass that failed, got "
        "FSDPEmbedding, which was not. Call zero_grad() and then reset_iter_state() of the "
        "outermost fully_shard module"
    )
    if hasattr(FSDPModule, "reset_iter_state"):
        for part in model.parts():
            part.zero_grad()  # what the failed pass has left in gathered parameters
            part.reset_iter_state()
        resharded = is_resharded(*model.parts())
        model(features, targets, "greedy").backward()
        seen = assert_gradients(model, gradients("function", "greedy")[1])
        assert resharded
        return seen


@across(2)
def test_sharded_modules_that_are_refused(rank, world):
    """Shards outside of their parent's forward, freed weights and `max_norm` are errors in words"""
    _, targets = next(micro_batches())

    def refused(model):
        parts = model.embedding, model.cell, model.head
        return error_of(accumext.decode_loss, *parts, targets, feedback="teacher")

    assert refused(fully_shard(make("gru"))) == (
        "TypeError: decode_loss: embedding must have whole weights, got shards (DTensor). Call "
        "this inside the forward of the fully_shard module that it is a part of, or apply "
        "fully_shard to it as well"
    )

    model = make("gru")
    model.embedding.max_norm = 1.0
    fully_shard(model.embedding)
    assert refused(model) == (
        "ValueError: decode_loss: embedding must have no max_norm if it is sharded, for what "
        "lookups write would be lost, got 1.0"
    )
    assert is_resharded(model.embedding)

    model = sharded("gru")
    model.embedding.set_unshard_in_backward(False)
    loss = model(*next(micro_batches()), "greedy")
    assert error_of(loss.backward) == (
        "RuntimeError: decode_loss: parameters must be in memory in the backward pass, which reads "
        "them again, got freed ones. Leave set_unshard_in_backward of fully_shard modules True"
    )
