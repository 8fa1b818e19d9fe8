"""The tokens of a decoder, against plain loops over log_softmax and lists of hypotheses."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import CELLS, Decoder, decode, make_decoder
from support.decoding import (
    BATCH,
    EXACT,
    VOCABULARY,
    lstm_runs_in_autocast,
    parts_of,
    wrapped,
)
from support.samples import assert_drawn, kept_shares
from support.tensors import assert_equal
from torch import Tensor

import accumext

MODES = st.sampled_from(["greedy", "sample", "top_k", "top_p", "both"])


SEARCHES = ["greedy", "sample", "beam"]


def say(decoder: Decoder, cell: Any = None, state: Any = None, **call: Any) -> Any:
    cell = decoder.cell if cell is None else cell
    state = decoder.state if state is None else state
    return accumext.generate(decoder.embedding, cell, decoder.head, state, **call)


def rows_of(state: Any, rows: list[int]) -> Any:
    """These rows of a state, whose batch is the last dimension but one."""
    if isinstance(state, tuple):
        return tuple(rows_of(s, rows) for s in state)
    return state[..., rows, :].detach()


def plain_step(decoder: Decoder, token: int, state: Any) -> tuple[Tensor, Any]:
    """Log-probabilities [V] after a token of one row."""
    with torch.no_grad():
        output, state = decoder.step(decoder.embedding(torch.tensor([token])), state)
        return decoder.head(output)[0].log_softmax(-1), state


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(sorted(CELLS)),
    called=st.booleans(),
    mode=MODES,
    eos=st.sampled_from([None, 2]),
    limited=st.booleans(),
    prompted=st.integers(0, 3),
    batch_first=st.booleans(),
    steps=st.sampled_from([1, 5, 40]),
    seed=st.integers(0, 2**20),
)
def test_greedy_and_samples_are_the_plain_loops(
    kind, called, mode, eos, limited, prompted, batch_first, steps, seed
):
    torch.manual_seed(seed)
    decoder = make_decoder(kind)
    options: dict[str, Any] = {"search": "greedy"}
    filters = {"top_k": 4 if mode in ("top_k", "both") else None}
    filters["top_p"] = 0.6 if mode in ("top_p", "both") else None
    if mode != "greedy":
        options = {"search": "sample", "temperature": 1.5, **filters}
    limits = torch.randint(0, steps + 1, (BATCH,)) if limited else torch.full((BATCH,), steps)
    limits[0] = steps
    fed = torch.randint(VOCABULARY, (max(1, prompted), BATCH))
    if prompted:
        options["prompt"] = fed.t() if batch_first else fed
    out = say(
        decoder, wrapped(decoder) if called else None, max_length=steps, start=fed[0], eos=eos,
        lengths=limits if limited else None,
        generator=torch.Generator().manual_seed(seed), batch_first=batch_first,
        batch_dim=int(CELLS[kind][1] is not None), **options,
    )  # fmt: skip
    tokens, log_probs = out.tokens, out.log_probs
    if batch_first:
        tokens, log_probs = tokens.t(), log_probs.t()
    assert len(tokens) == (int(out.lengths.max()) if limited or eos is not None else steps)
    live = torch.arange(len(tokens))[:, None] < limits
    for t in range(len(tokens) if eos is not None else 0):
        live[t + 1 :] &= ~(live[t] & (tokens[t] == eos))
    assert torch.equal(out.lengths, live.sum(0))
    assert not tokens[~live].any()  # the padding token is 0
    assert not log_probs[~live].any()

    inputs, states = torch.cat([fed, tokens[:-1]]), []
    running = torch.arange(len(inputs))[:, None] < len(fed) - 1 + out.lengths
    _, _, logits = decode(decoder, inputs, inputs, running, states=states)
    expected = logits[len(fed) - 1 :].log_softmax(-1)
    of_tokens = expected.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(log_probs[live], of_tokens[live], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out.scores, log_probs.sum(0))
    if mode == "greedy":
        assert torch.equal(tokens[live], expected.argmax(-1)[live])
    else:
        numbers = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(steps, BATCH, dtype=torch.float64, generator=numbers)[: len(tokens)]
        shares = kept_shares(expected, **filters, temperature=1.5)
        assert_drawn(tokens[live], shares[live], uniforms[live], EXACT)
    for part, its in zip(parts_of(out.state), parts_of(states[-1]), strict=True):
        torch.testing.assert_close(part, its.detach(), rtol=EXACT, atol=EXACT)
    assert not log_probs.requires_grad


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast", "autocast, callable"])
def test_the_same_as_decode_loss_says(precision, search):
    """Bit for bit, over several chunks of steps, in half precision and autocast, too."""
    rounds = "autocast" in precision
    called = precision == "autocast, callable"
    for kind in ("gru_cell", "lstm_cell" if called and not lstm_runs_in_autocast() else "lstm"):
        decoder = make_decoder(
            kind, 301, 24, dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32
        )
        cell = decoder.step if "callable" in precision else decoder.cell
        call = {"batch_dim": int(kind == "lstm"), "eos": 5}
        if search == "sample":
            call["temperature"] = 0.8
        parts, results = (decoder.embedding, cell, decoder.head), []
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            for tell, count, way in (
                (accumext.generate, {"max_length": 75, "beams": 1}, {"search": search}),
                (
                    partial(accumext.decode_loss, targets=None), {"steps": 75},
                    {"feedback": "sample" if search == "sample" else "greedy"},
                ),
            ):  # fmt: skip
                generator = torch.Generator().manual_seed(1)
                results.append(
                    tell(*parts, state=decoder.state, generator=generator, **call, **count, **way)
                )
        said, out = results
        longest = len(said.tokens)
        assert torch.equal(said.lengths.view(-1), out.lengths)
        assert torch.equal(said.tokens.view(longest, BATCH), out.tokens[:longest])
        torch.testing.assert_close(said.log_probs.view(longest, BATCH), -out.token_losses[:longest])


near = partial(math.isclose, rel_tol=EXACT, abs_tol=EXACT)  # scores that rounding may exchange


def plain_beam(
    decoder: Decoder, b: int, start: int, limit: int, eos: int | None, beams: int, penalty: float
) -> list[tuple[float, list[int], list[float], Any]]:
    """The definition, with lists: hypotheses as (score, tokens, log-probabilities, state)."""
    live = [(0.0, [], [], rows_of(decoder.state, [b]))]
    kept: list[tuple[float, list[int], list[float], Any]] = []
    for step in range(limit):
        found = []
        for total, tokens, parts, state in live:
            log_probs, new = plain_step(decoder, tokens[-1] if tokens else start, state)
            for token, log_prob in enumerate(log_probs.tolist()):
                said = [*tokens, token], [*parts, log_prob], new
                found.append((total + log_prob, *said))
        found.sort(key=lambda one: -one[0])
        assume(len(found) <= beams or not near(found[beams - 1][0], found[beams][0]))
        for total, tokens, *rest in found[:beams]:
            if tokens[-1] == eos or step + 1 == limit:
                kept.append((total / (step + 1) ** penalty, tokens, *rest))
        kept.sort(key=lambda one: -one[0])
        assume(len(kept) <= beams or not near(kept[beams - 1][0], kept[beams][0]))
        kept = kept[:beams]
        live = [one for one in found if one[1][-1] != eos]
        assume(len(live) <= beams or not near(live[beams - 1][0], live[beams][0]))
        live = live[:beams]
        if len(kept) == beams and live:
            ahead = range(step + 2, limit + 1)
            best = max((live[0][0] / n**penalty for n in ahead), default=float("-inf"))
            if kept[-1][0] >= best:
                break
    return kept


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(sorted(CELLS)),
    called=st.booleans(),
    beams=st.sampled_from([1, 2, 3, 6, 40]),
    penalty=st.sampled_from([0.0, 0.7, 1.0, -0.5]),
    eos=st.sampled_from([None, 2]),
    limited=st.booleans(),
    steps=st.integers(0, 7),
    seed=st.integers(0, 2**20),
)
@example("rnn_relu_cell", False, 40, 0.0, 2, False, 6, 4607)  # scores that are tied up to rounding
def test_beam_search_is_the_definition(kind, called, beams, penalty, eos, limited, steps, seed):
    torch.manual_seed(seed)
    decoder = make_decoder(kind, vocabulary=9)
    cell = wrapped(decoder) if called else None
    limits = torch.randint(0, steps + 1, (BATCH,)) if limited else torch.full((BATCH,), steps)
    out = say(
        decoder, cell, max_length=steps, eos=eos, start=1,
        search="beam", beams=beams, length_penalty=penalty,
        lengths=limits if limited else None, batch_dim=int(CELLS[kind][1] is not None),
    )  # fmt: skip
    assert out.tokens.shape == (int(out.lengths.max()), BATCH, beams)
    for b in range(BATCH):
        expected = plain_beam(decoder, b, 1, int(limits[b]), eos, beams, penalty)
        told = set[tuple[int, ...]]()
        for k, (score, *_) in enumerate(expected):
            length = int(out.lengths[b, k])
            told.add(tokens := tuple(out.tokens[:length, b, k].tolist()))
            alike = {tuple(words): more for one, words, *more in expected if near(one, score)}
            assert tokens in alike
            parts, state = alike[tokens]
            torch.testing.assert_close(
                out.log_probs[:length, b, k], torch.tensor(parts).double(), rtol=1e-6, atol=1e-6
            )
            torch.testing.assert_close(float(out.scores[b, k]), score, rtol=EXACT, atol=EXACT)
            assert not out.tokens[length:, b, k].any()
            assert not out.log_probs[length:, b, k].any()
            if k == 0:
                torch.testing.assert_close(rows_of(out.state, [b]), state, rtol=EXACT, atol=EXACT)
        assert len(told) == len(expected)
        if limits[b] == 0:
            assert out.scores[b, 0] == 0
        assert (out.scores[b, max(1, len(expected)) :] == -torch.inf).all()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("ends", [{}, {"eos": 4}, {"lengths": [5, 2, 0]}], ids=str)
def test_a_cell_may_write_into_its_state(search, ends):
    """A cache, such as that of attention: rows that have ended keep what they had."""
    decoder = make_decoder("gru_cell")

    def cell(x: Tensor, state: Any, written: bool) -> tuple[Tensor, Any]:
        h, cache, count = state
        h = decoder.cell(x, h)
        if written:
            count += 1
        else:
            cache, count = cache.clone(), count + 1
        cache[torch.arange(len(h)), count - 1] = h
        return h + cache.sum(1), (h, cache, count)

    mine = (
        decoder.state.detach(), torch.zeros(BATCH, 9, 5, dtype=torch.float64),
        torch.zeros(BATCH, dtype=torch.int64),
    )  # fmt: skip
    before, found = [part.clone() for part in mine], []
    for written in (False, True):
        generator, way = torch.Generator().manual_seed(3), partial(cell, written=written)
        out = say(decoder, way, mine, search=search, generator=generator, max_length=8, **ends)
        assert torch.equal(out.state[2], out.lengths[:, 0] if search == "beam" else out.lengths)
        found.append(out)
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert_equal(found[0].state, found[1].state)
    assert_equal(mine, before)


@pytest.mark.parametrize("search", ["greedy", "beam"])
@pytest.mark.parametrize("context", [False, True])
def test_a_number_of_all_rows_may_be_written_too(search, context):
    """Every hypothesis has read it as it was."""
    decoder, found = make_decoder("gru_cell"), []
    memory = torch.randn(BATCH, 5, dtype=torch.float64)

    def cell(x: Tensor, state: Any, *memory: Tensor, written: bool) -> tuple[Tensor, Any]:
        h, count = state
        count = count.add_(1) if written else count + 1
        h = decoder.cell(x, h) + torch.sin(count) * (memory[0] if memory else 1)
        return h, (h, count)

    for written in (False, True):
        state = (decoder.state, torch.zeros((), dtype=torch.float64))
        out = say(
            decoder, partial(cell, written=written), state, max_length=9, search=search,
            beams=3 if search == "beam" else 1, eos=2, lengths=[9, 4, 1],
            context=(memory,) if context else (),
        )  # fmt: skip
        found.append((out.tokens, out.scores, out.state[1]))
    assert_equal(*found)


@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_a_cell_may_keep_its_state_in_a_buffer(lengths):
    decoder, buffer = make_decoder("gru_cell"), torch.empty(BATCH, 5, dtype=torch.float64)

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return (buffer.copy_(decoder.cell(x, h)),) * 2

    out, expected = (
        say(decoder, way, max_length=8, lengths=lengths) for way in (cell, wrapped(decoder))
    )
    assert torch.equal(out.tokens, expected.tokens)
    assert torch.equal(out.state, expected.state)


def test_it_ends_where_every_row_has_ended():
    """Whatever the limit is, memory and time are those of what is said."""
    decoder, calls = make_decoder("gru_cell"), []
    decoder.head.bias.data[4] = 100.0

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return decoder.step(x, h)

    for search in SEARCHES:
        for way in (None, cell):
            calls.clear()
            out = say(decoder, way, max_length=10**12, eos=4, search=search, beams=1)
            assert (out.lengths == 1).all()
            assert len(calls) == (way is cell)


def test_in_inference_mode_under_autocast_and_of_no_rows():
    decoder = make_decoder("gru_cell", dtype=torch.float32)
    nobody = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    for search in SEARCHES:
        for state, start in ((decoder.state, 0), nobody):
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                out = say(decoder, None, state, max_length=5, start=start, search=search)
            assert out.log_probs.dtype == torch.float32
            assert out.tokens.shape[1] == len(state)
            assert len(out.tokens) == 5 or not len(state)


def test_a_beam_of_equals_takes_the_first():
    decoder = make_decoder("gru_cell")
    for parameter in decoder.head.parameters():
        parameter.data.zero_()
    out = say(decoder, max_length=2, search="beam", beams=3)
    assert out.tokens[:, 0].tolist() == [[0, 0, 0], [0, 1, 2]]


def test_forbidden_words_are_in_no_hypothesis():
    """And where nothing but the end may be said, no hypothesis is left."""
    decoder = make_decoder("gru_cell", vocabulary=4)
    decoder.head.bias.data[1:] = -torch.inf
    out = say(decoder, max_length=3, search="beam", beams=2)
    assert out.scores.tolist() == [[0.0, -torch.inf]] * BATCH
    assert out.lengths.tolist() == [[3, 0]] * BATCH
    out = say(decoder, max_length=10**12, search="beam", beams=2, eos=0)
    assert out.lengths.tolist() == [[1, 0]] * BATCH


@pytest.mark.parametrize("search", SEARCHES)
def test_logits_that_are_nan_give_scores_that_are(search):
    """And tokens, as many as there may be."""
    decoder = make_decoder("gru_cell", vocabulary=4)
    decoder.head.bias.data[2] = torch.nan
    out = say(decoder, max_length=3, search=search)
    assert len(out.tokens) == 3
    assert out.scores.isnan().all()
    assert (out.lengths == 3).all()


def test_a_number_of_all_rows_counts_every_step_of_a_beam():
    """Also the last one, in which no hypothesis ends, and none can become better."""
    calls: list[int] = []
    # Two of them end, with 0.5 and 0.3 * 0.45; the best that lives then has 0.3 * 0.54 * 0.33.
    rows = [0.5, 0.3, 0.19, 0.01], [0.45, 0.54, 0.008, 0.002], [0.01, 0.33, 0.33, 0.33]
    chances = torch.tensor(rows)

    def cell(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return chances[count].log().expand(len(x), 4), count + 1

    out = accumext.generate(
        torch.zeros(4, 2), cell, (torch.eye(4), None), torch.tensor(0), start=torch.tensor([1, 1]),
        max_length=9, search="beam", beams=2, eos=0,
    )  # fmt: skip
    assert out.lengths.tolist() == [[1, 2]] * 2
    assert out.state == len(calls) == 3


def test_the_context_says_how_many_rows_there_are():
    decoder, context = make_decoder("gru_cell"), (torch.zeros(6, 5, dtype=torch.float64),)
    decoder.state = None
    out = say(decoder, lambda x, state, memory: (x + memory, state), max_length=2, context=context)
    assert out.tokens.shape == (2, 6)


def test_the_state_of_the_result_is_the_callers():
    decoder = make_decoder("gru_cell")
    before = decoder.state.detach().clone()
    for search in SEARCHES:
        for cell in (None, wrapped(decoder)):
            out = say(decoder, cell, max_length=0, search=search)
            assert len(out.tokens) == 0
            out.state.zero_()
    assert torch.equal(decoder.state, before)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", ["gru_cell", "lstm"])
def test_states_of_half_precision_are_rounded_in_the_end(search, kind):
    """A prompt and what follows are as one: greedy tokens, given as a prompt, change nothing."""
    decoder = make_decoder(kind, 301, 24, 3, torch.bfloat16)
    whole = say(decoder, max_length=12, search="beam", beams=1, start=1)
    said = torch.cat([torch.ones(1, 3, dtype=torch.int64), whole.tokens[:5, :, 0]])
    top_k = 1 if search == "sample" else None
    rest = say(decoder, max_length=7, prompt=said, search=search, beams=1, top_k=top_k)
    assert torch.equal(rest.tokens.view(7, 3), whole.tokens[5:, :, 0])
    torch.testing.assert_close(rest.log_probs.view(7, 3), whole.log_probs[5:, :, 0])
    for part, other in zip(parts_of(rest.state), parts_of(whole.state), strict=True):
        assert part.dtype == torch.bfloat16
        torch.testing.assert_close(part, other)


V, ONE = VOCABULARY, torch.zeros(1)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_length": -1}, ValueError, "max_length must be at least 0, got -1"),
    ({"search": "best"}, ValueError, "search must be one of 'greedy', 'sample', 'beam'"),
    ({"eos": 13}, ValueError, "eos must be in [0, 13), got 13"),
    ({"temperature": 0.0}, ValueError, "temperature must be greater than 0 and finite, got 0.0. s"),
    ({"length_penalty": float("inf")}, ValueError, "length_penalty must be finite, got inf"),
    (
        {"length_penalty": 400.0, "search": "beam"},
        ValueError,
        "length_penalty must have 7 ** length",
    ),
    ({"top_k": 3}, ValueError, "top_k must be None unless search is 'sample', got 3"),
    ({"top_p": 0.3, "search": "beam"}, ValueError, "top_p must be None unless search is 'sample'"),
    ({"beams": 3}, ValueError, "beams must be left at 4 unless search is 'beam', got 3"),
    (
        {"temperature": 0.5, "search": "beam"},
        ValueError,
        "temperature must be left at 1.0 unless search is 'sample', got 0.5",
    ),
    ({"top_k": 0, "search": "sample"}, ValueError, "top_k must be at least 1, got 0"),
    ({"top_p": 0.0, "search": "sample"}, ValueError, "top_p must be in (0, 1], got 0.0"),
    ({"beams": 0, "search": "beam"}, ValueError, "beams must be at least 1, got 0"),
    ({"prompt": ONE.long()}, ValueError, "prompt must have shape [P, B], got [1]"),
    ({"prompt": torch.zeros(0, 3).long()}, ValueError, "prompt must have at least one token"),
    ({"prompt": torch.full((2, 3), 13)}, ValueError, "prompt must be in [0, 13), got 13"),
    ({"start": 13}, ValueError, "start must be in [0, 13), got 13"),
    ({"lengths": [1, 2]}, ValueError, "state must have shape [2, 5], got [3, 5]"),
    ({"lengths": [1, 2, 9]}, ValueError, "lengths must be in [0, 6], got [1, 2, 9]"),
    ({"context": (ONE,)}, ValueError, "context must be empty for one of torch's cells"),
]


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=lambda value: str(value)[:60])
def test_what_arguments_must_be(change, kind, text):
    decoder = make_decoder("gru_cell")
    before = torch.get_rng_state()
    with pytest.raises(kind) as caught:
        say(decoder, **{"max_length": 6, **change})
    assert str(caught.value).startswith(f"generate: {text}")
    assert torch.equal(torch.get_rng_state(), before)
