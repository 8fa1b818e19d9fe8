"""Calls with misnamed or missing arguments: errors that say what to type."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar

from accumext.tensors.checks import FEEDBACK_WORDS, message
from accumext.tensors.torch_private import not_compiled

P = ParamSpec("P")
R = TypeVar("R")

_TYPO = 0.85  # the least similarity (difflib's ratio) of a misspelt name and the right one
# Names of arguments here, and what other libraries call them.
_OTHER_NAMES = {
    "beams": "beam_size beam_width n_beams num_beams",
    "class_weight": "class_weights weight",
    "context": "encoder_outputs memory",
    "criterion": "loss loss_fn",
    "embedding_dropout": "input_dropout",
    "entropy_weight": "ent_coef entropy_coef",
    "eos": "end_token eos_id eos_token eos_token_id",
    "feedback": "mode",
    "generator": "rng",
    "inputs": "input_ids obs observations",
    "label_smoothing": "smoothing",
    "lengths": "lens seq_lengths seq_lens sequence_lengths src_lengths",
    "loss": "criterion loss_fn",
    "max_length": "max_len max_new_tokens",
    "max_norm": "clip_grad clip_grad_norm clip_norm grad_clip grad_clip_norm grad_norm_clip "
    "gradient_clip_val max_grad_norm",
    "optimizer": "opt optim",
    "prompt": "input_ids",
    "resets": "episode_starts is_first is_init reset",
    "return_outputs": "return_hidden",
    "scaler": "amp_scaler grad_scaler loss_scaler",
    "search": "do_sample",
    "soft_targets": "soft_labels",
    "start": "bos bos_id bos_token_id decoder_start_token_id go sos sos_id sos_token start_token",
    "state": "h0 h_0 hidden hidden_state hx init_state initial_state states",
    "steps": "horizon n_steps num_steps",
    "targets": "labels tgt y",
    "teacher_forcing": "teacher_forcing_prob teacher_forcing_ratio",
    "weights": "weight",
    "window": "accum_steps accumulate_grad_batches accumulation_steps grad_accum_steps "
    "gradient_accumulation_steps",
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
        near = [known for known in parameters if name in _OTHER_NAMES.get(known, "").split()]
        others = [_op_of(f) for f in _EXPLAINED if name in inspect.signature(f).parameters]
        if not near and not others:  # a known name is not a misspelt one
            near = get_close_matches(name, parameters, n=1, cutoff=_TYPO)
        if not near and not others:
            return None
        belongs = f"It is an argument of {', '.join(others)}"
        sentence = f"Did you mean {near[0]}?" if near else belongs
        return message(op, "arguments", "have the names of its signature", name, sentence)
    by_name = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    left = [name for name in by_name if name not in kwargs]
    kinds = {p.kind for p in parameters.values()}
    one_more = len(args) == len(parameters) - len(by_name) + 1
    if one_more and left and kinds <= {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}:
        value = args[-1]
        told = f"{left[0]}={value!r}" if isinstance(value, (int, str)) else f"{left[0]}=..."
        contract = f"be given by name from {by_name[0]} on"
        return message(op, "arguments", contract, "one more", f"Did you mean {told}?")
    for name, parameter in [*parameters.items()][len(args) :]:
        if name in kwargs or parameter.default is not parameter.empty:
            continue
        of_parts = "head" in parameters and name in ("cell", "head", "targets")
        advice = _PARTS if of_parts else _MISSING.get(name)
        if advice is not None:
            return message(op, name, "be given", "nothing", advice)
    return None
