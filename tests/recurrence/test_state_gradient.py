"""The factors and bounds of a state's gradient, and rows that have ended."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from torch import Tensor, nn

import accumext
from accumext.recurrence import _truncation

STEPS, BATCH, VOCABULARY = 5, 3, 13
EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
KINDS = ["gru_cell", "lstm_cell", "rnn_cell", "gru", "lstm"]


def decoder_and_targets(kind: str, steps: int = STEPS) -> tuple[Decoder, Tensor]:
    decoder = make_decoder(kind)
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    targets[steps // 2, 0] = -100
    return decoder, targets


def run(decoder: Decoder, targets: Tensor, cell: Any = None, **call: Any) -> accumext.DecodeOutput:
    call = {"feedback": "teacher", **call}
    cell = decoder.cell if cell is None else cell
    return accumext.decode_loss(
        decoder.embedding, cell, decoder.head, targets, decoder.state, **call
    )


def wrapped(decoder: Decoder) -> Any:
    """The same cell as a callable, with the batch in dimension 0 of its state."""
    return lambda x, state: decoder.step(x, state)


def fixed_cuts(monkeypatch: pytest.MonkeyPatch, factors: Tensor) -> None:
    monkeypatch.setattr(_truncation, "random_cuts", lambda *_, **__: factors)


@pytest.mark.parametrize("mean", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_expectation_over_all_cuts_is_the_exact_gradient(
    kind: str, mean: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, targets = decoder_and_targets(kind)
    exact = decoder.gradients(run(decoder, targets).loss)
    cut = 1 / mean
    expected = [torch.zeros_like(g) for g in exact]
    spread = 0.0
    for pattern in itertools.product([False, True], repeat=STEPS - 1):
        coins = torch.tensor([False, *pattern])[:, None].expand(STEPS, BATCH)
        factors = torch.full((STEPS, BATCH), 1 / (1 - cut), dtype=torch.float64)
        factors[coins] = 0
        factors[0] = 1
        fixed_cuts(monkeypatch, factors)
        out = run(decoder, targets, truncation="random", k2=mean)
        gradients = decoder.gradients(out.loss)
        chance = cut ** sum(pattern) * (1 - cut) ** (STEPS - 1 - sum(pattern))
        for total, gradient in zip(expected, gradients, strict=True):
            total += chance * gradient
        spread = max(spread, relative_distance(gradients, exact))
    assert relative_distance(expected, exact) < EXACT
    assert spread > 1e-3  # or the patterns would all be the same


def test_cuts_are_drawn_per_row_with_the_given_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    for mean in (2, 4):
        factors = _truncation.random_cuts(
            400, 50, mean, torch.zeros((), dtype=torch.float64), generator
        )
        assert (factors[0] == 1).all()
        assert set(factors[1:].unique().tolist()) == {0.0, 1 / (1 - 1 / mean)}
        share = (factors[1:] == 0).double()
        # 20,000 coins: 6 standard deviations are below 0.022
        assert abs(share.mean() - 1 / mean) < 0.022
        # a row's own, and a step's own: 400 or 50 coins, 6 standard deviations
        assert (share.mean(0) - 1 / mean).abs().max() < 0.15
        assert (share.mean(1) - 1 / mean).abs().max() < 0.43
        assert share.std(0).min() > 0
        assert share.std(1).min() > 0


@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 0, 4])], ids=["whole", "lengths"])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell", "rnn_cell"])
def test_the_same_coins_cut_a_callable_alike(kind: str, lengths: Tensor | None) -> None:
    decoder, targets = decoder_and_targets(kind, 9)
    results = []
    for cell in (decoder.cell, wrapped(decoder)):
        generator = torch.Generator().manual_seed(3)
        results.append(
            run(
                decoder,
                targets,
                cell,
                truncation="random",
                k2=3,
                generator=generator,
                lengths=lengths,
                state_grad_clip=0.01,
            )
        )
    native, autograd = results
    gradients = [decoder.gradients(out.loss) for out in results]
    torch.testing.assert_close(native.loss, autograd.loss, rtol=EXACT, atol=0)
    assert relative_distance(*gradients) < EXACT
    assert relative_distance(gradients[0], decoder.gradients(run(decoder, targets).loss)) > 1e-3
    assert not any(s.requires_grad for s in _parts(native.state))


def _parts(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


def clipped_by_hand(
    decoder: Decoder, targets: Tensor, inputs: Tensor, bound: float, upstream: float
) -> list[Tensor]:
    """A plain loop whose states, before every step, have a hook that clamps."""

    def bounded(state: Tensor) -> Tensor:
        state = state * 1
        state.register_hook(lambda g: g.clamp(-bound * abs(upstream), bound * abs(upstream)))
        return state

    step = decoder.step

    def clipped(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        pair = isinstance(state, tuple)
        return step(x, tuple(map(bounded, state)) if pair else bounded(state))

    decoder.step = clipped
    try:
        losses, divisor, _ = decode(decoder, targets, inputs)
        return decoder.gradients(losses.sum() / divisor * upstream)
    finally:
        decoder.step = step


@pytest.mark.parametrize("upstream", [1.0, 65536.0, -0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_clip_is_that_of_a_loop_with_hooks(kind: str, upstream: float) -> None:
    decoder, targets = decoder_and_targets(kind, 8)
    free = decoder.gradients(run(decoder, targets).loss * upstream)
    bound = 2e-3
    cells = [decoder.cell] if kind in ("gru", "lstm") else [decoder.cell, wrapped(decoder)]
    for cell in cells:
        out = run(decoder, targets, cell, state_grad_clip=bound)
        expected = clipped_by_hand(decoder, targets, out.inputs, bound, upstream)
        actual = decoder.gradients(out.loss * upstream)
        assert relative_distance(actual, expected) < EXACT
        assert relative_distance(free, expected) > 1e-3  # the bound is felt
    loose = run(decoder, targets, state_grad_clip=1e9)
    for a, b in zip(decoder.gradients(loose.loss * upstream), free, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("periods", [(2, 2), (2, 5), (1, 3)], ids=str)
@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell"])
def test_clip_and_windows_agree_with_a_callable(kind: str, periods: tuple[int, int]) -> None:
    decoder, targets = decoder_and_targets(kind, 8)
    k1, k2 = periods
    call = {"k1": k1, "k2": k2, "state_grad_clip": 2e-3, "lengths": torch.tensor([8, 3, 6])}
    gradients = [
        decoder.gradients(run(decoder, targets, cell, **call).loss)
        for cell in (decoder.cell, wrapped(decoder))
    ]
    assert relative_distance(*gradients) < EXACT


@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell"])
def test_clip_of_the_last_states_gradient_alone(kind: str) -> None:
    """No loss scale is known then: the bound is what was given, for every cell alike."""
    decoder, targets = decoder_and_targets(kind)
    gradients = []
    for cell in (decoder.cell, wrapped(decoder)):
        out = run(decoder, targets, cell, state_grad_clip=1e9)
        gradients.append(decoder.gradients(sum(s.square().sum() for s in _parts(out.state))))
    free = run(decoder, targets)
    expected = decoder.gradients(sum(s.square().sum() for s in _parts(free.state)))
    assert relative_distance(gradients[1], expected) < EXACT
    assert relative_distance(gradients[0], expected) < EXACT


def test_clip_with_a_loss_per_token() -> None:
    decoder, targets = decoder_and_targets("lstm_cell")
    upstream = torch.rand(STEPS, BATCH, dtype=torch.float64)
    gradients = []
    for cell in (decoder.cell, wrapped(decoder)):
        out = run(decoder, targets, cell, state_grad_clip=0.02, reduction="none")
        gradients.append(decoder.gradients((out.loss * upstream).sum()))
    assert relative_distance(*gradients) < EXACT


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"truncation": "random", "k1": 2, "k2": 4}, ValueError,
     "k1 must be None where cuts are random, got 2"),
    ({"truncation": "random", "k2": 1}, ValueError,
     "k2 must be at least 2, the mean of steps between random cuts, got 1"),
    ({"truncation": "random"}, ValueError,
     "k2 must be at least 2, the mean of steps between random cuts, got None"),
    ({"truncation": "random", "k2": 2.5}, TypeError, "k2 must be an int, got float"),
    ({"truncation": "sometimes"}, ValueError,
     "truncation must be one of 'fixed', 'random', got 'sometimes'"),
    ({"state_grad_clip": 0.0}, ValueError, "state_grad_clip must be greater than 0, got 0.0"),
    ({"state_grad_clip": -1.0}, ValueError, "state_grad_clip must be greater than 0, got -1.0"),
    ({"state_grad_clip": "1"}, TypeError, "state_grad_clip must be a number, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[t[:50] for _, _, t in WRONG])
def test_wrong_values(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    decoder, targets = decoder_and_targets("gru_cell")
    drawn = torch.get_rng_state()
    with pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}$"):
        run(decoder, targets, **change)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_cut_concerns_one_row() -> None:
    """Cuts per row: a row that is cut everywhere leaves the other rows' gradients exact."""
    decoder, targets = decoder_and_targets("lstm_cell")
    exact = decoder.gradients(run(decoder, targets).loss)[-2:]
    with pytest.MonkeyPatch.context() as patch:
        factors = torch.ones(STEPS, BATCH, dtype=torch.float64)
        factors[1, 1] = 0
        fixed_cuts(patch, factors)
        cut = decoder.gradients(run(decoder, targets, truncation="random", k2=2).loss)[-2:]
    first = decoder.gradients(run(decoder, targets, k1=1, k2=1).loss)[-2:]
    for whole, some, one in zip(exact, cut, first, strict=True):
        assert relative_distance([some[[0, 2]]], [whole[[0, 2]]]) < EXACT
        assert relative_distance([some[1]], [one[1]]) < EXACT


