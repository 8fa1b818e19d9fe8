"""The arguments of a call of `decode_loss` or `decode_memory`, checked and in groups."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from accumext.decoder._model import OP, Arguments, Model, model_from
from accumext.decoder._objective import Objective, objective_from
from accumext.decoder._plan import Plan, plan_from
from accumext.decoder._tokens import Tokens, tokens_from
from accumext.ops.wgrad_fusion import may_fuse
from accumext.recurrence import NO_TRUNCATION, Truncation, truncation_from


class Call(NamedTuple):
    """The arguments of a call in frozen groups. No random number is drawn yet."""

    model: Model
    tokens: Tokens
    objective: Objective
    truncation: Truncation
    plan: Plan
    return_outputs: bool


def call_from(args: Arguments, has_data: bool = True) -> Call:
    """Check the arguments of a call, and group them. Their tensors are [T, B, ...]."""
    model = model_from(OP, args, has_data)
    tokens = tokens_from(model, args)
    objective = objective_from(tokens, model.head_weight, args)
    k1, k2, clip, truncation = args["k1"], args["k2"], args["state_grad_clip"], NO_TRUNCATION
    if args["truncation"] != "fixed" or not k1 is k2 is clip is None:
        truncation = truncation_from(OP, k1, k2, args["truncation"], clip)
    in_forward = objective.reduction != "none" and not may_fuse(model.head_weight)
    plan = plan_from(
        args["memory_budget"], shape=tokens.shape, words=len(model.head_weight),
        device=model.device.type, dtypes=model.dtypes, free_running=tokens.free_running,
        gradients_in_forward=in_forward, rnn=model.rnn,
    )  # fmt: skip
    return Call(model, tokens, objective, truncation, plan, args["return_outputs"])


def steps_first(args: Arguments) -> dict[str, Any]:
    """Return the arguments of a call with `batch_first` as those of a call without it."""
    turned = dict(args)
    for name in ("targets", "inputs", "feedback", "token_weight", "resets"):
        value = args[name]
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            turned[name] = value.transpose(0, 1)
    if isinstance(args["soft_targets"], (tuple, list)):
        turned["soft_targets"] = tuple(map(_soft_steps_first, args["soft_targets"]))
    return turned


def _soft_steps_first(value: Any) -> Any:
    """Return an entry of `soft_targets` as [T, B, K] if it is [B, T, K], and else unchanged."""
    return value.transpose(0, 1) if isinstance(value, Tensor) and value.dim() == 3 else value
