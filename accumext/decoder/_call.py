"""The arguments of a call of `decode_loss` or `decode_memory`, checked and in groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext.decoder._model import OP, Arguments, Model, model_from
from accumext.decoder._objective import Objective, objective_from
from accumext.decoder._plan import Plan, plan_from
from accumext.decoder._tokens import Tokens, tokens_from
from accumext.ops.wgrad_fusion import may_fuse
from accumext.recurrence import NO_TRUNCATION, Truncation, truncation_from

CUDNN_BFLOAT16 = 91300  # the version of cuDNN from which torch lets it multiply bfloat16


class Call(NamedTuple):
    """The arguments of a call in frozen groups. No random number is drawn yet."""

    model: Model
    tokens: Tokens
    objective: Objective
    truncation: Truncation
    plan: Plan
    return_outputs: bool
    at_once: bool = False  # torch's function runs all steps of the cell


def call_from(args: Arguments, has_data: bool = True) -> Call:
    """Check the arguments of a call, and group them. Their tensors are [T, B, ...]."""
    model = model_from(OP, args, has_data)
    tokens = tokens_from(model, args)
    objective = objective_from(tokens, model.head_weight, args)
    k1, k2, clip, truncation = args["k1"], args["k2"], args["state_grad_clip"], NO_TRUNCATION
    if args["truncation"] != "fixed" or not k1 is k2 is clip is None:
        truncation = truncation_from(OP, k1, k2, args["truncation"], clip)
    at_once = False
    if not tokens.free_running and args["memory_budget"] is None:
        at_once = runs_at_once(model, tokens, truncation)
    in_forward = objective.reduction != "none" and not may_fuse(model.head_weight)
    plan = plan_from(
        args["memory_budget"], shape=tokens.shape, words=len(model.head_weight),
        device=model.device.type, dtypes=model.dtypes, free_running=tokens.free_running,
        gradients_in_forward=in_forward, rnn=None if at_once else model.rnn,
    )  # fmt: skip
    return Call(model, tokens, objective, truncation, plan, args["return_outputs"], at_once)


def runs_at_once(model: Model, tokens: Tokens, truncation: Truncation) -> bool:
    """Tell whether torch's function runs all steps of the cell, whose inputs are known.

    It can if no row ends or is reset between two steps, and no gradient of a state is cut or
    bounded.
    """
    rnn = model.rnn
    if rnn is None or len(rnn.given) % (2 * rnn.layers):  # it takes both biases or none
        return False
    if tokens.within_length is not None or tokens.resets is not None:
        return False
    if truncation.cuts or truncation.clip is not None:
        return False
    return torch_is_faster(model.table.weight, model.dtypes.product)


def torch_is_faster(weight: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether torch's function of a whole module is faster than the operators' steps.

    cuDNN is, which fuses more of a layer and of its steps. oneDNN, on a CPU, is not with AVX2: by
    `bench/loops.py known` it takes as long at best, if the operators keep their pre-activations as
    it keeps its own. With AVX-512 and AMX this has not been measured.
    """
    if not torch.cudnn_is_acceptable(weight):  # on a CPU, too
        return False
    if dtype != torch.bfloat16:
        return True
    version = torch.backends.cudnn.version() or 0
    return version >= CUDNN_BFLOAT16 and torch.cuda.get_device_capability(weight.device) >= (8, 0)


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
