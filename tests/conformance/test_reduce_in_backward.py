"""`reduce_in_backward`: what it takes, and errors that leave a way on."""

from __future__ import annotations

import pytest
import ranks
import torch
from data_parallel import BATCHES, WINDOW, adam, in_group
from optimizer_oracle import assert_close, loss_of, make_model, train_by_hand
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

OP = "AccumulatingOptimizer"
LATE = "must be the one backward of a micro-batch and be followed by step"


def started(rank, world, **kwargs):
    """An optimizer whose window is full and on its way."""
    model = make_model()
    opt = in_group(model, reduce_in_backward=True, **kwargs)
    for i in range(WINDOW):
        opt.backward(loss_of(model, BATCHES[i * world + rank]))
        if i < WINDOW - 1:
            opt.step()
    return model, opt


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def finished(model, opt, **more):
    opt.step()
    return {"parameters": [p.detach() for p in model.parameters()], "stepped": opt.stepped, **more}


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
    }
    loss_of(model, BATCHES[0]).backward()
    errors["step"] = error_of(opt.step)
    opt.zero_grad()
    return finished(model, opt, errors=errors)


def two_in_a_micro_batch(rank, world):
    """The second backward pass of the last micro-batch is refused; the first one's sum arrives."""
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None, reduce_in_backward=True)
    for i in range(WINDOW - 1):
        with opt.micro_batch(model):
            opt.backward(loss_of(model, BATCHES[i * world + rank]))
        opt.step()

    def last():
        with opt.micro_batch(model):
            opt.backward(loss_of(model, BATCHES[(WINDOW - 1) * world + rank]))
            opt.backward(loss_of(model, BATCHES[0]))

    return finished(model.module, opt, errors={"backward": error_of(last)})


def discarded(rank, world):
    """A window on its way may be dropped by all ranks; they go on with the next."""
    model, opt = started(rank, world)
    opt.discard()
    for i in range(WINDOW):
        opt.backward(loss_of(model, BATCHES[i * world + rank]))
        opt.step()
    return {"parameters": [p.detach() for p in model.parameters()], "stepped": opt.stepped}


def gradients_in_parts(rank, world):
    """A reentrant checkpoint used twice hands over the gradient of one layer in two parts."""
    model = make_model()
    opt = in_group(model, window=1, reduce_in_backward=True)
    before = [p.detach().clone() for p in model.parameters()]
    with ranks.small_buckets():
        batch = BATCHES[rank].clone().requires_grad_()
        twice = sum(checkpoint(model, batch, use_reentrant=True).square().mean() for _ in range(2))
        error = error_of(lambda: opt.backward(twice))
    untouched = all(map(torch.equal, before, model.parameters()))
    clear = all(p.grad is None for p in model.parameters())
    held = opt.accumulation_state_dict()["micro_batches"]
    return {"error": error, "untouched": untouched and clear and held == 0}


ARRIVING = (too_late, two_in_a_micro_batch, discarded)
SCENARIOS = (*ARRIVING, gradients_in_parts)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return ranks.run_on(2, SCENARIOS, "reduce_in_backward", tmp_path_factory)


@pytest.mark.parametrize("scenario", ARRIVING, ids=lambda s: s.__name__)
def test_a_window_on_its_way_arrives(seen, scenario):
    """A window that is being sent takes no more gradients, says so, and arrives; or is discarded"""
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], train_by_hand(adam, BATCHES[: 2 * WINDOW], 2 * WINDOW))
    for rank in seen:
        assert rank[scenario.__name__]["stepped"]
        for call, error in rank[scenario.__name__].get("errors", {}).items():
            assert error.startswith(f"{OP}.{call}: the call {LATE}"), (call, error)


def test_gradients_in_parts_are_an_error(seen):
    """A gradient that comes in parts after it was sent is an error, and nothing was stepped on"""
    for rank in seen:
        assert "got one in several parts, as reentrant" in rank["gradients_in_parts"]["error"]
        assert rank["gradients_in_parts"]["untouched"]
