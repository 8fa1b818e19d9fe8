"""What every gradient operation has in common: numbers on a device, empty lists, autograd."""

import pytest
import torch
from support import oracle
from support.device import DeviceReads
from support.gradient_operations import LISTS, copies, good, with_lists, written
from support.tensors import assert_bits

import accumext

every = pytest.mark.parametrize("op", LISTS)
FACTOR = {op: "inv_scale" for op in LISTS if op != "copy_rounded_"} | {"scale_": "factor"}


@pytest.mark.parametrize("module", [accumext, torch.ops.accumext], ids=["function", "operator"])
@pytest.mark.parametrize("op", FACTOR)
def test_a_factor_on_the_device_equals_a_float_and_is_not_read(op, module, dtype):
    factor = torch.tensor(0.37, dtype=dtype)
    drawn = with_lists(op, good(op), lambda t: oracle.random([100], t.dtype))
    results = []
    for given in (factor.item(), factor):
        arguments = with_lists(op, drawn, torch.clone) | {FACTOR[op]: given}
        with DeviceReads() as reads:
            norm = getattr(module, op)(**arguments)
        assert reads.count == 0
        written_lists = copies({name: arguments[name] for name in LISTS[op]})
        results.append(written_lists + ([] if norm is None else [norm]))
    assert_bits(*results)


@every
def test_lists_without_tensors(op):
    norm = getattr(accumext, op)(**good(op) | {name: [] for name in LISTS[op]})
    if norm is not None:
        assert norm.dtype == torch.float32
        assert norm.item() == 0.0


@every
def test_autograd_is_told_of_every_write(op):
    """What a graph has saved may not change unseen."""
    for index in range(len(written(op, good(op)))):
        arguments = good(op)
        target = written(op, arguments)[index]
        product = torch.ones_like(target, requires_grad=True) * target
        getattr(accumext, op)(**arguments)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@every
def test_a_parameter_is_written_like_under_no_grad(op):
    arguments, expected = with_lists(op, good(op), torch.nn.Parameter), good(op)
    norm = getattr(accumext, op)(**arguments)
    getattr(accumext, op)(**expected)
    assert_bits(copies(arguments), copies(expected))
    assert norm is None or not norm.requires_grad
    assert all(p.is_leaf for name in LISTS[op] for p in arguments[name])
