"""Every option of `decode_loss` beside the others, against the plain loop in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import CELLS, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, VOCABULARY
from support.objectives import SOFT, entropy, objective, soft_targets

import accumext

OPTIONS = (
    "lengths", "eos", "resets", "token_weight", "embedding_dropout", "output_dropout",
    "class_weight", "label_smoothing", "z_loss", "entropy_weight", *SOFT,
)  # fmt: skip


def options_of(names: set[str], steps: int) -> dict[str, Any]:
    """The arguments of a call, by what is on."""
    floats = {
        "embedding_dropout": 0.4,
        "output_dropout": 0.3,
        "label_smoothing": 0.2,
        "z_loss": 0.1,
        "entropy_weight": 0.3,
    }
    call: dict[str, Any] = {name: floats[name] for name in names & floats.keys()}
    if "lengths" in names:
        call["lengths"] = torch.randint(steps + 1, (BATCH,))
    if "eos" in names:
        call["eos"] = 3
    if "resets" in names:
        call["resets"] = torch.rand(steps, BATCH) < 0.3
    if "token_weight" in names:
        call["token_weight"] = torch.randn(steps, BATCH)
    if "class_weight" in names:
        call["class_weight"] = torch.rand(VOCABULARY, dtype=torch.float64)
    if "num_items" in names:
        call["num_items"] = 5
    for kind in names & set(SOFT):
        call["soft_targets"] = soft_targets(kind, steps, BATCH, VOCABULARY)
        call["soft_weight"], call["soft_temperature"] = (1.0, 1.0) if steps % 2 else (0.4, 2.0)
    return call


@settings(max_examples=examples(120), deadline=None)
@given(
    kind=st.sampled_from(sorted(CELLS)),
    called=st.booleans(),
    feedback=st.sampled_from(["teacher", "greedy", "sample", "scheduled", "mask"]),
    sampled=st.booleans(),
    own=st.booleans(),
    names=st.sets(st.sampled_from(OPTIONS), max_size=5),
    num_items=st.booleans(),
    windows=st.sampled_from([None, (2, 2), (3, 3), (2, 5), (1, 3)]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    budget=st.sampled_from([None, VOCABULARY * 8, VOCABULARY * 8 * 10]),
    batch_first=st.booleans(),
    steps=st.integers(1, 8),
    seed=st.integers(0, 2**20),
)
def test_any_options(
    kind: str, called: bool, feedback: str, sampled: bool, own: bool, names: set[str],
    num_items: bool, windows: tuple[int, int] | None, reduction: str, budget: int | None,
    batch_first: bool, steps: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    decoder = make_decoder(kind, tied=seed % 2 == 0)
    own = own and feedback in ("greedy", "sample")
    if windows is not None:  # where the plain loop draws anew
        names = names - {"embedding_dropout", "output_dropout"}
    if num_items and reduction == "mean":
        names = names | {"num_items"}
    call = options_of(names, steps)
    call |= {"reduction": reduction, "memory_budget": budget, "return_outputs": True}
    if windows is not None:
        call["k1"], call["k2"] = windows
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    targets[steps // 2, 0] = -100
    if feedback == "mask":
        call["feedback"] = torch.rand(steps, BATCH) < 0.5
    else:
        call["feedback"] = feedback
    if feedback in ("scheduled", "mask"):
        call["draw"] = "sample" if sampled else "argmax"
    if feedback == "scheduled":
        call["teacher_forcing"] = 0.5
    if own:
        call["steps"] = steps
    cell, call["batch_dim"] = decoder.cell, int(CELLS[kind][1] is not None)
    if called:
        cell = decoder.step
    laid_out = dict(call)
    if batch_first:
        for name in ("resets", "token_weight", "feedback"):
            if isinstance(call.get(name), torch.Tensor):
                laid_out[name] = call[name].t()
        if "soft_targets" in call:
            laid_out["soft_targets"] = tuple(
                t.transpose(0, 1) if t is not None and t.dim() == 3 else t
                for t in call["soft_targets"]
            )

    torch.manual_seed(seed)
    out = accumext.decode_loss(
        decoder.embedding, cell, decoder.head,
        None if own else targets.t() if batch_first else targets, decoder.state,
        generator=torch.Generator().manual_seed(seed), batch_first=batch_first, **laid_out,
    )  # fmt: skip
    if batch_first:
        turned = (out.tokens, out.inputs, out.token_losses, out.outputs)
        tokens, inputs, token_losses, outputs = (x.transpose(0, 1) for x in turned)
    else:
        tokens, inputs, token_losses, outputs = (
            out.tokens, out.inputs, out.token_losses, out.outputs,
        )  # fmt: skip
    loss = out.loss.t() if batch_first and out.loss.dim() == 2 else out.loss

    live = torch.arange(steps)[:, None] < out.lengths
    criterion = {k: call[k] for k in ("label_smoothing", "z_loss", "class_weight") if k in call}
    rates = {k: call[k] for k in ("embedding_dropout", "output_dropout", "resets") if k in call}
    seen: list[torch.Tensor] = []
    torch.manual_seed(seed)
    wanted = tokens if own else targets
    losses, divisor, logits = decode(
        decoder, wanted, inputs, live, windows=windows, outputs=seen, objective=objective(call),
        **criterion, **rates,
    )  # fmt: skip
    torch.testing.assert_close(token_losses, losses.detach(), rtol=1e-11, atol=EXACT)
    if "token_weight" in call:
        losses = losses * call["token_weight"]
    expected = losses
    if reduction != "none":
        divisor = call.get("num_items", divisor) if reduction == "mean" else 1
        expected = losses.sum() / divisor if divisor else losses.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=EXACT, check_dtype=True)
    if feedback in ("teacher", "greedy"):
        assert torch.equal(tokens[live], logits.argmax(-1)[live])
    torch.testing.assert_close(outputs, torch.stack(seen[:steps]), rtol=EXACT, atol=EXACT)
    if "entropy_weight" in call:
        entropies = out.entropies.t() if batch_first else out.entropies
        counted = live if own else live & (targets != -100)
        expected_entropies = torch.where(counted, entropy(logits), 0)
        torch.testing.assert_close(entropies, expected_entropies, rtol=EXACT, atol=EXACT)

    factors, probe = torch.rand_like(losses), torch.randn_like(outputs)
    if windows is not None:  # the plain windows give no graph of all outputs together
        probe = torch.zeros_like(outputs)
    actual = (loss * factors).sum() if reduction == "none" else loss
    plain = (expected * factors).sum() if reduction == "none" else expected
    actual = actual + (outputs * probe).sum()
    plain = plain + (torch.stack(seen[:steps]) * probe).sum()
    distance = relative_distance(decoder.gradients(actual), decoder.gradients(plain))
    assert distance < EXACT
