"""Processes that differ: an error on each, and nothing has changed. Here they are two threads."""

from __future__ import annotations

import pytest
import torch
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import OP, on_both, says, sgd, wrapped_zeros
from torch import nn

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


@pytest.mark.parametrize(
    ("counts", "windows", "sizes", "text"),
    [
        ((2, 3), (9, 9), (1, 1), "number of micro-batches on every process, got 2, 3 by"),
        ((0, 3), (9, 9), (1, 1), "got 0, 3 by rank. Give every process the same"),
        ((2, 2), (9, 2), (1, 1), "got 2, full with 2 by rank. Give every process the same"),
        ((3, 2), (3, 2), (1, 1), "got full with 3, full with 2 by rank. Give every process"),
        ((2, 2), (2, 2), (1, 4), "be of the same trainable parameters on every process, got"),
    ],
)
def test_windows_that_differ_are_refused_on_every_process(groups, counts, windows, sizes, text):
    def refused(rank):
        parameter, opt = wrapped_zeros(windows[rank], sizes[rank], process_group=groups[rank])
        for _ in range(counts[rank]):
            opt.backward(parameter.sum())
        full = counts[rank] == windows[rank]
        with pytest.raises(RuntimeError, match=f"{OP}.*: the window must ") as raised:
            (opt.step if full else opt.flush)()
        held = opt.accumulation_state_dict()["main_grads"].values()
        assert [main.tolist() for main in held] == [[counts[rank]] * sizes[rank]][: counts[rank]]
        opt.discard()
        return str(raised.value)

    assert all(text in said for said in on_both(refused))


SETTINGS = {  # a setting, its values by rank, and how an error shows them
    "max_norm": ((None, 0.25), "None, 0.25"),
    "norm_type": ((2.0, torch.inf), "2.0, inf"),
    "reduction": (("sum", "mean"), "'sum', 'mean'"),
    "on_nonfinite": (("skip_window", "raise"), "'skip_window', 'raise'"),
}
IN_BACKWARD = [name for name in SETTINGS if name != "on_nonfinite"]


def closing(opt, parameter):
    """Return the last call, in a window of two, of those in which processes agree."""
    opt.backward(parameter.sum())
    opt.step()
    if opt.reduce_in_backward:
        return lambda: opt.backward(parameter.sum())
    opt.backward(parameter.sum())
    return opt.step


@pytest.mark.parametrize(
    ("name", "in_backward"),
    [(name, False) for name in SETTINGS] + [(name, True) for name in IN_BACKWARD],
)
def test_settings_that_differ_are_refused_on_every_process(groups, name, in_backward):
    """In the first window and in a later one, where one process alone was assigned another value;
    with the same value the window is closed."""
    values, shown = SETTINGS[name]

    def moved(rank):
        options = {"reduce_in_backward": in_backward, "process_group": groups[rank]}
        parameter, opt = wrapped_zeros(2, **options, **{name: values[rank]})
        seen = [0.0]
        for _ in range(2):
            close = closing(opt, parameter)
            text = f"{name} must be the same on every process, got {shown} by rank"
            with pytest.raises(RuntimeError, match=f"^{OP}.*: {text}$"):
                close()
            assert parameter.item() == seen[-1]
            setattr(opt, name, values[0])
            close()
            if in_backward:
                opt.step()
            seen.append(parameter.item())
            setattr(opt, name, values[rank])
        return seen

    first, second = on_both(moved)
    assert first == second
    assert first[0] > first[1] > first[2]


def on_masters(parameters, group):
    masters = accumext.masters(parameters)
    return AccumulatingOptimizer(sgd(masters), masters=masters, process_group=group)


def plain(parameters, group):
    return AccumulatingOptimizer(sgd(parameters), process_group=group)


HALF, WIDE, SINGLE = torch.bfloat16, torch.float64, torch.float32
BUILT = {  # sizes, dtypes and wrapper by rank
    "masters must be of as many parameters on every process, got 1, 0 by rank": (
        ([3], [HALF], on_masters),
        ([3], [HALF], plain),
    ),
    "parameters must have the same dtypes on every process, got float32, float64 and float32": (
        ([3, 2], [SINGLE, SINGLE], plain),
        ([3, 2], [SINGLE, WIDE], plain),
    ),
    "parameters must have the same shapes and dtypes in the same order on every process, got ": (
        ([4, 8], [WIDE, SINGLE], plain),  # both send 32 bytes, and then 32 more
        ([8, 4], [SINGLE, WIDE], plain),
    ),
}


@pytest.mark.parametrize("text", BUILT)
def test_optimizers_of_other_parameters_are_refused_on_every_process(groups, text):
    def refused(rank):
        sizes, dtypes, make = BUILT[text][rank]
        pairs = zip(sizes, dtypes)
        parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in pairs]
        opt = make(parameters, groups[rank])
        opt.backward(sum(parameter.sum().double() for parameter in parameters))
        with pytest.raises(RuntimeError, match=says(f"{OP}.step: {text}")):
            opt.step()
        assert not any(parameter.any() for parameter in parameters)
        opt.discard()

    on_both(refused)


def test_a_device_is_read_where_settings_are_new_alone(groups):
    """A process that was assigned another value says so, and the device of one that was not."""
    opts = [wrapped_zeros(process_group=groups[rank]) for rank in range(2)]

    def lists():
        for parameter, opt in opts:
            opt.backward(parameter * 1)
        with cpu_as_device(), DeviceReads() as reads:
            on_both(lambda rank: opts[rank][1].step())
        return reads.lists

    assert [lists() for _ in range(3)] == [2, 0, 0]
    for _, opt in opts:
        opt.max_norm = 4.0
    assert [lists() for _ in range(3)] == [2, 0, 0]
    opts[1][1].max_norm = 8.0
    said = [
        "windows, settings and parameters must be the same on every process",
        "max_norm must be the same on every process, got 4.0, 8.0 by rank",
    ]

    def refused(rank):
        parameter, opt = opts[rank]
        opt.backward(parameter * 1)
        with pytest.raises(RuntimeError, match=says(f"{OP}.step: {said[rank]}")):
            opt.step()
        opt.discard()

    with cpu_as_device():
        on_both(refused)
