"""`reduce_in_backward`: what it takes, and errors that leave a way on."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from shares import (
    BATCHES,
    WINDOW,
    by_hand,
    error_of,
    held,
    in_group,
    inside,
    made,
    outcome,
    own_share,
    train,
)
from support.optimizer_oracle import (
    OP,
    ByHand,
    adam,
    assert_close,
    loss_of,
    make_model,
    parameters_of,
    sgd,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LATE = "must come after step or discard, got one for a window that is summed over processes"


def started(rank, world):
    """An optimizer whose window is full and on its way."""
    model, opt = made(reduce_in_backward=True)
    *share, (batch, weight) = own_share(rank, world, WINDOW)
    train(opt, model, share)
    opt.backward(loss_of(model, batch), weight)
    return model, opt


def finished(model, opt, **more):
    opt.step()
    return outcome(model, opt, **more)


def too_late(rank, world):
    """Whatever would change a window that is on its way is refused, and the window arrives."""
    model, opt = started(rank, world)
    loss = loss_of(model, BATCHES[0])

    def micro_batch():
        with opt.micro_batch():
            raise AssertionError("it was entered")

    errors = {
        "backward": error_of(lambda: opt.backward(loss)),
        "micro_batch": error_of(micro_batch),
        "accumulation_state_dict": error_of(opt.accumulation_state_dict),
        "__getstate__": error_of(lambda: copy.deepcopy(opt)),
    }
    loss_of(model, BATCHES[0]).backward()
    errors["accumulate"] = error_of(opt.accumulate)
    errors["step"] = error_of(opt.step)
    opt.zero_grad()
    return finished(model, opt, errors=errors)


def two_in_a_micro_batch(rank, world):
    """The second backward pass of the last micro-batch is refused; the first one's sum arrives."""
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None, reduce_in_backward=True)
    *share, (batch, weight) = own_share(rank, world, WINDOW)
    train(opt, model, share, inside)

    def last():
        with opt.micro_batch(model):
            opt.backward(loss_of(model, batch), weight)
            opt.backward(loss_of(model, BATCHES[0]))

    return finished(model.module, opt, errors={"backward": error_of(last)})


def discarded(rank, world):
    """A window on its way may be dropped by all ranks; they go on with the next."""
    model, opt = started(rank, world)
    opt.discard()
    train(opt, model, own_share(rank, world, WINDOW))
    return outcome(model, opt)


def gradients_in_parts(rank, world):
    """A reentrant checkpoint used twice hands over the gradient of one layer in two parts."""
    model, opt = made(window=1, reduce_in_backward=True)
    before = [p.detach().clone() for p in model.parameters()]
    with ranks.small_buckets():
        batch = BATCHES[rank].clone().requires_grad_()
        twice = sum(checkpoint(model, batch, use_reentrant=True).square().mean() for _ in range(2))
        error = error_of(lambda: opt.backward(twice))
    untouched = all(map(torch.equal, before, model.parameters()))
    clear = all(p.grad is None for p in model.parameters())
    return {"error": error, "untouched": untouched and clear and held(opt) == 0}


class Partly(nn.Module):
    """Two layers, of which a rank may leave out the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

    def loss(self, batch, both):
        loss = self.layers[1](batch).square().mean()
        return loss + self.layers[0](batch).square().mean() if both else loss


def partly(rank, world, drop):
    """Ranks have sent different buckets when the window is dropped; then they train on."""
    torch.manual_seed(5)
    model = Partly()
    opt = in_group(model, window=1, reduce_in_backward=True)
    with ranks.small_buckets():
        errors = drop(opt, model, rank)
        for batch in BATCHES[rank : 2 * world : world]:
            opt.backward(model.loss(batch, True))
            opt.step()
    return outcome(model, opt, errors=errors)


def one_discards(opt, model, rank):
    opt.backward(model.loss(BATCHES[0], rank == 0))
    opt.discard()
    return []


def out_of_memory(*args):
    raise ValueError("out of memory")


def at_its_end(*args):
    """When all gradients have been made."""
    torch.autograd.Variable._execution_engine.queue_callback(out_of_memory)


def backward_fails(opt, model, rank, fail=out_of_memory):
    """On one rank, where the window is dropped; elsewhere it is not finite, and skipped."""
    handle = model.layers[0].weight.register_hook(fail) if rank == 0 else None
    error = error_of(lambda: opt.backward(model.loss(BATCHES[0], True)))
    opt.step()
    if rank == 0:
        handle.remove()
    return [error, rank > 0 and opt.last.skipped]


def payload_fails(opt, model, rank):
    """A collective fails after the ranks have agreed: the window is dropped, in words."""
    opt.reduce_in_backward = False
    opt.backward(model.loss(BATCHES[0], True))
    all_reduce, calls = dist.all_reduce, []

    def breaking(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("connection reset")
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", breaking)
        error = error_of(opt.step)
    opt.step()
    return [error, opt.stepped]


def step_fails(rank, world):
    """The wrapped optimizer's step fails once, after the sum: it is not summed again."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model = nn.ParameterList([weight])
    opt = in_group(model, sgd, window=1, reduction="sum")
    failures = ["disk full"]

    def fail(optimizer, args, kwargs):
        if failures:
            raise RuntimeError(failures.pop())

    opt.register_step_pre_hook(fail)
    opt.backward(weight.sum())
    errors = [error_of(opt.step), error_of(lambda: opt.backward(weight.sum()))]
    opt.step()
    return outcome(model, opt, errors=errors)


