"""Arguments that share memory: right sums or an error, never threads that race."""

import itertools
import math
import random
from functools import partial
from operator import le

import pytest
import torch
from support.gradient_operations import PAIRS
from support.tensors import assert_bits

import accumext
from accumext.tensors import memory_overlap


def memory(n=6):
    return torch.arange(1.0, n + 1)


# Views of one buffer that share no element, whatever their ranges do.
APART = {
    "neighbours": lambda b: [b[:30], b[30:60], b[60:]],
    "reversed": lambda b: [b[60:], b[30:60], b[:30]],
    "every other": lambda b: [b[::2], b[1::2]],
    "columns": lambda b: b[:96].view(8, 12).split(3, dim=1),
    "blocks": lambda b: [v for c in b[:96].view(4, 2, 12).split(5, 2) for v in c.split(1, 1)],
    "between": lambda b: [torch.as_strided(b, (4, 3), (21, 3)), b[1:3], b[7:21], b[28:42]],
    "diagonal": lambda b: [b[:100].view(10, 10).diagonal(), *b[1:].view(9, 11)[:, :10].unbind()],
    "even and odd": lambda b: [b.view(10, 10)[:, ::2], b.view(10, 10).t()[1::2]],
    "middle": lambda b: [b[:96].view(4, 4, 6)[:, :2, 2:], b[:96].view(4, 4, 6)[::3, 2:, :4]],
    "parts": lambda b: torch.view_as_real(torch.view_as_complex(b.view(50, 2))).unbind(1),
    "channels last": lambda b: b[:96].view(2, 4, 3, 4).permute(0, 3, 1, 2).chunk(2, dim=1),
    "size 1": lambda b: [b[:90].view(9, 10)[:, :1].as_strided((9, 1, 1), (10, 0, 3)), b[1:9]],
    "empty": lambda b: [b[:5], b[2:2], b[5:]],
    "dtypes": lambda b: [b[:10], b.view(torch.half)[20:30], b[15:]],
}


@pytest.mark.parametrize("case", APART)
def test_disjoint_views_are_accumulated(case):
    views = APART[case](torch.zeros(100))
    expected = [view + 1.0 for view in views]
    accumext.accumulate_(views, [torch.ones_like(view) for view in views])
    assert_bits(views, expected)


@pytest.mark.parametrize("op", PAIRS)
def test_a_main_gradient_may_be_its_own_gradient(op):
    limit = {"max_norm": 1.0} if op == "unscale_check_clip_accumulate_" else {}
    call = partial(getattr(accumext, op), inv_scale=0.5, overwrite=True, **limit)
    for make in [lambda b: [b], lambda b: [b[::2], b[1::2]], lambda b: [b.view(2, 3).t(), b[:0]]]:
        mains = make(memory())
        others, grads = ([main.clone() for main in mains] for _ in range(2))
        assert_bits([call(mains, mains), *mains], [call(others, grads), *others])


def test_scale_multiplies_shared_elements_as_often_as_they_are_named():
    buffer, expected = torch.ones(200000), torch.ones(200000)
    views = [lambda b: b, lambda b: b, lambda b: b[1:], lambda b: b[:70000]]
    accumext.scale_([view(buffer) for view in views], 0.5)
    torch._foreach_mul_([view(expected) for view in views], 0.5)
    assert torch.equal(buffer, expected)


def test_clip_counts_and_scales_a_shared_gradient_like_torch():
    def clipped(clip):
        grad = memory()
        a, b, c = (torch.nn.Parameter(torch.zeros(6)) for _ in range(3))
        a.grad = b.grad = grad
        c.grad = memory()
        return [clip([a, b, c], 2.0), grad, c.grad]

    expected = clipped(torch.nn.utils.clip_grad_norm_)
    torch.testing.assert_close(clipped(accumext.clip_grad_norm_), expected, rtol=1e-6, atol=0)


def addresses(tensor):
    size = tensor.element_size()
    for index in itertools.product(*map(range, tensor.shape)):
        yield tensor.data_ptr() + size * sum(
            i * s for i, s in zip(index, tensor.stride(), strict=True)
        )


def bytes_of(tensor):
    return {first + k for first in addresses(tensor) for k in range(tensor.element_size())}


def any_view(draw, buffer):
    """As odd as `as_strided` allows."""
    dtype = draw.choice([torch.float16, torch.float32, torch.float64])
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
    strides = [draw.randint(1, 13) if draw.random() < 0.95 else 0 for _ in shape]
    return torch.as_strided(buffer.view(dtype), shape, strides, draw.randint(0, 40))


def any_slice(draw, buffer, shape):
    """What slices and a transposition make of a contiguous tensor."""
    view = buffer.view(torch.float32)[: math.prod(shape)].view(shape)
    for dim, size in enumerate(shape):
        ends = sorted(draw.sample(range(size + 1), 2))
        view = view[(slice(None),) * dim + (slice(*ends, draw.choice([1, 1, 2])),)]
    return view.transpose(0, draw.randrange(len(shape)))


def overlap(a, b):
    """Which of two tensors share elements, by a look at each byte: itself, itself, each other."""
    in_themselves = [len(set(addresses(tensor))) < tensor.numel() for tensor in (a, b)]
    return (*in_themselves, bool(bytes_of(a) & bytes_of(b)))


def refused(a, b):
    """Tell whether the operators refuse two tensors; all that answers is of one mind."""
    answers = (
        memory_overlap.overlaps_itself(a),
        memory_overlap.overlaps_itself(b),
        memory_overlap.share_memory(a, b),
    )
    assert answers[2] == memory_overlap.share_memory(b, a)
    assert memory_overlap.any_shared([a, b]) == any(answers)
    try:
        accumext.accumulate_([a, b], [torch.zeros_like(a), torch.zeros_like(b)])
    except ValueError:
        assert any(answers)
    else:
        assert not any(answers)
    return answers


def test_no_strides_hide_shared_elements():
    draw, buffer = random.Random(0), torch.zeros(512, dtype=torch.float64)
    seen = set()
    for _ in range(600):
        a, b = any_view(draw, buffer), any_view(draw, buffer)
        truth = overlap(a, b)
        assert all(map(le, truth, refused(a, b)))
        seen.add(truth)
    assert len(seen) == 8


def test_answers_are_exact_for_slices():
    draw, buffer = random.Random(0), torch.zeros(512, dtype=torch.float64)
    seen = set()
    for _ in range(600):
        shape = [draw.choice([2, 4, 6]) for _ in range(draw.randint(1, 3))]
        a, b = any_slice(draw, buffer, shape), any_slice(draw, buffer, shape)
        truth = overlap(a, b)
        assert refused(a, b) == truth
        seen.add(truth)
    assert len(seen) == 2


# What is refused needlessly: these views share no element.
HARMLESS = {
    "interlocked": lambda b: [torch.as_strided(b, (2, 3), (3, 2))],
    "every other of nine columns": lambda b: [b.view(9, 9)[:, ::2], b.view(9, 9)[:, 1::2]],
}


@pytest.mark.parametrize("views", HARMLESS.values(), ids=HARMLESS)
def test_what_is_refused_and_need_not_be(views):
    mains = views(torch.zeros(81))
    with pytest.raises(ValueError, match="memory"):
        accumext.accumulate_(mains, [torch.ones_like(main) for main in mains])
    grads = [torch.ones_like(main) for main in mains]
    accumext.accumulate_([main.clone() for main in mains], grads)  # as the error advises
