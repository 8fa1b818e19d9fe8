"""Decoders whose modules `fully_shard` (FSDP2) wraps one by one, 2 and 3 processes."""

from __future__ import annotations

import warnings

import pytest
import ranks
import torch
from sharded_modules import (
    CELLS,
    FEEDBACK,
    STEPS,
    VOCABULARY,
    WINDOW,
    collectives,
    full,
    gradients,
    is_resharded,
    make,
    mean_loss,
    micro_batches,
    sgd,
    sharded,
    tied,
    trained,
)
from support.optimizer_oracle import assert_close, assert_equal
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

pytestmark = pytest.mark.process

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
    # Weights and activations are rounded to 8 bits, so are products of a few of them.
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
