"""`reduce_in_backward`: what it takes, and errors that leave a way on."""

import copy
from functools import partial

import pytest
import ranks
import shares
import torch
import torch.distributed as dist
from ranks import across
from shares import BATCHES, WINDOW, as_expected, error_of, held, in_group, made, own_share, train
from support.optimizer_oracle import OP, ByHand, adam, loss_of, make_model, parameters_of, sgd
from support.tensors import assert_equal
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LATE = "must come after step or discard, got one for a window that is summed over processes"


def started(rank, world):
    """Make an optimizer whose window is full and on its way."""
    model, opt = made(reduce_in_backward=True)
    *share, (batch, weight) = own_share(rank, world, WINDOW)
    train(opt, model, share)
    opt.backward(loss_of(model, batch), weight)
    return model, opt


def too_late(rank, world):
    """Try to change a window that is on its way: each call is refused, and the window arrives."""
    model, opt = started(rank, world)
    loss = loss_of(model, BATCHES[0])
    errors = {
        "backward": error_of(opt.backward, loss),
        "micro_batch": error_of(opt.micro_batch().__enter__),
        "accumulation_state_dict": error_of(opt.accumulation_state_dict),
        "__getstate__": error_of(copy.deepcopy, opt),
    }
    loss_of(model, BATCHES[0]).backward()
    errors["accumulate"] = error_of(opt.accumulate)
    errors["step"] = error_of(opt.step)
    opt.zero_grad()
    opt.step()
    return model, opt, errors


def two_in_a_micro_batch(rank, world):
    """Run two backward passes in the last micro-batch: the second is refused, the first arrives."""
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None, reduce_in_backward=True)
    *share, (batch, weight) = own_share(rank, world, WINDOW)
    train(opt, model, share, shares.inside)

    def last():
        with opt.micro_batch(model):
            opt.backward(loss_of(model, batch), weight)
            opt.backward(loss_of(model, BATCHES[0]))

    error = error_of(last)
    opt.step()
    return model.module, opt, {"backward": error}


def discarded(rank, world):
    """Drop a window on its way on all ranks; they go on with the next."""
    model, opt = started(rank, world)
    opt.discard()
    train(opt, model, own_share(rank, world, WINDOW))
    return model, opt, {}


ARRIVING = {way.__name__: {"way": way} for way in (too_late, two_in_a_micro_batch, discarded)}


@across(2, cases=ARRIVING)
def test_a_window_on_its_way_arrives(rank, world, way):
    """A window that is being sent takes no more gradients, says so, and arrives; or is discarded"""
    model, opt, errors = way(rank, world)
    assert opt.stepped
    for call, error in errors.items():
        assert error.startswith(f"RuntimeError: {OP}.{call}: the call {LATE}"), (call, error)
    return as_expected(model, opt, shares.by_hand(2, 0, WINDOW, max_norm=None))


class Partly(nn.Module):
    """Two layers, of which a rank may leave out the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

    def loss(self, batch, both=True):
        loss = self.layers[1](batch).square().mean()
        return loss + self.layers[0](batch).square().mean() if both else loss


def one_discards(opt, model, rank):
    """Discard a window of which the ranks have sent different buckets."""
    opt.backward(model.loss(BATCHES[0], rank == 0))
    opt.discard()


def out_of_memory(*args):
    raise ValueError("out of memory")


def at_its_end(*args):
    """Fail when all gradients have been made."""
    torch.autograd.Variable._execution_engine.queue_callback(out_of_memory)


def backward_fails(opt, model, rank, fail=out_of_memory):
    """Fail on one rank, which drops the window; on others it is not finite, and skipped."""
    handle = model.layers[0].weight.register_hook(fail) if rank == 0 else None
    error = error_of(opt.backward, model.loss(BATCHES[0]))
    opt.step()
    if rank == 0:
        handle.remove()
        assert error == "ValueError: out of memory"
    else:
        assert not error
        assert opt.last.skipped


def payload_fails(opt, model, rank):
    """Fail in a collective after the ranks have agreed: the window is dropped, in words."""
    opt.reduce_in_backward = False
    opt.backward(model.loss(BATCHES[0]))
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
    assert error.startswith("RuntimeError: ")
    dropped = "the open window was dropped: it was being summed over all processes"
    assert f"{OP}.step: {dropped}" in error
    assert not opt.stepped


DROPS = {
    "backward_fails_on_one_rank": {"drop": backward_fails},
    "backward_fails_at_its_end_on_one_rank": {"drop": partial(backward_fails, fail=at_its_end)},
    "discarded_in_different_places": {"drop": one_discards},
    "payload_fails": {"drop": payload_fails},
}


@across(2, cases=DROPS)
def test_ranks_train_on_after_a_dropped_window(rank, world, drop):
    """Ranks train on together after a window on its way was dropped, by you or by an error"""
    model = Partly()
    reference = copy.deepcopy(model)
    opt = in_group(model, window=1, reduce_in_backward=True)
    plain = ByHand(reference.parameters(), adam)
    with ranks.small_buckets():
        drop(opt, model, rank)
        for start in (0, world):
            opt.backward(model.loss(BATCHES[start + rank]))
            opt.step()
            for batch in BATCHES[start : start + world]:
                plain.add(reference.loss(batch))
            plain.step()
    return as_expected(model, opt, parameters_of(reference))


@across(2)
def test_a_failed_step_is_not_summed_again(rank, world):
    """A step that fails after the sum over ranks is tried again without another sum"""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model, failures = nn.ParameterList([weight]), ["disk full"]
    opt = in_group(model, sgd, window=1, reduction="sum")

    def fail(optimizer, args, kwargs):
        if failures:
            raise RuntimeError(failures.pop())

    opt.register_step_pre_hook(fail)
    opt.backward(weight.sum())
    errors = [error_of(opt.step), error_of(opt.backward, weight.sum())]
    opt.step()
    assert errors[0] == "RuntimeError: disk full"
    assert LATE in errors[1]
    assert opt.last.weight == 2.0
    return as_expected(model, opt, [torch.full((2,), -2.0, dtype=torch.float64)])


@across(2)
def test_gradients_in_parts_are_an_error(rank, world):
    """A gradient that comes in parts after it was sent is an error, and nothing was stepped on"""
    # A reentrant checkpoint used twice hands over the gradient of one layer in two parts.
    model, opt = made(window=1, reduce_in_backward=True)
    with ranks.small_buckets():
        batch = BATCHES[rank].clone().requires_grad_()
        twice = sum(checkpoint(model, batch, use_reentrant=True).square().mean() for _ in range(2))
        error = error_of(opt.backward, twice)
    assert "got one in several parts, as reentrant" in error
    assert held(opt) == 0
    assert all(p.grad is None for p in model.parameters())
    assert_equal(model.parameters(), make_model().parameters())
