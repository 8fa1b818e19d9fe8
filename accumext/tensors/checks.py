"""Checks of arguments, and the one sentence of each error, part of the public interface: `<op>:
<argument> must <contract>, got <value>`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from accumext.tensors import memory_overlap
from accumext.tensors.torch_private import local_part, not_compiled, sparse_values

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
OnNonfinite: TypeAlias = Literal["skip_window", "skip_micro_batch", "raise"]
ON_NONFINITE = get_args(OnNonfinite)
Synchronize: TypeAlias = Literal["backward", "window"]
SYNCHRONIZE = get_args(Synchronize)

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Lists that are written, and read, whose entries of the same index may be the same tensor.
_IN_PLACE = {("main_grads", "grads"), ("targets", "sources")}


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


def zero_dim_loss(op: str, argument: str, loss: Any, advice: str | None = None) -> Tensor:
    """Return the loss that a user's function returned, of one element and any shape, as 0-dim."""
    if not isinstance(loss, Tensor):
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


def same_device(op: str, name: str, given: Sequence[Tensor], device: torch.device) -> None:
    """Raise if one of the tensors is not on the head's device."""
    for tensor in given:
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


# --- calls with misnamed or missing arguments ----------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

_TYPO = 0.85  # the least similarity (difflib's ratio) of a misspelt name and the right one
# Names of arguments in other libraries, and the names here; the first that a function has is meant.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "accum_steps": ("window",),
    "accumulate_grad_batches": ("window",),
    "accumulation_steps": ("window",),
    "amp_scaler": ("scaler",),
    "beam_size": ("beams",),
    "beam_width": ("beams",),
    "bos": ("start",),
    "bos_id": ("start",),
    "bos_token_id": ("start",),
    "class_weights": ("class_weight",),
    "clip_grad": ("max_norm",),
    "clip_grad_norm": ("max_norm",),
    "clip_norm": ("max_norm",),
    "criterion": ("loss",),
    "decoder_start_token_id": ("start",),
    "do_sample": ("search",),
    "encoder_outputs": ("context",),
    "end_token": ("eos",),
    "ent_coef": ("entropy_weight",),
    "entropy_coef": ("entropy_weight",),
    "eos_id": ("eos",),
    "eos_token": ("eos",),
    "eos_token_id": ("eos",),
    "episode_starts": ("resets",),
    "go": ("start",),
    "grad_accum_steps": ("window",),
    "grad_clip": ("max_norm",),
    "grad_clip_norm": ("max_norm",),
    "grad_norm_clip": ("max_norm",),
    "grad_scaler": ("scaler",),
    "gradient_accumulation_steps": ("window",),
    "gradient_clip_val": ("max_norm",),
    "h0": ("state",),
    "h_0": ("state",),
    "hidden": ("state",),
    "hidden_state": ("state",),
    "horizon": ("steps",),
    "hx": ("state",),
    "init_state": ("state",),
    "initial_state": ("state",),
    "input_dropout": ("embedding_dropout",),
    "input_ids": ("prompt", "inputs"),
    "is_first": ("resets",),
    "is_init": ("resets",),
    "labels": ("targets",),
    "lens": ("lengths",),
    "loss": ("criterion",),
    "loss_fn": ("criterion", "loss"),
    "loss_scaler": ("scaler",),
    "max_grad_norm": ("max_norm",),
    "max_len": ("max_length",),
    "max_new_tokens": ("max_length",),
    "memory": ("context",),
    "mode": ("feedback",),
    "n_beams": ("beams",),
    "n_steps": ("steps",),
    "num_beams": ("beams",),
    "num_steps": ("steps",),
    "obs": ("inputs",),
    "observations": ("inputs",),
    "opt": ("optimizer",),
    "optim": ("optimizer",),
    "reset": ("resets",),
    "return_hidden": ("return_outputs",),
    "rng": ("generator",),
    "seq_lengths": ("lengths",),
    "seq_lens": ("lengths",),
    "sequence_lengths": ("lengths",),
    "smoothing": ("label_smoothing",),
    "soft_labels": ("soft_targets",),
    "sos": ("start",),
    "sos_id": ("start",),
    "sos_token": ("start",),
    "src_lengths": ("lengths",),
    "start_token": ("start",),
    "states": ("state",),
    "teacher_forcing_prob": ("teacher_forcing",),
    "teacher_forcing_ratio": ("teacher_forcing",),
    "tgt": ("targets",),
    "weight": ("class_weight", "weights"),
    "y": ("targets",),
}
_EXPLAINED: list[Callable[..., Any]] = []  # the functions that `explained` has wrapped
_PARTS = "It takes the parts of a model: model.embedding, model.cell, model.head; tbptt a whole one"
_MISSING = {
    "feedback": f"One of {', '.join(map(repr, FEEDBACK_WORDS))}, or a bool mask [T, B]",
    "criterion": "Such as F.cross_entropy",
    "loss": "Such as lambda output, t: F.mse_loss(output, series[t])",
}


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with errors for wrong or missing arguments that say what to type.

    torch.compile does not trace it: a trace for one module would ignore hooks of the next one.
    """
    _EXPLAINED.append(function)
    not_traced = not_compiled(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            # If the compiler, whose import takes seconds, is not imported, nothing traces.
            return (not_traced if "torch._dynamo" in sys.modules else function)(*args, **kwargs)
        except TypeError:
            sentence = _what_to_type(function, args, kwargs)
            if sentence is None:  # for example an error inside the function
                raise
            raise TypeError(sentence) from None

    return call


def _op_of(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _what_to_type(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Return the error of a call with wrong argument names; None if there is no advice to add."""
    op, parameters = _op_of(function), inspect.signature(function).parameters
    for name in kwargs:
        if name in parameters:
            continue
        near = [known for known in _ELSEWHERE.get(name, ()) if known in parameters]
        others = [_op_of(f) for f in _EXPLAINED if name in inspect.signature(f).parameters]
        if not near and not others:  # a known name is not a misspelt one
            near = get_close_matches(name, parameters, n=1, cutoff=_TYPO)
        if not near and not others:
            return None
        belongs = f"It is an argument of {', '.join(others)}"
        sentence = f"Did you mean {near[0]}?" if near else belongs
        return message(op, "arguments", "have the names of its signature", name, sentence)
    for name, parameter in [*parameters.items()][len(args) :]:
        if name in kwargs or parameter.default is not parameter.empty:
            continue
        of_parts = "head" in parameters and name in ("cell", "head", "targets")
        advice = _PARTS if of_parts else _MISSING.get(name)
        if advice is not None:
            return message(op, name, "be given", "nothing", advice)
    return None


