"""Every option of decode_loss together with every other, in float64 against plain autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
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
    "seed": st.integers(0, 2**20),
}
BACKWARD = {  # see assert_gradients
    "upstream": st.sampled_from([1.0, 65536.0, -0.3]),
    "further": st.booleans(),
    "twice": st.booleans(),
}


@dataclass
class Call:
    """A call of decode_loss; tensors are [T, B], however the call lays them out."""

    decoder: Decoder
    targets: torch.Tensor
    feedback: str
    mask: torch.Tensor | None  # where to feed the target, if feedback is a mask
    periods: tuple[int | None, int | None]
    keywords: Model
    seed: int

    @property
    def pad(self) -> int:
        return self.decoder.embedding.padding_idx or 0

    @property
    def ignored(self) -> torch.Tensor:
        return self.targets == self.keywords["ignore_index"]

    def flip(self, tensor: torch.Tensor) -> torch.Tensor:
        """From one layout to the other."""
        return tensor.t() if self.keywords["batch_first"] and tensor.dim() == 2 else tensor


@dataclass
class Found:
    """The results of a call."""

    loss: torch.Tensor
    token_losses: torch.Tensor
    tokens: torch.Tensor
    inputs: torch.Tensor
    lengths: torch.Tensor
    state: Any


@dataclass
class Truth:
    """The plain loop over the tokens that a call fed."""

    live: torch.Tensor
    losses: torch.Tensor
    divisor: torch.Tensor
    logits: torch.Tensor


def drawn(
    kind: str, *, layers: int, batch: int, steps: int, sizes: tuple[int, int], feedback: str,
    ends: str, hole: str, smoothing: float, z_loss: float, weighted: bool, reduction: str,
    periods: tuple[int | None, int | None] | None, budget: int | None, tied: bool,
    frozen: frozenset[str], biases: tuple[bool, bool], padding_idx: int | None, batch_first: bool,
    dropout: float, given_state: bool, seed: int,
) -> Call:  # fmt: skip
    """The call that these options describe."""
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
    targets = torch.randint(words, (steps, batch))
    if hole == "some":
        targets[torch.rand(steps, batch) < 0.3] = -100
    elif hole == "all":
        targets[:] = -100
    keywords: Model = {
        "state": decoder.state if given_state else None,
        "ignore_index": 3 if hole == "word" else -100,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "reduction": "mean" if reduction == "items" else reduction,
        "start": torch.randint(words, (batch,)),
        "batch_first": batch_first,
    }
    if weighted:
        keywords["class_weight"] = torch.rand(words, dtype=torch.float64)
    if reduction == "items":
        keywords["num_items"] = 17
    if ends in ("lengths", "both"):
        keywords["lengths"] = torch.randint(0, steps + 1, (batch,))
    if ends in ("eos", "both"):
        keywords["eos"] = 1
    if budget is not None:
        keywords["memory_budget"] = budget * words * 8
    if periods is not None:
        keywords["k1"], keywords["k2"] = periods
    if feedback == "scheduled":
        keywords["teacher_forcing"] = 0.4
    mask = None
    if feedback in ("mask", "spans", "all-teacher"):
        mask = torch.rand(steps, batch) < 0.5
        mask[torch.rand(steps) < 0.6] = True
        if feedback == "all-teacher":
            mask[:] = True
        elif feedback == "spans":
            mask[:] = (torch.arange(steps)[:, None] + 1) % 5 < 3
    return Call(decoder, targets, feedback, mask, periods or (None, None), keywords, seed)


def run(call: Call) -> Found:
    torch.manual_seed(call.seed + 1)
    decoder, flip = call.decoder, call.flip
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, flip(call.targets),
        feedback=call.feedback if call.mask is None else flip(call.mask),
        **call.keywords,
    )  # fmt: skip
    each = flip(out.token_losses), flip(out.tokens), flip(out.inputs)
    return Found(flip(out.loss), *each, out.lengths, out.state)


def plain_loop(call: Call, found: Found) -> Truth:
    steps, keywords = len(call.targets), call.keywords
    live = torch.ones_like(call.targets, dtype=torch.bool)
    if "lengths" in keywords:
        live &= torch.arange(steps)[:, None] < keywords["lengths"]
    if "eos" in keywords:
        for t in range(steps):
            live[t + 1 :] &= ~(live[t] & (found.tokens[t] == 1))
    k1, k2 = call.periods
    torch.manual_seed(call.seed + 1)
    losses, divisor, logits = decode(
        call.decoder, call.targets, found.inputs, live,
        windows=None if k2 is None else (k1 or k2, k2), class_weight=keywords.get("class_weight"),
        **{name: keywords[name] for name in ("ignore_index", "label_smoothing", "z_loss")},
    )  # fmt: skip
    return Truth(live, losses, divisor, logits)


def assert_rows_end(call: Call, found: Found, truth: Truth) -> None:
    """A row that has ended says and is fed nothing but padding."""
    assert torch.equal(found.lengths, truth.live.sum(0))
    assert (found.tokens[~truth.live] == call.pad).all()
    assert (found.inputs[~truth.live] == call.pad).all()


def assert_fed(call: Call, found: Found, truth: Truth) -> None:
    """Where rows live, the most probable word is said, and what feedback asks for is fed."""
    live = truth.live
    if call.feedback != "sample":
        assert torch.equal(found.tokens[live], truth.logits.argmax(-1)[live])
    teacher = torch.where(call.ignored, call.pad, call.targets)[:-1]
    following = teacher if call.feedback in ("teacher", "all-teacher") else found.tokens[:-1]
    if call.mask is not None:
        following = torch.where(call.mask[1:], teacher, found.tokens[:-1])
    if call.feedback != "scheduled":
        assert torch.equal(found.inputs[1:], following.where(live[1:], torch.tensor(call.pad)))


def reduced(call: Call, truth: Truth) -> torch.Tensor:
    """The sum of what decode_loss should return."""
    if call.keywords["reduction"] != "mean":
        return truth.losses.sum()
    divisor = call.keywords.get("num_items", truth.divisor)
    return truth.losses.sum() / divisor if divisor else truth.losses.sum() * 0


def assert_losses(call: Call, found: Found, truth: Truth) -> None:
    """Token by token, and as they are reduced; exactly zero where nothing counts."""
    each = truth.losses.detach()
    torch.testing.assert_close(found.token_losses, each, rtol=1e-11, atol=EXACT)
    total, expected = found.loss.sum().detach(), reduced(call, truth).detach()
    torch.testing.assert_close(total, expected, rtol=EXACT, atol=EXACT)
    assert (truth.live & ~call.ignored).any() or total == 0


def assert_gradients(
    call: Call, found: Found, truth: Truth, *, upstream: float, further: bool, twice: bool
) -> None:
    """Of the loss times `upstream`, with a loss on the last state too if `further`, and from the
    same graph again if `twice`."""
    decoder, truncated = call.decoder, call.periods[1] is not None
    total, expected = found.loss.sum(), reduced(call, truth)
    if call.keywords["reduction"] == "none":  # every token its own factor
        factors = torch.randn_like(truth.losses)
        total, expected = (found.loss * factors).sum(), (truth.losses * factors).sum()
    total, expected = total * upstream, expected * upstream
    if truncated:
        assert not any(s.requires_grad for s in leaves_of(found.state))
    elif further:
        torch.manual_seed(call.seed + 1)
        theirs = leaves_of(last_of(decoder, found.inputs, truth.live))
        for mine, its in zip(leaves_of(found.state), theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-11, atol=EXACT)
            factor = torch.randn_like(its)
            total, expected = total + (mine * factor).sum(), expected + (its * factor).sum()
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


@pytest.mark.filterwarnings("ignore:decode_loss. k1=5 has no effect without k2")
@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once(kind: str) -> None:
    @settings(max_examples=examples(50), deadline=None)
    @given(options=st.fixed_dictionaries(OPTIONS), backward=st.fixed_dictionaries(BACKWARD))
    def check(options: Model, backward: Model) -> None:
        call = drawn(kind, **options)
        found = run(call)
        truth = plain_loop(call, found)
        assert_rows_end(call, found, truth)
        assert_fed(call, found, truth)
        assert_losses(call, found, truth)
        assert_gradients(call, found, truth, **backward)

    check()


@pytest.mark.parametrize("kind", ["GRUCell", "LSTM"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_subset_of_frozen_parts(kind: str, reduction: str) -> None:
    for chosen in range(16):
        frozen = frozenset(part for i, part in enumerate(PARTS) if chosen >> i & 1)
        call = drawn(
            kind, layers=2, batch=3, steps=5, sizes=(5, 5), feedback="mask", ends="lengths",
            hole="some", smoothing=0.1, z_loss=0.1, weighted=True, reduction=reduction,
            periods=None, budget=4, tied=False, frozen=frozen, biases=(True, True),
            padding_idx=None, batch_first=False, dropout=0.0, given_state=True, seed=chosen,
        )  # fmt: skip
        found = run(call)
        truth = plain_loop(call, found)
        assert_rows_end(call, found, truth)
        assert_fed(call, found, truth)
        assert_losses(call, found, truth)
        assert_gradients(call, found, truth, upstream=2.0, further=True, twice=True)


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
