"""Calls of the decoder's operators on small tensors, for a GPU and for its stand-in on the host."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

KINDS = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}  # gates; in the order of `kind`
BATCH, UNITS, WIDTH, WORDS = 5, 70, 9, 300


class Call(NamedTuple):
    """An operator and its arguments, some of which it writes."""

    op: str
    arguments: list[Any]
    first_written: int  # behind this argument, all tensors together are compared

    def __call__(self) -> None:
        getattr(torch.ops.accumext, self.op)(*self.arguments)

    def to(self, device: str) -> "Call":
        """A copy on a device; strides stay as they are."""

        def moved(leaf: Any) -> Any:
            return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf

        return self._replace(arguments=tree_map(moved, self.arguments))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]

    @property
    def written(self) -> list[Tensor]:
        leaves = tree_leaves(self.arguments[self.first_written :])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def head_call(
    *, rows: int = BATCH, words: int = WORDS, sampled: bool = True, exps: bool = True,
    temperature: float = 0.7, logit_rows: int = 3, narrow: bool = False, own: bool = False,
) -> Call:  # fmt: skip
    dtype = torch.bfloat16 if narrow else torch.float32
    workspace = torch.zeros(words, rows, dtype=dtype).t()
    return Call("head_forward", [
        torch.randn(rows, UNITS), torch.randn(words, UNITS).div(9).to(dtype), torch.randn(words),
        None if own else torch.randint(words, [rows]), _uniforms(rows) if sampled else None,
        temperature, workspace if exps else None, logit_rows, torch.zeros(rows, dtype=torch.int64),
        torch.zeros(3, rows),
    ], 6)  # fmt: skip


def top_call(
    *, rows: int = BATCH, words: int = WORDS, size: int = 5, logit_rows: int = 3,
    narrow: bool = False,
) -> Call:  # fmt: skip
    head = head_call(rows=rows, words=words, narrow=narrow).arguments
    return Call("head_top", [
        *head[:3], logit_rows, torch.zeros(rows, size), torch.zeros(rows, size, dtype=torch.int64),
        torch.zeros(2, rows),
    ], 4)  # fmt: skip


def sample_call(
    *, rows: int = BATCH, words: int = WORDS, top_k: int = 20, top_p: float = 0.8,
    logit_rows: int = 3, narrow: bool = False,
) -> Call:  # fmt: skip
    head = head_call(rows=rows, words=words, narrow=narrow).arguments
    return Call("head_sample", [
        *head[:3], _uniforms(rows), 0.7, min(top_k, words), top_p, logit_rows, *head[-2:],
    ], 8)  # fmt: skip


def beam_call(
    *, rows: int = BATCH, beams: int = 3, words: int = WORDS, size: int | None = None,
    levels: int = 10**6, dtype: torch.dtype = torch.float32,
) -> Call:  # fmt: skip
    """Some hypotheses, and rows, have no score; few levels make many scores equal; word 0 ends."""
    size, shape = min(beams + 1, words) if size is None else size, (beams, rows)

    def scores(*of: int) -> Tensor:
        return -torch.randint(1, levels + 1, of).double() / levels

    hypotheses = scores(*shape).sort(dim=0, descending=True).values
    hypotheses[beams // 2 + 1 :, ::2], hypotheses[:, 3::4] = -torch.inf, -torch.inf
    kept = scores(*shape).sort(dim=0, descending=True).values
    kept[(beams + 1) // 2 :] = -torch.inf
    logits = scores(beams * rows, size).sort(dim=1, descending=True).values.to(dtype)
    found = torch.stack([torch.randperm(words)[:size] for _ in range(beams * rows)])
    limits = torch.randint(3, 7, [rows])
    of_kept, numbers = torch.randint(beams, (3, *shape)), torch.zeros(2, *shape).long()
    of_kept[0] = (kept != -torch.inf) * torch.randint(1, 3, shape)
    total = 1 + torch.rand(beams * rows, dtype=dtype) * (levels > 99)  # else its logarithm is exact
    return Call("beam_step", [
        logits, found, torch.stack([logits[:, 0], total]).t(), limits, 2, 0.7, 0, hypotheses,
        [kept, of_kept, torch.rand(shape, dtype=dtype)],
        [*numbers, torch.zeros(shape, dtype=dtype)],
    ], 7)  # fmt: skip


def select_call(
    *, rows: int = BATCH, beams: int = 3, dtype: torch.dtype = torch.float32, layers: int = 0
) -> Call:
    """Of a state [L, K B, H], or [K B, H]."""
    stack = (layers,) if layers else ()
    state = torch.randint(100, (*stack, beams * rows, 9)).to(dtype)
    return Call("select_states", [
        state, torch.randint(beams, (beams, rows)), torch.randint(beams, (3, beams, rows)),
        beams // 2 - 1, len(stack),
        torch.zeros_like(state), torch.ones(*stack, rows, 9).to(dtype),
    ], 5)  # fmt: skip


def end_rows_call(*, rows: int = 300, eos: int = 2) -> Call:
    tokens, limits = torch.randint(4, (2, rows))
    return Call("end_rows", [
        tokens, torch.rand(rows) < 0.8, limits, 1, eos, 7, torch.zeros(rows, dtype=torch.bool),
        torch.zeros_like(tokens),
    ], 6)  # fmt: skip


def objective_call(
    *, rows: int = BATCH, words: int = WORDS, logit_rows: int = 3, narrow: bool = False,
    soft: str = "tokens",
) -> Call:  # fmt: skip
    """With a teacher's head, and its probabilities of some "tokens", some of them more than once,
    or of "all words"."""
    dtype = torch.bfloat16 if narrow else torch.float32
    indices = torch.randint(words, (rows, 40))
    if soft == "all words":
        indices = torch.arange(words).expand(rows, -1)
    return Call("head_objective", [
        torch.randn(rows, UNITS), torch.randn(words, UNITS).div(9).to(dtype), torch.randn(words),
        torch.randint(words, [rows]), torch.rand(rows), 0.1, 0.2, 0.5, 2.0,
        torch.rand(indices.shape) / indices.shape[1], indices, torch.randn(rows, WIDTH),
        torch.randn(words, WIDTH).to(dtype), torch.randn(words),
        torch.zeros(words, rows, dtype=dtype).t(), logit_rows,
        torch.zeros(rows, dtype=torch.int64), torch.zeros(5, rows),
    ], 14)  # fmt: skip


def steps_call(
    kind: str, *, layers: int = 1, steps: int = 4, head: bool = True, narrow: bool = False,
    exps: bool = True, ends: bool = False, logit_rows: int = 32, around: bool = False,
    own: bool = False, batch: int = BATCH, sampled: bool = True, bias: float = 0.0,
) -> Call:  # fmt: skip
    """Mixed feedback and dropout; with `ends`, some rows end; with `around`, dropout before and
    behind the layers; with `own`, tokens are their own targets; `bias` is added to the head's."""
    dtype = torch.bfloat16 if narrow else torch.float32
    gates, parts, shape = KINDS[kind] * UNITS, 2 if kind == "lstm" else 1, (steps, batch)
    cell = []
    for layer in range(layers):
        for depth in (UNITS if layer else WIDTH, UNITS):
            cell.append(torch.randn(gates, depth).div(9).to(dtype))
        cell += [torch.randn(gates), torch.randn(gates)]
    states = [torch.randn(steps + 1, batch, UNITS) for _ in range(layers * parts)]
    inputs, teacher, targets, tokens = torch.randint(WORDS, (4, *shape)).unbind()
    kept = torch.rand(steps, layers - 1, batch, UNITS) < 0.5 if layers > 1 else None
    masks = [torch.rand(*shape, size) < 0.5 if around else None for size in (WIDTH, UNITS)]
    workspace = torch.zeros(WORDS, steps * batch, dtype=dtype).t()
    results: list[Tensor | None] = [
        workspace if exps else None, torch.zeros(3, steps * batch),
        torch.zeros(steps * batch, dtype=torch.int64),
    ]  # fmt: skip
    return Call("decode_steps", [
        torch.randn(WORDS, WIDTH), cell, states, list(KINDS).index(kind),
        [masks[0], kept, masks[1]], [2.0] * 3, inputs.clone(), teacher, torch.rand(shape) < 0.5,
        torch.ones(shape, dtype=torch.bool) if ends else None, 3 if ends else -1, 0,
        _uniforms(*shape) if sampled else None, 0.7,
        torch.randn(WORDS, UNITS).div(9).to(dtype), torch.randn(WORDS) + bias,
        None if own else targets, tokens.clone(), *(results if head else [None] * 3), logit_rows,
        0, steps,
    ], 2)  # fmt: skip


def backward_call(kind: str, *, steps: int = 4, narrow: bool = False, batch: int = BATCH) -> Call:
    gates, lstm = KINDS[kind] * UNITS, kind == "lstm"
    h, c = torch.randn(2, steps + 1, batch, UNITS)
    dh, dc = torch.randn(2, batch, UNITS)
    weight = torch.randn(UNITS, gates) / 9
    d_x = torch.zeros(steps, batch, gates)
    return Call("rnn_backward", [
        list(KINDS).index(kind), torch.randn(steps, batch, UNITS),
        torch.randn(steps, batch, 4 * UNITS) if gates > UNITS else None, h, c if lstm else None,
        torch.rand(steps, batch) < 0.8, torch.rand(steps, batch), torch.tensor(0.5),
        weight.bfloat16() if narrow else weight, dh.clone(), dc.clone() if lstm else None, d_x,
        torch.zeros_like(d_x) if kind == "gru" else None,
    ], 9)  # fmt: skip


def _uniforms(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)