# --- the gradient operations of accumext.ops -----------------------------------------------------


def accumulate_(main_grads: Any, grads: Any, inv_scale: Any, found_inf: Any) -> None:
    """Check arguments of `accumext.accumulate_`, except memory (`accumulate_memory`)."""
    op = "accumulate_"
    tensors = _pairs(op, main_grads, grads)
    _one_device(op, tensors | _scalars(op, "inv_scale", inv_scale, found_inf))


def unscale_check_clip_accumulate_(
    main_grads: Any, grads: Any, inv_scale: Any, max_norm: Any, norm_type: Any, found_inf: Any
) -> None:
    """Check arguments of `unscale_check_clip_accumulate_`, except memory (`accumulate_memory`)."""
    op = "unscale_check_clip_accumulate_"
    tensors = _pairs(op, main_grads, grads)
    _one_device(op, tensors | _scalars(op, "inv_scale", inv_scale, found_inf))
    number(op, "max_norm", max_norm, low=0.0)
    _norm_type(op, norm_type)


def total_norm(grads: Any, norm_type: Any, inv_scale: Any, found_inf: Any) -> None:
    """Check arguments of `accumext.total_norm`, except memory (`norm_memory`)."""
    op = "total_norm"
    tensors = _dense_floats(op, "grads", grads)
    _one_device(op, tensors | _scalars(op, "inv_scale", inv_scale, found_inf))
    _norm_type(op, norm_type)


def scale_(grads: Any, factor: Any) -> None:
    """Check arguments of `accumext.scale_`, except memory (`scale_memory`)."""
    op = "scale_"
    tensors = _dense_floats(op, "grads", grads, written=True)
    _one_device(op, tensors | _scalars(op, "factor", factor, None))


def copy_rounded_(targets: Any, sources: Any, seed: Any, found_inf: Any) -> None:
    """Check arguments of `accumext.copy_rounded_`, except memory (`copy_memory`)."""
    op = "copy_rounded_"
    tensors = _pairs(op, targets, sources, ("targets", "sources"), "target")
    _one_device(op, tensors | _seed(op, seed) | _flag(op, found_inf))


# Checks of memory that arguments share are separate functions, since they fail on tensors without
# memory, such as those that torch.compile traces with.


def accumulate_memory(op: str, main_grads: Any, grads: Any, inv_scale: Any, found_inf: Any) -> None:
    """Raise if written memory is shared, unless a main gradient and its gradient are one tensor."""
    named = _named("main_grads", main_grads) | _named("grads", grads)
    _apart(op, named | _scalars(op, "inv_scale", inv_scale, found_inf), ("main_grads", "found_inf"))


