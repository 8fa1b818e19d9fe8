"""Decoders whose modules `fully_shard` (FSDP2) wraps one by one, 2 and 3 processes."""

from __future__ import annotations

import pytest
import ranks
import torch
from sharded_decoders import CASES, SCENARIOS, several_uses
from sharded_modules import (
    CELLS,
    gradients,
    make,
    mean_loss,
    micro_batches,
    tied,
    trained,
)
from support.optimizer_oracle import assert_close, assert_equal

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}-processes")
def seen(request, tmp_path_factory):
    return ranks.run_on(request.param, SCENARIOS, "sharded-decoders", tmp_path_factory)


@pytest.mark.parametrize(("kind", "feedback"), CASES)
def test_decode_loss_of_sharded_modules(seen, kind, feedback):
    """`decode_loss` of modules sharded one by one, its gradients and windows equal one process"""
    loss, grads = gradients(kind, feedback)
    assert_close([mean_loss(seen, "one_by_one", (kind, feedback))], [loss])
    for rank in seen:
        case = rank["one_by_one"]["cases"][kind, feedback]
        assert_close(case["grads"], grads)
        assert_close(case["parameters"], trained(kind, feedback))


@pytest.mark.parametrize("kind", CELLS)
def test_sharded_decoders_that_are_reduced_once_per_window(seen, kind):
    """`decode_loss` of sharded modules with `synchronize="window"` equals one process"""
    for rank in seen:
        assert_close(rank["once_per_window"]["cases"][kind], trained(kind, "greedy"))


@pytest.mark.parametrize(("kind", "feedback"), CASES)
def test_a_call_gathers_and_reduces_once(seen, kind, feedback):
    """`decode_loss` gathers sharded modules once forward, once backward, and reduces them once"""
    for rank in seen:
        case = rank["one_by_one"]["cases"][kind, feedback]
        # The encoder, which FSDP takes for a root, is gathered forward only.
        assert case["collectives"] == {"allgather": 3 * 2 + 1, "reduce_scatter": 4}
        assert case["resharded"] == [True, True, True]


@pytest.mark.parametrize(("kind", "feedback"), CASES)
@pytest.mark.parametrize("inner", [False, True], ids=["alone", "with_parts"])
def test_decode_loss_in_a_sharded_parent(seen, kind, feedback, inner):
    """`decode_loss` in the forward of a sharded model, whose parts may be sharded by themselves"""
    loss, grads = gradients(kind, feedback)
    assert_close([mean_loss(seen, "one_parent", (kind, feedback, inner))], [loss])
    for rank in seen:
        assert_close(rank["one_parent"]["cases"][kind, feedback, inner]["grads"], grads)


