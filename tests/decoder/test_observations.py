"""decode_loss of observations, floating-point inputs [T, B, E], against a plain loop that reads
them, and every wrong argument."""

# ruff: noqa: E501  (one contract to a line)

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, SEED, STEPS, VOCABULARY, batch_first, turned, wrapped
from torch import Tensor, nn

import accumext
from accumext._peak_memory import peak_memory

WIDTH, SIZE = 4, 5
TARGETS = torch.arange(STEPS * BATCH).view(STEPS, BATCH) % VOCABULARY
ROWS = torch.arange(STEPS * BATCH).view(STEPS, BATCH)
LENGTHS = torch.tensor([0, STEPS, 3])  # of the first row no observation is read
RESETS = ROWS % 4 == 1
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "lengths": {"lengths": LENGTHS},
    "eos": {"eos": 3},
    "resets": {"resets": RESETS},
    "k1 = k2": {"k1": 2, "k2": 2},
    "k1 < k2": {"k1": 2, "k2": 5},
    "resets, lengths, windows": {"resets": RESETS, "lengths": LENGTHS, "k1": 2, "k2": 3},
    "embedding_dropout": {"embedding_dropout": 0.4},
    "a row of logits at a time": {"memory_budget": 8 * VOCABULARY},
}


def observations(**options: Any) -> Tensor:
    return torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64, **options)


def call_of(option: str, x: Tensor) -> dict[str, Any]:
    """With NaN where no row lives, which is a padding of no one's choice."""
    call = {"targets": TARGETS, "feedback": "teacher", "inputs": x, **OPTIONS[option]}
    if "lengths" in call:
        past = torch.arange(STEPS)[:, None] >= call["lengths"]
        call["inputs"] = torch.where(past[:, :, None], torch.nan, x)
    return call


def plain(
    decoder: Decoder, x: Tensor, lengths: Tensor, call: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """The loss and the outputs [B, H] of the loop by its definition."""
    reads = replace(decoder, embedding=lambda rows: x.flatten(0, 1)[rows])
    windows = (call["k1"], call["k2"]) if "k2" in call else None
    live, outputs = torch.arange(STEPS)[:, None] < lengths, []
    names = {"resets", "embedding_dropout"} & call.keys()
    torch.manual_seed(SEED)
    losses, divisor, _ = decode(
        reads, TARGETS, ROWS, live, windows=windows, outputs=outputs, **{n: call[n] for n in names}
    )
    return losses.sum() / divisor, outputs


@pytest.mark.parametrize("turn", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["gru", "lstm_cell", "a function"])
def test_a_plain_loop_that_reads_them(kind, option, turn):
    decoder = make_decoder(
        "gru_cell" if kind == "a function" else kind, VOCABULARY, SIZE, inputs=WIDTH
    )
    x = observations(requires_grad=True)
    cell = wrapped(decoder) if kind == "a function" else decoder.cell
    call = call_of(option, x)
    given = (
        {**batch_first(call), "batch_first": True, "inputs": turned(call["inputs"])}
        if turn
        else call
    )
    torch.manual_seed(SEED)
    out = accumext.decode_loss(
        None, cell, decoder.head, state=decoder.state, return_outputs=True, **given
    )
    assert torch.equal(out.inputs.nan_to_num(), given["inputs"].nan_to_num())
    expected, outputs = plain(decoder, x, out.lengths, call)
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=EXACT)
    of_cell = turned(out.outputs) if turn else out.outputs
    if "k2" not in call:  # the plain windows run steps again
        torch.testing.assert_close(of_cell, torch.stack(outputs), rtol=EXACT, atol=EXACT)
    leaves = [leaf for leaf in decoder.leaves if leaf is not decoder.embedding.weight]
    torch.manual_seed(99)  # the backward pass must bring its own masks
    actual, wanted = (
        torch.autograd.grad(3 * loss, [x, *leaves], materialize_grads=True)
        for loss in (out.loss, expected)
    )
    assert relative_distance(list(actual), list(wanted)) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gru", "a function"])
