"""The operator of a decoder's steps against torch's cells in float64."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_cases import cell_step
from support.rnn_oracle import BATCHES, KINDS, UNITS, advance, close, make_cell
from support.tensors import dtype_id
from torch import Tensor, nn

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
    no_bias: tuple[int, ...] = ()  # which of the 2 layers biases are missing
    narrow: torch.dtype | None = None  # of the matrices, else `dtype`
    cells: list[nn.RNNCellBase] = field(default_factory=list)

    def __post_init__(self) -> None:
        def rounded(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64).to(self.dtype).double()

        self.narrow = self.narrow or self.dtype
        self.table = rounded(self.words, self.inputs)
        self.weight = rounded(self.words, self.units).to(self.narrow).double()
        self.bias = rounded(self.words)
        for layer in range(self.layers):
            cell = make_cell(self.kind, self.units if layer else self.inputs, self.units)
            with torch.no_grad():
                for p in cell.parameters():
                    p.copy_(p.to(self.narrow if p.dim() == 2 else self.dtype))
                for side, bias in enumerate((cell.bias_ih, cell.bias_hh)):
                    if 2 * layer + side in self.no_bias:
                        bias.zero_()
            self.cells.append(cell)
        self.parts = 2 if self.kind == "lstm" else 1
        self.start = [rounded(self.batch, self.units) for _ in range(self.layers * self.parts)]
        self.targets = torch.randint(self.words, (self.steps, self.batch))

    def weights(self) -> list[Tensor]:
        found = []
        for layer, cell in enumerate(self.cells):
            biases = [cell.bias_ih, cell.bias_hh]
            for side in range(2):
                if 2 * layer + side in self.no_bias:
                    biases[side] = torch.empty(0)
            found += [cell.weight_ih, cell.weight_hh, *biases]
        dtypes = {2: self.narrow, 1: self.dtype}
        return [w.detach().to(dtypes[w.dim()]).contiguous() for w in found]

    def loop(
        self,
        inputs: Tensor,  # [T, B], what is read
        live: Tensor | None,  # bool [T, B]
        dropout_mask: Tensor | None,
        dropout_scale: float,
        input_mask: Tensor | None = None,
        output_mask: Tensor | None = None,
        around_scale: float = 1.0,  # of both
    ) -> tuple[list[Tensor], Tensor]:
        """States [T + 1, B, H] of every layer and part, and the logits [T, B, V]."""
        states = [[s] for s in self.start]
        logits = []
        for t in range(self.steps):
            x = self.table[inputs[t]]
            if input_mask is not None:
                x = x * input_mask[t] * around_scale
            for layer, cell in enumerate(self.cells):
                own = states[layer * self.parts : (layer + 1) * self.parts]
                alive = None if live is None else live[t]
                for part, new in zip(
                    own, advance(cell, x, tuple(s[-1] for s in own), alive), strict=True
                ):
                    part.append(new.detach())
                x = own[0][-1]
                if dropout_mask is not None and layer + 1 < self.layers:
                    x = x * dropout_mask[t, layer] * dropout_scale
            if output_mask is not None:
                x = x * output_mask[t] * around_scale
            logits.append(x @ self.weight.t() + self.bias)
        return [torch.stack(s) for s in states], torch.stack(logits)


@dataclass
class Steps:
    """The tensors that decode_steps wrote."""

    states: list[Tensor]
    inputs: Tensor
    live: Tensor | None
    tokens: Tensor
    exps: Tensor
    stats: Tensor
    rows: Tensor
    calls: list[tuple[int, int]]  # (rows before, rows after) of each call
    pre: Tensor | None  # [L, T, B, 4 H]


def run(
    decoder: LayeredDecoder,
    *,
    teacher: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    live: Tensor | None = None,
    eos: int = -1,
    uniforms: Tensor | None = None,
    temperature: float = 1.0,
    dropout_mask: Tensor | None = None,
    dropout_scale: float = 1.0,
    input_mask: Tensor | None = None,
    output_mask: Tensor | None = None,
    around_scale: float = 1.0,
    own_targets: bool = False,
    logit_rows: int = 32,
    borders: tuple[int, ...] = (),  # where one call ends and the next begins
    pad: int = 1,
    inputs: Tensor | None = None,  # all that are read: the head sees nothing
    keeps: bool = False,  # the pre-activations
) -> Steps:
    r, dtype = decoder, decoder.dtype
    states = []
    for start in r.start:
        states.append(start.new_full((r.steps + 1, *start.shape), float("nan")).to(dtype))
        states[-1][0] = start
    head = inputs is None
    tokens = torch.full((r.steps, r.batch), pad)
    inputs = tokens.clamp(max=r.words - 1) if inputs is None else inputs
    live = None if live is None else live.clone()
    most = r.steps * r.batch
    exps = torch.full((r.words, most), float("nan"), dtype=dtype)
    stats = exps.new_full((3, most), float("nan"))
    rows = torch.full((most,), -1)
    pre = None
    if keeps:
        shape = (r.layers, r.steps, r.batch, 4 * states[0].shape[-1])
        pre = torch.full(shape, float("nan"), dtype=dtype)
    used, calls = 0, []
    marks = [0, *borders, r.steps]
    for begin, end in pairwise(marks):
        some = exps.new_full((3, most), float("nan"))
        named = torch.full((most,), -1)
        workspace_slice = torch.cat([exps[:, used:], exps.new_empty(r.words, used)], 1).t()
        count = decode_steps(
            r.table.to(dtype), r.weights(), states, KINDS.index(r.kind), dropout_mask,
            dropout_scale, input_mask, around_scale, output_mask, around_scale, inputs, teacher,
            teacher_mask, live, eos, pad, uniforms, temperature, r.weight.to(r.narrow),
            r.bias.to(dtype), None if own_targets else r.targets, tokens,
            workspace_slice if head else None, some if head else None, named if head else None,
            logit_rows, begin, end, pre,
        )  # fmt: skip
        exps[:, used : used + count] = workspace_slice[:count].t()
        stats[:, used : used + count] = some[:, :count]
        rows[used : used + count] = named[:count]
        assert (named[count:] == -1).all()
        calls.append((used, used + count))
        used += count
    return Steps(states, inputs, live, tokens, exps, stats, rows, calls, pre)


def check(
    decoder: LayeredDecoder,
    steps: Steps,
    live: Tensor | None,
    eos: int,
    pad: int = 1,
    **call: Tensor,
) -> None:
    """Every step against the plain loop on the tokens that were read."""
    dropout_mask, scale = call.get("dropout_mask"), float(call.get("dropout_scale", 1.0))
    around = [call.get(name) for name in ("input_mask", "output_mask")]
    around_scale = float(call.get("around_scale", 1.0))
    states, logits = decoder.loop(
        steps.inputs, steps.live, dropout_mask, scale, *around, around_scale
    )
    for actual, expected in zip(steps.states, states, strict=True):
        close(actual, expected)
    alive = torch.ones_like(steps.inputs, dtype=torch.bool) if live is None else live.clone()
    if eos >= 0:
        for t in range(decoder.steps):
            alive[t + 1 :] &= ~(alive[t] & (steps.tokens[t] == eos))
        assert steps.live is not None
        assert torch.equal(steps.live, alive)
    count = steps.calls[-1][1]
    rows = alive.flatten().nonzero()[:, 0]
    if count == alive.numel():  # on a device that nobody waits for, all rows are named
        rows = torch.arange(count)
    assert count == len(rows)
    assert torch.equal(steps.rows[:count], rows)
    z = logits.flatten(0, 1)[rows]
    peak = z.amax(1, keepdim=True)
    exps = (z - peak).exp()
    of_all = steps.tokens if call.get("own_targets") else decoder.targets
    targets = of_all.flatten()[rows]
    close(steps.stats[0, :count], peak[:, 0])
    close(steps.stats[1, :count], exps.sum(1))
    # a row that has ended predicts nothing that could be its target
    known = slice(None) if not call.get("own_targets") else alive.flatten()[rows]
    close(steps.stats[2, :count][known], z.gather(1, targets[:, None])[:, 0][known])
    close(steps.exps[:, :count].t()[known], exps.scatter(1, targets[:, None], 0)[known])
    tokens = torch.full_like(steps.tokens, pad)
    if "uniforms" not in call:
        tokens[alive] = logits.argmax(-1)[alive]
        assert torch.equal(steps.tokens, tokens)
    else:
        share = (logits / call["temperature"]).softmax(-1).cumsum(-1)
        sampled = torch.searchsorted(share, call["uniforms"][..., None], right=True)[..., 0]
        tokens[alive] = sampled[alive].clamp(max=decoder.words - 1)
        assert torch.equal(steps.tokens, tokens)
    fed = steps.tokens[:-1]
    if "teacher" in call:
        fed = torch.where(
            call.get("teacher_mask", torch.ones_like(alive))[1:], call["teacher"][1:], fed
        )
    fed = torch.where(alive[1:], fed, pad)
    assert torch.equal(steps.inputs[1:], fed)


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 3),
    batch=st.sampled_from(BATCHES),
    units=st.sampled_from(UNITS),
    inputs=st.sampled_from([1, 5, 16, 17]),
    words=st.sampled_from([2, 13, 481]),
    missing=st.sets(st.integers(0, 5)),
    feed=st.sampled_from(["greedy", "sample", "teacher", "mixed"]),
    ends=st.sampled_from(["none", "lengths", "eos", "both"]),
    dropped=st.booleans(),
    around=st.sampled_from([(), ("input_mask",), ("output_mask",), ("input_mask", "output_mask")]),
    own_targets=st.booleans(),
    logit_rows=st.integers(1, 33),
    border=st.integers(0, 4),
    seed=st.integers(0, 2**20),
)
def test_steps_are_those_of_torchs_cells(
    kind: str, layers: int, batch: int, units: int, inputs: int, words: int, missing: set[int],
    feed: str, ends: str, dropped: bool, around: tuple[str, ...], own_targets: bool,
    logit_rows: int, border: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    steps = 5
    decoder = LayeredDecoder(
        kind, layers, batch, units, inputs, words, steps, no_bias=tuple(sorted(missing))
    )
    call = {}
    if feed in ("teacher", "mixed"):
        call["teacher"] = torch.randint(words, (steps, batch))
    if feed == "mixed":
        call["teacher_mask"] = torch.rand(steps, batch) < 0.5
    if feed == "sample":
        call["uniforms"] = torch.rand(steps, batch, dtype=torch.float64)
        call["temperature"] = 1.5
    live = None
    if ends in ("lengths", "both"):
        live = torch.arange(steps)[:, None] < torch.randint(0, steps + 1, (batch,))
    elif ends == "eos":
        live = torch.ones(steps, batch, dtype=torch.bool)
    eos = 0 if ends in ("eos", "both") else -1
    if dropped and layers > 1:
        call["dropout_mask"] = torch.rand(steps, layers - 1, batch, units) < 0.6
        call["dropout_scale"] = 1 / 0.6
    sizes = {"input_mask": inputs, "output_mask": units}
    for name in around:
        call[name] = torch.rand(steps, batch, sizes[name]) < 0.6
    call |= {"around_scale": 1 / 0.6, "own_targets": own_targets}
    borders = (border,) if border else ()
    found = run(decoder, live=live, eos=eos, logit_rows=logit_rows, borders=borders, **call)
    check(decoder, found, live, eos, **call)


@pytest.mark.skipif(
    "host_cuda.launchers.loaded" in sys.modules, reason="a device's host does not wait to know"
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_once_every_row_has_ended(kind: str) -> None:
    """Padding that the table has no row for would be an error."""
    decoder = LayeredDecoder(kind, 2, 3, 5, 4, 13, 6)
    lengths = torch.tensor([3, 1, 2])
    live = torch.arange(6)[:, None] < lengths
    found = run(decoder, live=live, pad=12)
    stopped = run(decoder, live=live.all(1, keepdim=True).expand(6, 3).clone(), pad=13)
    for whole, short in zip(found.states, stopped.states, strict=True):
        close(whole[:2], short[:2])
        assert torch.equal(short[1:], short[1:2].expand(6, -1, -1))
    assert stopped.calls[-1][1] == 3
    assert (stopped.inputs[1:] == 13).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 8, 17, 33, 41])  # the last ends in one whole vector
def test_steps_in_float32(kind: str, batch: int) -> None:
    for units in (7, 48, 100):
        decoder = LayeredDecoder(kind, 2, batch, units, 12, 100, 5, torch.float32)
        teacher = torch.randint(100, (5, batch))
        lengths = torch.randint(0, 6, (batch,))
        live = torch.arange(5)[:, None] < lengths
        steps = run(decoder, teacher=teacher, live=live)
        states, _ = decoder.loop(steps.inputs, live, None, 1.0)
        for actual, expected in zip(steps.states, states, strict=True):
            close(actual, expected)
            # a row that has ended keeps the bits of its state
            for b, length in enumerate(lengths.tolist()):
                assert (actual[length:, b] == actual[length, b]).all()


@pytest.mark.parametrize("batch", [9, 17, 33])  # more than one tile of a GPU's tensor cores
def test_logits_that_are_all_below_zero(batch: int) -> None:
    """No word wins, and no sum begins, with what stands there before the first logit."""
    for dtype in (torch.float32, torch.float64):
        decoder = LayeredDecoder("gru", 1, batch, 5, 4, 70, 4, dtype)
        decoder.bias -= 100.0  # exp(-100) is 0 in float32
        check(decoder, run(decoder), None, -1)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_inputs_that_are_known(kind: str, dropped: bool) -> None:
    """Around the rows that are multiplied at once where no step waits for another: 2,048."""
    for batch, steps, border in ((1, 3, 0), (700, 5, 0), (1024, 4, 1), (2049, 2, 0)):
        decoder = LayeredDecoder(kind, 2, batch, 3, 2, 5, steps)
        mask = torch.rand(steps, 1, batch, 3) < 0.6 if dropped else None
        live = torch.arange(steps)[:, None] < torch.randint(0, steps + 1, (batch,))
        inputs = torch.randint(5, (steps, batch))
        found = run(
            decoder, live=live, dropout_mask=mask, dropout_scale=1.5, inputs=inputs.clone(),
            borders=(border,) if border else (),
        )  # fmt: skip
        assert found.calls[-1][1] == 0
        assert torch.equal(found.inputs, inputs)
        assert (found.tokens == 1).all()
        states, _ = decoder.loop(inputs, live, mask, 1.5)
        for actual, expected in zip(found.states, states, strict=True):
            close(actual, expected)


@pytest.mark.skipif("host_cuda.launchers.loaded" in sys.modules, reason="of a CPU alone")
@pytest.mark.parametrize("known", [False, True], ids=["predicted", "known"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_pre_activations_are_those_of_the_steps(batch: int, kind: str, known: bool) -> None:
    steps, units = 6, 20
    decoder = LayeredDecoder(kind, 2, batch, units, 7, 50, steps, no_bias=(1,))
    mask = torch.rand(steps, 1, batch, units) < 0.6
    live = torch.arange(steps)[:, None] < torch.randint(1, steps + 1, (batch,))
    found = run(
        decoder, live=live, dropout_mask=mask, dropout_scale=1.25, borders=(1,), keeps=True,
        inputs=torch.randint(50, (steps, batch)) if known else None,
    )  # fmt: skip
    assert found.pre is not None
    x = decoder.table[found.inputs]
    for layer, cell in enumerate(decoder.cells):
        outputs = found.states[layer * decoder.parts]
        from_x = (x @ cell.weight_ih.t() + cell.bias_ih).detach()
        from_h = (outputs[:-1] @ cell.weight_hh.t() + cell.bias_hh).detach()
        expected = from_x + from_h
        if kind == "gru":
            rz = slice(2 * units)
            n = slice(2 * units, None)
            expected = torch.cat([expected[..., rz], from_x[..., n], from_h[..., n]], -1)
        close(found.pre[layer][live], expected[live])
        x = outputs[1:] * mask[:, 0] * 1.25


@pytest.mark.parametrize("known", [False, True], ids=["predicted", "known"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_weights(kind: str, narrow: torch.dtype, known: bool) -> None:
    """Operands of the products are rounded as the weights are, and the sums are not: each step from
    the state that was found before it, so that no rounding is there twice."""
    words, steps, batch, units = 50, 4, 9, 20
    decoder = LayeredDecoder(kind, 2, batch, units, 7, words, steps, torch.float32, narrow=narrow)
    mask = torch.rand(steps, 1, batch, units) < 0.6
    live = torch.arange(steps)[:, None] < torch.randint(0, steps + 1, (batch,))
    inputs = torch.randint(words, (steps, batch)) if known else None
    found = run(decoder, live=live, dropout_mask=mask, dropout_scale=1.25, inputs=inputs)

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
        named[found.calls[-1][1] :] = -1
        columns = (named // batch == t).nonzero()[:, 0]
        close(found.stats[0, columns], z[named[columns] % batch].amax(1))


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_a_narrow_table_with_a_stride(table_dtype: torch.dtype) -> None:
    decoder = LayeredDecoder("gru", 1, 9, 12, 7, 13, 3, torch.float32)
    decoder.table = decoder.table.to(table_dtype).double()
    wide = torch.full((13, 11), float("nan"), dtype=table_dtype)
    wide[:, :7] = decoder.table
    inputs, tokens = torch.randint(13, (3, 9)), torch.zeros(3, 9, dtype=torch.int64)
    states = [torch.zeros(4, 9, 12)]
    states[0][0] = decoder.start[0]
    decode_steps(
        wide[:, :7], decoder.weights(), states, 0, None, 1.0, None, 1.0, None, 1.0, inputs,
        None, None, None, -1, 0, None, 1.0, decoder.weight.float(), None, decoder.targets, tokens,
        None, None, None, 32, 0, 3,
    )  # fmt: skip
    expected, _ = decoder.loop(inputs, None, None, 1.0)
    close(states[0], expected[0])
