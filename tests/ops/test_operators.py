"""What every gradient operation has in common: numbers on a device, empty lists, autograd."""

import math

import pytest
import torch
from support import oracle
from support.device import DeviceReads
from support.gradient_operations import LISTS, copies, good, with_lists, written
from support.tensors import assert_bits

import accumext

SIZES = (300001, 65536, 7)  # of several chunks, of one, and of less

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


NORMS = (0.5, 1.0, 2.0, 2.5, 3.0, math.inf, -1.0, -2.5, -math.inf)
WITH_NORMS = [
    *((op, {}) for op in LISTS if op != "total_norm"),
    *(("total_norm", {"norm_type": p}) for p in NORMS),
]
LOOKING = [case for case in WITH_NORMS if FACTOR.get(case[0]) == "inv_scale"]  # for inf and NaN


@pytest.mark.parametrize(("op", "options"), WITH_NORMS)
def test_the_bits_do_not_depend_on_the_number_of_threads(op, options, two_threads):
    long = {n: [oracle.random([size], torch.float32) for size in SIZES] for n in LISTS[op]}
    results = []
    for threads in two_threads:
        torch.set_num_threads(threads)
        arguments = with_lists(op, good(op) | long, torch.clone)
        norm = getattr(accumext, op)(**arguments | options)
        results.append(written(op, arguments) + ([] if norm is None else [norm]))
    assert_bits(*results)


@pytest.mark.parametrize(("where", "value"), [(0, math.inf), (35000, -math.inf), (69999, math.nan)])
@pytest.mark.parametrize(("op", "options"), LOOKING)
def test_one_element_sets_found_inf_and_finite_ones_leave_it(op, options, where, value, dtype):
    """Whatever the main gradients hold."""
    grad = torch.ones(70000, dtype=dtype)
    main_grads = [torch.full([3], math.inf), torch.zeros(70000)]
    lists = {"main_grads": main_grads, "grads": [torch.ones(3), grad]}
    for before in (0.0, 0.25, 1.0):
        arguments = good(op) | {name: lists[name] for name in LISTS[op]} | options
        arguments["found_inf"] = torch.tensor(before)
        for element, expected in ((1.0, before), (value, 1.0)):
            grad[where] = element
            getattr(accumext, op)(**arguments)
            assert arguments["found_inf"].item() == expected


@every
def test_lists_without_tensors(op):
    arguments = good(op) | {name: [] for name in LISTS[op]}
    norm = getattr(accumext, op)(**arguments)
    assert arguments.get("found_inf", 0.25) == 0.25
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
