"""The operator of a layer's steps backward against autograd in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_cases import cell_step
from support.rnn_oracle import BATCHES, KINDS, UNITS, close, make_cell
from torch import Tensor

import accumext  # noqa: F401  (registers the operators)

rnn_backward = torch.ops.accumext.rnn_backward.default
# Of weight_hh, transposed: a copy, as it lies, and every other element of a larger matrix.
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    Tensor.contiguous,
    lambda weight: weight.t().contiguous().t(),
    lambda weight: weight.repeat_interleave(2, 1)[:, ::2],
]


@settings(max_examples=examples(100), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    batch=st.sampled_from(BATCHES),
    units=st.sampled_from(UNITS),
    steps=st.integers(1, 5),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    ended=st.booleans(),
    carried=st.sampled_from(["none", "cut", "weighted", "limit", "both"]),
    in_memory=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**20),
)
def test_backward_is_autograds(kind, batch, units, steps, dtype, ended, carried, in_memory, seed):
    torch.manual_seed(seed)
    cell = make_cell(kind, units, units)
    gates = cell.weight_hh.shape[0] // units
    with torch.no_grad():
        for p in cell.parameters():
            p.copy_(p.to(dtype))
        cell.weight_ih.copy_(torch.eye(units).repeat(gates, 1))
        cell.bias_ih.zero_()
        cell.bias_hh.zero_()
    lstm = kind == "lstm"
    parts = 2 if lstm else 1

    def rounded(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype).double()

    d_out, d_last = rounded(steps, batch, units), [rounded(batch, units) for _ in range(parts)]
    live = torch.rand(steps, batch) < 0.6 if ended else None
    factors, limit = torch.ones(steps, batch, dtype=torch.float64), None
    if carried in ("cut", "weighted", "both"):
        factors = torch.randint(0, 2, (steps, batch)).double()
        factors *= 1.25 if carried != "cut" else 1.0
        factors[:, 0] = 1.0
    if carried in ("limit", "both"):
        limit = torch.tensor(0.25, dtype=torch.float64)

    # The plain loop: the cell by its definition, from W_ih x and W_hh h as leaves' children.
    from_x = [rounded(batch, gates * units).requires_grad_() for _ in range(steps)]
    first = [rounded(batch, units).requires_grad_() for _ in range(parts)]
    current, outputs, products, states = list(first), [], [], [list(first)]
    for t in range(steps):
        current = [_carried(s, factors[t], limit) for s in current]
        product = current[0] @ cell.weight_hh.t()
        product.retain_grad()
        products.append(product)
        new = definition(kind, from_x[t], product, current)
        if live is not None:
            new = [torch.where(live[t][:, None], n, o) for n, o in zip(new, current, strict=True)]
        current = new
        states.append(list(current))
        outputs.append(current[0])
    up = d_out if live is None else d_out * live[..., None]
    total = sum((o * u).sum() for o, u in zip(outputs, up, strict=True))
    total = total + sum((s * d).sum() for s, d in zip(current, d_last, strict=True))
    total.backward()

    with torch.no_grad():
        pre = None
        if kind == "gru":
            rz = 2 * units
            pairs = zip(from_x, products, strict=True)
            pre = torch.stack(
                [torch.cat([x[:, :rz] + h[:, :rz], x[:, rz:], h[:, rz:]], 1) for x, h in pairs]
            )
        elif lstm:
            pre = torch.stack([x + h for x, h in zip(from_x, products, strict=True)])
        stacked = [torch.stack([s[part] for s in states]).to(dtype) for part in range(parts)]
    d_state = [d.to(dtype).clone() for d in d_last]
    d_x = torch.full((steps, batch, gates * units), float("nan"), dtype=dtype)
    d_h = torch.full_like(d_x, float("nan")) if kind == "gru" else None
    rnn_backward(
        KINDS.index(kind), d_out.to(dtype), None if pre is None else pre.to(dtype), stacked[0],
        stacked[1] if lstm else None, live,
        None if carried in ("none", "limit") else factors.to(dtype),
        None if limit is None else limit.to(dtype),
        in_memory(cell.weight_hh.detach().t().to(dtype)), d_state[0],
        d_state[1] if lstm else None, d_x, d_h,
    )  # fmt: skip
    for actual, leaf in zip(d_state, first, strict=True):
        close(actual, leaf.grad)
    close(d_x, torch.stack([x.grad for x in from_x]))
    if d_h is not None:
        close(d_h, torch.stack([p.grad for p in products]))


def definition(kind: str, x: Tensor, h_part: Tensor, state: list[Tensor]) -> list[Tensor]:
    """The new state from W_ih x and W_hh h."""
    new = cell_step(KINDS.index(kind), x, h_part, *state, *[None] * (2 - len(state)))
    return [part for part in new if part is not None]


def _carried(state: Tensor, factor: Tensor, limit: Tensor | None) -> Tensor:
    """The state, whose gradient is multiplied and bounded on its way back."""
    state = state * 1
    if not state.requires_grad:
        return state

    def change(gradient: Tensor) -> Tensor:
        gradient = gradient * factor[:, None]
        return gradient if limit is None else gradient.clamp(-limit, limit)

    state.register_hook(change)
    return state


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_weight(kind, narrow):
    """The gradient that it is multiplied with is rounded like it, and the sums are not."""
    steps, batch, units = 3, 9, 20
    gates, lstm = {"gru": 3, "lstm": 4}.get(kind, 1), kind == "lstm"
    weight = torch.randn(units, gates * units).to(narrow)
    h, c = torch.randn(2, steps + 1, batch, units)
    pre = torch.randn(steps, batch, 4 * units)
    d_out = torch.randn(steps, batch, units)
    d_last = torch.randn(2, batch, units)
    live = torch.rand(steps, batch) < 0.8

    def run(begin: int, end: int, weight: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        """dh after these steps, and the gradient that weight_hh is multiplied with."""
        span = slice(begin, end)
        d_x = torch.zeros(end - begin, batch, gates * units)
        d_h = torch.zeros_like(d_x) if kind == "gru" else None
        rnn_backward(
            KINDS.index(kind), d_out[span], pre[span] if gates > 1 else None, h[begin : end + 1],
            c[begin : end + 1] if lstm else None, live[span], None, None, weight, dh,
            dc if lstm else None, d_x, d_h,
        )  # fmt: skip
        return dh, d_x if d_h is None else d_h

    dh, dc = d_last.clone()
    for t in reversed(range(steps)):
        past, _ = run(t, t + 1, torch.zeros_like(weight), dh.clone(), dc.clone())
        dh, d_h = run(t, t + 1, weight, dh, dc)
        product = d_h[0].to(narrow).double() @ weight.double().t()
        close(dh, past.double() + product)
    together, _ = run(0, steps, weight, *d_last.clone())
    close(together, dh.double())


def test_a_cut_stops_what_is_not_finite():
    """0 times infinity is a cut, not a NaN."""
    for kind in ("rnn_tanh", "lstm"):
        gates, parts = (4, 2) if kind == "lstm" else (1, 1)
        dh = [torch.tensor([[float("inf")], [1.0]]) for _ in range(parts)]
        carry = torch.tensor([[0.0, 1.0]])
        d_x = torch.zeros(1, 2, gates)
        pre = torch.zeros(1, 2, 4) if kind == "lstm" else None
        state = torch.zeros(2, 2, 1)
        c = state.clone() if kind == "lstm" else None
        rnn_backward(
            KINDS.index(kind), torch.zeros(1, 2, 1), pre, state, c, None, carry, None,
            torch.ones(1, gates), dh[0], dh[1] if parts == 2 else None, d_x, None,
        )  # fmt: skip
        for d in dh:
            assert d[0] == 0
            assert d[1].isfinite()