def test_half_precision_is_that_of_an_embedding_with_these_rows(kind, dtype):
    """Bit for bit; which sums are in float32 is tested of embeddings."""
    decoder = make_decoder("gru", VOCABULARY, SIZE, inputs=WIDTH, dtype=dtype)
    x = observations().to(dtype).requires_grad_()
    table = nn.Embedding.from_pretrained(x.detach().flatten(0, 1), freeze=False)
    call = {"feedback": "teacher", "batch_dim": 1}
    cell = decoder.cell if kind == "gru" else wrapped(decoder)
    parts, state = (cell, decoder.head, TARGETS), decoder.state
    accumext.decode_loss(None, *parts, state, inputs=x, **call).loss.backward()
    accumext.decode_loss(table, *parts, state, inputs=ROWS, **call).loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), table.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_what_a_trunk_gives(dtype):
    """In either precision, on the path of the kernels."""
    cell, head = nn.GRU(WIDTH, SIZE), nn.Linear(SIZE, VOCABULARY)
    x = observations().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = accumext.decode_loss(None, cell, head, TARGETS, feedback="teacher", inputs=x)
        wide = x.detach().float().requires_grad_()
        same = accumext.decode_loss(None, cell, head, TARGETS, feedback="teacher", inputs=wide)
    out.loss.backward()
    same.loss.backward()
    assert torch.equal(out.loss, same.loss)
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, wide.grad.to(dtype))


def test_a_run_is_replayed_by_its_inputs():
    decoder, x = make_decoder("gru", VOCABULARY, SIZE, inputs=WIDTH), observations()
    call = {"feedback": "teacher", "state": decoder.state}
    out = accumext.decode_loss(None, decoder.cell, decoder.head, TARGETS, inputs=x, **call)
    again = accumext.decode_loss(
        None, decoder.cell, decoder.head, TARGETS, inputs=out.inputs, **call
    )
    assert torch.equal(out.loss, again.loss)
    assert not out.inputs.requires_grad


@pytest.mark.parametrize("shape", [(0, BATCH), (STEPS, 0)])
def test_no_steps_or_rows(shape):
    x = torch.zeros(*shape, WIDTH, requires_grad=True)
    parts = nn.GRU(WIDTH, SIZE), nn.Linear(SIZE, VOCABULARY), torch.zeros(shape, dtype=torch.int64)
    accumext.decode_loss(None, *parts, feedback="teacher", inputs=x).loss.backward()
    assert x.grad.shape == x.shape


def test_observations_that_were_written_since_are_an_error():
    x = observations()
    decoder = make_decoder("gru", VOCABULARY, SIZE, inputs=WIDTH)
    out = accumext.decode_loss(
        None, decoder.cell, decoder.head, TARGETS, decoder.state, feedback="teacher", inputs=x
    )
    x.zero_()
    with pytest.raises(
        RuntimeError, match=r"^decode_loss: parameters must be those of the forward"
    ):
        out.loss.backward()


