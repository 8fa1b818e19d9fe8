"""Checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import CLASSES, batches_for, make_optimizer, model_for
from support.optimizer_oracle import (
    adam,
    assert_close,
    assert_equal,
    closure_of,
    make_batches,
    make_model,
    parameters_of,
    run,
    through_a_file,
    train_by_hand,
    windows_of,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 3
BATCHES = make_batches(12)


def run_bare(opt, model, batches, window=WINDOW):
    """On the joined batches of each window."""
    for some in windows_of(batches, window):
        opt.step(closure_of(opt, model, torch.cat(some)))


@pytest.mark.parametrize("first", ["bare", "wrapped"])
@pytest.mark.parametrize("name", CLASSES)
def test_checkpoints_move_both_ways(name, first):
    """`state_dict` moves between the bare and the wrapped optimizer, both ways, bit for bit"""
    batches = batches_for(name, [4] * 9, torch.float32)

    def build(wrap):
        model = model_for(name, torch.float32)
        bare = make_optimizer(name, model.parameters())
        return model, AccumulatingOptimizer(bare) if wrap else bare

    expected, uninterrupted = build(wrap=False)
    run_bare(uninterrupted, expected, batches, 1)

    wrap = first == "wrapped"
    model, opt = build(wrap)
    for start in range(0, 9, 3):
        if start:
            wrap = not wrap
            states = through_a_file([model.state_dict(), opt.state_dict()])
            model, opt = build(wrap)
            model.load_state_dict(states[0])
            opt.load_state_dict(states[1])
        run_bare(opt, model, batches[start : start + 3], 1)
    assert_equal(parameters_of(model), parameters_of(expected))
    assert set(opt.state_dict()) == {"state", "param_groups"}


def test_loading_leaves_the_open_window_alone():
    """`load_state_dict` inside a window changes the optimizer's state and leaves the window"""
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=WINDOW)
    run(opt, model, BATCHES[:3])
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    run(opt, model, BATCHES[3:6])
    model.load_state_dict(saved[0])
    run(opt, model, BATCHES[6:7])
    opt.load_state_dict(saved[1])
    run(opt, model, BATCHES[7:9])
    assert opt.stepped
    batches = [*BATCHES[:3], *BATCHES[6:9]]
    assert_close(parameters_of(model), train_by_hand(adam, batches, WINDOW))


OPTIMIZERS = {
    "adam": adam,
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),  # which never has any state
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
}


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("position", [0, 1, 4], ids=["fresh", "mid-window", "later-mid-window"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_distributed_checkpoint_leaves_no_trace(kind, position, flatten):
    """`torch.distributed.checkpoint` get and set, fresh or inside a window, leave no trace"""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def get_and_set(model, opt):
        state = get_optimizer_state_dict(model, opt, options=options)
        set_optimizer_state_dict(model, opt, state, options=options)

    reference, model = make_model(), make_model()
    bare = OPTIMIZERS[kind](reference.parameters())
    opt = AccumulatingOptimizer(OPTIMIZERS[kind](model.parameters()), window=WINDOW)
    before = position // WINDOW * WINDOW  # of the bare optimizer, which has no windows
    run_bare(bare, reference, BATCHES[:before])
    get_and_set(reference, bare)  # its own priming counts as a step in the state of Adam
    run_bare(bare, reference, BATCHES[before:])

    run(opt, model, BATCHES[:position])
    here, report = opt.stepped, opt.last
    parameters = [p.clone() for p in parameters_of(model)]
    get_and_set(model, opt)
    assert opt.stepped == here
    assert opt.last is report
    assert_equal(parameters_of(model), parameters)
    run(opt, model, BATCHES[position:])
    assert opt.last.micro_batches == WINDOW
    assert_close(parameters_of(model), parameters_of(reference))
    torch.testing.assert_close(opt.state_dict()["state"], bare.state_dict()["state"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("direction", ["wrapped-to-bare", "bare-to-wrapped"])
def test_distributed_checkpoint_files_move_both_ways(tmp_path, direction):
    """`torch.distributed.checkpoint.save` with the wrapper, `load` without it, and the reverse"""

    def build(wrap):
        model = make_model()
        bare = OPTIMIZERS["adam"](model.parameters())
        return model, AccumulatingOptimizer(bare, window=WINDOW) if wrap else bare

    def go(model, opt, batches):
        (run if isinstance(opt, AccumulatingOptimizer) else run_bare)(opt, model, batches)

    expected, uninterrupted = build(wrap=False)
    run_bare(uninterrupted, expected, BATCHES)

    first = direction == "wrapped-to-bare"
    model, opt = build(wrap=first)
    go(model, opt, BATCHES[:6])
    dcp.save(
        {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt)},
        checkpoint_id=tmp_path,
    )
    other, resumed = build(wrap=not first)
    state = {"model": other.state_dict(), "opt": get_optimizer_state_dict(other, resumed)}
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, resumed, state["opt"])
    go(other, resumed, BATCHES[6:])
    assert_close(parameters_of(other), parameters_of(expected))
