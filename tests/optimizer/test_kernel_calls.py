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
    """Bytes that operators read and write, of tensors that are not `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name, arguments = kwargs or {}, func._schema.name, func._schema.arguments
        result = func(*args, **kwargs)
        if func.is_view or name in NO_DATA:
            return result
        values = dict(zip([a.name for a in arguments], args)) | kwargs
        given = set()
        for argument in arguments:
            tensors = _tensors(values.get(argument.name))
            given |= {t.data_ptr() for t in tensors}
            writes = argument.alias_info is not None and argument.alias_info.is_write
            times = reads(name, values, writes) + (writes and writes_at_all(name, argument, values))
            self._count(tensors, times)
        self._count([t for t in _tensors(result) if t.data_ptr() not in given])
        return result

    def _count(self, tensors: list[Tensor], times: int = 1) -> None:
        for tensor in tensors:
            if tensor.numel() >= SIZE and tensor.data_ptr() not in self._known:
                self.bytes += times * tensor.numel() * tensor.element_size()


def _tensors(value: object) -> list[Tensor]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Tensor)]


def reads(name: str, values: dict, writes: bool) -> int:
    """Return how often an operator reads an argument."""
    if name == "accumext::scale_":
        return int(float(values["factor"]) != 1.0)
    if writes and (name in WRITE_ONLY or values.get("overwrite")):
        return 0
    return 1


def writes_at_all(name: str, argument: torch.Argument, values: dict) -> bool:
    """Tell whether an operator writes what its schema says that it may."""
    if name == "accumext::scale_":
        return float(values["factor"]) != 1.0
    if name.startswith("aten::_fused_") and argument.name == "grads":
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
    return filling.bytes / ELEMENTS, closing.bytes / ELEMENTS


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

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (loop, parameters, K): bytes while the window fills, and when it closes before the gradient is
# multiplied. Autograd adds in 12, and so does a pass of ours, which finds the norm; a check is 2 s.
BUDGET = {
    ("1", F32, 1): (0, 4),
    ("1", F32, 4): (3 * 12, 4),
    ("1", BF16, 1): (0, 2),
    ("1", BF16, 4): (4 * (2 + 8) - 4, 0),
    ("1", F16, 1): (0, 2),
    ("1", F16, 4): (4 * (2 + 8) - 4, 0),
    ("2", F32, 1): (0, 4),
    ("2", F32, 4): (2 * 12, 12),
    ("2", BF16, 4): (3 * (2 + 8) - 4, 2 + 8),
    ("3", F32, 1): (0, 8 + 4),
    ("3", F32, 4): (3 * 8 + 2 * 12, 8 + 12),
    ("3", F16, 4): (3 * 4 + 3 * (2 + 8) - 4, 4 + 2 + 8),
    ("3-unscaled", F32, 1): (0, 8 + 4),
    ("3-unscaled", F32, 4): (3 * 8 + 2 * 12, 8 + 12),
    ("4", F32, 1): (12, 8 + 4),
}


def product(dtype, window, fused):
    """The gradient is multiplied by clip and scale and read by the optimizer: bytes."""
    size = dtype.itemsize
    if dtype != F32 and window > 1:  # sums are multiplied as they are cast
        return 4 + size + size
    return 2 * size if fused else 3 * size


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(
    ("loop", "dtype", "window", "own"),
    [(*row, own) for row in BUDGET for own in ([False, True] if row[0] == "1" else [False])],
    ids=str,
)
def test_bytes_of_a_window(loop, dtype, window, own, fused):
    filling, closing = run(loop, fused, dtype, window, own)
    assert filling == BUDGET[loop, dtype, window][0]
    assert closing == BUDGET[loop, dtype, window][1] + product(dtype, window, fused)


@pytest.mark.parametrize("own", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("window", [1, 4])
def test_bytes_without_a_clip(window, fused, own):
    """Where only a known factor is left, finding the norm multiplies in the same pass."""
    _, closing = run("1", fused, F32, window, own, max_norm=None)
    one = window == 1 and not own  # the factor is 1
    norm_and_product = 4 if one else 8
    assert closing == norm_and_product + 4
