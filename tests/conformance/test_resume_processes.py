"""Runs that are killed in the middle of a window, and go on in new processes."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shares import BATCHES, WEIGHTS, inside, outcome, own_share, train
from support.optimizer_oracle import (
    INF,
    adam,
    assert_close,
    assert_equal,
    loss_of,
    make_model,
    parameters_of,
    sgd,
    train_by_hand,
    wrapped,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

END = 14  # micro-batches; windows of 4, so the last is open
KILLED_AFTER = (1, 6, 11)  # in the first window, in the middle and before the end of a later one

# dtype of the parameters, and the wrapper's options
RUNS = {
    "float64": (torch.float64, {}),
    "float32 with a clip": (torch.float32, {"max_norm": 0.02}),
    "bfloat16": (torch.bfloat16, {"max_norm": 0.02}),
    "float16": (torch.float16, {"on_nonfinite": "skip_micro_batch"}),
    "bfloat16, in backward": (torch.bfloat16, {"accumulate_in_backward": True}),
}


class Training:
    """A training run: everything that a checkpoint has to hold, and one micro-batch after another.

    The loss scale grows every window, and the micro-batches 2 and 9 hold an inf.
    """

    def __init__(self, dtype, options, rank=0, world=1):
        self.rank, self.world = rank, world
        self.module = make_model(dtype)
        self.model = DistributedDataParallel(self.module) if world > 1 else self.module
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        momentum = partial(sgd, lr=0.1, momentum=0.9)
        self.opt = wrapped(self.module, momentum, window=4, scaler=self.scaler, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.7)
        self.parts = {
            "model": self.module,
            "optimizer": self.opt,
            "scaler": self.scaler,
            "schedule": self.schedule,
        }
        self.done = 0

    def run(self, until):
        dtype = next(self.module.parameters()).dtype
        for number in range(self.done, until):
            batch = BATCHES[(number * self.world + self.rank) % len(BATCHES)].to(dtype)
            factor = INF if number in (2, 9) else 1.0
            held_back = self.opt.micro_batch(self.model) if self.world > 1 else nullcontext()
            with held_back:
                self.opt.backward(loss_of(self.model, batch).float() * factor, number % 3 + 1)
            self.opt.step()
            if self.opt.stepped:
                self.schedule.step()
        self.done = until

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({**state, "open": self.opt.accumulation_state_dict(), "done": self.done}, path)

    def load(self, path):
        state = torch.load(path)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.opt.load_accumulation_state_dict(state["open"])
        self.done = state["done"]

    def finish(self):
        """Train to the end, flush the open window, and tell the outcome, with the last reports."""
        reports = []
        for until in range(self.done + 1, END + 1):
            self.run(until)
            reports.append(list(self.opt.stats().values()))
        self.opt.flush()
        scale = torch.tensor(self.scaler.get_scale())
        last = torch.tensor(reports[KILLED_AFTER[-1] - END :])  # norms of skipped windows are NaN
        return [*parameters_of(self.module), scale, last.nan_to_num()]


def cases(rank, world, folder):
    """Every run with every place to be killed at, and where that one is saved."""
    for kind, run in RUNS.items():
        for after in KILLED_AFTER:
            path = Path(folder, f"{kind}-{after}-{rank}.pt")
            yield (kind, after), lambda run=run: Training(*run, rank, world), path


def until_killed(rank, world, folder, meeting):
    ranks.join(rank, world, meeting)
    for (_, after), make, path in cases(rank, world, folder):
        training = make()
        training.run(after)
        training.save(path)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def going_on(rank, world, folder, meeting):
    ranks.join(rank, world, meeting)
    seen = {}
    for case, make, path in cases(rank, world, folder):
        resumed = make()
        resumed.load(path)
        seen[case] = resumed.finish(), make().finish()
    torch.save(seen, Path(folder, f"seen-{rank}.pt"))
    ranks.leave()


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2], ids=["1-process", "2-processes"])
def test_a_killed_run_goes_on_bit_for_bit(world, tmp_path):
    """Saved mid-window, killed, loaded in new processes: bit for bit the run that went on"""
    with pytest.raises(ProcessExitedException) as killed:
        ranks.spawn(until_killed, (world, str(tmp_path), f"{tmp_path}/first"), world)
    assert killed.value.signal_name == "SIGKILL"
    ranks.spawn(going_on, (world, str(tmp_path), f"{tmp_path}/second"), world)
    for rank in range(world):
        seen = torch.load(tmp_path / f"seen-{rank}.pt")
        assert len(seen) == len(RUNS) * len(KILLED_AFTER)
        for case, (resumed, uninterrupted) in seen.items():
            assert_equal(resumed, uninterrupted)
            start = make_model(RUNS[case[0]][0]).parameters()
            assert not torch.equal(resumed[0], next(start)), case
            assert all(part.isfinite().all() for part in resumed), case


WINDOW = 12  # micro-batches of all processes together, in any number of them


@contextmanager
def replicated(model, opt, path, going_on):
    """From the checkpoint of the window before to that of this one."""
    path = f"{path}.pt"
    if going_on:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        opt.load_accumulation_state_dict(state["open"])
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
        torch.save({**state, "open": opt.accumulation_state_dict()}, path)


@contextmanager
def sharded(model, opt, path, going_on):
    """The same with torch.distributed.checkpoint."""
    if going_on:
        weights, state = get_state_dict(model, opt)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    yield
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def one_window(rank, world, folder, part, checkpoints):
    ranks.join(rank, world, f"{folder}/meeting-{part}")
    module = make_model()
    if checkpoints is sharded:
        model = fully_shard(module)
    else:
        model = DistributedDataParallel(module) if world > 1 else module
    opt = wrapped(module, adam, window=WINDOW // world)
    share = own_share(rank, world)[part * WINDOW // world :][: WINDOW // world]
    with checkpoints(module, opt, f"{folder}/checkpoint", part > 0):
        train(opt, model, share, inside)
    torch.save(outcome(module, opt)["parameters"], f"{folder}/parameters-{rank}.pt")
    ranks.leave()


@pytest.mark.process
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1)], ids=["2-to-3", "3-to-1"])
@pytest.mark.parametrize("checkpoints", [replicated, sharded], ids=["ddp", "fully_shard"])
def test_a_closed_window_goes_on_in_another_number_of_processes(checkpoints, worlds, tmp_path):
    """After a closed window a run goes on in any number of processes"""
    for part, world in enumerate(worlds):
        ranks.spawn(one_window, (world, str(tmp_path), part, checkpoints), world)
    parameters = torch.load(tmp_path / "parameters-0.pt")
    assert_close(parameters, train_by_hand(adam, BATCHES, WINDOW, weights=WEIGHTS))
