"""The gradient lent to an optimizer that does not multiply: its memory, and who may hold it."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from accumext import AccumulatingOptimizer

LARGE = (32 << 20) // 4  # elements of float32: from here on memory is kept
FACTOR = 0.5  # what a clip to half the norm multiplies with, but for its 1e-6
TOLERANCE = 1e-5  # that, and the rounding of a norm and of a few sums in float32


def parameters_of(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def clipped(parameters, **options):
    """An optimizer whose gradients of `give` are to be multiplied with FACTOR."""
    sgd = torch.optim.SGD(parameters, lr=1.0)
    return AccumulatingOptimizer(sgd, max_norm=FACTOR, **options)


def give(parameters, sign=1.0):
    """A gradient of norm 1."""
    count = sum(p.numel() for p in parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, sign * count**-0.5)


def lent_to(opt):
    """Runs a step; what was lent, looked at by `look`, as a hook of the wrapped optimizer."""

    def step(look):
        seen = []
        hook = opt.optimizer.register_step_pre_hook(
            lambda sgd, *_: seen.extend(look(p.grad) for p in sgd.param_groups[0]["params"])
        )
        opt.step()
        hook.remove()
        return seen

    return step


@pytest.mark.parametrize(
    ("elements", "options", "kept"),
    [
        (LARGE, {}, True),
        (LARGE + 3, {}, True),
        (LARGE // 2, {}, False),
        (LARGE, {"accumulate_in_backward": True}, False),
    ],
)
def test_large_products_have_the_same_memory_in_every_step(elements, options, kept):
    parameters = parameters_of(elements)
    step, addresses, others = lent_to(clipped(parameters, **options)), [], []
    for number in range(3):
        give(parameters)
        addresses += step(lambda grad: grad.data_ptr())
        torch.testing.assert_close(
            parameters[0].detach().double(),
            torch.full((elements,), -(number + 1) * FACTOR * elements**-0.5, dtype=torch.float64),
            rtol=TOLERANCE,
            atol=0.0,
        )
        others.append(torch.empty(elements))  # takes memory that was given back
    assert (len(set(addresses)) == 1) == kept


@pytest.mark.parametrize(
    "hold",
    [
        lambda grad: grad,
        lambda grad: grad.numpy(),
        lambda grad: grad.view(-1)[:5],
        lambda grad: grad.detach(),
        lambda grad: grad.untyped_storage(),
        lambda grad: torch.utils.dlpack.to_dlpack(grad),
    ],
    ids=["tensor", "numpy", "part", "alias", "storage", "dlpack"],
)
def test_what_somebody_holds_is_not_written_again(hold):
    parameters = parameters_of(LARGE)
    step = lent_to(clipped(parameters))
    give(parameters)
    (held,) = step(hold)
    give(parameters, sign=-1.0)
    step(lambda grad: None)
    if type(held).__name__ == "PyCapsule":
        held = torch.utils.dlpack.from_dlpack(held)
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0).set_(held, 0, (5,), (1,))
    assert float(held.reshape(-1)[0]) == pytest.approx(FACTOR * LARGE**-0.5, rel=TOLERANCE)


def test_tensors_of_any_size_layout_and_dtype_share_the_memory():
    shapes = [(3,), (), (5, 7), (0, 4), (64, 3, 3, 3), (LARGE,)]
    parameters = parameters_of(*shapes) + parameters_of((129,), (1 << 10,), dtype=torch.float64)
    parameters[4].data = parameters[4].data.to(memory_format=torch.channels_last)
    parameters[2].data = parameters[2].data.t().contiguous().t()
    step = lent_to(clipped(parameters))
    for number in range(2):
        give(parameters)
        strides = [torch.empty_like(p.grad).stride() for p in parameters]
        seen = step(lambda grad: (grad.stride(), grad.dtype, grad.data_ptr(), grad.nbytes))
        assert [stride for stride, *_ in seen] == strides
        assert [dtype for _, dtype, *_ in seen] == [p.dtype for p in parameters]
        spans = sorted((begin, begin + size) for *_, begin, size in seen if size)
        assert all(begin % 64 == 0 for begin, _ in spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        count = sum(p.numel() for p in parameters)
        for parameter in parameters:
            expected = torch.full_like(parameter, -(number + 1) * FACTOR * count**-0.5)
            torch.testing.assert_close(
                parameter.detach(), expected.detach(), rtol=TOLERANCE, atol=0.0
            )


def test_another_set_of_gradients_has_other_memory():
    parameters = parameters_of(LARGE, LARGE)
    step = lent_to(clipped(parameters))
    give(parameters)
    step(lambda grad: None)
    for expected in (1, 2):
        parameters[1].grad = None
        give(parameters[:1])
        sizes = step(lambda grad: 0 if grad is None else grad.untyped_storage().nbytes())
        assert sizes == [4 * LARGE, 0]
        moved = FACTOR * (2 * LARGE) ** -0.5 + expected * FACTOR * LARGE**-0.5
        assert float(parameters[0].detach()[-1]) == pytest.approx(-moved, rel=TOLERANCE)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deep", "pickle"]
)
def test_a_copy_has_memory_of_its_own(copied):
    parameters = parameters_of(LARGE)
    opt = clipped(parameters)
    give(parameters)
    addresses = lent_to(opt)(lambda grad: grad.data_ptr())
    bare = len(pickle.dumps(opt.optimizer))
    assert len(pickle.dumps(opt)) < bare + (1 << 20)
    other = copied(opt)
    theirs = other.param_groups[0]["params"]
    give(theirs)
    assert lent_to(other)(lambda grad: grad.data_ptr()) != addresses
