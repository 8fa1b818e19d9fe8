"""Every option of decode_loss together with every other, in float64 against plain autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_oracle import CELLS, Decoder, decode, make_decoder, relative_distance
from torch import nn

import accumext

EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
PARTS = ("embedding", "cell", "head", "state")

Model = dict[str, Any]


def recurrent(kind: str, layers: int, inputs: int, units: int, dropout: float, bias: bool) -> Any:
    """One of torch's cells or modules in float64."""
    name, _, nonlinearity = kind.partition("-")
    options: Model = {"bias": bias, "dtype": torch.float64}
    if nonlinearity:
        options["nonlinearity"] = nonlinearity
    if name.endswith("Cell"):
        return getattr(nn, name)(inputs, units, **options)
    return getattr(nn, name)(inputs, units, layers, dropout=dropout, **options)


KINDS = [
    *("GRUCell", "LSTMCell", "RNNCell-tanh", "RNNCell-relu"),
    *("GRU", "LSTM", "RNN-tanh", "RNN-relu"),
]


@dataclass(frozen=True)
class Shape:
    """Of a decoder."""

    kind: str
    layers: int
    batch: int
    words: int
    inputs: int  # E
    units: int  # H


def build(
    shape: Shape, *, tied: bool, frozen: frozenset[str], cell_bias: bool, head_bias: bool,
    padding_idx: int | None, dropout: float, given: bool,
) -> Decoder:  # fmt: skip
    """The decoder, its leaves only those that want a gradient."""
    inputs = shape.units if tied else shape.inputs
    embedding = nn.Embedding(shape.words, inputs, padding_idx=padding_idx, dtype=torch.float64)
    head = nn.Linear(shape.units, shape.words, bias=head_bias, dtype=torch.float64)
    if tied:
        head.weight = embedding.weight
    cell = recurrent(shape.kind, shape.layers, inputs, shape.units, dropout, cell_bias)
    stacked, pair = "Cell" not in shape.kind, "LSTM" in shape.kind
    size: tuple[int, ...] = (shape.batch, shape.units)
    if stacked:
        size = (shape.layers, *size)
    make = torch.randn if given else torch.zeros
    states = [make(size, dtype=torch.float64) for _ in range(1 + pair)]
    for part in ("embedding", "cell", "head"):
        if part in frozen:
            {"embedding": embedding, "cell": cell, "head": head}[part].requires_grad_(False)
    if given and "state" not in frozen:
        for state in states:
            state.requires_grad_()

    def step(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        if stacked:
            output, state = cell(x[None], state)
            return output[0], state
        state = cell(x, state)
        return (state[0] if pair else state), state

    leaves = {id(p): p for m in (embedding, cell, head) for p in m.parameters()}
    wanted = [leaf for leaf in [*leaves.values(), *states] if leaf.requires_grad]
    return Decoder(embedding, cell, head, tuple(states) if pair else states[0], step, (), wanted)


def last_of(decoder: Decoder, inputs: torch.Tensor, live: torch.Tensor | None) -> Any:
    """The plain loop's last state."""
    state = decoder.state
    for t in range(len(inputs)):
        _, new = decoder.step(decoder.embedding(inputs[t]), state)
        if live is not None:
            pair = isinstance(new, tuple)
            parts = zip(new, state, strict=True) if pair else [(new, state)]
            kept = [torch.where(live[t][:, None], n, o) for n, o in parts]
            new = tuple(kept) if pair else kept[0]
        state = new
    return state


def leaves_of(state: Any) -> list[torch.Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


OPTIONS = {
    "layers": st.integers(1, 3),
    "batch": st.integers(1, 4),
    "steps": st.integers(1, 14),
    "sizes": st.sampled_from([(5, 5), (3, 7), (13, 4), (1, 1)]),  # E, H
    "feedback": st.sampled_from(
        ["teacher", "greedy", "sample", "scheduled", "mask", "spans", "all-teacher"]
    ),
    "ends": st.sampled_from(["none", "none", "lengths", "eos", "both"]),
    "hole": st.sampled_from(["none", "some", "all", "word"]),
    "smoothing": st.sampled_from([0.0, 0.2, 1.0]),
    "z_loss": st.sampled_from([0.0, 0.05]),
    "weighted": st.booleans(),
    "reduction": st.sampled_from(["mean", "mean", "sum", "none", "items"]),
    "periods": st.sampled_from(
        [None, None, (None, 3), (1, 1), (2, 2), (1, 3), (3, 4), (2, 30), (5, None)]
    ),
    "budget": st.sampled_from([None, None, 1, 2, 3, 5, 8, 30]),
    "tied": st.booleans(),
    "frozen": st.frozensets(st.sampled_from(PARTS), max_size=3),
    "biases": st.tuples(st.booleans(), st.booleans()),
    "padding_idx": st.sampled_from([None, 4, 0]),
    "batch_first": st.booleans(),
    "dropout": st.sampled_from([0.0, 0.0, 0.5]),
    "given_state": st.booleans(),
    "upstream": st.sampled_from([1.0, 65536.0, -0.3]),
    "further": st.booleans(),  # a loss on the last state, too
    "twice": st.booleans(),
    "seed": st.integers(0, 2**20),
}


@pytest.mark.filterwarnings("ignore:decode_loss. k1=5 has no effect without k2")
@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once(kind: str) -> None:
    @settings(max_examples=50, deadline=None)
    @given(options=st.fixed_dictionaries(OPTIONS))
    def check(options: Model) -> None:
        check_one(kind, **options)

    check()


def check_one(
    kind: str, *, layers: int, batch: int, steps: int, sizes: tuple[int, int], feedback: str,
    ends: str, hole: str, smoothing: float, z_loss: float, weighted: bool, reduction: str,
    periods: tuple[int | None, int | None] | None, budget: int | None, tied: bool,
    frozen: frozenset[str], biases: tuple[bool, bool], padding_idx: int | None, batch_first: bool,
    dropout: float, given_state: bool, upstream: float, further: bool, twice: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    words = 9
    layers = 1 if "Cell" in kind else layers
    dropout = dropout if layers > 1 else 0.0
    if feedback in ("sample", "scheduled") or (periods and periods[1] and dropout):
        dropout = 0.0  # the plain loop would draw other masks
    shape = Shape(kind, layers, batch, words, *sizes)
    decoder = build(
        shape, tied=tied, frozen=frozen, cell_bias=biases[0], head_bias=biases[1],
        padding_idx=padding_idx, dropout=dropout, given=given_state,
    )  # fmt: skip
    ignored = 3 if hole == "word" else -100
    targets = torch.randint(words, (steps, batch))
    if hole == "some":
        targets[torch.rand(steps, batch) < 0.3] = -100
    elif hole == "all":
        targets[:] = -100
    call: Model = {
        "ignore_index": ignored,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "reduction": "mean" if reduction == "items" else reduction,
        "start": torch.randint(words, (batch,)),
        "batch_first": batch_first,
    }
    if weighted:
        call["class_weight"] = torch.rand(words, dtype=torch.float64)
    if reduction == "items":
        call["num_items"] = 17
    if ends in ("lengths", "both"):
        call["lengths"] = torch.randint(0, steps + 1, (batch,))
    if ends in ("eos", "both"):
        call["eos"] = 1
    if budget is not None:
        call["memory_budget"] = budget * words * 8
    if periods is not None:
        call["k1"], call["k2"] = periods
    mask = None
    if feedback in ("mask", "spans", "all-teacher"):
        mask = torch.rand(steps, batch) < 0.5
        mask[torch.rand(steps) < 0.6] = True
        if feedback == "all-teacher":
            mask[:] = True
        elif feedback == "spans":
            mask[:] = (torch.arange(steps)[:, None] + 1) % 5 < 3

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if batch_first and tensor.dim() == 2 else tensor

    torch.manual_seed(seed + 1)
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, flip(targets),
        decoder.state if given_state else None,
        feedback=feedback if mask is None else flip(mask), teacher_forcing=0.4, **call,
    )  # fmt: skip
    tokens, inputs = flip(out.tokens), flip(out.inputs)

    # who was alive, from the tokens
    live = torch.ones(steps, batch, dtype=torch.bool)
    if "lengths" in call:
        live &= torch.arange(steps)[:, None] < call["lengths"]
    if "eos" in call:
        for t in range(steps):
            live[t + 1 :] &= ~(live[t] & (tokens[t] == 1))
    assert torch.equal(out.lengths, live.sum(0))
    pad = 0 if padding_idx is None else padding_idx
    assert (tokens[~live] == pad).all()
    assert (inputs[~live] == pad).all()
    counted = live & (targets != ignored)
    teacher = torch.where((targets != ignored), targets, pad)[:-1]
    following = teacher if feedback in ("teacher", "all-teacher") else tokens[:-1]
    if mask is not None:
        following = torch.where(mask[1:], teacher, tokens[:-1])
    if feedback != "scheduled":
        assert torch.equal(inputs[1:], following.where(live[1:], torch.tensor(pad)))

    k1, k2 = periods if periods is not None else (None, None)
    windows = None if k2 is None else (k1 or k2, k2)
    criterion = {k: call[k] for k in ("ignore_index", "label_smoothing", "z_loss") if k in call}
    torch.manual_seed(seed + 1)
    losses, divisor, logits = decode(
        decoder, targets, inputs, live, windows=windows, class_weight=call.get("class_weight"),
        **criterion,
    )  # fmt: skip
    if feedback != "sample":
        assert torch.equal(tokens[live], logits.argmax(-1)[live])
    torch.testing.assert_close(flip(out.token_losses), losses.detach(), rtol=1e-11, atol=EXACT)
    if reduction == "mean":
        expected = losses.sum() / divisor if divisor else losses.sum() * 0
    else:
        expected = losses.sum() / 17 if reduction == "items" else losses.sum()
    total = out.loss.sum()
    torch.testing.assert_close(total.detach(), expected.detach(), rtol=EXACT, atol=EXACT)
    if reduction == "none":  # every token its own factor
        factors = torch.randn(steps, batch, dtype=torch.float64)
        total, expected = (flip(out.loss) * factors).sum(), (losses * factors).sum()
    assert counted.any() or total == 0
    total, expected = total * upstream, expected * upstream
    if further and windows is None:
        torch.manual_seed(seed + 1)
        theirs = last_of(decoder, inputs, live)
        for mine, its in zip(leaves_of(out.state), leaves_of(theirs), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-11, atol=EXACT)
            factor = torch.randn_like(its)
            total, expected = total + (mine * factor).sum(), expected + (its * factor).sum()
    if windows is not None:
        assert not any(s.requires_grad for s in leaves_of(out.state))
    if not decoder.leaves:
        assert not total.requires_grad
        return

    def gradients(of: torch.Tensor, again: bool = False) -> list[torch.Tensor]:
        if not of.requires_grad:
            return [torch.zeros_like(leaf) for leaf in decoder.leaves]
        return list(
            torch.autograd.grad(of, decoder.leaves, materialize_grads=True, retain_graph=again)
        )

    wanted = gradients(expected)
    assert relative_distance(gradients(total, twice), wanted) < EXACT
    if twice:
        assert relative_distance(gradients(total), wanted) < EXACT


@pytest.mark.parametrize("kind", ["GRUCell", "LSTM"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_subset_of_frozen_parts(kind: str, reduction: str) -> None:
    for chosen in range(16):
        frozen = frozenset(part for i, part in enumerate(PARTS) if chosen >> i & 1)
        check_one(
            kind, layers=2, batch=3, steps=5, sizes=(5, 5), feedback="mask", ends="lengths",
            hole="some", smoothing=0.1, z_loss=0.1, weighted=True, reduction=reduction,
            periods=None, budget=4, tied=False, frozen=frozen, biases=(True, True),
            padding_idx=None, batch_first=False, dropout=0.0, given_state=True, upstream=2.0,
            further=True, twice=True, seed=chosen,
        )  # fmt: skip


@pytest.mark.parametrize("periods", [None, (2, 2), (2, 5)], ids=str)
def test_one_leaf_at_a_time(periods: tuple[int, int] | None) -> None:
    """torch.autograd.grad for a part of the leaves, from the same retained graph."""
    for kind, tied in (("lstm", False), ("gru_cell", True)):
        decoder = make_decoder(kind, tied=tied)
        targets = torch.randint(13, (6, 3))
        k1, k2 = periods or (None, None)
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
            feedback="greedy", label_smoothing=0.1, k1=k1, k2=k2,
        )  # fmt: skip
        losses, divisor, _ = decode(
            decoder, targets, out.inputs, label_smoothing=0.1, windows=periods
        )
        expected = decoder.gradients(losses.sum() / divisor)
        for leaf, gradient in zip(decoder.leaves, expected, strict=True):
            (mine,) = torch.autograd.grad(out.loss, [leaf], retain_graph=True)
            assert relative_distance([mine], [gradient]) < 10 * EXACT


@pytest.mark.parametrize("kind", CELLS)
def test_the_last_state_alone(kind: str) -> None:
    decoder = make_decoder(kind)
    targets = torch.randint(13, (5, 3))
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="greedy"
    )
    last = last_of(decoder, out.inputs, None)
    mine = sum((s * s).sum() for s in leaves_of(out.state))
    its = sum((s * s).sum() for s in leaves_of(last))
    assert relative_distance(decoder.gradients(mine), decoder.gradients(its)) < EXACT
