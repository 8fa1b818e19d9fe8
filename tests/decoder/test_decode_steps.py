"""The operator of a decoder's steps against torch's cells: in float32, with known inputs, and with
narrow weights. In float64 it runs under tests/decoder/test_decode_loss*.py."""

import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.decode_cases import cell_step
from support.rnn_oracle import KINDS, advance, close, make_cell
from support.tensors import dtype_id
from torch import Tensor

import accumext  # noqa: F401  (registers the operators)

decode_steps = torch.ops.accumext.decode_steps.default


@dataclass
class LayeredDecoder:
    """A decoder of several layers, its arguments, and the plain loop."""

    kind: str
    layers: int
    batch: int
    units: int
    inputs: int  # E
    words: int
    steps: int
    dtype: torch.dtype = torch.float64
    narrow: torch.dtype | None = None  # of the matrices, else `dtype`

    def __post_init__(self) -> None:
        self.narrow = self.narrow or self.dtype
        self.table = self.rounded(self.words, self.inputs)
        self.weight = self.rounded(self.words, self.units).to(self.narrow).double()
        self.bias = self.rounded(self.words)
        self.cells = [
            make_cell(self.kind, self.units if layer else self.inputs, self.units)
            for layer in range(self.layers)
        ]
        for cell in self.cells:
            for p in cell.parameters():
                p.data.copy_(p.to(self.narrow if p.dim() == 2 else self.dtype))
        self.parts = 2 if self.kind == "lstm" else 1
        self.start = [self.rounded(self.batch, self.units) for _ in range(self.layers * self.parts)]
        self.targets = torch.randint(self.words, (self.steps, self.batch))

    def rounded(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(self.dtype).double()

    def weights(self) -> list[Tensor]:
        names, dtypes = ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), [self.dtype, self.narrow]
        found = [getattr(cell, name).detach() for cell in self.cells for name in names]
        return [w.to(dtypes[w.dim() - 1]).contiguous() for w in found]

    def states(
        self, inputs: Tensor, live: Tensor | None, mask: Tensor | None = None, scale: float = 1.0
    ) -> list[Tensor]:
        """Of every layer and part, [T + 1, B, H], if `inputs` [T, B] are read."""
        states = [[s] for s in self.start]
        for t in range(self.steps):
            x = self.table[inputs[t]]
            for layer, cell in enumerate(self.cells):
                own = states[layer * self.parts : (layer + 1) * self.parts]
                alive = None if live is None else live[t]
                for part, new in zip(
                    own, advance(cell, x, tuple(s[-1] for s in own), alive), strict=True
                ):
                    part.append(new.detach())
                x = own[0][-1]
                if mask is not None and layer + 1 < self.layers:
                    x = x * mask[t, layer] * scale
        return [torch.stack(s) for s in states]


@dataclass
class Steps:
    """The tensors that decode_steps wrote."""

    states: list[Tensor]
    inputs: Tensor
    tokens: Tensor
    exps: Tensor
    stats: Tensor
    rows: Tensor
    count: int  # of rows that the head saw


def run(
    decoder: LayeredDecoder,
    *,
    teacher: Tensor | None = None,
    live: Tensor | None = None,
    mask: Tensor | None = None,  # of dropout
    scale: float = 1.0,
    border: int = 0,  # where one call ends and the next begins
    pad: int = 1,
    inputs: Tensor | None = None,  # all that are read: the head sees nothing
) -> Steps:
    r, dtype, states = decoder, decoder.dtype, []
    for start in r.start:
        states.append(start.new_full((r.steps + 1, *start.shape), float("nan")).to(dtype))
        states[-1][0] = start
    head = inputs is None
    tokens = torch.full((r.steps, r.batch), pad)
    inputs = tokens.clamp(max=r.words - 1) if inputs is None else inputs
    live = None if live is None else live.clone()
    most = r.steps * r.batch
    exps = torch.full((r.words, most), float("nan"), dtype=dtype)
    stats, rows = exps.new_full((3, most), float("nan")), torch.full((most,), -1)
    used = 0
    for begin, end in pairwise([0, border, r.steps] if border else [0, r.steps]):
        some, named = exps.new_full((3, most), float("nan")), torch.full((most,), -1)
        workspace = torch.cat([exps[:, used:], exps.new_empty(r.words, used)], 1).t()
        count = decode_steps(
            r.table.to(dtype), r.weights(), states, KINDS.index(r.kind), [None, mask, None],
            [1.0, scale, 1.0], inputs, teacher, None, live, -1, pad, None, 1.0,
            r.weight.to(r.narrow), r.bias.to(dtype), r.targets, tokens,
            workspace if head else None, some if head else None, named if head else None, 32,
            begin, end,
        )  # fmt: skip
        exps[:, used : used + count] = workspace[:count].t()
        stats[:, used : used + count] = some[:, :count]
        rows[used : used + count] = named[:count]
        used += count
    return Steps(states, inputs, tokens, exps, stats, rows, used)


def assert_states(decoder: LayeredDecoder, found: Steps, live: Tensor | None, **mask: Any) -> None:
    for actual, expected in zip(
        found.states, decoder.states(found.inputs, live, **mask), strict=True
    ):
        close(actual, expected)


@pytest.mark.skipif(
    "host_cuda.loaded" in sys.modules, reason="a device's host does not wait to know"
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_once_every_row_has_ended(kind):
    """Padding that the table has no row for would be an error."""
    decoder = LayeredDecoder(kind, 2, 3, 5, 4, 13, 6)
    lengths = torch.tensor([3, 1, 2])
    live = torch.arange(6)[:, None] < lengths
    found = run(decoder, live=live, pad=12)
    stopped = run(decoder, live=live.all(1, keepdim=True).expand(6, 3).clone(), pad=13)
    for whole, short in zip(found.states, stopped.states, strict=True):
        close(whole[:2], short[:2])
        assert torch.equal(short[1:], short[1:2].expand(6, -1, -1))
    assert stopped.count == 3
    assert (stopped.inputs[1:] == 13).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 8, 17, 33, 41])  # the last ends in one whole vector
