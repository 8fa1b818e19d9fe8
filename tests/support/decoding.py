"""Calls of `decode_loss` on small decoders: one table of its options, and one comparison of all
that comes out with the plain loop."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accumext
from support.decode_oracle import Decoder, decode, relative_distance
from support.objectives import SOFT, entropy, objective, soft_targets

STEPS, BATCH, VOCABULARY = 7, 3, 13
TARGETS = torch.arange(6 * BATCH).view(6, BATCH) % VOCABULARY
EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
SEED = 7

Call = dict[str, Any]
Option = Callable[[int, int, int], Call]  # of the steps T, the batch B and the vocabulary V


def fixed(**call: Any) -> Option:
    return lambda t, b, v: dict(call)


def soft(kind: str, weight: float, temperature: float) -> Option:
    return lambda t, b, v: {
        "soft_targets": soft_targets(kind, t, b, v),
        "soft_weight": weight,
        "soft_temperature": temperature,
    }


def spans(t: int, b: int, v: int) -> Call:
    """Targets for some steps, predictions for some."""
    return {"feedback": ((torch.arange(t)[:, None] + 1) % 5 < 3).expand(t, b).clone()}


FEEDBACKS: dict[str, Option] = {
    "teacher": fixed(feedback="teacher"),
    "greedy": fixed(feedback="greedy"),
    "sample": fixed(feedback="sample", temperature=1.7),
    "scheduled": fixed(feedback="scheduled", teacher_forcing=0.4),
    "scheduled samples": fixed(feedback="scheduled", teacher_forcing=0.5, draw="sample"),
    "mask": lambda t, b, v: {"feedback": torch.rand(t, b) < 0.5},
    "mask, samples": lambda t, b, v: {"feedback": torch.rand(t, b) < 0.5, "draw": "sample"},
    "mask of nothing else": lambda t, b, v: {"feedback": torch.ones(t, b, dtype=torch.bool)},
    "spans": spans,
    "own samples": lambda t, b, v: {"feedback": "sample", "steps": t},
    "own words": lambda t, b, v: {"feedback": "greedy", "steps": t},
}
# Of the options of a group, one at a time.
GROUPS: dict[str, dict[str, Option]] = {
    "reduction": {
        "sum": fixed(reduction="sum"),
        "none": fixed(reduction="none"),
        "num_items": fixed(num_items=17),
        "num_items on the device": fixed(num_items=torch.tensor(40)),
    },
    "windows": {
        "k1 = k2 = 1": fixed(k1=1, k2=1),
        "k2 = 3": fixed(k2=3),
        "k1, k2": fixed(k1=2, k2=5),
        "longer than the call": fixed(k1=4, k2=30),
    },
    "budget": {
        "a row": lambda t, b, v: {"memory_budget": v * 8},
        "few rows": lambda t, b, v: {"memory_budget": v * 8 * 5},
        "many rows": lambda t, b, v: {"memory_budget": v * 8 * 30},
    },
    "soft": {kind: soft(kind, 0.4, 2.0) for kind in SOFT}
    | {f"{kind} alone": soft(kind, 1.0, 1.0) for kind in SOFT},
}
OPTIONS: dict[str, Option] = {
    "start": lambda t, b, v: {"start": torch.randint(v, (b,))},
    "lengths": lambda t, b, v: {"lengths": torch.randint(t + 1, (b,))},
    "nobody": lambda t, b, v: {"lengths": [0] * b},
    "eos": fixed(eos=3),
    "resets": lambda t, b, v: {"resets": torch.rand(t, b) < 0.3},
    "ignore_index": fixed(ignore_index=2),
    "label_smoothing": fixed(label_smoothing=0.2),
    "label_smoothing of 1": fixed(label_smoothing=1.0),
    "z_loss": fixed(z_loss=0.1),
    "class_weight": lambda t, b, v: {"class_weight": torch.linspace(0, 2, v).double()},
    "token_weight": lambda t, b, v: {"token_weight": torch.randn(t, b)},
    "entropy_weight": fixed(entropy_weight=0.3),
    "negative entropy_weight": fixed(entropy_weight=-0.3),
    "embedding_dropout": fixed(embedding_dropout=0.4),
    "output_dropout": fixed(output_dropout=0.3),
    "batch_first": fixed(batch_first=True),
    "no state": fixed(state=None),
}
EVERY_OPTION = OPTIONS | {name: group[name] for group in GROUPS.values() for name in group}


def options(names: Iterable[str], t: int = STEPS, b: int = BATCH, v: int = VOCABULARY) -> Call:
    """The arguments by these names, but for what another of them excludes."""
    call: Call = {}
    for name in names:
        call |= (EVERY_OPTION | FEEDBACKS)[name](t, b, v)
    if call.get("reduction", "mean") != "mean":
        call.pop("num_items", None)
    # With windows the plain loop draws masks anew; without targets none is ignored, and the state
    # says how many rows there are.
    excluded = ["embedding_dropout", "output_dropout"] if "k2" in call else []
    excluded += ["ignore_index", "state"] if "steps" in call else []
    return {name: value for name, value in call.items() if name not in excluded}


def targets_with_holes(steps: int = STEPS, hole: int = -100) -> Tensor:
    """Random targets, one of which is ignored."""
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    targets[steps // 2, 0] = hole
    return targets


def wrapped(decoder: Decoder) -> Callable[..., Any]:
    """The same cell as a function of our own."""
    return lambda x, state: decoder.step(x, state)


def run(
    decoder: Decoder, cell: Any = None, state: Any = None, **call: Any
) -> accumext.DecodeOutput:
    """`decode_loss` of TARGETS, or others, teacher-forced unless said otherwise."""
    call = {"targets": TARGETS, "feedback": "teacher", **call}
    cell = decoder.cell if cell is None else cell
    state = decoder.state if state is None else state
    return accumext.decode_loss(decoder.embedding, cell, decoder.head, state=state, **call)


def raises(kind: type[Exception], text: str) -> Any:
    """An error of `decode_loss` that begins with this text."""
    return pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}")


class WholeModel(nn.Module):
    """A model as people have it: (tokens [B], state) -> (logits [B, V], state)."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(vocabulary, size), nn.GRUCell(size, size)
        self.out = nn.Linear(size, vocabulary)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.rnn(self.words(token), state)
        return self.out(state), state


