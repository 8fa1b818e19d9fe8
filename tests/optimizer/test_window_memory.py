"""The memory of a window of full-precision parameters beside that of a loop by hand, counted."""

import pytest
import torch
from support.optimizer_oracle import OPTIMIZERS, one_call, outer_scaler
from torch import nn

import accumext
from accumext._peak_memory import peak_memory

PARAMETERS, SIZE = 32, 2**12
SET = 4 * SIZE * PARAMETERS  # bytes of one set of gradients
SLACK = 0.06  # of a set: a few gradients that a pass has made and not added yet, and scalars
MAX_NORM = 1.0  # less than the gradients have


def peak(loop, kind, window, scaled, max_norm):
    """Sets of gradients at the highest point of a window, with what the step itself takes.

    `loop` is that of a micro-batch; None is plain PyTorch's.
    """
    parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(PARAMETERS)]
    batches = [torch.full((SIZE,), 1.0 + i) for i in range(window)]
    # One that is not enabled hands everything through.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    opt = bare = OPTIMIZERS[kind](parameters)
    if loop is not None:
        own = scaler if loop is one_call else None
        opt = accumext.AccumulatingOptimizer(bare, window=window, max_norm=max_norm, scaler=own)

    def loss_of(i):
        return torch.stack([parameter @ batches[i] for parameter in parameters]).sum()

    def by_hand():
        for i in range(window):
            scaler.scale(loss_of(i) / window).backward()
        scaler.unscale_(bare)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(bare)
        scaler.update()
        bare.zero_grad()

    def run():
        if loop is None:
            by_hand()
            return
        for i in range(window):
            loop(opt, loss_of(i), scaler)
        assert opt.stepped
        assert not opt.last.skipped
        assert (opt.last.clip_coef < 1.0) == (max_norm is not None)

    run()  # the optimizer has its state
    for parameter in parameters:
        parameter.grad = None

    def windows():  # what a window of one leaves in `.grad`, the next has to free in time
        for _ in range(2 if window == 1 else 1):
            run()

    return peak_memory(windows) / SET


@pytest.mark.parametrize("kind", ["sgd", "adamw-foreach", "adamw-fused"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("max_norm", [None, MAX_NORM], ids=["unclipped", "clipped"])
def test_a_window_holds_what_a_loop_by_hand_does(kind, window, scaled, max_norm):
    case = kind, window, scaled, max_norm
    least = peak(None, *case)
    assert least >= 1.0
    assert peak(one_call, *case) <= least + SLACK
    # Whoever calls `loss.backward()` has the micro-batch's gradients beside the sums.
    assert peak(outer_scaler, *case) <= least + 1.0 + SLACK
