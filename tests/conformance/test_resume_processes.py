"""Runs that are killed, also in the middle of a window, and go on in new processes."""

import os
import signal
from contextlib import contextmanager

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shares import BATCHES, WEIGHTS, inside, train, whole
from support import optimizer_oracle as oracle
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

WINDOW = 6  # micro-batches of all processes together, in any number of them


@contextmanager
def replicated(module, opt, path, begin):
    """Load the checkpoint of the processes before, and save that of these."""
    parts = {"model": module, "optimizer": opt, "scaler": opt.scaler}
    if begin > 0:
        # An open window is a rank's own; elsewhere any rank's checkpoint will do.
        state = torch.load(f"{path}-{dist.get_rank() if begin % WINDOW else 0}.pt")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        opt.load_accumulation_state_dict(state["open"])
    yield DistributedDataParallel(module)
    dist.barrier()
    state = {name: part.state_dict() for name, part in parts.items()}
    state["open"] = opt.accumulation_state_dict()
    torch.save(state, f"{path}-{dist.get_rank()}.pt")


@contextmanager
def sharded(module, opt, path, begin):
    """Do so with torch.distributed.checkpoint, after a closed window."""
    if begin > 0:
        weights, state = get_state_dict(module, opt)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(module, opt, model_state_dict=weights, optim_state_dict=state)
    yield module
    weights, state = get_state_dict(module, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


# How many processes run, and which micro-batches, of all of them together
PARTS = [
    (2, {replicated: (0, 8)}),  # one window, and a third of the next
    (2, {replicated: (8, 12), sharded: (0, 12)}),
    (3, {replicated: (12, 18), sharded: (12, 18)}),
    (1, {replicated: (18, 24), sharded: (18, 24)}),
]


def until_killed(rank, folder, number):
    world, runs = PARTS[number]
    ranks.join(rank, world, f"{folder}/meeting-{number}")
    for checkpoints, (begin, end) in runs.items():
        module = oracle.make_model()
        if checkpoints is sharded:
            fully_shard(module)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        window = {"window": WINDOW // world, "max_norm": 0.02}
        path = f"{folder}/{checkpoints.__name__}"
        share = list(zip(BATCHES, WEIGHTS))[begin:end][rank::world]
        opt = oracle.wrapped(module, oracle.adam, scaler=scaler, **window)
        with checkpoints(module, opt, path, begin) as model:
            train(opt, model, share, inside)
        steps = end // WINDOW * WINDOW
        expected = oracle.train_by_hand(
            oracle.adam, BATCHES[:steps], WINDOW, weights=WEIGHTS[:steps], max_norm=0.02
        )
        parameters = whole(oracle.parameters_of(module))
        oracle.assert_close(parameters, expected)
        assert checkpoints is sharded or scaler.get_scale() == 8.0 * 2 ** (end // WINDOW)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_killed_run_goes_on(tmp_path):
    """Saved, killed, loaded: in as many processes mid-window, after it in any number of them"""
    for number, (world, _) in enumerate(PARTS):
        with pytest.raises(ProcessExitedException) as killed:
            ranks.spawn(until_killed, (str(tmp_path), number), world)
        assert killed.value.signal_name == "SIGKILL"