def parts_of(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


def stateless(decoder: Decoder) -> Decoder:
    """The same decoder at a zero state, for which no gradient is taken."""
    parts = parts_of(decoder.state)
    zeros = [torch.zeros_like(part, requires_grad=False) for part in parts]
    leaves = [leaf for leaf in decoder.leaves if all(leaf is not part for part in parts)]
    state = tuple(zeros) if isinstance(decoder.state, tuple) else zeros[0]
    return replace(decoder, state=state, leaves=leaves)


def turned(value: Any) -> Any:
    """[T, B, ...] from [B, T, ...], and back."""
    return value.transpose(0, 1) if isinstance(value, Tensor) and value.dim() > 1 else value


def batch_first(call: Call) -> Call:
    """The arguments of a call, [B, T] where they are [T, B]."""
    by_token = ("targets", "inputs", "feedback", "token_weight", "resets")
    found = {name: turned(value) if name in by_token else value for name, value in call.items()}
    if "soft_targets" in call:
        whole = call["soft_targets"]
        found["soft_targets"] = tuple(
            turned(t) if t is not None and t.dim() == 3 else t for t in whole
        )
    return found


def found_by(decoder: Decoder, targets: Tensor | None, call: Call, cell: Any) -> Any:
    """The results of a call, [T, B] in any case; samples have a generator of their own."""
    call = {"return_outputs": True, "state": decoder.state, "targets": targets, **call}
    call |= {"generator": torch.Generator().manual_seed(SEED)}
    call |= {"batch_dim": parts_of(decoder.state)[0].dim() - 2}
    call = batch_first(call) if call.get("batch_first") else call
    torch.manual_seed(SEED)
    cell = decoder.cell if cell is None else cell
    out = accumext.decode_loss(decoder.embedding, cell, decoder.head, **call)
    if not call.get("batch_first"):
        return out
    names = ("loss", "tokens", "inputs", "token_losses", "outputs", "entropies")
    return out._replace(**{name: turned(getattr(out, name)) for name in names})


def rows_that_live(call: Call, out: Any, pad: int) -> Tensor:
    """Which rows live in which steps, bool [T, B], by `lengths` and `eos`; of all others the
    results say nothing but padding."""
    steps, batch = out.tokens.shape
    lengths = torch.as_tensor(call.get("lengths", [steps] * batch))
    live = torch.arange(steps)[:, None] < lengths
    for t in range(steps if "eos" in call else 0):
        live[t + 1 :] &= ~(live[t] & (out.tokens[t] == call["eos"]))
    assert torch.equal(out.lengths, live.sum(0))
    assert (out.tokens[~live] == pad).all()
    assert (out.inputs[~live] == pad).all()
    return live


def assert_fed(call: Call, out: Any, teacher: Tensor, live: Tensor, pad: int) -> None:
    """What feedback asks for, where rows live."""
    feedback, said = call["feedback"], out.tokens[:-1]
    first = torch.as_tensor(call.get("start", 0))
    if feedback == "scheduled":
        fed = out.inputs[1:]
        assert ((fed == teacher) | (fed == said) | ~live[1:]).all()
    elif isinstance(feedback, Tensor):
        fed = torch.where(feedback[1:], teacher, said)
    else:
        fed = teacher if feedback == "teacher" else said
    assert torch.equal(out.inputs[1:], fed.where(live[1:], torch.tensor(pad)))
    assert (out.inputs[0] == first)[live[0]].all()


def check(
    decoder: Decoder,
    targets: Tensor | None,  # int64 [T, B]; None: those that the decoder says itself
    call: Call,  # its tensors are [T, B] even where `batch_first` is
    cell: Any = None,  # else the decoder's own
    upstream: float = 1.0,
    twice: bool = False,  # backward
) -> Any:
    """All results of a call and every gradient equal the plain loop's on the same tokens; returns
    the results, [T, B]."""
    call = {"feedback": "teacher", **call}
    if "state" in call:  # None, which is zero; a function would have to make its own
        decoder = stateless(decoder)
        call = call if cell is None else {k: v for k, v in call.items() if k != "state"}
    out = found_by(decoder, targets, call, cell)
    wanted = out.tokens if targets is None else targets
    ignored, pad = call.get("ignore_index", -100), decoder.embedding.padding_idx or 0
    live = rows_that_live(call, out, pad)
    assert_fed(call, out, wanted.where(wanted != ignored, pad)[:-1], live, pad)

    names = "ignore_index", "label_smoothing", "z_loss", "class_weight"
    names += "embedding_dropout", "output_dropout", "resets"
    windows = (call.get("k1") or call["k2"], call["k2"]) if call.get("k2") else None
    whole = {"soft_targets", "entropy_weight"} & call.keys()
    outputs: list[Tensor] = []
    states: list[Any] = []
    torch.manual_seed(SEED)
    losses, divisor, logits = decode(
        decoder, wanted, out.inputs, live, windows=windows, outputs=outputs, states=states,
        objective=objective(call) if whole else None,
        **{name: call[name] for name in names if name in call},
    )  # fmt: skip
    seen = torch.stack(outputs[: len(wanted)])
    expected = losses * call.get("token_weight", 1)
    if call.get("reduction", "mean") == "mean":
        divisor = call.get("num_items", divisor)
        expected = expected.sum() / divisor if divisor else expected.sum() * 0
    elif call["reduction"] == "sum":
        expected = expected.sum()
    results = [
        (out.loss, expected), (out.token_losses, losses), (out.outputs, seen),
        *zip(parts_of(out.state), parts_of(states[-1]), strict=True),
    ]  # fmt: skip
    if "entropy_weight" in call:
        counted = live & (wanted != ignored)
        results.append((out.entropies, torch.where(counted, entropy(logits), 0)))
    for actual, exact in results:
        torch.testing.assert_close(actual, exact, rtol=1e-11, atol=EXACT)
    if "sample" not in (call["feedback"], call.get("draw")):
        assert torch.equal(out.tokens[live], logits.argmax(-1)[live])
    assert not (windows and any(part.requires_grad for part in parts_of(out.state)))

    if not decoder.leaves:
        assert not any(actual.requires_grad for actual, _ in results)
        return out
    torch.manual_seed(99)  # the backward pass must bring its own masks
    factors = [upstream * torch.rand_like(expected.detach())]
    if windows is None:  # the plain windows give no graph of all outputs together
        factors += [torch.randn_like(exact) for _, exact in results[2:]]
    weighed = zip(factors, results[:1] + results[2:], strict=False)
    pairs = [(f * actual, f * exact) for f, (actual, exact) in weighed if exact.requires_grad]
    actual, plain = (sum(term.sum() for term in side) for side in zip(*pairs))
    wants = decoder.gradients(plain)
    for again in [True] * twice + [False]:
        found = torch.autograd.grad(
            actual, decoder.leaves, retain_graph=again, materialize_grads=True
        )
        assert relative_distance(list(found), wants) < EXACT
    return out


@cache
def lstm_runs_in_autocast() -> bool:
    """Whether torch itself can: on a processor without AVX-512 it raises, but cells do not."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.ones(1, 1, 2))
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        return False
    return True
