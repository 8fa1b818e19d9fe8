"""Windows; the factors and bounds of a state's gradient; rows that have ended."""

import itertools
from typing import Any

import pytest
import torch
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, parts_of, run, targets_with_holes, wrapped
from torch import Tensor, nn

from accumext.recurrence import _truncation

STEPS = 5
KINDS = ["gru_cell", "lstm_cell", "rnn_cell", "gru", "lstm"]


def decoder_and_call(kind: str, steps: int = STEPS, **call: Any) -> tuple[Decoder, dict[str, Any]]:
    return make_decoder(kind), {"targets": targets_with_holes(steps), **call}


def both_ways(decoder: Decoder, of: Any = None, **call: Any) -> list[list[Tensor]]:
    """Gradients of the loss, or of what `of` says of the results, by kernels and by autograd, with
    the same random numbers."""
    found = []
    for cell in (decoder.cell, wrapped(decoder)):
        out = run(decoder, cell, generator=torch.Generator().manual_seed(3), **call)
        found.append(decoder.gradients(of(out) if of else out.loss))
    return found


@pytest.mark.parametrize("mean", [2, 4])
@pytest.mark.parametrize("kind", ["gru_cell", "rnn_cell", "lstm"])
def test_the_expectation_over_all_cuts_is_the_exact_gradient(kind, mean, monkeypatch):
    decoder, call = decoder_and_call(kind)
    exact = decoder.gradients(run(decoder, **call).loss)
    cut = 1 / mean
    expected, spread = [torch.zeros_like(g) for g in exact], 0.0
    for pattern in itertools.product([False, True], repeat=STEPS - 1):
        factors = torch.ones(STEPS, BATCH, dtype=torch.float64)
        kept = [0.0 if coin else 1 / (1 - cut) for coin in pattern]
        factors[1:] = torch.tensor(kept, dtype=torch.float64)[:, None]
        monkeypatch.setattr(_truncation, "random_cuts", lambda *_, f=factors, **__: f)
        gradients = decoder.gradients(run(decoder, truncation="random", k2=mean, **call).loss)
        chance = cut ** sum(pattern) * (1 - cut) ** (STEPS - 1 - sum(pattern))
        for total, gradient in zip(expected, gradients, strict=True):
            total += chance * gradient
        spread = max(spread, relative_distance(gradients, exact))
    assert relative_distance(expected, exact) < EXACT
    assert spread > 1e-3  # or the patterns would all be the same


def test_cuts_are_drawn_per_row_with_the_given_probability():
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


@pytest.mark.parametrize("lengths", [None, [9, 0, 4]], ids=["whole", "lengths"])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell", "rnn_cell"])
def test_the_same_coins_cut_a_callable_alike(kind, lengths):
    decoder, call = decoder_and_call(kind, 9, lengths=lengths)
    whole = decoder.gradients(run(decoder, **call).loss)
    call |= {"truncation": "random", "k2": 3, "state_grad_clip": 0.01}
    gradients = both_ways(decoder, **call)
    assert relative_distance(*gradients) < EXACT
    assert relative_distance(gradients[0], whole) > 1e-3
    assert not any(s.requires_grad for s in parts_of(run(decoder, **call).state))


def test_cells_in_modules_are_cut_in_the_batch_dimension():
    """A stacked state has the batch in dimension 1, where the factors go."""
    cell, single = nn.GRU(5, 5, 1, dtype=torch.float64), nn.GRUCell(5, 5, dtype=torch.float64)
    single.load_state_dict({k.removesuffix("_l0"): v for k, v in cell.state_dict().items()})
    hooked = nn.GRU(5, 5, 1, dtype=torch.float64)  # which autograd runs
    hooked.load_state_dict(cell.state_dict())
    hooked.register_forward_hook(lambda *_: None)
    decoder, call = decoder_and_call("gru_cell", 9, truncation="random", k2=2)
    grads = []
    for module in (single, cell, hooked):
        state = decoder.state if module is single else decoder.state[None]
        out = run(decoder, module, state, generator=torch.Generator().manual_seed(1), **call)
        grads.append(list(torch.autograd.grad(out.loss, [*module.parameters(), decoder.state])))
    assert relative_distance(grads[1], grads[0]) < EXACT
    assert relative_distance(grads[2], grads[0]) < EXACT


