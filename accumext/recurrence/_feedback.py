"""The token that a decoder reads at each step: the target, its prediction, or either by a mask."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from accumext.recurrence._arguments import check_tokens, first_outside, start_of
from accumext.recurrence._generators import own_generator
from accumext.tensors.checks import (
    DRAW_WORDS,
    FEEDBACK_WORDS,
    fail_type,
    fail_value,
    number,
    one_of,
    token_tensor,
    type_name,
    users_level,
    without_effect,
)

# The default of `teacher_forcing`: this object, so that a schedule may begin with 1.0. Not a
# literal, which modules may share.
ALL_TARGETS: Final = float("1")
_DEVICE = "the device of targets"
_SHARE = "feedback='scheduled', teacher_forcing=0.5"
_SHARES = f"A share of the targets is fed by {_SHARE}, given ones by a bool mask [T, B]"


@dataclass(frozen=True)
class Feedback:
    """The arguments that choose the input of each step. No random number is drawn yet."""

    teacher: Tensor  # int64 [T, B]: the inputs of teacher forcing
    word: str = "teacher"  # a FeedbackWord, or "mask"
    mask: Tensor | None = None  # bool [T, B]: True feeds the teacher's input
    share: float = 1.0  # probability of True in the mask of "scheduled"
    temperature: float = 1.0  # of samples
    samples: bool = False  # predictions are samples, not the argmax
    generator: torch.Generator | None = None

    def drawn(self) -> Inputs:
        """Return the inputs of one call, with all random numbers that they need."""
        if self.word == "teacher":
            return Inputs(self.teacher)
        generator, shape, device = self.generator, self.teacher.shape, self.teacher.device
        if self.samples or self.word == "scheduled":
            generator = own_generator(generator, device)
        mask, uniforms = self.mask, None
        if self.word == "scheduled":
            drawn = torch.rand(shape, dtype=torch.float32, device=device, generator=generator)
            mask = drawn < self.share
        elif mask is None:
            mask = torch.zeros(shape, dtype=torch.bool, device=device)
        if self.samples:
            uniforms = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
        own = self.word in ("greedy", "sample")
        return Inputs(self.teacher, mask, self.temperature, uniforms, own)


def feedback_from(
    op: str,
    feedback: Any,
    fed: Tensor,  # int64 [T, B]: the targets, with padding in place of ignored ones
    *,
    start: Any, inputs: Any, teacher_forcing: Any, temperature: Any, generator: Any,
    rows: int | None,  # of the embedding: tokens that can be fed; None: unknown
    draw: Any = "argmax",
) -> Feedback:  # fmt: skip
    """Check the arguments, and return them."""
    teacher = _teacher_inputs(op, start, inputs, fed, rows)
    word = "mask"
    if isinstance(feedback, Tensor):
        _check_mask(op, feedback, fed)
    else:
        word = feedback
        if word.__class__ is not str or word not in FEEDBACK_WORDS:
            one_of(op, "feedback", word, FEEDBACK_WORDS, _SHARES)
    samples = word == "sample"
    plain = teacher_forcing.__class__ is temperature.__class__ is float and generator is None
    if not (plain and teacher_forcing == temperature == 1.0 and draw == "argmax"):
        samples = check_options(op, word, teacher_forcing, temperature, generator, draw)
    if teacher_forcing is ALL_TARGETS and word == "scheduled":
        text = f"{op}: teacher_forcing=1.0, the default, feeds targets alone. Pass the probability "
        text += "of a target, such as teacher_forcing=0.5, or feedback='teacher'"
        warnings.warn(text, stacklevel=users_level())
    if word == "teacher":
        return Feedback(teacher, generator=generator)
    mask = feedback if word == "mask" else None
    share, temperature = float(teacher_forcing), float(temperature)
    return Feedback(teacher, word, mask, share, temperature, samples, generator)


@dataclass(frozen=True)
class Inputs:
    """The rule by which one call chooses the input of every step."""

    teacher: Tensor  # int64 [T, B]
    mask: Tensor | None = None  # bool [T, B]: True feeds the teacher's input; None always does
    temperature: float = 1.0  # of the samples
    uniforms: Tensor | None = None  # fp64 [T, B] in [0, 1), to sample with; None takes the argmax
    own: bool = False  # True feeds predictions alone, after the first step

    def choose(self, step: int, logits: Tensor) -> Tensor:
        """Return the tokens [B] that logits [B, V] predict: argmax in at least fp32, or samples."""
        logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        if self.uniforms is None:
            return logits.max(-1).indices
        return sample(logits, self.uniforms[step], self.temperature)

    def next(self, step: int, predicted: Tensor) -> Tensor:
        """Return the input [B] of `step` >= 1, after `predicted` [B] at the step before."""
        if self.own:
            return predicted
        if self.mask is None:
            return self.teacher[step]
        return torch.where(self.mask[step], self.teacher[step], predicted)


def sample(
    logits: Tensor,  # [M, V]
    uniforms: Tensor,  # fp64 [M], in [0, 1)
    temperature: float,
) -> Tensor:
    """Return samples [M] of softmax(logits / temperature), by inversion: the first token at which
    the running sum of probabilities exceeds the uniform number. A row whose largest logit is
    infinite or NaN is no distribution: return its argmax."""
    tokens, peaks = [], []
    # A few rows at a time, for the running sums take twice the memory of the logits.
    for row, uniform in zip(logits.split(4), uniforms.split(4), strict=True):
        peaks.append(peak := row.amax(1, keepdim=True))
        shifted = (row - peak) / temperature
        running = shifted.exp_().cumsum(1, dtype=torch.float64)
        total = running[:, -1:].contiguous()
        token = torch.searchsorted(running, uniform[:, None] * total, right=True)
        possible = torch.searchsorted(running, total)  # last possible token: products are rounded
        tokens.append(torch.minimum(token, possible).squeeze(1))
    sampled, drawn = torch.cat(tokens), torch.cat(peaks).squeeze(1).isfinite()
    if logits.device.type == "cpu" and bool(drawn.all()):
        return sampled
    return torch.where(drawn, sampled, logits.argmax(1))


def _check_mask(op: str, mask: Tensor, fed: Tensor) -> None:
    if mask.dtype != torch.bool:
        advice = f"One is drawn by {_SHARE}"
        fail_type(op, "feedback", "be a word or a bool mask [T, B]", type_name(mask), advice)
    if mask.shape != fed.shape:
        fail_value(op, "feedback", f"have shape {list(fed.shape)}", list(mask.shape))
    if mask.device != fed.device:
        fail_value(op, "feedback", f"be on {_DEVICE}, {fed.device}", mask.device)


def check_options(
    op: str, word: Any, teacher_forcing: Any, temperature: Any, generator: Any, draw: Any = "argmax"
) -> bool:
    """Tell whether this feedback ("mask" for a mask) draws samples. Raise for an option without
    effect. A generator is allowed without samples, since results would be the same."""
    number(op, "teacher_forcing", teacher_forcing, 0, 1)
    if number(op, "temperature", temperature) <= 0:
        fail_value(op, "temperature", "be greater than 0", temperature)
    if generator is not None and not isinstance(generator, torch.Generator):
        fail_type(op, "generator", "be a torch.Generator or None", type_name(generator))
    one_of(op, "draw", draw, DRAW_WORDS)
    if word in ("teacher", "greedy"):
        others = "feedback is 'sample', 'scheduled' or a mask"
        without_effect(op, "draw", draw, ("argmax",), others)
    if word != "scheduled":
        neutral = (1.0,) if word == "teacher" else (1.0, 0.0)
        without_effect(op, "teacher_forcing", teacher_forcing, neutral, "feedback is 'scheduled'")
    sampled = "sample" in (draw, word)
    if not sampled:
        without_effect(op, "temperature", temperature, (1.0,), "samples are drawn")
    return sampled


def _teacher_inputs(op: str, start: Any, inputs: Any, fed: Tensor, rows: int | None) -> Tensor:
    steps, batch = fed.shape
    if inputs is not None:
        contract = "be an integer tensor [T, B]"
        advice = "Observations [T, B, E] take embedding=None"
        given = token_tensor(op, "inputs", inputs, contract, of_floats=advice)
        if given.shape != fed.shape:
            fail_value(op, "inputs", f"have shape {[steps, batch]}", list(given.shape))
        check_tokens(op, "inputs", given, rows, fed.device, _DEVICE)
        return given
    first = start_of(op, start, batch, rows, fed.device, _DEVICE)
    if rows is not None and (wrong := first_outside(fed[:-1], rows)) is not None:
        fail_value(op, "targets that are fed", f"be in [0, {rows})", wrong)
    return torch.cat([first[None], fed[:-1]])[:steps]
