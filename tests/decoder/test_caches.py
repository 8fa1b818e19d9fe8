"""States that hold what has been read, such as a cache of keys, against each row by itself.

The oracle decodes one row at a time, in float64, only as far as it goes: nothing is frozen there.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import Decoder, relative_distance
from support.decoding import EXACT, raises
from torch import Tensor, nn

import accumext
from accumext.recurrence._states import leaves, map_tensors, tensors
from accumext.recurrence._truncation import windows as windows_of

SIZE, VOCABULARY, LONGEST = 4, 7, 12
EOS = 3


class Reader(nn.Module):
    """Attention over all inputs so far and a memory; keys and values are the state.

    `kind` says how they are kept: "growing" [B, n, H]; "time_major" [n, B, H]; "heads" [B, h, n,
    d], in a dict with a count of the whole batch; "own": a growing one that begins with None;
    "fixed" [B, N, H] with a count [B] of what is in it; "gru": a growing one beside a hidden state.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(SIZE, 3 * SIZE, dtype=torch.float64)
        self.gru = nn.GRUCell(SIZE, SIZE, dtype=torch.float64)

    def forward(self, x: Tensor, state: Any, memory: Tensor) -> tuple[Tensor, Any]:
        if self.kind == "gru":
            hidden, state = state
            x = hidden = self.gru(x, hidden)
        query, *new = self.project(x).chunk(3, -1)
        if self.kind in ("growing", "gru", "own"):
            new = [part[:, None] for part in new]
            state = new if state is None else [torch.cat(pair, 1) for pair in zip(state, new)]
            keys, values, state = *state, tuple(state)
        elif self.kind == "time_major":
            state = [torch.cat([cache, part[None]]) for cache, part in zip(state, new)]
            keys, values = (cache.transpose(0, 1) for cache in state)
        elif self.kind == "heads":
            parts = [part.view(-1, 2, 1, SIZE // 2) for part in new]
            kv = [torch.cat([state[name], part], 2) for name, part in zip("kv", parts)]
            state = {"k": kv[0], "v": kv[1], "n": state["n"] + 1}
            keys, values = (cache.transpose(1, 2).flatten(2) for cache in kv)
        else:
            kv, count = state
            here = (torch.arange(kv[0].shape[1]) == count[:, None])[:, :, None]
            kv = [torch.where(here, part[:, None], cache) for cache, part in zip(kv, new)]
            keys, values = kv
            state = (kv, count + 1)
        scores = torch.einsum("bh,bnh->bn", query, torch.cat([memory, keys], 1))
        if self.kind == "fixed":
            unset = torch.arange(keys.shape[1]) > count[:, None]
            scores = scores.masked_fill(F.pad(unset, (memory.shape[1], 0)), -torch.inf)
        read = torch.einsum("bn,bnh->bh", scores.softmax(-1), torch.cat([memory, values], 1))
        return torch.tanh(read + x), (hidden, state) if self.kind == "gru" else state


KINDS = ["growing", "time_major", "heads", "own", "fixed", "gru"]
BATCH_DIM = {"time_major": 1}


def first_state(kind: str, batch: int, held: int) -> Any:
    """An initial state with `held` entries, for which gradients are taken."""
    shape = {"time_major": (held, batch, SIZE), "heads": (batch, 2, held, SIZE // 2)}
    shape["fixed"] = (batch, held + LONGEST, SIZE)
    kv = [
        torch.randn(shape.get(kind, (batch, held, SIZE)), dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    ]
    hidden = torch.randn(batch, SIZE, dtype=torch.float64, requires_grad=True)
    states = {
        "own": None, "gru": (hidden, kv), "fixed": (kv, torch.full((batch,), held)),
        "heads": {"k": kv[0], "v": kv[1], "n": torch.tensor(held)},
    }  # fmt: skip
    return states.get(kind, kv)


def make_parts(kind: str, batch: int, held: int) -> Decoder:
    memory = torch.randn(batch, 2, SIZE, dtype=torch.float64, requires_grad=True)
    embedding = nn.Embedding(VOCABULARY, SIZE, dtype=torch.float64)
    cell, head = Reader(kind), nn.Linear(SIZE, VOCABULARY, dtype=torch.float64)
    state = first_state(kind, batch, held)
    leaves = [p for module in (embedding, cell, head) for p in module.parameters()]
    leaves += [memory, *(t for t in tensors(state) if t.requires_grad)]
    return Decoder(embedding, cell, head, state, cell, (memory,), leaves)


def row_of(state: Any, row: int, batch_dim: int) -> Any:
    """The state of one row, in a batch of one."""
    return map_tensors(
        lambda leaf: leaf if leaf.dim() == 0 else leaf.narrow(batch_dim, row, 1), state
    )


def alone(
    parts: Decoder,
    row: int,
    inputs: Tensor,
    resets: Tensor | None,
    spans: list[tuple[int, int, int]],
) -> tuple[Tensor, Any]:
    """Logits [n, V] of a row by itself, whose steps [counting, end) of each window flow back to its
    begin; and its last state."""
    initial = row_of(parts.state, row, BATCH_DIM.get(parts.cell.kind, 0))
    memory = parts.context[0][row : row + 1]
    starts, found = {0: initial}, []
    state = initial
    for begin, counting, end in spans:
        if counting >= len(inputs):
            break
        state = starts[begin]
        for t in range(begin, min(end, len(inputs))):
            if t not in starts:
                starts[t] = map_tensors(Tensor.detach, state)
            if resets is not None and t > 0 and resets[t, row]:
                state = initial
            output, state = parts.cell(parts.embedding(inputs[t : t + 1]), state, memory)
            if t >= counting:
                found.append(parts.head(output))
        starts.setdefault(end, map_tensors(Tensor.detach, state))
    empty = inputs.new_zeros(0, VOCABULARY, dtype=torch.float64)
    return torch.cat([empty, *found]), state


def check_state(found: Any, expected: Any, row: int, batch_dim: int) -> None:
    """A row's state is what it is by itself; a tensor that grew on has zeros behind it."""
    for ours, own in zip(leaves(row_of(found, row, batch_dim)), leaves(expected), strict=True):
        if isinstance(own, Tensor) and own.dim() > 0:
            behind = [(0, b - a) for a, b in zip(own.shape, ours.shape, strict=True)]
            padded = F.pad(own, [n for pair in reversed(behind) for n in pair])
            torch.testing.assert_close(ours, padded, rtol=EXACT, atol=EXACT)


FEEDBACKS = ["teacher", "greedy", "sample", "mask"]
CUTS = [None, (1, 1), (3, 3), (1, 2), (2, 5), (4, 20)]


def by_decode_loss(
    parts: Decoder, targets: Tensor, call: dict[str, Any]
) -> tuple[Any, list[Tensor]]:
    """The results, and the gradients of the summed loss."""
    call = {**call, "context": parts.context, "reduction": "sum"}
    modules = (parts.embedding, parts.cell, parts.head)
    out = accumext.decode_loss(*modules, targets, parts.state, **call)
    return out, parts.gradients(out.loss)


def by_tbptt(parts: Decoder, targets: Tensor, call: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    def step(token: Tensor, state: Any, memory: Tensor) -> tuple[Tensor, Any]:
        output, state = parts.cell(parts.embedding(token), state, memory)
        return parts.head(output), state

    def criterion(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="sum")

    options = {**call, "context": parts.context, "reduction": "sum", "criterion": criterion}
    result = accumext.tbptt(step, targets, parts.state, **options)
    fed = targets if call["feedback"] == "teacher" else result.tokens
    inputs = torch.cat([torch.zeros_like(fed[:1]), fed[:-1]])
    lengths = call.get("lengths", torch.full((targets.shape[1],), len(targets)))
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts.leaves]
    return SimpleNamespace(**result._asdict(), inputs=inputs, lengths=lengths), found


@pytest.mark.timeout(0)  # hours, every night
@settings(max_examples=examples(500, nightly=20_000), deadline=None)
@given(
    way=st.sampled_from([by_decode_loss] * 4 + [by_tbptt]),
    kind=st.sampled_from(KINDS),
    held=st.sampled_from([0, 0, 1, 5]),
    feedback=st.sampled_from(FEEDBACKS),
    limited=st.booleans(),
    stops=st.booleans(),
    resetting=st.booleans(),
    cuts=st.sampled_from(CUTS),
    budget=st.sampled_from([None, VOCABULARY * 8 * 10]),
    batch=st.integers(1, 4),
    steps=st.integers(1, LONGEST),
    seed=st.integers(0, 2**30),
)
def test_any_configuration(
    way, kind, held, feedback, limited, stops, resetting, cuts, budget, batch, steps, seed
):
    torch.manual_seed(seed)
    parts, batch_dim = make_parts(kind, batch, held), BATCH_DIM.get(kind, 0)
    targets = torch.randint(VOCABULARY, (steps, batch))
    call: dict[str, Any] = {"feedback": feedback, "batch_dim": batch_dim}
    if way is by_tbptt:  # which has no rows that stop, and its windows in any case
        stops = resetting = False
        call["feedback"] = "teacher" if feedback == "teacher" else "greedy"
        cuts = cuts or (20, 20)
    else:
        targets[steps // 2, 0] = -100
        call["memory_budget"] = budget
        if feedback == "mask":
            call["feedback"] = torch.rand(steps, batch) < 0.5
    if limited:
        call["lengths"] = torch.randint(steps + 1, (batch,))
    if stops:
        call["eos"] = EOS
    if resetting and kind == "fixed":  # others have no state of the same shape to go back to
        call["resets"] = torch.rand(steps, batch) < 0.3
    if cuts is not None:
        call["k1"], call["k2"] = cuts
    out, gradients = way(parts, targets, call)

    spans = [(0, 0, steps)] if cuts is None else windows_of(steps, *cuts)
    total = parts.head.bias.sum() * 0
    for row, length in enumerate(out.lengths.tolist()):
        logits, state = alone(parts, row, out.inputs[:length, row], call.get("resets"), spans)
        total = total + F.cross_entropy(logits, targets[:length, row], reduction="sum")
        tokens = out.tokens[:length, row]
        if call["feedback"] in ("teacher", "greedy"):
            assert torch.equal(tokens, logits.argmax(-1))
        limit = int(call["lengths"][row]) if limited else steps
        ended = (tokens == EOS).nonzero().flatten().tolist() if stops else []
        assert length == min([limit, *(t + 1 for t in ended)])
        if not (kind == "own" and length == 0):
            check_state(out.state, state, row, batch_dim)
    torch.testing.assert_close(out.loss.detach(), total.detach(), rtol=EXACT, atol=EXACT)
    assert relative_distance(gradients, parts.gradients(total)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_generation(kind, search):
    """A batch says what each row says by itself."""
    for seed in range(2):
        torch.manual_seed(seed)
        parts, batch_dim = make_parts(kind, 3, 2 * (seed % 2)), BATCH_DIM.get(kind, 0)
        call: dict[str, Any] = {"max_length": 9, "eos": EOS, "search": search}
        call["batch_dim"] = batch_dim
        prompt = torch.randint(VOCABULARY, (2, 3))
        modules = (parts.embedding, parts.cell, parts.head)
        out = accumext.generate(*modules, parts.state, context=parts.context, prompt=prompt, **call)
        for row in range(3):
            state = row_of(parts.state, row, batch_dim)
            memory, column = parts.context[0][row : row + 1], prompt[:, row : row + 1]
            own = accumext.generate(*modules, state, context=(memory,), prompt=column, **call)
            length = len(own.tokens)
            assert torch.equal(out.tokens[:length, row], own.tokens[:, 0])
            torch.testing.assert_close(out.scores[row], own.scores[0], rtol=EXACT, atol=EXACT)
            inputs = torch.cat([column[:, 0], own.tokens.view(length, -1)[:-1, 0]])
            n = int(out.lengths[row].flatten()[0])
            _, last = alone(parts, row, inputs[: n + 1], None, [(0, 0, LONGEST)])
            check_state(out.state, last, row, batch_dim)


SHAPES = "cell must return a state of the shapes of the one before, or longer in one dimension"
ENTRIES = "cell must return a state with the 0 entries of the one before, got 1"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (lambda x, s: (x, s[:, 1:]), SHAPES),  # shorter
        (lambda x, s: (x, F.pad(s, (0, 1, 0, 1))), SHAPES),  # longer twice
        (lambda x, s: (x, s.flatten(1)), SHAPES),
        (lambda x, seen: (x, [*seen, x]), ENTRIES),
    ],
)
def test_other_changes_of_shape_are_refused_where_rows_end(cell, text):
    parts = make_parts("growing", 3, 0)
    state: Any = [] if text == ENTRIES else torch.zeros(3, 2, SIZE, dtype=torch.float64)
    call = (parts.embedding, cell, parts.head, torch.zeros(4, 3, dtype=torch.int64), state)
    if text == ENTRIES:
        accumext.decode_loss(*call, feedback="greedy")
    for options in ({"eos": 1}, {"lengths": [1, 2, 3]}):
        with raises(ValueError, text):
            accumext.decode_loss(*call, feedback="greedy", **options)


def test_rows_cannot_be_reset_to_less_than_the_others_hold():
    parts = make_parts("growing", 3, 0)
    resets = torch.zeros(4, 3, dtype=torch.bool)
    resets[2, 1] = True
    call = (parts.embedding, parts.cell, parts.head, torch.zeros(4, 3, dtype=torch.int64))
    with raises(ValueError, "cell must keep the shapes of its state if rows are reset, got"):
        accumext.decode_loss(
            *call, parts.state, feedback="greedy", context=parts.context, resets=resets
        )
