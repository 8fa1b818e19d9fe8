"""Reads and writes of the gradients of a window: all operators counted, in bytes per element.

Lower bounds, for K micro-batches of gradients of s bytes. `opt.backward` of float32 parameters:
autograd adds, 12 for each micro-batch after the first, and no operator of ours runs. The closing
step reads the sums once for norm and check, 4; a factor that is not 1 is folded into what a fused
optimizer reads, and writes back, or costs another 8 in place. Without a clip, where the factor is
known, one pass of 8 finds the norm and multiplies. The user's own backward passes cost 12 for each
micro-batch after the first, too, in a pass of ours, whose last one finds the norm.

Half precision: `K * (s + 8) - 4` until the norm is known, and the step reads the sums once more, to
round their products. A GradScaler around the optimizer checks each micro-batch in a pass of its
own, 2 * s.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from support.optimizer_oracle import OPTIMIZERS, growing_scaler
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

SHAPES = [(96, 128), (12288,), (3, 64, 64)]  # of one size, so that bytes divide evenly
SIZE = 12288  # elements; anything smaller is a number about the gradients, not one of them
ELEMENTS = SIZE * len(SHAPES)

WRITE_ONLY = {"aten::copy_", "aten::zero_", "aten::fill_"}
NO_DATA = {"aten::empty_like", "aten::empty", "aten::new_empty", "aten::new_empty_strided"}


class Traffic(TorchDispatchMode):
    """Bytes per element that each operator reads and writes, of tensors that are not `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.data_ptr() for tensor in known}
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def table(self) -> dict[str, tuple[float, float]]:
        """By operator: read, written."""
        names = self._read | self._written
        return {n: (self._read[n] / ELEMENTS, self._written[n] / ELEMENTS) for n in names}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        self.calls[name] += 1
        given = {a.name: a for a in func._schema.arguments}
        values = dict(zip(given, args)) | kwargs
        before = set()
        if not func.is_view and name not in NO_DATA:
            for argument, value in values.items():
                size = self._bytes(value)
                before |= {t.data_ptr() for t in _tensors(value)}
                alias = given[argument].alias_info
                writes = alias is not None and alias.is_write
                self._read[name] += size * reads(name, argument, values, writes)
                self._written[name] += size * (writes and writes_at_all(name, argument, values))
        result = func(*args, **kwargs)
        if not func.is_view and name not in NO_DATA:
            fresh = [t for t in _tensors(result) if t.data_ptr() not in before]
            self._written[name] += self._bytes(fresh)
        return result

    def _bytes(self, value: object) -> int:
        return sum(
            tensor.numel() * tensor.element_size()
            for tensor in _tensors(value)
            if tensor.numel() >= SIZE and tensor.data_ptr() not in self._known
        )


def _tensors(value: object) -> list[Tensor]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Tensor)]


def reads(name: str, argument: str, values: dict, writes: bool) -> int:
    """Return how often an operator reads an argument."""
    if name == "accumext::scale_":
        return int(float(values["factor"]) != 1.0)
    if writes and (name in WRITE_ONLY or values.get("overwrite")):
        return 0
    return 1


def writes_at_all(name: str, argument: str, values: dict) -> bool:
    """Tell whether an operator writes what its schema says that it may."""
    if name == "accumext::scale_":
        return float(values["factor"]) != 1.0
    if name.startswith("aten::_fused_") and argument == "grads":
        return values.get("grad_scale") is not None
    return True


class Given(torch.autograd.Function):
    """A loss with prepared gradients, which autograd may keep."""

    @staticmethod
    def forward(ctx, grads, *parameters):
        ctx.grads = grads
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, grad):
        return (None, *(ctx.grads.pop(0) for _ in SHAPES))


def run(loop, fused, dtype, window, own=False, *, max_norm=1e-3):
    """Traffic of the second window: of its micro-batches, and of the step that closes it.

    In the first, the optimizer makes its state.
    """
    scaler, (micro_batch, last_step) = growing_scaler(init_scale=8.0), LOOPS[loop]
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    inner = OPTIMIZERS["adamw-fused" if fused else "sgd"](parameters)
    own_scaler = scaler if own else None
    opt = AccumulatingOptimizer(inner, window=window, max_norm=max_norm, scaler=own_scaler)
    for _ in range(2):
        losses = [
            Given.apply([torch.randn(shape).to(dtype) for shape in SHAPES], *parameters)
            for _ in range(8)
        ]
        state = [t for s in inner.state.values() for t in s.values() if isinstance(t, Tensor)]
        known = [*parameters, *state]
        with Traffic(known) as filling:
            for i in range(window):
                micro_batch(opt, losses, scaler)
                if i < window - 1:
                    last_step(opt, scaler)
        with Traffic(known) as closing:
            last_step(opt, scaler)
        assert opt.stepped
        assert (opt.last.clip_coef < 1.0) == (max_norm is not None)
        assert not opt.last.skipped
    return filling, closing


def scaled_backward(opt, losses, scaler, passes=1):
    for _ in range(passes):
        scaler.scale(losses.pop()).backward()


def scaler_step(opt, scaler, unscales=False):
    if unscales:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


LOOPS = {
    "1": (lambda opt, losses, _: opt.backward(losses.pop()), lambda opt, _: opt.step()),
    "2": (
        lambda opt, losses, _: losses.pop().backward(),
        lambda opt, _: (opt.step(), opt.zero_grad()),
    ),
    "3": (scaled_backward, scaler_step),
    "3-unscaled": (scaled_backward, partial(scaler_step, unscales=True)),
    "4": (partial(scaled_backward, passes=2), scaler_step),
}

ADD, FACTORS, SCALE = (f"accumext::{n}" for n in ("accumulate_", "window_factors", "scale_"))
AUTOGRAD = "aten::add_"
CHECK = "aten::_amp_foreach_non_finite_check_and_unscale_"
ADAMW, SGD = "aten::_fused_adamw_", "aten::add_"

# (loop, parameters, K): while the window fills, when it closes before the gradient is multiplied,
# as (read, written). K = 4 adds three times.
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NORM, HALF_NORM = {FACTORS: (4, 0)}, {FACTORS: (2, 0)}
TABLE = {
    ("1", F32, 1): ({}, NORM),
    ("1", F32, 4): ({AUTOGRAD: (24, 12)}, NORM),
    ("1", BF16, 1): ({}, HALF_NORM),
    ("1", BF16, 4): ({ADD: (2 + 18, 16)}, {}),
    ("1", F16, 1): ({}, HALF_NORM),
    ("1", F16, 4): ({ADD: (2 + 18, 16)}, {}),
    ("2", F32, 1): ({}, NORM),
    ("2", F32, 4): ({ADD: (16, 8)}, {ADD: (8, 4)}),
    ("2", BF16, 4): ({ADD: (2 + 12, 12)}, {ADD: (6, 4)}),
    ("3", F32, 1): ({}, {CHECK: (4, 4), **NORM}),
    ("3", F32, 4): ({CHECK: (12, 12), ADD: (16, 8)}, {CHECK: (4, 4), ADD: (8, 4)}),
    ("3", F16, 4): ({CHECK: (6, 6), ADD: (2 + 12, 12)}, {CHECK: (2, 2), ADD: (6, 4)}),
    ("3-unscaled", F32, 1): ({}, {CHECK: (4, 4), **NORM}),
    ("3-unscaled", F32, 4): ({CHECK: (12, 12), ADD: (16, 8)}, {CHECK: (4, 4), ADD: (8, 4)}),
    ("4", F32, 1): ({AUTOGRAD: (8, 4)}, {CHECK: (4, 4), **NORM}),
}


def plus(table, *more):
    """A table with more passes in it."""
    total = dict(table)
    for name, (read, written) in more:
        before = total.get(name, (0, 0))
        total[name] = (before[0] + read, before[1] + written)
    return total


def with_step(closing, dtype, window, fused):
    """The closing passes, and those of the optimizer: clip and scale are in them where possible."""
    size = dtype.itemsize
    if dtype != F32 and window > 1:  # sums are multiplied as they are cast
        return plus(closing, (ADD, (4, size)), (ADAMW if fused else SGD, (size, 0)))
    if fused:
        return plus(closing, (ADAMW, (size, size)))
    return plus(closing, (SCALE, (size, size)), (SGD, (size, 0)))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(
    ("loop", "dtype", "window", "own"),
    [(*row, own) for row in TABLE for own in ([False, True] if row[0] == "1" else [False])],
    ids=str,
)
def test_passes(loop, dtype, window, own, fused):
    filling, closing = run(loop, fused, dtype, window, own)
    expected_filling, expected_closing = TABLE[loop, dtype, window]
    assert filling.table() == expected_filling
    assert closing.table() == with_step(expected_closing, dtype, window, fused)
    # A micro-batch and the product that the optimizer gets may be two calls of one operator.
    for traffic, most in ((filling, window), (closing, 2)):
        assert max(traffic.calls[name] for name in (ADD, SCALE)) <= most


@pytest.mark.parametrize("own", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("window", [1, 4])
def test_passes_without_a_clip(window, fused, own):
    """Where only a known factor is left, finding the norm multiplies in the same pass."""
    _, closing = run("1", fused, F32, window, own, max_norm=None)
    one = window == 1 and not own
    if fused:
        assert closing.table() == NORM | {ADAMW: (4, 0 if one else 4)}
    else:
        assert closing.table() == (NORM if one else {ADD: (4, 4)}) | {SGD: (4, 0)}
