"""Checks of arguments, and the one sentence of each error, part of the public interface: `<op>:
<argument> must <contract>, got <value>`."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor

# The words that an argument may be: a type for type checkers, and a tuple for the checks.
Reduction: TypeAlias = Literal["mean", "sum"]
REDUCTIONS = get_args(Reduction)
TokenReduction: TypeAlias = Literal["mean", "sum", "none"]
TOKEN_REDUCTIONS = get_args(TokenReduction)
FeedbackWord: TypeAlias = Literal["teacher", "greedy", "sample", "scheduled"]
FEEDBACK_WORDS = get_args(FeedbackWord)
DrawWord: TypeAlias = Literal["argmax", "sample"]
DRAW_WORDS = get_args(DrawWord)
TruncationWord: TypeAlias = Literal["fixed", "random"]
TRUNCATIONS = get_args(TruncationWord)
Search: TypeAlias = Literal["greedy", "sample", "beam"]
SEARCHES = get_args(Search)
OnNonfinite: TypeAlias = Literal["skip_window", "skip_micro_batch", "raise", "step"]
ON_NONFINITE = get_args(OnNonfinite)
Synchronize: TypeAlias = Literal["backward", "window"]
SYNCHRONIZE = get_args(Synchronize)

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def message(op: str, argument: str, contract: str, got: object, advice: str | None = None) -> str:
    """Return `<op>: <argument> must <contract>, got <got>`, and advice, if there is any."""
    text = f"{op}: {argument} must {contract}, got {got}"
    return f"{text}. {advice}" if advice else text


def fail_value(
    op: str, argument: str, contract: str, got: object, advice: str | None = None
) -> NoReturn:
    """Raise the ValueError of a wrong value or shape."""
    raise ValueError(message(op, argument, contract, got, advice))


def fail_type(
    op: str, argument: str, contract: str, got: object, advice: str | None = None
) -> NoReturn:
    """Raise the TypeError of a wrong type."""
    raise TypeError(message(op, argument, contract, got, advice))


def instance(op: str, argument: str, value: Any, kind: type, contract: str) -> None:
    """Raise unless a value is of a type."""
    if not isinstance(value, kind):
        fail_type(op, argument, contract, type_name(value))


def bools(op: str, **named: Any) -> None:
    """Raise unless each value is True or False; numbers are refused."""
    for argument, value in named.items():
        instance(op, argument, value, bool, "be a bool")


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def type_name(value: object) -> str:
    """Return the name of a value's type, for an error; of a tensor with its dtype."""
    if isinstance(value, Tensor):
        name = dtype_name(value.dtype)
        return f"{'an' if name.startswith('int') else 'a'} {name} tensor"
    return type(value).__name__


def integer(op: str, argument: str, value: Any, low: int | None = None) -> int:
    """Return an int of at least `low`, also from a type such as numpy's; not from a tensor, perhaps
    on a device."""
    count = None
    if not isinstance(value, (bool, Tensor)):
        with contextlib.suppress(TypeError):
            count = operator.index(value)
    if count is None:
        fail_type(op, argument, "be an int", type_name(value))
    if low is not None and count < low:
        fail_value(op, argument, f"be at least {low}", count)
    return count


def token_tensor(
    op: str, argument: str, value: Any, contract: str, of_floats: str | None = None
) -> Tensor:
    """Return tokens of any integer dtype as int64. Other dtypes are refused, since tokens may have
    been rounded in them. `of_floats` is advice for floating-point tensors."""
    if not isinstance(value, Tensor) or value.dtype not in INTEGER_DTYPES:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        fail_type(op, argument, contract, type_name(value), of_floats if floats else None)
    return value.to(torch.int64)


