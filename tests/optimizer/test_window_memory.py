"""The memory of a window of full-precision parameters beside that of a loop by hand, counted."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import OPTIMIZERS, one_call, outer_scaler
from torch import nn

import accumext
from accumext.demo.memory import peak_memory

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


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_decode_loss_adds_its_large_gradients_to_the_window(tied):
    """After the first micro-batch, none of them is made beside the sums."""
    vocabulary, size, steps, batch, window = 20_000, 64, 5, 3, 4
    embedding, cell = nn.Embedding(vocabulary, size), nn.GRUCell(size, size)
    head = nn.Linear(size, vocabulary)
    if tied:
        head.weight = embedding.weight
    parameters = list(nn.ModuleList([embedding, cell, head]).parameters())
    opt = accumext.AccumulatingOptimizer(
        torch.optim.SGD(parameters, lr=0.1), window=window, max_norm=MAX_NORM
    )
    targets = torch.arange(steps * batch).view(steps, batch)
    state = torch.zeros(batch, size)
    workspace = 2 * 4 * vocabulary * batch  # logits of a step, and their gradients

    def micro_batch():
        out = accumext.decode_loss(
            embedding, cell, head, targets, state, feedback="teacher", memory_budget=workspace
        )
        opt.backward(out.loss)

    peaks = []
    for _ in range(window):
        peaks.append(peak_memory(micro_batch))
        opt.step()
    assert opt.stepped
    first, *others = peaks
    assert first > 4 * vocabulary * size
    assert max(others) < workspace + 4 * vocabulary * size / 2


def test_decode_loss_adds_half_precision_to_the_window_from_the_first_micro_batch_on():
    """With accumulate_in_backward the sum, in float32, is the only tensor of the head's size."""
    vocabulary, size, steps, batch = 20_000, 64, 5, 3
    modules = nn.ModuleList(
        [nn.Embedding(vocabulary, size), nn.GRUCell(size, size), nn.Linear(size, vocabulary)]
    ).bfloat16()
    embedding, cell, head = modules
    embedding.requires_grad_(False)
    opt = accumext.AccumulatingOptimizer(
        torch.optim.SGD(modules.parameters()), window=2, accumulate_in_backward=True
    )
    targets = torch.arange(steps * batch).view(steps, batch)
    state = torch.zeros(batch, size, dtype=torch.bfloat16)
    workspace = 2 * 4 * vocabulary * batch  # logits of a step, and their gradients

    def micro_batch():
        out = accumext.decode_loss(
            embedding, cell, head, targets, state, feedback="teacher", memory_budget=workspace
        )
        opt.backward(out.loss)

    grad = 2 * vocabulary * size  # in bfloat16, beside the sum of twice its size; half is slack
    first, second = peak_memory(micro_batch), peak_memory(micro_batch)
    opt.discard()
    assert first < 2 * grad + workspace + grad / 2
    assert second < workspace + grad / 2
