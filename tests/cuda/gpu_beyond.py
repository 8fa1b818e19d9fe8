"""Options of a decoder on a GPU, beside the same on the CPU in float64: rows of gpu_checks.py.

The CPU's results are held against plain loops by the tests of tests/decoder. Where tokens are
chosen, those of the GPU are scored on the CPU: a near tie may fall either way.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rows import Checks, Facts
from support.decode_oracle import relative_distance
from torch import Tensor, nn

import accumext

STEPS, BATCH, WORDS, SIZE = 9, 5, 211, 48
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-4}  # sums of hundreds of float32 in two orders
SEED = 7


class Model(nn.Module):
    """A decoder, and what calls are given; everything follows it to a device and a dtype."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, WORDS)
        stacked = kind == "lstm"
        self.cell = nn.LSTM(SIZE, SIZE, 2) if stacked else nn.GRUCell(SIZE, SIZE)
        self.called = kind == "called"
        shape = (2, BATCH, SIZE) if stacked else (BATCH, SIZE)
        self.states = nn.ParameterList(torch.randn(shape) for _ in range(1 + stacked))
        self.register_buffer("weights", torch.randn(STEPS, BATCH))
        self.register_buffer("targets", torch.randint(WORDS, (STEPS, BATCH)))
        self.register_buffer("resets", torch.rand(STEPS, BATCH) < 0.3)
        self.register_buffer("lengths", torch.arange(BATCH) * STEPS // (BATCH - 1))
        self.register_buffer("probabilities", torch.rand(STEPS, BATCH, WORDS).softmax(2))
        self.register_buffer("words", torch.randint(WORDS, (STEPS, BATCH, 20)))
        self.teacher = nn.Linear(SIZE // 2, WORDS).requires_grad_(False)
        self.register_buffer("goal", torch.randn(STEPS, BATCH, SIZE))

    @property
    def parts(self) -> tuple[Any, ...]:
        """Embedding, cell and head."""
        return self.embedding, self.step if self.called else self.cell, self.head

    @property
    def state(self) -> Any:
        return tuple(self.states) if len(self.states) == 2 else self.states[0]

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A function of a user, with extras."""
        state = self.cell(x, state)
        return state.tanh(), state, state.mean(1)

    def results(self, loss: Tensor, *more: Tensor) -> list[Tensor]:
        """And the gradients of the loss."""
        leaves = [leaf for leaf in self.parameters() if leaf.requires_grad]
        return [loss, *more, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def taught(model: Model, teacher: tuple[Tensor | None, ...], **options: Any) -> list[Tensor]:
    """A loss of whole distributions."""
    return decoded(
        model, feedback="teacher", soft_targets=teacher, soft_temperature=2.0, soft_weight=0.7,
        entropy_weight=0.1, z_loss=0.01, label_smoothing=0.1, **options,
    )  # fmt: skip


def decoded(model: Model, **options: Any) -> list[Tensor]:
    """decode_loss, and a loss of the outputs if they are asked for."""
    out = accumext.decode_loss(*model.parts, model.targets, model.state, **options)
    loss = out.loss if out.outputs is None else out.loss + out.outputs.square().mean()
    return model.results(loss, *([] if out.extras is None else [out.extras.detach()]))


def rolled(model: Model, **options: Any) -> list[Tensor]:
    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = model.cell(x, h)
        return h, h

    def loss(x: Tensor, t: int) -> Tensor:
        return F.mse_loss(x, model.goal[t])

    out = accumext.rollout(step, model.state, STEPS, loss=loss, start=model.goal[0], **options)
    return model.results(out.loss)


CALLS: dict[str, tuple[str, Callable[[Model], list[Tensor]]]] = {
    **{
        f"{name}, {kind}": (kind, call)
        for kind in ("gru", "lstm", "called")
        for name, call in {
            "token weights": lambda m: decoded(m, feedback="teacher", token_weight=m.weights),
            "resets": lambda m: decoded(m, feedback="teacher", resets=m.resets),
            "resets, lengths": lambda m: decoded(
                m, feedback="teacher", resets=m.resets, lengths=m.lengths
            ),
            "outputs": lambda m: decoded(m, feedback="teacher", return_outputs=True),
            "outputs, lengths": lambda m: decoded(
                m, feedback="teacher", return_outputs=True, lengths=m.lengths
            ),
            "entropy": lambda m: decoded(m, feedback="teacher", entropy_weight=0.1),
            "taught words": lambda m: taught(m, (m.probabilities[:, :, :20], m.words)),
            "taught all words, lengths": lambda m: taught(
                m, (m.probabilities, None), lengths=m.lengths
            ),
            "taught by a head": lambda m: taught(
                m, (m.teacher.weight, m.teacher.bias, m.goal[:, :, : SIZE // 2])
            ),
        }.items()
    },
    "rollout": ("gru", rolled),
    "rollout, segments": ("gru", functools.partial(rolled, checkpoint=4)),
    "rollout, k1=2, k2=3": ("gru", functools.partial(rolled, k1=2, k2=3)),
}


def check_call(name: str, dtype: torch.dtype, device: torch.device) -> Facts:
    """The same call here and there."""
    kind, call = CALLS[name]
    here, there = models(kind, dtype, device)
    return compare(call(there), call(here), dtype)


OWN = {
    f"own tokens, {kind}, {feedback}": (kind, feedback)
    for kind in ("gru", "lstm", "called")
    for feedback in ("greedy", "sample")
}


def check_own_tokens(name: str, dtype: torch.dtype, device: torch.device) -> Facts:
    """To be fed one's own tokens is to be taught them."""
    kind, feedback = OWN[name]
    here, there = models(kind, dtype, device)
    out = accumext.decode_loss(
        *there.parts, None, there.state, steps=STEPS, feedback=feedback, token_weight=there.weights
    )
    taught = accumext.decode_loss(
        *here.parts, out.tokens.cpu(), here.state, feedback="teacher", token_weight=here.weights
    )
    return compare(there.results(out.loss), here.results(taught.loss), dtype)


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"search": "sample", "temperature": 0.7},
    "top_k": {"search": "sample", "top_k": 20},
    "top_p": {"search": "sample", "top_p": 0.8},
    "both": {"search": "sample", "top_k": 50, "top_p": 0.8},
    "beams": {"search": "beam", "beams": 3},
}
GENERATED = {
    f"generate, {name}, {kind}{', eos' if ends else ''}": (kind, ends, options)
    for kind in ("gru", "lstm", "called")
    for name, options in SEARCHES.items()
    for ends in (False, True)
}