def lengths_tensor(op: str, argument: str, value: Any, device: torch.device) -> Tensor:
    """Return lengths as int64: a tensor of any integer dtype, where it is, or a list of ints."""
    if isinstance(value, (tuple, list)):
        ints = [integer(op, f"{argument}[{i}]", number) for i, number in enumerate(value)]
        return torch.tensor(ints, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    return token_tensor(op, argument, value, "be an integer tensor [B] or a list of ints")


def positive_int(op: str, argument: str, value: Any) -> int:
    """Return an int of at least 1."""
    return integer(op, argument, value, 1)


def number(
    op: str, argument: str, value: Any, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return a real number in [low, high], of Python or a library such as numpy; refuse NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail_type(op, argument, "be a number", type_name(value))
    if math.isnan(value) or value < low:
        bound = "not be NaN" if low == -math.inf else f"be at least {low:g}"
        fail_value(op, argument, bound, value)
    if float(value) > high:
        fail_value(op, argument, f"be at most {high:g}", value)
    return float(value)


def one_of(
    op: str, argument: str, value: Any, choices: tuple[str, ...], advice: str | None = None
) -> str:
    """Return a word that is among the choices; the advice is for a value that is no string."""
    if not isinstance(value, str):
        contract = f"be one of {', '.join(map(repr, choices))}"
        fail_type(op, argument, contract, type_name(value), advice)
    if value not in choices:
        fail_value(op, argument, f"be one of {', '.join(map(repr, choices))}", repr(value))
    return value


def check_first_order(op: str) -> None:
    """Raise in the backward of a node without second derivatives, if the pass is to be
    differentiated. `once_differentiable` may silently return gradients without a graph."""
    if torch.is_grad_enabled():
        contract = "run without create_graph"
        advice = "The loop by hand has second derivatives, and so has accumext.rollout"
        text = message(op, "the backward pass", contract, "create_graph=True", advice)
        raise RuntimeError(text)


def forward_of(module: Any) -> Any:
    """Return the function behind a module's forward, which tells torch's own from an override."""
    return getattr(getattr(module, "forward", None), "__func__", None)


def without_effect(
    op: str, argument: str, value: Any, neutral: tuple[Any, ...], used_where: str
) -> None:
    """Raise for an option that has no effect in this call. `neutral` are the values that ask for
    nothing else than the call does, its default first."""
    if value not in neutral:
        contract = "be None" if neutral[0] is None else f"be left at {neutral[0]!r}"
        fail_value(op, argument, f"{contract} unless {used_where}", repr(value))


def where_the_loss_is(value: object) -> str | None:
    """Return advice for a value that is no tensor, if it holds a loss or is the number of one."""
    if isinstance(getattr(value, "loss", None), Tensor):
        return "Take the loss that it holds: out.loss"
    return "Leave out .item(), whose result has no graph" if isinstance(value, float) else None


def zero_dim_loss(op: str, argument: str, loss: Any, advice: str | None = None) -> Tensor:
    """Return the loss that a user's function returned, of one element and any shape, as 0-dim."""
    if not isinstance(loss, Tensor):
        advice = where_the_loss_is(loss) or advice
        fail_type(op, argument, "return a tensor", type_name(loss), advice)
    if loss.numel() != 1:
        advice = advice or "Take its mean() or sum()"
        fail_value(op, argument, "return a 0-dim loss", f"shape {list(loss.shape)}", advice)
    return loss if loss.dim() == 0 else loss.reshape(())


def check_vector(
    op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], contract: str, size: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Raise unless a tensor has one of these dtypes, this size and this device."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        fail_type(op, name, contract, type_name(value))
    if list(value.shape) != [size]:
        fail_value(op, name, f"have shape {[size]}", list(value.shape))
    same_device(op, name, [value], device)


def same_device(op: str, name: str, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Raise if one of the tensors is not on the head's device."""
    for tensor in tensors:
        if tensor.device != device:
            fail_value(op, name, f"be on the head's device, {device}", tensor.device)


def users_level() -> int:
    """Return the `stacklevel` of the user's line, for a warning by the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("accumext", "contextlib", "torch")
