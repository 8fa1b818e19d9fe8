"""tbptt against its definition, and every wrong argument."""

# ruff: noqa: E501  (one contract to a line)

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import Decoder, make_decoder, relative_distance, truncated
from support.decoding import BATCH, EXACT, TARGETS, VOCABULARY, WholeModel, targets_with_holes
from torch import Tensor, nn

import accumext

STEPS = len(TARGETS)
T, B, V, H = 4, 3, 7, 5
FEW = torch.arange(T * B).view(T, B) % V
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"step": 3}, TypeError, "step must be callable, got int"),
    ({"criterion": None}, TypeError, "criterion must be callable, got NoneType"),
    ({"backward": 1}, TypeError, "backward must be callable, got int"),
    ({"targets": FEW.int()}, TypeError, "targets must be an int64 tensor [T, B] or a floating-point tensor [T, B, ...], got an int32 tensor"),
    ({"targets": FEW.float()}, ValueError,
     "feedback must be 'teacher' if inputs or targets are floating-point, got 'greedy'. accumext.rollout feeds a model its own output"),
    ({"targets": FEW[0].float()}, ValueError, "targets must have shape [T, B, ...], got [3]"),
    ({"targets": FEW.float(), "feedback": FEW > 0}, ValueError,
     "feedback must be 'teacher' if inputs or targets are floating-point, got a bool tensor. accumext.rollout feeds a model its own output"),
    ({"targets": FEW.float(), "feedback": "teacher", "start": "a"}, TypeError, "start must be a number or a tensor [B, ...], got str"),
    ({"targets": FEW.float(), "feedback": "teacher", "start": torch.zeros(2)}, ValueError, "start must have shape [3], got [2]"),
    ({"feedback": "teacher", "inputs": torch.zeros(4, 2, 5)}, ValueError, "inputs must have shape [4, 3] in front, got [4, 2, 5]"),
    ({"targets": FEW.float(), "feedback": "teacher", "inputs": [1]}, TypeError, "inputs must be a tensor [T, B, ...], got list"),
    ({"targets": torch.zeros(3, 5), "state": FEW}, TypeError,
     "targets must be int64 tokens if the state is an int64 matrix, got a float32 tensor. Did you mean tbptt(step, targets, state)?"),
    ({"targets": (torch.zeros(3, 5),), "state": FEW}, TypeError,
     "targets must be an int64 tensor [T, B] or a floating-point tensor [T, B, ...], got tuple. Did you mean tbptt(step, targets, state)?"),
    ({"lengths": torch.tensor([1, 2, 9])}, ValueError, "lengths must be in [0, 4], got [1, 2, 9]"),
    ({"context": FEW}, TypeError, "context must be a tuple of tensors, got an int64 tensor"),
    ({"state": (torch.zeros(T, H), 0)}, ValueError,
     "targets must be [T, B] with B = 4, got [4, 3]. Did you mean targets.transpose(0, 1)?"),
    ({"state": torch.zeros(B, B, H), "lengths": [1, 2, 3]}, ValueError,
     "batch_dim must be given if dimensions 0 and 1 may both be the batch of 3, got a state of shape [3, 3, 5]"),
    ({"batch_dim": -1}, ValueError, "batch_dim must be at least 0, got -1"),
    ({"k1": 3, "k2": 2}, ValueError, "k2 must be at least k1, got k1=3, k2=2"),
    ({"reduction": "none"}, ValueError, "reduction must be one of 'mean', 'sum', got 'none'"),
    ({"start": -1}, ValueError, "start must be at least 0, got -1"),
    ({"teacher_forcing": 0.5}, ValueError, "teacher_forcing must be left at 1.0 unless feedback is 'scheduled', got 0.5"),
    ({"temperature": 2.0}, ValueError, "temperature must be left at 1.0 unless samples are drawn, got 2.0"),
    ({"criterion": lambda z, y: F.cross_entropy(z, y, reduction="none")}, ValueError,
     "criterion must return a 0-dim loss, got shape [3]. Take its mean() or sum()"),
    ({"criterion": lambda z, y: 3.0}, TypeError, "criterion must return a tensor, got float. Leave out .item(), whose result has no graph"),
]  # fmt: skip


