"""Default device and dtype."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import accumext

T, B, V, H = 6, 3, 11, 5
# Meta stands for any device but the model's: what is made there by mistake holds no numbers.
DEFAULTS = [("meta", torch.float32), ("cpu", torch.float64), ("meta", torch.bfloat16)]


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class Parts:
    """What users have made before, on the CPU and in float32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding, self.cell, self.head = nn.Embedding(V, H), nn.GRUCell(H, H), nn.Linear(H, V)
        self.modules = nn.ModuleList([self.embedding, self.cell, self.head])
        self.targets, self.state = torch.randint(V, (T, B)), torch.randn(B, H, requires_grad=True)
        self.series, self.flags = torch.randn(T, B, H, requires_grad=True), torch.rand(T, B) < 0.4
        self.half = nn.Linear(H, V).bfloat16()

    def function(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The cell as a function."""
        state = self.cell(F.dropout(x, 0.2), state)
        return state, state

    def whole(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.embedding(token), state)
        return self.head(state), state

    def given(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, some of which functions make from what is here."""
        return {name: value(self) if callable(value) else value for name, value in call.items()}

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in (*self.modules.parameters(), self.state, self.series)]


def decode(parts: Parts, cell: str = "cell", **call: Any) -> Any:
    call = {"feedback": "greedy", "targets": parts.targets, "state": parts.state, **call}
    call = parts.given(call)
    embedding = None if "inputs" in call else parts.embedding
    out = accumext.decode_loss(embedding, getattr(parts, cell), parts.head, **call)
    out.loss.sum().backward()
    return out, parts.gradients()


def predict(parts: Parts, cell: str = "cell", **call: Any) -> Any:
    given = parts.embedding, getattr(parts, cell), parts.head, (T, B), parts.state
    return accumext.decode_memory(*given, feedback="greedy", **call)


def generate(parts: Parts, cell: str = "cell", **call: Any) -> Any:
    given = parts.embedding, getattr(parts, cell), parts.head, parts.state
    return accumext.generate(*given, max_length=T, eos=1, **call)


def tbptt(parts: Parts, **call: Any) -> Any:
    call = {"feedback": "greedy", **parts.given(call)}
    result = accumext.tbptt(
        parts.whole, parts.targets, parts.state, criterion=F.cross_entropy, k1=2, **call
    )
    return result, parts.gradients()


def tbptt_of_numbers(parts: Parts) -> Any:
    def error(output: Tensor, target: Tensor, rows: Tensor) -> Tensor:
        return ((output - target)[rows] ** 2).sum()

    result = accumext.tbptt(
        parts.function, parts.series.detach(), parts.state, criterion=error, feedback="teacher",
        start=1, lengths=[T, 2, 0],
    )  # fmt: skip
    return result, parts.gradients()


def rollout(parts: Parts, **call: Any) -> Any:
    def loss(output: Tensor, t: int) -> Tensor:
        return F.mse_loss(output, parts.series[t].detach())

    out = accumext.rollout(
        parts.function, parts.state, T, loss=loss, start=parts.series[0], **parts.given(call)
    )
    out.loss.backward()
    return out, parts.gradients()


def chunks(parts: Parts) -> Any:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(parts.head(x), y, ignore_index=0)

    rows, targets = parts.series.flatten(0, 1), parts.targets.flatten()
    accumext.chunked_loss(fn, rows, targets, chunks=3).backward()
    return parts.gradients()