def norm_memory(grads: Any, inv_scale: Any, found_inf: Any) -> None:
    """Raise if `found_inf`, which is written, shares memory with tensors that are read."""
    named = _named("grads", grads) | _scalars("total_norm", "inv_scale", inv_scale, found_inf)
    _apart("total_norm", named, ("found_inf",))


def scale_memory(grads: Any, factor: Any) -> None:
    """Raise if `factor` is in the memory that it multiplies."""
    if isinstance(factor, Tensor):
        _apart("scale_", _named("grads", grads) | {"factor": factor}, ("factor",))


def copy_memory(targets: Any, sources: Any, seed: Any, found_inf: Any) -> None:
    """Raise if written memory is shared, unless a target and its source are one tensor."""
    op = "copy_rounded_"
    named = _named("targets", targets) | _named("sources", sources)
    _apart(op, named | _seed(op, seed) | _flag(op, found_inf), ("targets",))


def writable(op: str, argument: str, tensors: Any) -> None:
    """Raise for inference tensors outside of inference mode: autograd could not see the write."""
    if torch.is_inference_mode_enabled():
        return
    named = {argument: tensors} if isinstance(tensors, Tensor) else _named(argument, tensors or ())
    for name, tensor in named.items():
        if tensor.is_inference():
            contract = "not be an inference tensor outside of inference mode"
            advice = (
                "Inplace update to inference tensor outside InferenceMode is not allowed: "
                f"{name}.clone() is a normal tensor"
            )
            raise RuntimeError(message(op, name, contract, "one", advice))


def clip_limits(
    max_norm: Any, norm_type: Any, error_if_nonfinite: Any, foreach: Any
) -> tuple[float, float]:
    """Check arguments of `accumext.clip_grad_norm_`, except the parameters.

    Returns:
        norm type, largest norm: converted by `float`, as in torch, but strings other than "inf" and
        "-inf" are refused.
    """
    op = "clip_grad_norm_"
    bools(op, error_if_nonfinite=error_if_nonfinite)
    if not (foreach is None or isinstance(foreach, bool)):
        fail_type(op, "foreach", "be a bool or None", type_name(foreach))
    words = isinstance(norm_type, str) and norm_type in ("inf", "-inf")
    p = float(norm_type) if words else _any_number(op, "norm_type", norm_type)
    return number(op, "norm_type", p), _any_number(op, "max_norm", max_norm)


def _any_number(op: str, argument: str, value: Any) -> float:
    """Return any number that `float` reads, also from a tensor of one element; refuse strings."""
    if isinstance(value, Tensor) and value.numel() != 1:
        fail_value(op, argument, "have one element", f"shape {list(value.shape)}")
    try:
        return float("none" if isinstance(value, str) else value)
    except (TypeError, ValueError, RuntimeError):
        fail_type(op, argument, "be a number", type_name(value))


def clip_grad_norm_(parameters: Any) -> None:
    """Check the parameters of `accumext.clip_grad_norm_` and their gradients."""
    op = "clip_grad_norm_"
    for i, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor):
            fail_type(op, f"parameters[{i}]", "be a tensor", type_name(parameter))
        if parameter.grad is not None:
            grad = parameter.grad
            grad = local_part(grad) if hasattr(grad, "device_mesh") else grad
            grad = sparse_values(grad) if grad.is_sparse else grad
            _dense_float(op, f"parameters[{i}].grad", grad, written=True)


def broken_contract(error: Exception, *checks: Callable[[], None]) -> Exception:
    """Return the exception of a failed call: that of the first check that fails, else `error`."""
    try:
        for check in checks:
            check()
    except (ValueError, TypeError, RuntimeError) as sentence:
        return sentence
    return error


def _dense_floats(op: str, argument: str, tensors: Any, written: bool = False) -> dict[str, Tensor]:
    """Return a list's tensors by name; raise unless they are dense and of floating point."""
    if not isinstance(tensors, (list, tuple)):
        fail_type(op, argument, "be a list of tensors", type_name(tensors))
    named = _named(argument, tensors)
    for name, tensor in named.items():
        _dense_float(op, name, tensor, written)
    return named


def _named(argument: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"{argument}[{i}]": tensor for i, tensor in enumerate(tensors)}