def one_hot(token: Tensor, state: Any) -> tuple[Tensor, Any]:
    return F.one_hot(token, V).float().requires_grad_(), state


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[t[:60] for _, _, t in WRONG])
def test_wrong_arguments(change, kind, text):
    call = {"step": one_hot, "targets": FEW, "state": None, "criterion": F.cross_entropy}
    accumext.tbptt(**call)
    with pytest.raises(kind, match=rf"^tbptt: {re.escape(text)}$"):
        accumext.tbptt(**{**call, **change})


WHOLE, GRU, ZEROS = WholeModel(V, H), nn.GRU(H, H), torch.zeros(B, H)
BATCH_FIRST, CELL = nn.GRU(H, H, batch_first=True), nn.LSTMCell(H, H)


def one_step(token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y, state = GRU(WHOLE.words(token[None]), state)
    return WHOLE.out(y), state


def one_step_batch_first(token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y, state = BATCH_FIRST(WHOLE.words(token[:, None]), state)
    return WHOLE.out(y), state


def reshaped(change: Any) -> Any:
    """A step whose logits have another shape, or are none."""

    def step(token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = WHOLE(token, state)
        return change(logits), state

    return step


def lstm(token: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Its state, and no logits."""
    return CELL(WHOLE.words(token), state)


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"step": lambda t, s: WHOLE(t, s)[::-1]}, "got ([3, 5], [3, 7]). Return them in this order"),
        ({"step": lambda t, s: ((s, s), s)}, "got (tuple, [3, 5]). Return them in this order"),
        ({"step": lambda t, s: WHOLE(t, s)[0]}, "Return both: return logits, state"),
        ({"step": one_step, "state": ZEROS[None]}, "Return output[0]"),
        ({"step": one_step_batch_first, "state": ZEROS[None]}, "Return output[:, 0]"),
        ({"step": reshaped(lambda y: y[..., None])}, "got [3, 7, 1]. Return output.squeeze(-1)"),
        ({"step": reshaped(lambda y: y.t())}, "got [7, 3]. Return output.t()"),
        ({"step": reshaped(lambda y: y.expand(T, B, V))}, "got [4, 3, 7]. Return those of one step"),
        ({"step": reshaped(lambda y: y.argmax(1))}, "got an int64 tensor. Return the scores of all words, not the word"),
        ({"step": reshaped(lambda y: y[..., None]), "targets": FEW[:, :1], "state": ZEROS[:1]}, "Return output.squeeze(-1)"),
        ({"step": reshaped(lambda y: y[:, None]), "targets": FEW[:, :1], "state": ZEROS[:1]}, "Return output[0]"),
        ({"step": reshaped(lambda y: y.expand(T, 1, V)), "targets": FEW[:, :1], "state": ZEROS[:1]}, "Return those of one step"),
        ({"step": lstm, "state": (ZEROS, ZEROS)}, "got ([3, 5], [3, 5]), the parts of the state. Return logits, (h, c)"),
        ({"step": lambda t, s: lstm(t, s)[::-1], "state": (ZEROS, ZEROS)}, "Return logits, (h, c)"),
        ({"step": lambda t, s: (s, WHOLE(t, s[0])[0]), "state": (ZEROS, ZEROS)}, "got (tuple, [3, 7]). Return them in this order"),
        ({"step": lambda t, s: GRU(WHOLE.words(t), s), "state": ZEROS[None]}, "token[None], or token[:, None]"),
        ({"backward": accumext.AccumulatingOptimizer(torch.optim.SGD(WHOLE.parameters()))}, "Pass its method: opt.backward"),
        ({"criterion": nn.CrossEntropyLoss}, "Pass an instance, CrossEntropyLoss()"),
        ({"criterion": nn.CrossEntropyLoss(reduction="none")}, "Take its mean() or sum()"),
    ],
)  # fmt: skip
def test_what_to_type_instead(change, cure):
    call = {"step": WHOLE, "targets": FEW, "state": ZEROS, "criterion": F.cross_entropy}
    accumext.tbptt(**call)
    with pytest.raises((TypeError, ValueError), match=f"^tbptt: .*{re.escape(cure)}"):
        accumext.tbptt(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"targets": FEW + V}, IndexError),
        ({"step": reshaped(lambda y: y[0])}, ValueError),
        ({"criterion": lambda z, y: F.cross_entropy(z[None], y)}, ValueError),
    ],
)
def test_errors_of_a_criterion_that_no_shape_explains_are_its_own(change, kind):
    call = {"step": WHOLE, "targets": FEW, "state": ZEROS, "criterion": F.cross_entropy}
    with pytest.raises(kind, match=r"^(?!tbptt)"):
        accumext.tbptt(**{**call, **change})


def test_a_criterion_may_take_outputs_of_any_shape():
    """Not squeezed, or of several heads: where it raises no error, there is none."""
    for change, criterion in (
        (lambda y: y[:, None], lambda z, y: F.cross_entropy(z[:, 0], y)),
        (lambda y: y[..., None].expand(B, V, 2), lambda z, y: F.cross_entropy(z[..., 0], y)),
    ):
        step = reshaped(change)
        accumext.tbptt(step, FEW, ZEROS, criterion=criterion, feedback="teacher")


@pytest.mark.parametrize("what", ["state", "context", "input"])
def test_a_step_that_writes_into_its_tensors(what):
    """An error where they are read again."""
    linear, series = nn.Linear(5, 5), torch.randn(STEPS, BATCH, 5)

    def step(x: Tensor, state: Any, seen: Tensor) -> tuple[Tensor, Any]:
        h, count = state
        h = torch.tanh(linear(x + h))
        {"state": count, "context": seen, "input": x}[what].add_(1)
        return h, (h, count)

    def squares(output: Tensor, target: Tensor, rows: Any = None) -> Tensor:
        return (output - target).square().mean()

    def call(**options: Any) -> None:
        accumext.tbptt(
            step, series.clone(), (torch.zeros(BATCH, 5), torch.zeros(BATCH)), criterion=squares,
            feedback="teacher", inputs=series, context=(torch.zeros(BATCH),), k1=2, **options,
        )  # fmt: skip

    call()
    text = "tbptt: step must write into no tensor of its input, state or context, got a write"
    for options in ({"k2": 4}, {"lengths": [6, 3, 0]}):
        if "lengths" in options and what != "state":
            call(**options)
            continue
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call(**options)


def test_a_state_that_is_written_before_a_window_starts_from_it_is_an_error():
    weight = torch.ones(3, requires_grad=True)
    buffers, calls = [torch.zeros(1, 3) for _ in range(2)], []

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return h * weight, buffers[len(calls) % 2].copy_(h.detach() + x)

    text = "tbptt: step must write into no state of an earlier step, got a write"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        accumext.tbptt(
            step, torch.ones(6, 1, 3), torch.zeros(1, 3), criterion=lambda h, y: (h * y).sum(),
            feedback="teacher", k1=1, k2=4,
        )  # fmt: skip


def test_outputs_are_those_of_their_steps():
    """Also where the step returns the state that it writes into."""
    weight = torch.ones(3, requires_grad=True)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h.add_(x * weight)
        return h, h

    series = torch.ones(4, 1, 3)
    result = accumext.tbptt(
        step,
        series,
        torch.zeros(1, 3),
        criterion=lambda h, y: (h * y).sum(),
        feedback="teacher",
        start=1,
        k1=4,
    )
    assert result.tokens[:, 0, 0].tolist() == [1, 2, 3, 4]


def step_of(decoder: Decoder, dropout: float = 0.0) -> Any:
    """Of an LSTM cell, with a nested state."""

    def step(token: Tensor, state: dict[str, Any]) -> tuple[Tensor, Any]:
        output, state = decoder.step(decoder.embedding(token), tuple(state["lstm"]))
        return decoder.head(F.dropout(output, dropout)), {"lstm": list(state)}

    return step


def taken(leaves: list[Tensor]) -> list[Tensor]:
    """Their gradients, which they lose."""
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def test_dropout_is_replayed_where_windows_overlap():
    """One window over everything, and windows that reach back to the start: the same masks."""
    decoder, grads = make_decoder("lstm_cell"), []
    for k1 in (6, 1):
        torch.manual_seed(2)
        accumext.tbptt(
            step_of(decoder, 0.5), TARGETS, {"lstm": list(decoder.state)}, k1=k1, k2=6,
            criterion=F.cross_entropy, feedback="teacher",
        )  # fmt: skip
        grads.append(taken(decoder.leaves))
    assert relative_distance(*grads) < EXACT


def test_backward_is_the_users_and_memory_is_a_window():
    decoder, alive, seen, step = make_decoder("lstm_cell"), [], [], None

    def watched(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = step(token, state)
        alive.append(logits.grad_fn)
        return logits, state

    def backward(loss: Tensor) -> None:
        seen.append(float(loss.detach()))
        (loss * 8).backward()

    step = step_of(decoder)
    result = accumext.tbptt(
        watched, targets_with_holes(10), {"lstm": list(decoder.state)}, k1=5, backward=backward,
        criterion=F.cross_entropy, reduction="sum",
    )  # fmt: skip
    assert len(seen) == 2
    assert float(result.loss) == pytest.approx(sum(seen), rel=EXACT)
    with pytest.raises(RuntimeError, match="freed"):
        alive[-1](torch.ones(BATCH, VOCABULARY, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, BATCH), (4, 0)])
def test_no_steps_or_rows(shape):
    targets = torch.zeros(shape, dtype=torch.int64)
    result = accumext.tbptt(WHOLE, targets, torch.zeros(shape[1], H), criterion=F.cross_entropy)
    assert result.loss == 0
    assert result.tokens.shape == shape


# --- state and context ----------------------------------------------------------------------------


@pytest.mark.parametrize("periods", [(1, 1), (1, 2), (2, 5), (4, 50)])
def test_state_and_context_may_come_from_one_graph(periods):
    """As the last state and the outputs of an encoder do."""
    decoder, encoder = make_decoder("gru_cell"), nn.Linear(5, 5, dtype=torch.float64)
    source = torch.randn(BATCH, 5, dtype=torch.float64)
    leaves = [*encoder.parameters(), *decoder.cell.parameters()]

    def step(token: Tensor, h: Any, memory: Tensor) -> tuple[Tensor, Any]:
        h = decoder.cell(decoder.embedding(token) + memory, h)
        return decoder.head(h), h

    found = []
    for shared in (True, False):
        encoded = torch.tanh(encoder(source))
        other = encoded if shared else torch.tanh(encoder(source))
        accumext.tbptt(
            step, TARGETS, encoded * 2, criterion=F.cross_entropy, feedback="greedy",
            k1=periods[0], k2=periods[1], context=(other + 1,),
        )  # fmt: skip
        found.append(taken(leaves))
    assert relative_distance(*found) < EXACT


@pytest.mark.parametrize("where", ["state", "context"])
def test_a_tensor_that_is_given_twice_counts_twice_and_no_more(where):
    """In every window, as the sum of its two places."""
    place = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(5, 3, 2, dtype=torch.float64)
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def step(x: Tensor, state: Any, *context: Tensor) -> tuple[Tensor, Any]:
        first, second = state
        new = torch.tanh(first @ weight + 2 * second + x)
        if context:
            new = new * context[0] + context[1].sin()
        return new, (new, first * second)

    def gradient(one: Tensor, two: Tensor) -> Tensor:
        pair = one, two
        fixed = torch.full((3, 2), 0.5, dtype=torch.float64)
        accumext.tbptt(
            step, targets, pair if where == "state" else (fixed, fixed.clone()),
            context=() if where == "state" else pair, criterion=F.mse_loss, feedback="teacher",
            k1=1, k2=3,
        )  # fmt: skip
        assert place.grad is not None
        found, place.grad = place.grad, None
        return found

    torch.testing.assert_close(
        gradient(place, place), gradient(place * 1, place * 1), rtol=EXACT, atol=EXACT
    )


# --- floating-point inputs and targets, and rows of different lengths ------------------------------


class Forecaster(nn.Module):
    """An LSTM cell from numbers to numbers, whose state may have the batch in dimension 1."""

    def __init__(self, width: int = 2, outputs: int = 2) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, 4, dtype=torch.float64)
        self.head = nn.Linear(4, outputs, dtype=torch.float64)
        self.hidden = nn.Parameter(torch.randn(1, BATCH, 4, dtype=torch.float64))
        self.memory = nn.Parameter(torch.randn(BATCH, 4, dtype=torch.float64))

    def state(self) -> dict[str, Any]:
        return {"h": self.hidden * 1, "c": self.hidden * 2, "steps": torch.zeros(())}

    def context(self) -> tuple[Tensor, ...]:
        return (torch.tanh(self.memory),)

    def forward(self, x: Tensor, state: dict[str, Any], *memory: Tensor) -> Any:
        h, c = self.cell(x, (state["h"][0], state["c"][0]))
        seen = h + sum(memory)
        return self.head(seen), {"h": h[None], "c": c[None], "steps": state["steps"] + 1}


FORECASTS: list[dict[str, Any]] = [
    {"given": "inputs"},
    {"given": "start"},
    {"given": "nothing"},
    {"given": "context"},
    {"lengths": [11, 4, 7]},
    {"lengths": [5, 0, 2]},
    {"lengths": [0, 0, 0]},
    {"classes": True},
    {"classes": True, "lengths": [5, 0, 2]},
    {"classes": True, "lengths": [0, 0, 0]},
]


@pytest.mark.parametrize("periods", [(1, 1), (2, 5), (3, 3), (11, 11), (2, 20)])
@pytest.mark.parametrize("case", FORECASTS, ids=str)
def test_numbers_are_teacher_forced(case, periods):
    """Numbers go in, and numbers or classes come out; rows end at their lengths."""
    classes, given, lengths = case.get("classes"), case.get("given", "inputs"), case.get("lengths")
    ends = torch.tensor(lengths or [11] * BATCH)
    model = Forecaster(outputs=5 if classes else 2)
    targets = torch.randn(11, BATCH, 2, dtype=torch.float64)
    first = torch.zeros(BATCH, 2) if given == "nothing" else torch.randn(BATCH, 2)
    inputs, outputs = torch.cat([first.double()[None], targets[:-1]]), []
    call: dict[str, Any] = {"start": first.double()} if given == "start" else {}
    if given in ("inputs", "context"):
        inputs = call["inputs"] = torch.randn(11, BATCH, 2, dtype=torch.float64)
    if given == "context":
        call |= {"context": model.context(), "backward": lambda loss: (loss * 8).backward()}
    if lengths:
        call |= {"lengths": ends, "batch_dim": 1}
    if classes:
        targets = torch.randint(5, (11, BATCH))
        targets[torch.arange(11)[:, None] >= ends] = 77  # anything may stand there

    def criterion(output: Tensor, target: Tensor, live: Any = None) -> Tensor:
        assert (live is None) == bool(classes or not lengths)
        if classes:
            return F.cross_entropy(output, target)
        errors = (output - target).square().mean(1)
        return errors.mean() if live is None else errors[live].mean()

    def run(begin: int, end: int, state: Any) -> tuple[list[Tensor], Any]:
        """Steps by hand, rows frozen where they have ended."""
        losses = []
        for t in range(begin, end):
            output, new = model(inputs[t], state, *(model.context() if given == "context" else ()))
            live = t < ends
            for name in ("h", "c"):
                new[name] = torch.where(live[None, :, None], new[name], state[name])
            state = new
            outputs.append(output.argmax(-1) if classes else output.detach())
            if classes:
                loss = F.cross_entropy(output[live], targets[t][live])
            else:
                loss = (output - targets[t]).square().mean(1)[live].mean()
            losses.append(loss if live.any() else output.sum() * 0)
        return losses, state

    k1, k2 = periods
    result = accumext.tbptt(
        model, targets, model.state(), criterion=criterion, feedback="teacher", k1=k1, k2=k2, **call
    )
    actual = taken(list(model.parameters()))
    if given == "context":
        actual = [gradient / 8 for gradient in actual]
    losses, _ = truncated(run, model.state(), 11, k1, k2)
    total = torch.stack(losses).mean()
    total.backward()
    torch.testing.assert_close(result.loss, total.detach(), rtol=EXACT, atol=EXACT)
    assert relative_distance(actual, taken(list(model.parameters()))) < EXACT
    if not lengths:
        torch.testing.assert_close(result.tokens, torch.stack(outputs[:11]), rtol=EXACT, atol=EXACT)
    assert result.state["steps"] == 11
    ended = ends == 0
    assert torch.equal(result.state["h"][:, ended], model.hidden.detach()[:, ended])
