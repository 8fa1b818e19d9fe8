"""Errors in float32, half precision and autocast: no larger than plain PyTorch's, against float64
on the same tokens, gradient by gradient."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from support.decoding import lstm_runs_in_autocast, run

# The error that a gradient may have over plain PyTorch's, relative to its norm. float32: 40
# roundings, in sums of another order and exponentials within two units in the last place, over a
# dozen steps. Half precision: half a unit in the last place, once, of the result.
EXTRA = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Under autocast operands alone are rounded: the products of plain PyTorch are rounded, too.
MODES = ["float32", "bfloat16", "float16", "autocast"]
WORDS, STEPS, BATCH = 300, 12, 8
SHAPE = {"vocabulary": WORDS, "size": 32, "batch": BATCH}


def settings(mode: str) -> tuple[torch.dtype, float, Any]:
    """Of the parameters; the extra error; what to run in."""
    if mode == "autocast":
        return torch.float32, EXTRA[torch.bfloat16], torch.autocast("cpu", torch.bfloat16)
    dtype = getattr(torch, mode)
    return dtype, EXTRA[dtype], nullcontext()


def twin(decoder: Decoder, kind: str, **shape: Any) -> Decoder:
    """The same parameters in float64."""
    truth = make_decoder(kind, **shape)
    with torch.no_grad():
        for exact, leaf in zip(truth.leaves, decoder.leaves, strict=True):
            exact.copy_(leaf)
    return truth


def groups(decoder: Decoder) -> dict[str, list[int]]:
    """Leaves by what their gradient comes through."""
    ids = [id(leaf) for leaf in decoder.leaves]
    named = {
        "embedding": [decoder.embedding.weight],
        "cell": list(decoder.cell.parameters()),
        "head weight": [decoder.head.weight],
        "head bias": [decoder.head.bias],
        "state": list(decoder.state) if isinstance(decoder.state, tuple) else [decoder.state],
    }
    return {name: [ids.index(id(t)) for t in given] for name, given in named.items()}


WEIGHT = torch.linspace(0.5, 2.0, WORDS)
FAVOURED = torch.full((STEPS, BATCH), 7)
# A loss scale over a mean of many tokens neither overflows nor underflows; a favoured word has
# confident rows.
CASES: list[dict[str, Any]] = [
    {"kind": "gru_cell"},
    {"kind": "gru_cell", "feedback": "teacher"},
    {"kind": "lstm_cell"},
    {"kind": "rnn_cell"},
    {"kind": "lstm"},
    {"label_smoothing": 0.1, "z_loss": 0.01, "class_weight": WEIGHT},
    {"batch": 40, "scale": 65536.0 / 64},
    {"vocabulary": 3000, "size": 16, "scale": 65536.0 / 16},
    {"targets": FAVOURED, "above": 8.0, "scale": 1024.0},
    {"targets": FAVOURED, "above": 30.0, "scale": 1024.0},
    {"lengths": torch.arange(BATCH) + 5, "memory_budget": 40 * WORDS},
    {"kind": "lstm", "lengths": torch.arange(BATCH) + 4, "feedback": "teacher", "k2": 5},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_no_worse_than_plain(case, mode):
    """error(accumext) <= error(plain) + extra, of the loss and every group of gradients; tokens are
    those of float64 on the rounded operands, wherever that is clear."""
    (dtype, extra, context), call = settings(mode), {"feedback": "greedy", **case}
    kind, scale, above = call.pop("kind", "gru_cell"), call.pop("scale", 1.0), call.pop("above", 0)
    if (kind, mode) == ("lstm", "autocast") and not lstm_runs_in_autocast():
        pytest.skip("torch's own LSTM has no bfloat16 on this processor")
    shape = SHAPE | {name: call.pop(name) for name in SHAPE if name in call}
    decoder = make_decoder(kind, dtype=dtype, **shape)
    decoder.head.bias.data[7] += above
    targets = call.pop("targets", torch.randint(shape["vocabulary"], (STEPS, shape["batch"])))
    if "class_weight" in call:
        call["class_weight"] = call["class_weight"].to(dtype)
    with context:
        out = run(decoder, targets=targets, **call)
        criterion = {n: call[n] for n in ("label_smoothing", "z_loss", "class_weight") if n in call}
        live = torch.arange(STEPS)[:, None] < out.lengths
        windows = (call["k2"], call["k2"]) if "k2" in call else None
        given = targets, out.inputs, live
        losses, divisor, _ = decode(decoder, *given, windows=windows, **criterion)
        plain_loss = losses.sum() / divisor
    assert out.loss.dtype == out.token_losses.dtype == torch.float32
    actual, plain = decoder.gradients(out.loss * scale), decoder.gradients(plain_loss * scale)
    assert all(g.dtype == leaf.dtype for g, leaf in zip(actual, decoder.leaves, strict=True))
    assert all(g.isfinite().all() for g in actual)
    truth = twin(decoder, kind, **shape)
    if "class_weight" in criterion:
        criterion["class_weight"] = criterion["class_weight"].double()
    losses, divisor, logits = decode(truth, *given, windows=windows, **criterion)
    expected = truth.gradients(losses.sum() / divisor * scale)
    exact = float(losses.detach().sum()) / float(divisor)
    error, allowed = (abs(float(x.detach()) - exact) for x in (out.loss, plain_loss))
    assert error <= allowed + extra * abs(exact)
    for name, indices in groups(decoder).items():
        mine, its, right = ([g[i] for i in indices] for g in (actual, plain, expected))
        error, allowed = relative_distance(mine, right), relative_distance(its, right)
        assert error <= allowed + extra, f"{name}: {error}, plain {allowed}"
    top = logits.topk(2, -1).values
    # rounding operands to half precision moves logits of this size by less
    clear = live & (top[..., 0] - top[..., 1] > (1e-4 if mode == "float32" else 0.03))
    assert clear.any()
    assert torch.equal(out.tokens[clear], logits.argmax(-1)[clear])


@pytest.mark.parametrize("mode", MODES)
def test_confident_rows_keep_their_relative_accuracy(mode):
    """A row that gives its target 99.8% still has a gradient of that accuracy, though the
    exponentials may be kept in half precision: the target's coefficient is formed in float32."""
    dtype, extra, context = settings(mode)
    decoder = make_decoder("gru_cell", dtype=dtype, **SHAPE)
    with torch.no_grad():
        decoder.head.bias[7] = 12.0
        decoder.head.weight.mul_(0.5)
    with context:
        out = run(decoder, targets=FAVOURED, feedback="greedy")
    assert (out.tokens == 7).all()
    actual = decoder.gradients(out.loss * 65536.0)
    truth = twin(decoder, "gru_cell", **SHAPE)
    losses, divisor, _ = decode(truth, FAVOURED, out.inputs)
    assert 1e-4 < float((losses.sum() / divisor).detach()) < 1e-2
    expected = truth.gradients(losses.sum() / divisor * 65536.0)
    at = groups(decoder)
    # 1 - p is known to eps / (1 - p); operands of half precision move logits by 2**-8 of a unit
    allowed = 1e-3 + (4 * extra if dtype != torch.float32 or mode == "autocast" else 0)
    for name in ("head bias", "head weight", "embedding", "state"):
        mine, exact = ([g[i] for i in at[name]] for g in (actual, expected))
        assert relative_distance(mine, exact) < allowed, name
    (bias,) = at["head bias"]
    ours, true = float(actual[bias][7]), float(expected[bias][7])
    assert abs(ours - true) < allowed * abs(true)


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_a_divisor_moves_no_bit_of_accuracy(mode):
    """The gradient of a mean over 10**9 items is that of the sum, scaled."""
    dtype, extra, context = settings(mode)
    decoder = make_decoder("lstm_cell", dtype=dtype, **SHAPE)
    call = {"targets": torch.randint(WORDS, (STEPS, BATCH)), "feedback": "greedy"}
    with context:
        mean, total = run(decoder, num_items=10**9, **call), run(decoder, reduction="sum", **call)
    few = [g.double() * 1e9 for g in decoder.gradients(mean.loss)]
    many = [g.double() for g in decoder.gradients(total.loss)]
    assert relative_distance(few, many) < extra * 1.5