def test_a_weight_that_embedding_and_head_share(seen):
    """A weight of embedding and head, sharded by `fully_shard([embedding, head])` in a parent"""
    model = tied()
    model.by_the_book(*next(micro_batches()), "greedy").backward()
    for rank in seen:
        assert_close(rank["tied_in_one_group"]["grads"], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("kind", CELLS)
def test_several_calls_in_one_backward_pass(seen, kind):
    """Two losses and uses of a sharded head between them, in one backward pass"""
    model = make(kind)
    several_uses(model, model.by_the_book, *next(micro_batches())).backward()
    for rank in seen:
        grads = rank["several_calls"]["cases"][kind]
        assert_close(grads, [p.grad for p in model.parameters()])


def test_a_shared_weight_that_is_sharded_twice_is_two_weights(seen):
    """Embedding and head of one weight, each in a `fully_shard` of its own, share it no more"""
    model = tied()
    model.by_the_book(*next(micro_batches()), "greedy").backward()
    for rank in seen:
        assert not rank["tied_apart"]["shared"]
        assert_close([sum(rank["tied_apart"]["grads"])], [model.head.weight.grad])


def test_a_part_of_a_sharded_model_outside_its_forward(seen):
    """A part of a sharded model, used outside its forward, is an error that says so"""
    text = (
        "decode_loss: embedding must have whole weights, got shards (DTensor). Call this inside "
        "the forward of the fully_shard module that it is a part of, or apply fully_shard to it "
        "as well"
    )
    assert all(rank["sharded_outside"]["error"] == text for rank in seen)


def test_sharded_modules_without_synchronisation(seen):
    """`set_requires_gradient_sync(False)` holds gradients of `decode_loss` back"""
    _, grads = gradients("module", "greedy", batches=2)
    for rank in seen:
        assert rank["without_synchronisation"]["counts"] == [0, 4]
        assert_close(rank["without_synchronisation"]["grads"], grads)


@pytest.mark.parametrize("kind", ["gru", "module"])
def test_sharded_modules_in_mixed_precision(seen, kind):
    """Mixed-precision policies of sharded modules reach `decode_loss`"""
    loss, grads = gradients(kind, "teacher", dtype=torch.float32)
    # Weights and activations are rounded to 8 bits, and errors of 0.4 % add up over 5 steps.
    near = {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(mean_loss(seen, "mixed_precision", kind).float(), loss, **near)
    for rank in seen:
        case = rank["mixed_precision"]["cases"][kind]
        assert case["dtypes"] == {torch.float32}
        for got, expected in zip(case["grads"], grads, strict=True):
            torch.testing.assert_close(got, expected, **near)


@pytest.mark.parametrize("search", ["greedy", "sample", "beam"])
@pytest.mark.parametrize("kind", CELLS)
def test_generate_with_sharded_modules(seen, kind, search):
    """`generate` with sharded modules gives the tokens of plain ones, and gathers each once"""
    for rank in seen:
        case = rank["generated"]["cases"][kind, search]
        plain, ours = case["found"]
        assert_equal(ours[:1], plain[:1])
        assert_close(ours[1:], plain[1:])
        assert case["resharded"]
        assert case["begun"] == {"allgather": 4}  # with the encoder's


def test_an_exception_leaves_modules_sharded(seen):
    """After an exception sharded modules are sharded again, and the next call is right"""
    for rank in seen:
        for case in rank["failing"]["seen"]:
            assert case["raised"]
            assert case["resharded"]
            assert_close(case["grads"], gradients(case["kind"], "greedy")[1])


def test_an_exception_in_a_backward_pass(seen):
    """After a backward pass that raised, the next call asks for FSDP's `reset_iter_state()`"""
    text = (
        "decode_loss: modules must be where an earlier backward pass has succeeded, or been "
        "reset, got FSDPEmbedding after one that failed. Call zero_grad() and then "
        "reset_iter_state() of the outermost fully_shard module"
    )
    for rank in seen:
        case = rank["failing_backward"]
        assert case["errors"] == ["in the cell", text]
        if "grads" in case:
            assert case["resharded"]
            assert_close(case["grads"], gradients("function", "greedy")[1])


def test_an_embedding_that_is_not_gathered_in_the_backward_pass(seen):
    """`set_unshard_in_backward(False)` of an embedding is an error that says so"""
    text = (
        "decode_loss: parameters must be in memory in the backward pass, which reads them again, "
        "got freed ones. Leave set_unshard_in_backward of fully_shard modules True"
    )
    assert all(rank["freed"]["error"] == text for rank in seen)


def test_a_method_of_a_sharded_module(seen):
    """A method that FSDP knows as a forward as the cell of `decode_loss`"""
    for rank in seen:
        assert_close(rank["methods"]["grads"], gradients("module", "greedy")[1])
        assert rank["methods"]["collectives"] == {"allgather": 3 * 2, "reduce_scatter": 4}


def test_a_compiled_cell_beside_sharded_modules(seen):
    """A cell compiled with `fullgraph=True` beside sharded modules: no break, no warning"""
    for rank in seen:
        assert_close(rank["compiled"]["grads"], gradients("module", "greedy")[1])


def test_a_sharded_embedding_with_a_maximal_norm(seen):
    """A sharded embedding with `max_norm` is refused: what its lookups write would be lost"""
    text = (
        "decode_loss: embedding must have no max_norm where it is sharded, for what lookups write "
        "would be lost, got 1.0"
    )
    for rank in seen:
        assert rank["renormalised"] == {"error": text, "resharded": True}
