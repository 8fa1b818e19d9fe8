"""Decoders whose modules `fully_shard` has wrapped one by one, 2 and 3 processes."""

from __future__ import annotations

import pytest
import ranks
import sharded_decoders as does
import torch
import torch.nn.functional as F
from support.optimizer_oracle import assert_close
from torch import nn

import accumext


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}-processes")
def world(request):
    return request.param


@pytest.fixture(scope="module")
def seen(world, tmp_path_factory):
    return ranks.run_on(world, does.SCENARIOS, "sharded_decoders", tmp_path_factory)


def of_all(world, losses_of, model):
    """Each rank's loss, and the gradient of their mean."""
    losses = [losses_of(rank) for rank in range(world)]
    grads = torch.autograd.grad(sum(losses) / world, list(model.parameters()))
    return [loss.detach() for loss in losses], list(grads)


@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
@pytest.mark.parametrize("kind", does.CELLS)
def test_decode_loss_of_sharded_modules(seen, world, kind, feedback):
    """`decode_loss` of modules wrapped one by one equals one process; each is gathered once"""
    parts = does.Parts(kind)

    def loss(rank):
        return parts.loss(*does.data(rank), feedback=feedback).loss

    losses, grads = of_all(world, loss, parts)
    for rank, saw in enumerate(seen):
        found = saw["decode"]["seen"][kind, feedback]
        assert_close([found["loss"]], [losses[rank]])
        assert_close(found["gradients"], grads)
        targets, memory = does.data(rank)
        memory.requires_grad_()
        out = parts.loss(targets, memory, feedback=feedback)
        (grad,) = torch.autograd.grad(out.loss, [memory])
        assert_close([found["memory"]], [grad])
        assert torch.equal(found["tokens"], out.tokens)
        assert found["gathered"] == []
        modules = 4 if kind == "module" else 3
        assert found["counts"]["reduce-scatters"] == modules
        # What a root of FSDP is stays gathered until the backward pass; others are gathered again.
        assert found["counts"]["all-gathers"] <= modules + 1


@pytest.mark.parametrize("scenario", [does.train, does.train_once_per_window])
def test_sharded_modules_train_as_one_process(seen, world, scenario):
    """Windows of sharded decoders, clipped, reduced in every pass or once, equal one process"""
    parts = does.Parts("gru")
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)
    for window in ((0, 1), (2, 3)):
        optimizer.zero_grad()
        for number in window:
            for rank in range(world):
                out = parts.loss(*does.data(rank, number), feedback="greedy")
                (out.loss / (2 * world)).backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 0.7)
        optimizer.step()
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], [p.detach() for p in parts.parameters()])


@pytest.mark.parametrize("both", [False, True], ids=["as one", "and its parts"])
@pytest.mark.parametrize("kind", does.CELLS)
def test_decode_loss_in_a_sharded_model(seen, world, kind, both):
    """`decode_loss` inside the forward pass of a sharded model, whose parts may be sharded, too"""
    model = does.Whole(kind)
    losses, grads = of_all(world, lambda rank: model(*does.data(rank)), model)
    for rank, saw in enumerate(seen):
        found = saw["inside_a_sharded_parent"]["seen"][kind, both]
        assert_close([found["loss"]], [losses[rank]])
        assert_close(found["gradients"], grads)


@pytest.mark.parametrize("search", ["greedy", "beam"])
@pytest.mark.parametrize("kind", does.CELLS)
def test_generate_with_sharded_modules(seen, kind, search):
    """`generate` with sharded modules: each is gathered once, and given up at the end"""
    parts = does.Parts(kind)
    _, memory = does.data(0)
    context = (memory,) if kind == "module" else ()
    out = accumext.generate(
        parts.embedding, parts.cell, parts.head, parts.state(memory),
        max_length=6, search=search, context=context, eos=3,
    )  # fmt: skip
    for saw in seen:
        found = saw["generated"]["seen"][kind, search]
        assert torch.equal(found["tokens"], out.tokens)
        assert found["gathered"] == []
        assert found["counts"] == {"all-gathers": 4 if kind == "module" else 3}


def test_an_exception_in_a_sharded_cell(seen, world):
    """An exception in a cell leaves nothing gathered, and the next call is as any other"""
    parts = does.Parts("gru")
    _, grads = of_all(
        world, lambda rank: parts.loss(*does.data(rank), feedback="teacher").loss, parts
    )
    for saw in seen:
        found = saw["failing"]
        assert found["gathered"] == []
        assert found["still"] == []
        assert found["errors"][0].startswith("decode_loss: feedback must be ")
        assert_close(found["gradients"], grads)


def test_a_tied_embedding_and_head(seen, world):
    """An embedding and a head of one weight, given to `fully_shard` together, in a sharded model"""
    parts = does.Parts("gru")
    parts.head.weight = parts.embedding.weight
    losses, grads = of_all(world, lambda rank: parts(*does.data(rank)).loss, parts)
    named = dict(zip([name for name, _ in parts.named_parameters()], grads, strict=True))
    for rank, saw in enumerate(seen):
        assert_close([saw["tied"]["loss"]], [losses[rank]])
        assert saw["tied"]["gradients"].keys() == named.keys()
        assert_close(list(saw["tied"]["gradients"].values()), list(named.values()))


@pytest.mark.parametrize("scenario", [does.sliced_head, does.sliced_head_of_a_model])
def test_a_sharded_head_in_slices(seen, world, scenario):
    """`chunked_loss(chunks=16)` of a sharded head gathers it at most twice and reduces it once"""
    model = does.Trunk()

    def loss(rank):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(32, does.SIZE, generator=generator, dtype=torch.float64)
        targets = torch.randint(does.WORDS, (32,), generator=generator)
        logits = model.head(model(x))
        return sum(map(F.cross_entropy, logits.split(2), targets.split(2)))

    losses, grads = of_all(world, loss, model)
    for rank, saw in enumerate(seen):
        found = saw[scenario.__name__]
        assert_close([found["loss"]], [losses[rank]])
        assert_close(found["gradients"], grads)
        assert found["counts"]["reduce-scatters"] == 2  # of the head, and of the body behind it
        assert found["counts"]["all-gathers"] <= 4


def test_rollout_with_sharded_modules(seen, world):
    """`rollout` whose steps call sharded modules: each is gathered at most twice, reduced once"""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        cell, head = nn.GRUCell(2, does.SIZE).double(), nn.Linear(does.SIZE, 2).double()

    def loss(rank):
        generator = torch.Generator().manual_seed(rank)
        series = torch.randn(9, does.BATCH, 2, generator=generator, dtype=torch.float64)
        x, h, total = series[0], series.new_zeros(does.BATCH, does.SIZE), 0.0
        for t in range(9):
            h = cell(x, h)
            x = x + head(h)
            total = total + F.mse_loss(x, series[t])
        return total / 9

    losses, grads = of_all(world, loss, nn.ModuleList([cell, head]))
    for rank, saw in enumerate(seen):
        found = saw["rolled_out"]
        assert_close([found["loss"]], [losses[rank]])
        assert_close(found["gradients"], grads)
        assert found["counts"]["reduce-scatters"] == 2
        assert found["counts"]["all-gathers"] <= 4