@pytest.mark.parametrize("turn", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize("lengths", [None, [40] * 15 + [7]], ids=["all steps", "lengths"])
@pytest.mark.parametrize("trained", [False, True], ids=["given", "trained"])
def test_predicted_peak(trained, lengths, turn):
    """Of observations that are the largest part of it."""
    steps, batch, width, units, words = 40, 16, 512, 32, 10
    cell, head = nn.GRU(width, units), nn.Linear(units, words)
    shape = (batch, steps) if turn else (steps, batch)
    x = torch.randn(*shape, width, requires_grad=trained)
    targets = torch.randint(words, shape)
    call = {"feedback": "teacher", "inputs": x, "lengths": lengths, "batch_first": turn}
    predicted = accumext.decode_memory(None, cell, head, shape, **call)
    of_meta = accumext.decode_memory(None, cell, head, shape, **{**call, "inputs": x.to("meta")})
    parts = nn.GRU(width, units, device="meta"), nn.Linear(units, words, device="meta")
    accumext.decode_memory(None, *parts, shape, **{**call, "inputs": x.detach().bfloat16()})

    def run() -> None:
        accumext.decode_loss(None, cell, head, targets, **call).loss.backward()

    assert predicted == of_meta == pytest.approx(peak_memory(run), rel=0.02)


FEW = torch.zeros(4, 3, dtype=torch.int64)
X = torch.zeros(4, 3, WIDTH)
with torch.inference_mode():
    INFERENCE = X.clone()
WHERE = "if inputs are observations"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"inputs": None}, TypeError, "embedding must be an nn.Embedding or a floating-point tensor [V, E], got NoneType. "
     "None is for observations: pass them as floating-point inputs [T, B, E]"),
    ({"inputs": FEW}, TypeError, "inputs must be a floating-point tensor [T, B, E] if embedding is None, got an int64 tensor"),
    ({"inputs": X.to(torch.complex64)}, TypeError,
     "inputs must be a floating-point tensor [T, B, E] if embedding is None, got a complex64 tensor"),
    ({"embedding": nn.Embedding(7, WIDTH)}, TypeError,
     "inputs must be an integer tensor [T, B], got a float32 tensor. Observations [T, B, E] take embedding=None"),
    ({"inputs": X[..., 0]}, ValueError, "inputs must have shape [4, 3, E], got [4, 3]"),
    ({"inputs": X.transpose(0, 1)}, ValueError,
     "inputs must have shape [4, 3, E], got [3, 4, 4]. Did you mean inputs.transpose(0, 1)?"),
    ({"inputs": X[..., None]}, ValueError,
     "inputs must have shape [4, 3, E], got [4, 3, 4, 1]. Pass inputs.flatten(2), which a cell of yours may unflatten"),
    ({"inputs": X[..., 1:]}, ValueError, "inputs must have the cell's input size, 4, got 3"),
    ({"inputs": X.double()}, TypeError, "inputs must have the cell's dtype, float32, got float64. "
     "Pass inputs.to(torch.float32), or call it under torch.autocast"),
    ({"inputs": X.to("meta")}, TypeError,
     "inputs must hold numbers, got a meta tensor. accumext.decode_memory takes such tensors, for the memory of a call"),
    ({"inputs": INFERENCE}, RuntimeError, "inputs must not be made in torch.inference_mode if it is to be used outside, "
     "got an inference tensor. Pass inputs.clone()"),
    ({"targets": FEW[0]}, ValueError, "targets must have shape [T, B], got [3]"),
    ({"targets": None, "steps": 4}, TypeError, f"targets must be an integer tensor [T, B] {WHERE}, got NoneType"),
    ({"feedback": "greedy"}, ValueError, f"feedback must be 'teacher' {WHERE}, which are all that is fed, got 'greedy'"),
    ({"feedback": FEW == 0}, ValueError, f"feedback must be 'teacher' {WHERE}, which are all that is fed, got a bool tensor"),
    ({"start": 3}, ValueError, f"start must be left at 0 {WHERE}, got 3. The first one is inputs[0]"),
    ({"start": FEW[0]}, ValueError, f"start must be left at 0 {WHERE}, got an int64 tensor. The first one is inputs[0]"),
    ({"lengths": [1, 2, 5]}, ValueError, "lengths must be in [0, 4], got [1, 2, 5]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[t[:70] for _, _, t in WRONG])
def test_wrong_arguments(change, kind, text):
    call = {
        "embedding": None,
        "cell": nn.GRU(WIDTH, SIZE),
        "head": nn.Linear(SIZE, 7),
        "targets": FEW,
    }
    call |= {"feedback": "teacher", "inputs": X}
    accumext.decode_loss(**call)
    with pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}$"):
        accumext.decode_loss(**{**call, **change})


def test_generate_feeds_words_alone():
    with pytest.raises(TypeError, match=r"^generate: embedding must be an nn.Embedding"):
        accumext.generate(None, nn.GRU(WIDTH, SIZE), nn.Linear(SIZE, 7), max_length=3)