def test_a_cut_of_a_callable_stops_what_is_not_finite() -> None:
    """0 times infinity is a cut, not a NaN."""
    gate = _truncation.StateGradientGate(torch.tensor([[0.0, 1.0]]), None)
    state = torch.ones(2, 3, requires_grad=True)
    gate.attach(0, state, 0).backward(torch.full((2, 3), float("inf")))
    assert state.grad is not None
    assert (state.grad[0] == 0).all()
    assert state.grad[1].isinf().all()


def test_cells_in_modules_are_cut_in_the_batch_dimension() -> None:
    """A stacked state has the batch in dimension 1, where the factors go."""
    torch.manual_seed(0)
    cell = nn.GRU(5, 5, 1, dtype=torch.float64)
    single = nn.GRUCell(5, 5, dtype=torch.float64)
    single.load_state_dict({k.removesuffix("_l0"): v for k, v in cell.state_dict().items()})
    decoder, targets = decoder_and_targets("gru_cell", 9)
    grads = []
    for module, state in ((cell, decoder.state[None]), (single, decoder.state)):
        generator = torch.Generator().manual_seed(1)
        out = accumext.decode_loss(
            decoder.embedding, module, decoder.head, targets, state, feedback="teacher",
            truncation="random", k2=2, generator=generator,
        )  # fmt: skip
        grads.append(list(torch.autograd.grad(out.loss, [*module.parameters(), decoder.state])))
    assert relative_distance(*grads) < EXACT
    cell.register_forward_hook(lambda *_: None)  # autograd runs it now
    generator = torch.Generator().manual_seed(1)
    out = accumext.decode_loss(
        decoder.embedding, cell, decoder.head, targets, decoder.state[None], feedback="teacher",
        truncation="random", k2=2, generator=generator,
    )  # fmt: skip
    again = list(torch.autograd.grad(out.loss, [*cell.parameters(), decoder.state]))
    assert relative_distance(again, grads[0]) < EXACT


@pytest.mark.parametrize("call", [{"truncation": "random", "k2": 2}, {"state_grad_clip": 1e-3}])
def test_complex_states_are_pairs_of_numbers(call: dict[str, Any]) -> None:
    """As those of a linear recurrence with complex eigenvalues."""
    decoder, targets = decoder_and_targets("gru_cell")
    rotation = torch.randn(5, dtype=torch.complex128, requires_grad=True)

    def turn(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z * rotation + x
        return z.real + z.imag, z

    def pairs(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, z = turn(x, torch.view_as_complex(state))
        return output, torch.view_as_real(z)

    found = []
    start = torch.ones(BATCH, 5, 2, dtype=torch.float64)
    for cell, decoder.state in ((turn, torch.view_as_complex(start)), (pairs, start)):
        generator = torch.Generator().manual_seed(3)
        loss = run(decoder, targets, cell, generator=generator, **call).loss
        found.append([torch.view_as_real(torch.autograd.grad(loss, rotation)[0])])
    assert relative_distance(*found) < EXACT
