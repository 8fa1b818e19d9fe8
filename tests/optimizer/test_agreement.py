"""Processes that differ: an error on each, and nothing has changed. Here they are two threads."""

import pytest
import torch
from support.optimizer_oracle import OP, on_both, says, sgd, wrapped_zeros
from torch import nn

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

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