def test_steps_in_float32(kind, batch):
    for units in (7, 48, 100):
        decoder = LayeredDecoder(kind, 2, batch, units, 12, 100, 5, torch.float32)
        teacher, lengths = torch.randint(100, (5, batch)), torch.randint(0, 6, (batch,))
        live = torch.arange(5)[:, None] < lengths
        found = run(decoder, teacher=teacher, live=live)
        assert_states(decoder, found, live)
        for state in found.states:  # a row that has ended keeps the bits of its state
            for b, length in enumerate(lengths.tolist()):
                assert (state[length:, b] == state[length, b]).all()


@pytest.mark.parametrize("batch", [9, 17, 33])  # more than one tile of a GPU's tensor cores
def test_logits_that_are_all_below_zero(batch):
    """No word wins, and no sum begins, with what stands there before the first logit."""
    for dtype in (torch.float32, torch.float64):
        decoder = LayeredDecoder("gru", 1, batch, 5, 4, 70, 4, dtype)
        decoder.bias -= 100.0  # exp(-100) is 0 in float32
        found = run(decoder)
        (states,) = decoder.states(found.inputs, None)
        z = (states[1:] @ decoder.weight.t() + decoder.bias).flatten(0, 1)
        assert torch.equal(found.rows, torch.arange(4 * batch))
        assert torch.equal(found.tokens.flatten(), z.argmax(1))
        close(found.stats[0], z.amax(1))
        exps = (z - z.amax(1, keepdim=True)).exp()
        close(found.stats[1], exps.sum(1))
        close(found.exps.t(), exps.scatter(1, decoder.targets.view(-1, 1), 0))


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_inputs_that_are_known(kind, dropped):
    """Around the rows that are multiplied at once where no step waits for another: 2,048."""
    for batch, steps, border in ((1, 3, 0), (700, 5, 0), (1024, 4, 1), (2049, 2, 0)):
        decoder = LayeredDecoder(kind, 2, batch, 3, 2, 5, steps)
        mask = torch.rand(steps, 1, batch, 3) < 0.6 if dropped else None
        live = torch.arange(steps)[:, None] < torch.randint(0, steps + 1, (batch,))
        inputs = torch.randint(5, (steps, batch))
        call = {"mask": mask, "scale": 1.5}
        found = run(decoder, live=live, inputs=inputs.clone(), border=border, **call)
        assert found.count == 0
        assert torch.equal(found.inputs, inputs)
        assert (found.tokens == 1).all()
        assert_states(decoder, found, live, **call)


@pytest.mark.parametrize("known", [False, True], ids=["predicted", "known"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_weights(kind, narrow, known):
    """Operands of the products are rounded as the weights are, and the sums are not: each step from
    the state that was found before it, so that no rounding is there twice."""
    words, steps, batch, units = 50, 4, 9, 20
    decoder = LayeredDecoder(kind, 2, batch, units, 7, words, steps, torch.float32, narrow=narrow)
    mask = torch.rand(steps, 1, batch, units) < 0.6
    live = torch.arange(steps)[:, None] < torch.randint(0, steps + 1, (batch,))
    inputs = torch.randint(words, (steps, batch)) if known else None
    found = run(decoder, live=live, mask=mask, scale=1.25, inputs=inputs)

    def rounded(x: Tensor) -> Tensor:
        return x.to(narrow).double()

    for t in range(steps):
        x = decoder.table[found.inputs[t]].float()
        for layer, cell in enumerate(decoder.cells):
            parts = found.states[layer * decoder.parts : (layer + 1) * decoder.parts]
            h, c = [*(part[t].double() for part in parts), None][:2]
            new = cell_step(
                KINDS.index(kind),
                (rounded(x) @ cell.weight_ih.t() + cell.bias_ih).detach(),
                (rounded(parts[0][t]) @ cell.weight_hh.t() + cell.bias_hh).detach(),
                h,
                c,
            )
            for part, value, before in zip(parts, new, (h, c), strict=False):
                close(part[t + 1], torch.where(live[t][:, None], value, before))
            x = parts[0][t + 1]
            if layer == 0:
                x = x * mask[t, 0] * 1.25
        if known:
            continue
        z = rounded(x) @ decoder.weight.t() + decoder.bias
        named = found.rows.clone()
        named[found.count :] = -1
        columns = (named // batch == t).nonzero()[:, 0]
        close(found.stats[0, columns], z[named[columns] % batch].amax(1))


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_a_narrow_table_with_a_stride(table_dtype):
    decoder = LayeredDecoder("gru", 1, 9, 12, 7, 13, 3, torch.float32)
    decoder.table = decoder.table.to(table_dtype).double()
    wide = torch.full((13, 11), float("nan"), dtype=table_dtype)
    wide[:, :7] = decoder.table
    inputs, tokens = torch.randint(13, (3, 9)), torch.zeros(3, 9, dtype=torch.int64)
    states = [torch.zeros(4, 9, 12)]
    states[0][0] = decoder.start[0]
    decode_steps(
        wide[:, :7], decoder.weights(), states, 0, [None] * 3, [1.0] * 3, inputs,
        None, None, None, -1, 0, None, 1.0, decoder.weight.float(), None, decoder.targets, tokens,
        None, None, None, 32, 0, 3,
    )  # fmt: skip
    close(states[0], decoder.states(inputs, None)[0])