def window(parts: Parts, scaled: bool = False, inf: bool = False, **options: Any) -> Any:
    """Train for two windows and a part of a third, which is saved and loaded."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    optimizer = torch.optim.AdamW(parts.modules.parameters(), lr=0.01)
    opt = accumext.AccumulatingOptimizer(optimizer, window=2, scaler=scaler, **options)
    found = []
    for i in range(5):
        out = accumext.decode_loss(
            parts.embedding, parts.cell, parts.head, parts.targets, feedback="teacher"
        )
        opt.backward(out.loss * (torch.inf if inf and i == 2 else 1.0), weight=i + 1)
        opt.step()
        if i == 4:
            opt.load_accumulation_state_dict(opt.accumulation_state_dict())
            found += [opt.main_grad(parts.head.weight)]
            opt.flush()
        last = opt.last
        if last is not None:
            found += [opt.stats(), last.total_norm, last.loss_scale, last.weight, last.nonfinite]
    opt.discard()
    opt.zero_grad()
    return found, list(parts.modules.parameters())


def masters(parts: Parts) -> Any:
    copies = accumext.masters(parts.half.parameters(), stochastic_rounding=True)
    optimizer = torch.optim.SGD(copies, lr=0.1)
    opt = accumext.AccumulatingOptimizer(optimizer, window=2, max_norm=0.1, masters=copies)
    for _ in range(2):
        opt.backward(parts.half(parts.series[0].detach().bfloat16()).square().sum())
        opt.step()
    return opt.stats(), copies, list(parts.half.parameters())


def operators(parts: Parts) -> Any:
    given = [p.detach().clone() for p in parts.modules.parameters()]
    sums = [torch.zeros_like(p) for p in given]
    found = [accumext.accumulate_(sums, given, inv_scale=0.5)]
    found += [accumext.unscale_check_clip_accumulate_(sums, given, max_norm=0.1)]
    found += [accumext.total_norm(given, norm_type=p) for p in (1.0, 2.0, torch.inf)]
    accumext.scale_(sums, 0.3)
    for parameter, gradient in zip(parts.modules.parameters(), given, strict=True):
        parameter.grad = gradient
    found += [accumext.clip_grad_norm_(parts.modules.parameters(), 0.1, p) for p in (0, 2.0)]
    return found, sums, given, parts.gradients()


def audited(parts: Parts) -> Any:
    """Audit a loop whose losses are not divided by the two micro-batches of a window."""
    optimizer = torch.optim.SGD(parts.modules.parameters(), lr=0.01)
    with accumext.audit(parts.modules, optimizer) as audit:
        for _ in range(4):
            for _ in range(2):
                logits, _ = parts.whole(parts.targets[0], parts.state.detach())
                F.cross_entropy(logits, parts.targets[1]).backward()
            torch.nn.utils.clip_grad_norm_(parts.modules.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [[found.id, found.evidence] for found in (*audit.findings, *audit.questions)]


CALLS: dict[str, Callable[[Parts], Any]] = {
    "teacher": partial(decode, feedback="teacher"),
    "greedy": decode,
    "sample": partial(decode, feedback="sample"),
    "scheduled": partial(decode, feedback="scheduled", teacher_forcing=0.5, draw="sample"),
    "its own tokens": partial(decode, targets=None, steps=T, feedback="sample"),
    "mask, lists": partial(
        decode, feedback=lambda p: p.flags, lengths=[T, 2, 4], class_weight=[0.5] * V, eos=1
    ),
    "entropy, z-loss, smoothing": partial(
        decode, entropy_weight=0.1, z_loss=0.1, label_smoothing=0.1, num_items=7
    ),
    "losses": partial(decode, reduction="none", state_grad_clip=0.01),
    "random cuts": partial(decode, k2=2, truncation="random"),
    "windows, resets": partial(decode, k1=1, k2=3, resets=lambda p: p.flags),
    "dropout": partial(decode, embedding_dropout=0.3, output_dropout=0.3, return_outputs=True),
    "no state": partial(decode, state=None),
    "observations": partial(
        decode, feedback="teacher", inputs=lambda p: p.series, lengths=[T, 2, 4]
    ),
    "nothing": partial(decode, lengths=[0] * B),
    "a function": partial(
        decode, cell="function", feedback="sample", resets=lambda p: p.flags, eos=1
    ),
    "a function in windows": partial(decode, cell="function", k1=1, k2=3),
    "random cuts of a function": partial(decode, cell="function", k2=2, truncation="random"),
    "memory": predict,
    "memory of a function": partial(predict, cell="function", k1=1, k2=3, lengths=[T, 2, 4]),
    "generate": generate,
    "generate samples": partial(generate, search="sample", top_k=4, top_p=0.9, temperature=1.3),
    "beams": partial(generate, search="beam", length_penalty=0.7, lengths=[T, 2, 4]),
    "beams of a function": partial(generate, cell="function", search="beam", beams=2, start=2),
    "tbptt": tbptt,
    "tbptt samples": partial(
        tbptt, feedback="sample", k2=3, lengths=[T, 2, 4], resets=lambda p: p.flags
    ),
    "tbptt of numbers": tbptt_of_numbers,
    "rollout": rollout,
    "rollout, recomputed": partial(rollout, checkpoint=2, k1=1, k2=3, resets=lambda p: p.flags),
    "rollout, random cuts": partial(rollout, k2=2, truncation="random"),
    "chunked_loss": chunks,
    "window": window,
    "window, clipped": partial(window, max_norm=0.1),
    "window, scaled": partial(window, scaled=True, max_norm=0.1, accumulate_in_backward=True),
    "window, inf": partial(window, scaled=True, inf=True),
    "window without a bad micro-batch": partial(window, inf=True, on_nonfinite="skip_micro_batch"),
    "masters": masters,
    "operators": operators,
    "audit": audited,
}  # fmt: skip


@cache
def run(call: str, device: str, dtype: torch.dtype) -> list[Any]:
    parts = Parts()
    torch.manual_seed(1)
    with defaults(device, dtype):
        return tree_leaves(CALLS[call](parts))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("device", "dtype"), DEFAULTS, ids=str)
def test_another_default_changes_nothing(device, dtype, call):
    """Under another `torch.set_default_device` or default dtype every call gives the same bits"""
    expected = run(call, "cpu", torch.float32)
    found = run(call, device, dtype)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, (Tensor, float)):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other
