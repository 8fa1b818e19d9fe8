"""Tensors that are more than their memory, through every gradient operation: negated views,
subclasses, parameters, wrappers of torch.func, tensors of inference mode, nested and fake ones."""

import itertools

import pytest
import torch
from support import oracle
from support.gradient_operations import LISTS, PAIRS, copies, good, with_lists, written
from support.tensors import assert_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import accumext
from accumext.ops import any_tensors

SIZES = (1, 3, 100, 5000, 70000)  # malloc writes into small ones as soon as they are freed


def values(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return [oracle.random([n], dtype) for n in SIZES]


# --- the negative bit: the dispatcher makes plain copies, which only the operator owns ------------


def negated(tensor):
    return torch._neg_view(tensor.neg())


def imaginary(tensor):
    """As the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(tensor), tensor.neg()).conj().imag


def strided(tensor):
    return negated(tensor.expand(2, -1).t().contiguous())[:, 0]


@pytest.fixture(params=[negated, imaginary, strided], ids=lambda view: view.__name__)
def view(request):
    """A tensor -> one of equal values that has the negative bit."""
    assert torch.equal(request.param(torch.tensor([1.0, -2.0])), torch.tensor([1.0, -2.0]))
    assert request.param(torch.ones(2)).is_neg()
    return request.param


FACTOR = dict.fromkeys((*PAIRS, "total_norm"), "inv_scale") | {"scale_": "factor"}


@pytest.mark.parametrize("op", LISTS)
def test_negated_views_are_their_values(view, op):
    """All tensors of a list, or some of them, beside a number that is a negated view, too."""
    drawn = good(op) | {name: values(seed) for seed, name in enumerate(LISTS[op])}

    def results(factor, negated, count):
        arguments = with_lists(op, drawn, torch.clone)
        arguments |= {FACTOR[op]: factor} if op in FACTOR else {}
        if negated is not None:
            viewed = [view(tensor) for tensor in arguments[negated][:count]]
            arguments[negated][:count] = viewed
            assert all(tensor.is_neg() for tensor in viewed)
        norm = getattr(accumext, op)(**arguments)
        lists = [tensor + 0.0 for name in LISTS[op] for tensor in arguments[name]]  # no -0.0
        return lists if norm is None else [norm, *lists]

    expected = results(torch.tensor(0.5), None, 0)
    for name, count in itertools.product(LISTS[op], (2, len(SIZES))):
        assert_bits(results(view(torch.tensor([0.5]))[0], name, count), expected)


def test_a_negated_gradient_is_clipped_like_torchs(view):
    ours, theirs = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(100))
    for parameter in (ours, theirs):
        parameter.grad = view(torch.arange(100.0))
    norm = accumext.clip_grad_norm_([ours], 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([theirs], 1.0, foreach=False))
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("op", ["accumulate_", "total_norm"])
def test_a_negated_flag_is_refused_before_anything_is_written(op):
    main, flag = torch.ones(3), torch._neg_view(torch.zeros(()))
    operands = ([main], [main.clone()]) if op == "accumulate_" else ([main],)
    with pytest.raises(ValueError, match=f"{op}: found_inf must not be a negated view, got one"):
        getattr(accumext, op)(*operands, found_inf=flag)
    assert torch.equal(main, torch.ones(3))


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_decoder_with_negated_weights(kind):
    def gradients(view):
        torch.manual_seed(0)
        table, weight, bias = torch.randn(11, 5), torch.randn(11, 4), torch.randn(11)
        table, weight, bias = (view(t).requires_grad_() for t in (table, weight, bias))
        state, cell = view(torch.randn(1, 3, 4)), getattr(torch.nn, kind)(5, 4)
        operands = table, cell, (weight, bias), torch.randint(11, (6, 3))
        state = (state, state) if kind == "LSTM" else state
        out = accumext.decode_loss(*operands, state, feedback="greedy", k1=2, k2=4)
        out.loss.backward()
        leaves = (table, weight, bias, *cell.parameters())
        return [out.tokens, out.loss.detach(), *(leaf.grad for leaf in leaves)]

    assert_bits(gradients(lambda t: torch._neg_view(t.neg())), gradients(torch.clone))


# --- tensors of inference mode --------------------------------------------------------------------


def replaced(arguments, old, new):
    """The arguments with another tensor in the place of one."""

    def one(value):
        return new if value is old else value

    return {k: [one(t) for t in v] if isinstance(v, list) else one(v) for k, v in arguments.items()}


@pytest.mark.parametrize("op", LISTS)
def test_a_tensor_of_inference_mode_is_written_within_it_alone(op):
    for index in range(len(written(op, good(op)))):
        arguments = good(op)
        target = written(op, arguments)[index]
        with torch.inference_mode():
            arguments = replaced(arguments, target, target.clone())
        before = copies(arguments)
        text = rf"^{op}: (\w+\[{index}\]|found_inf) must not be an inference tensor outside of "
        with pytest.raises(RuntimeError, match=text) as raised:
            getattr(accumext, op)(**arguments)
        assert "Inplace update to inference tensor outside InferenceMode" in str(raised.value)
        assert_bits(copies(arguments), before)
        with torch.inference_mode():
            getattr(accumext, op)(**arguments)


def test_tensors_of_inference_mode_are_read():
    with torch.inference_mode():
        made = torch.ones(4)
    assert accumext.total_norm([made]).item() == 2.0


# --- subclasses and wrappers ----------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass as __torch_function__ makes it by itself."""


class Wrapped(torch.Tensor):
    """A tensor around another one, of which __torch_dispatch__ sees every operator."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: getattr(x, "inner", x), (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("kind", [lambda t: t.as_subclass(Named), torch.nn.Parameter, Wrapped])
def test_subclasses(kind):
    expected, memory = values(0), values(0)
    mains, grads = list(map(kind, memory)), list(map(kind, values(1)))
    for norm, want in [
        (accumext.total_norm(grads), accumext.total_norm(values(1))),
        (accumext.accumulate_(mains, grads), accumext.accumulate_(expected, values(1))),
    ]:
        assert_bits([norm.as_subclass(torch.Tensor)], [want])
    accumext.scale_(mains, 0.5)
    accumext.scale_(expected, 0.5)
    assert_bits(memory, expected)


def test_wrappers_of_torch_func():
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda x: accumext.total_norm([x]))(torch.ones(2, 3))

    def scaled(x):  # outside of autograd, like torch.no_grad()
        y = 2 * x
        accumext.scale_([y], 3.0)
        assert torch.equal(y, torch.full([3], 6.0))
        return y.sum()

    assert torch.equal(torch.func.grad(scaled)(torch.ones(3)), torch.full([3], 2.0))


def test_fake_tensors_have_no_memory_to_share():
    with FakeTensorMode():
        main, flag = torch.ones(3), torch.zeros(())
        norm = accumext.accumulate_([main, main], [main, main], found_inf=flag)
        assert norm.shape == ()
        accumext.scale_([main], 2.0)
    meta = torch.ones(3, device="meta")
    assert accumext.accumulate_([meta, meta], [meta, meta]).device.type == "meta"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    plain = torch.ones(3)
    for call, name in [
        (lambda: accumext.total_norm([plain, nested]), "grads[1]"),
        (lambda: accumext.accumulate_([plain, nested], [plain.clone(), nested]), "main_grads[1]"),
        (lambda: accumext.scale_([plain, nested], 2.0), "grads[1]"),
    ]:
        with pytest.raises(TypeError) as raised:
            call()
        assert f"{name} must be a dense" in str(raised.value)
        assert str(raised.value).endswith("got a nested tensor")
    assert torch.equal(plain, torch.ones(3))


def test_operands_go_to_their_devices_in_the_order_in_which_they_came():
    pairs = torch.tensor([3.0 + 4.0j])  # a view of two real numbers
    first = [torch.ones(1), torch.ones(2, device="meta"), pairs]
    second = [torch.zeros(1), torch.zeros(2, device="meta"), pairs]
    (host, mine), (device, theirs) = any_tensors.group_by_device(first, second)
    assert (host.type, device.type) == ("cpu", "meta")
    assert [[t.numel() for t in operand] for operand in mine] == [[1, 2], [1, 2]]
    assert [[t.numel() for t in operand] for operand in theirs] == [[2], [2]]
    assert any_tensors.group_by_device([], []) == []
    assert any_tensors.group_by_device(first[:1], second[:1])[0][1] == [first[:1], second[:1]]