def check_generate(name: str, dtype: torch.dtype, device: torch.device) -> Facts:
    """The log-probabilities of the tokens, scored step by step on the CPU."""
    kind, ends, options = GENERATED[name]
    here, there = models(kind, dtype, device)
    if ends:
        options = {**options, "eos": 3, "lengths": there.lengths + 1}
    out = accumext.generate(*there.parts, there.state, max_length=STEPS + 1, **options)
    beams = out.tokens.shape[2] if out.tokens.dim() == 3 else 1
    shape = (len(out.tokens), BATCH, beams)
    tokens, log_probs = (part.cpu().reshape(shape) for part in (out.tokens, out.log_probs))
    lengths = out.lengths.cpu().reshape(BATCH, beams)
    mine, scored = [], []
    for beam in range(beams):
        loss = accumext.decode_loss(
            *here.parts, tokens[:, :, beam], here.state, feedback="teacher",
            lengths=lengths[:, beam], reduction="none",
        ).loss  # fmt: skip
        scored.append(-loss.detach())
        mine.append(log_probs[:, :, beam])
    return compare(mine, scored, dtype)


def models(kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Model, Model]:
    """On the CPU in float64 and on the device, of the same parameters."""
    torch.manual_seed(SEED)
    there = Model(kind).to(dtype)
    return copy.deepcopy(there).double(), there.to(device)


def compare(mine: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> Facts:
    off = relative_distance([t.detach().cpu() for t in mine], [t.detach() for t in expected])
    if not off <= ALLOWED[dtype]:  # a NaN, too
        raise AssertionError(f"off by {off:.2e}, more than {ALLOWED[dtype]:.0e}")
    return {"off by": off}


def checks(device: torch.device, quick: bool) -> Checks:
    kinds = {check_call: CALLS, check_own_tokens: OWN, check_generate: GENERATED}
    for check, names in kinds.items():
        for name in names:
            for dtype in (torch.float32,) if quick else ALLOWED:
                told = str(dtype).removeprefix("torch.")
                yield f"{name}: {told}", functools.partial(check, name, dtype, device)