def frozen_on_one_rank(rank, world):
    model = make_model()
    model[0].requires_grad_(rank == 0)
    opt = in_group(model, window=1)
    opt.backward(loss_of(model, BATCHES[0]))
    kept = held(opt)
    return {"error": error_of(opt.step), "held": kept}


def all_frozen(rank, world):
    model = make_model().requires_grad_(False)
    opt = in_group(model)
    opt.flush()
    return {"stepped": opt.stepped}


def groups_differ(rank, world):
    alone = [dist.new_group([n]) for n in range(world)][rank]
    model = nn.ModuleList(
        DistributedDataParallel(make_model(), process_group=group) for group in (None, alone)
    )
    opt = in_group(model, process_group=None)
    return {"error": error_of(opt.micro_batch(model).__enter__)}


ARRIVING = ranks.named(too_late, two_in_a_micro_batch, discarded)
FAILING = {
    "backward_fails_on_one_rank": partial(partly, drop=backward_fails),
    "backward_fails_at_its_end_on_one_rank": partial(
        partly, drop=partial(backward_fails, fail=at_its_end)
    ),
}
DROPPED = {
    **FAILING,
    "discarded_in_different_places": partial(partly, drop=one_discards),
    "payload_fails": partial(partly, drop=payload_fails),
}
SCENARIOS = {
    **ARRIVING,
    **DROPPED,
    **ranks.named(gradients_in_parts, step_fails, frozen_on_one_rank, all_frozen, groups_differ),
}


@pytest.mark.parametrize("scenario", ARRIVING)
def test_a_window_on_its_way_arrives(pair, scenario):
    """A window that is being sent takes no more gradients, says so, and arrives; or is discarded"""
    first = ranks.agreed(pair, scenario)
    assert_close(first["parameters"], by_hand(2, 0, WINDOW, max_norm=None))
    for rank in pair:
        assert rank[scenario]["stepped"]
        for call, error in rank[scenario].get("errors", {}).items():
            assert error.startswith(f"RuntimeError: {OP}.{call}: the call {LATE}"), (call, error)


@pytest.mark.parametrize("scenario", DROPPED)
def test_ranks_train_on_after_a_dropped_window(pair, scenario):
    """Ranks train on together after a window on its way was dropped, by you or by an error"""
    torch.manual_seed(5)
    model = Partly()
    plain = ByHand(model.parameters(), adam)
    for start in (0, 2):
        for batch in BATCHES[start : start + 2]:
            plain.add(model.loss(batch, True))
        plain.step()
    first = ranks.agreed(pair, scenario)
    assert_close(first["parameters"], parameters_of(model))
    errors = ranks.of(pair, scenario, "errors")
    if scenario in FAILING:
        assert errors == [["ValueError: out of memory", False], ["", True]]
    if scenario == "payload_fails":
        text = f"{OP}.step: the open window was dropped: it was being summed over all processes"
        for said, stepped in errors:
            assert said.startswith("RuntimeError: ")
            assert text in said
            assert not stepped


def test_a_failed_step_is_not_summed_again(pair):
    """A step that fails after the sum over ranks is tried again without another sum"""
    first = ranks.agreed(pair, "step_fails")
    assert first["parameters"][0].tolist() == [-2.0, -2.0]
    assert first["stats"]["weight"] == 2.0
    for failed, late in ranks.of(pair, "step_fails", "errors"):
        assert failed == "RuntimeError: disk full"
        assert LATE in late


def test_gradients_in_parts_are_an_error(pair):
    """A gradient that comes in parts after it was sent is an error, and nothing was stepped on"""
    for rank in pair:
        assert "got one in several parts, as reentrant" in rank["gradients_in_parts"]["error"]
        assert rank["gradients_in_parts"]["untouched"]


def test_ranks_must_train_the_same(pair):
    """Parameters frozen on some ranks only, or parts in several groups, are refused in words"""
    for rank in pair:
        error = rank["frozen_on_one_rank"]["error"]
        text = "the window must be of the same trainable parameters on every process"
        assert error == f"RuntimeError: {OP}.step: {text}, got 26, 10 elements by rank"
        assert rank["frozen_on_one_rank"]["held"] == 1
        error = rank["groups_differ"]["error"]
        assert "must have DistributedDataParallel parts of one process group, got several" in error
        assert not rank["all_frozen"]["stepped"]