def _dense_float(op: str, name: str, tensor: Any, written: bool) -> None:
    """Raise unless a tensor is dense, of floating point and, if written, without overlap."""
    contract = "be a dense float16, bfloat16, float32 or float64 tensor"
    if not isinstance(tensor, Tensor):
        fail_type(op, name, contract, type_name(tensor))
    if tensor.is_nested:
        fail_type(op, name, contract, "a nested tensor")
    if tensor.layout != torch.strided:
        fail_type(op, name, contract, f"a {str(tensor.layout).removeprefix('torch.')} tensor")
    if tensor.dtype not in FLOAT_DTYPES:
        fail_type(op, name, contract, type_name(tensor))
    if written and memory_overlap.overlaps_itself(tensor):
        got = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        advice = f"Give it memory of its own: {name}.contiguous()"
        fail_value(op, name, "not overlap itself in memory", got, advice)


def _apart(op: str, named: dict[str, Tensor], written: tuple[str, ...]) -> None:
    """Raise if an argument whose name begins with one of `written` shares memory with another."""
    names, tensors = list(named), list(named.values())
    shared = memory_overlap.sharing_pairs(tensors, [name.startswith(written) for name in names])
    for i, j in sorted(shared, key=lambda pair: (pair[1], pair[0])):
        first, name = names[i], names[j]
        contract = f"share no memory with {first}"
        (writes, _, number), (reads, _, other_number) = first.partition("["), name.partition("[")
        if number == other_number and (writes, reads) in _IN_PLACE:
            if memory_overlap.is_same(tensors[i], tensors[j]):
                continue
            contract = f"be {first} or share no memory with it"
        advice = f"Give it memory of its own: {name}.clone()"
        fail_value(op, name, contract, "some of its elements", advice)


def _pairs(
    op: str,
    written: Any,
    read: Any,
    names: tuple[str, str] = ("main_grads", "grads"),
    entry: str = "main gradient",  # the word for an entry of `written` in an error
) -> dict[str, Tensor]:
    """Return tensors to write and to read by name; raise unless they pair with equal shapes."""
    mains = _dense_floats(op, names[0], written, written=True)
    incoming = _dense_floats(op, names[1], read)
    if len(mains) != len(incoming):
        entries = f"have one entry per {entry}, {len(mains)}"
        fail_value(op, names[1], entries, len(incoming))
    for main_name, name in zip(mains, incoming, strict=True):
        shape, got = list(mains[main_name].shape), list(incoming[name].shape)
        if got != shape:
            fail_value(op, name, f"have the shape of {main_name}, {shape}", got)
    return mains | incoming


def _scalars(op: str, argument: str, factor: Any, found_inf: Any) -> dict[str, Tensor]:
    """Check a factor (number or 0-dim tensor) and found_inf; return tensors among them by name."""
    scalars: dict[str, Tensor] = {}
    if isinstance(factor, Tensor):
        if factor.layout != torch.strided or factor.dtype not in FLOAT_DTYPES:
            fail_type(op, argument, "be a float or a 0-dim float tensor", type_name(factor))
        _zero_dim(op, argument, factor)
        scalars[argument] = factor
    else:
        number(op, argument, factor)
    if found_inf is not None:
        scalars |= _flag(op, found_inf)
        if found_inf.is_neg():
            advice = "Give it memory of its own: found_inf.resolve_neg()"
            fail_value(op, "found_inf", "not be a negated view", "one", advice)
    return scalars


def _flag(op: str, found_inf: Any) -> dict[str, Tensor]:
    """Return found_inf by name; raise unless it is a 0-dim float32 tensor or None."""
    if found_inf is None:
        return {}
    if not isinstance(found_inf, Tensor) or found_inf.dtype != torch.float32:
        fail_type(op, "found_inf", "be a 0-dim float32 tensor", type_name(found_inf))
    _zero_dim(op, "found_inf", found_inf)
    return {"found_inf": found_inf}


def _seed(op: str, seed: Any) -> dict[str, Tensor]:
    """Return a seed by name; raise unless it is a 0-dim int64 tensor or None."""
    if seed is None:
        return {}
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        advice = "On the device of the lists: torch.tensor(0, device=...)"
        fail_type(op, "seed", "be a 0-dim int64 tensor", type_name(seed), advice)
    _zero_dim(op, "seed", seed)
    return {"seed": seed}


def _zero_dim(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.dim() != 0:
        fail_value(op, argument, "be 0-dim", f"shape {list(tensor.shape)}")


def _one_device(op: str, tensors: dict[str, Tensor]) -> None:
    """Raise unless every tensor is on the device of the first."""
    first_name, first = next(iter(tensors.items()), ("", None))
    for name, tensor in tensors.items():
        if first is not None and tensor.device != first.device:
            device = f"be on the device of {first_name}, {first.device}"
            fail_value(op, name, device, tensor.device)


def _norm_type(op: str, norm_type: Any) -> float:
    p = number(op, "norm_type", norm_type)
    if p == 0:
        fail_value(op, "norm_type", "be nonzero", norm_type)
    return p