def test_a_cut_of_a_callable_stops_what_is_not_finite():
    """0 times infinity is a cut, not a NaN."""
    gate = _truncation.StateGradientGate(torch.tensor([[0.0, 1.0]]), None)
    state = torch.ones(2, 3, requires_grad=True)
    gate.attach(0, state, 0).backward(torch.full((2, 3), float("inf")))
    assert state.grad is not None
    assert (state.grad[0] == 0).all()
    assert state.grad[1].isinf().all()


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
def test_clip_is_that_of_a_loop_with_hooks(kind, upstream):
    decoder, call = decoder_and_call(kind, 8)
    free = decoder.gradients(run(decoder, **call).loss * upstream)
    bound = 2e-3
    for cell in [decoder.cell] if kind in ("gru", "lstm") else [decoder.cell, wrapped(decoder)]:
        out = run(decoder, cell, state_grad_clip=bound, **call)
        expected = clipped_by_hand(decoder, call["targets"], out.inputs, bound, upstream)
        actual = decoder.gradients(out.loss * upstream)
        assert relative_distance(actual, expected) < EXACT
        assert relative_distance(free, expected) > 1e-3  # the bound is felt
    loose = run(decoder, state_grad_clip=1e9, **call)
    assert relative_distance(decoder.gradients(loose.loss * upstream), free) == 0


@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell"])
def test_clip_agrees_with_a_callable(kind):
    """In windows, with rows that end, and of a loss per token."""
    decoder, call = decoder_and_call(kind, 8, state_grad_clip=2e-3, lengths=[8, 3, 6])
    for k1, k2 in ((2, 2), (2, 5), (1, 3)):
        assert relative_distance(*both_ways(decoder, **call, k1=k1, k2=k2)) < EXACT
    factors = torch.rand(8, BATCH, dtype=torch.float64)
    call |= {"state_grad_clip": 0.02, "reduction": "none"}
    assert (
        relative_distance(*both_ways(decoder, lambda o: (o.loss * factors).sum(), **call)) < EXACT
    )


@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell"])
def test_clip_of_the_last_states_gradient_alone(kind):
    """No loss scale is known then: the bound is what was given, for every cell alike."""
    decoder, call = decoder_and_call(kind)

    def squares(out: Any) -> Tensor:
        return sum(s.square().sum() for s in parts_of(out.state))

    (expected, _) = both_ways(decoder, squares, **call)
    for gradients in both_ways(decoder, squares, state_grad_clip=1e9, **call):
        assert relative_distance(gradients, expected) < EXACT


@pytest.mark.parametrize("call", [{"truncation": "random", "k2": 2}, {"state_grad_clip": 1e-3}])
def test_complex_states_are_pairs_of_numbers(call):
    """As those of a linear recurrence with complex eigenvalues."""
    decoder = make_decoder("gru_cell")
    rotation = torch.randn(5, dtype=torch.complex128, requires_grad=True)

    def turn(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z * rotation + x
        return z.real + z.imag, z

    def pairs(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, z = turn(x, torch.view_as_complex(state))
        return output, torch.view_as_real(z)

    found = []
    start = torch.ones(BATCH, 5, 2, dtype=torch.float64)
    for cell, state in ((turn, torch.view_as_complex(start)), (pairs, start)):
        loss = run(decoder, cell, state, generator=torch.Generator().manual_seed(3), **call).loss
        found.append([torch.view_as_real(torch.autograd.grad(loss, rotation)[0])])
    assert relative_distance(*found) < EXACT


def test_a_gate_leaves_the_gradient_alone_that_a_step_asks_for():
    """Of its own state, as one that descends an energy does: only what passes is cut."""
    truncation = _truncation.truncation_from("rollout", None, 2, "random")
    gate = truncation.gate(64, 1, torch.empty((), dtype=torch.float64))
    state = torch.ones(3, dtype=torch.float64, requires_grad=True)
    step = next(t for t in range(64) if gate.factors is not None and gate.factors[t] == 2)
    inner = gate.attach(step, state)
    (gradient,) = torch.autograd.grad(inner.square().sum(), inner, create_graph=True)
    assert gradient.tolist() == [2.0] * 3
    gradient.sum().backward()
    assert state.grad is not None
    assert state.grad.tolist() == [4.0] * 3
