"""Callable cells, which autograd differentiates, in segments and windows."""

from functools import partial
from typing import Any

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, raises, run
from torch import Tensor

# Steps that run again in every way there is: in segments, windows, and windows that overlap.
WAYS: list[dict[str, Any]] = [{}, {"k1": 2, "k2": 2}, {"k1": 2, "k2": 5}, {"memory_budget": 4000}]
FEEDBACKS = ["teacher", "greedy"]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


WRITES = "cell must write into no tensor of its state or context, got a write into one of shape"


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_cell_that_writes_into_its_tensors_is_an_error(options):
    """Its steps run again from the same tensors."""
    decoder = make_decoder("gru_cell")
    for what in ("state", "context"):

        def cell(x: Tensor, state: Any, seen: Tensor, what: str = what) -> tuple[Tensor, Any]:
            h, count = state
            h = decoder.cell(x, h)
            (count if what == "state" else seen).add_(1)
            return h * (1 + count + seen)[:, None], (h, count)

        with raises(RuntimeError, WRITES + " [3]. Make new ones: count + 1 in place of count += 1"):
            run(decoder, cell, (decoder.state, zeros(BATCH)), context=(zeros(BATCH),), **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cell_that_writes_into_its_state_without_a_graph(mode):
    """It may, where nothing reads the state again; in inference mode always."""
    decoder = make_decoder("gru_cell")

    def cell(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, count = state
        return decoder.cell(x, h), (decoder.cell(x, h), count.add_(1))

    def state() -> Any:
        return decoder.state, zeros(BATCH)

    with mode():
        assert run(decoder, cell, state()).state[1].tolist() == [len(TARGETS)] * BATCH
        for lengths in ([6, 3, 0], [2, 2, 5]):
            if mode is torch.no_grad:
                with raises(RuntimeError, WRITES):
                    run(decoder, cell, state(), lengths=lengths)
                continue
            assert run(decoder, cell, state(), lengths=lengths).state[1].tolist() == lengths


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_a_cell_may_return_the_same_memory_at_every_step_without_a_graph(feedback, mode):
    """In inference mode a buffer may be the state of rows that have ended, too, also where the cell
    makes its own initial state."""
    decoder, buffer = make_decoder("gru_cell"), zeros(BATCH, 5)

    def cell(x: Tensor, h: Any, memory: Tensor | None) -> tuple[Tensor, ...]:
        out = (h if memory is None else memory).copy_(decoder.cell(x, h))
        return out, out, out

    def plain(x: Tensor, h: Any) -> tuple[Tensor, ...]:
        return (decoder.cell(x, h),) * 3

    call = {"feedback": feedback, "return_outputs": True}
    with mode():
        expected = run(decoder, plain, **call)
        for memory in (None, buffer):
            out = run(decoder, partial(cell, memory=memory), decoder.state.clone(), **call)
            torch.testing.assert_close(out.loss, expected.loss)
            torch.testing.assert_close(out.outputs, expected.outputs)
            torch.testing.assert_close(out.extras, expected.outputs)
        if mode is torch.inference_mode:
            decoder.state = None
            ends = {"feedback": feedback, "lengths": [6, 3, 1]}
            out, expected = run(decoder, partial(cell, memory=buffer), **ends), run(decoder, **ends)
            torch.testing.assert_close(out.loss, expected.loss)
            torch.testing.assert_close(out.state, expected.state)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("what", ["output", "extras"])
def test_an_output_that_the_cell_writes_again_is_an_error(what, options):
    text = "cell must write into no output or extras of an earlier step, got a write into one of"
    decoder, buffer = make_decoder("gru_cell"), zeros(BATCH, 5)

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h = decoder.cell(x, h)
        buffer.copy_(h.detach())
        return (buffer if what == "output" else h), h, buffer

    for feedback in FEEDBACKS:
        with raises(RuntimeError, text):
            run(decoder, cell, feedback=feedback, **options)


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_states_in_two_buffers_in_turn(feedback):
    """Windows begin with states that are overwritten two steps later."""
    decoder, calls = make_decoder("gru_cell"), []
    buffers = zeros(BATCH, 5), zeros(BATCH, 5)

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = decoder.cell(x, h)
        if torch.is_grad_enabled():
            return h, h
        calls.append(1)
        return h, buffers[len(calls) % 2].copy_(h)

    out, expected = (run(decoder, f, feedback=feedback, k1=2, k2=4) for f in (cell, None))
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss))
    assert distance < EXACT


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_a_cell_may_write_into_what_it_reads(feedback, options):
    """Such as by dropout in place: each step has an embedded input of its own."""
    decoder = make_decoder("gru_cell")
    cells = lambda x, h: decoder.step(x.mul_(2), h), lambda x, h: decoder.step(x * 2, h)
    found = [run(decoder, cell, feedback=feedback, **options).loss for cell in cells]
    assert relative_distance(*(decoder.gradients(loss) for loss in found)) < EXACT


@pytest.mark.parametrize("called", [False, True], ids=["module", "callable"])
@pytest.mark.parametrize("periods", [(2, 2), (2, 5)])
def test_dropout_is_the_same_in_overlapping_windows(periods, called):
    decoder, targets = make_decoder("lstm", dropout=0.5), torch.arange(27).view(9, 3) % 13
    cell = decoder.step if called else decoder.cell

    def seeded(targets: Tensor, **call: Any) -> Any:
        torch.manual_seed(1)
        return run(decoder, cell, targets=targets, batch_dim=1, **call).loss

    k1, k2 = periods
    whole = seeded(targets)
    torch.testing.assert_close(seeded(targets, k1=k1, k2=k2), whole, rtol=EXACT, atol=0)
    # with masks that differed between windows, the last step's own loss would have another gradient
    last = torch.full_like(targets, -100)
    last[-1] = targets[-1]
    inputs = torch.cat([torch.zeros(1, 3, dtype=torch.int64), targets[:-1]])
    found = [seeded(last, inputs=inputs, **k) for k in ({"k1": 1, "k2": 9}, {})]
    assert relative_distance(*(decoder.gradients(loss) for loss in found)) < EXACT


@pytest.mark.parametrize("options", [{}, {"k1": 4, "k2": 4}, {"return_outputs": True}], ids=str)
def test_a_cell_is_not_called_once_every_row_has_ended(options):
    decoder, calls = make_decoder("gru_cell"), []

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(1)
        h = decoder.cell(x, h)
        return h, h, h.sum(1)

    targets = torch.arange(90 * BATCH).view(90, BATCH) % 13
    call = {"feedback": "greedy", "lengths": torch.tensor([5, 2, 0]), **options}
    out = run(decoder, cell, targets=targets, **call)
    assert len(calls) < 20
    short = run(decoder, cell, targets=targets[:5], **call)
    assert torch.equal(out.tokens[:5], short.tokens)
    torch.testing.assert_close(out.loss, short.loss, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out.state, short.state, rtol=EXACT, atol=EXACT)
    assert out.extras.shape == (90, BATCH)
    assert not out.extras[20:].any()
    if out.outputs is not None:
        assert torch.equal(out.outputs[:5], short.outputs)
        assert not out.outputs[5:].any()
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(short.loss))
    assert distance < EXACT


def test_complex_states_count_in_calls_of_no_steps():
    """Whose loss ties all of a state together, without a word about what a cast discards."""
    decoder = make_decoder("gru_cell")
    state = decoder.state, torch.zeros(3, 5, dtype=torch.complex128, requires_grad=True)
    none = torch.zeros(0, 3, dtype=torch.int64)
    loss = run(decoder, lambda x, s: (x, s), state, targets=none).loss
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, state))


def test_containers_that_cannot_be_looked_into_are_refused():
    decoder = make_decoder("gru_cell")

    class Hidden:
        def __init__(self, h: Tensor) -> None:
            self.h = h

    text = "state must nest tensors in tuples, lists, dicts and dataclasses, got Hidden"
    for state, k2 in ((decoder.state, None), (Hidden(decoder.state), 1)):
        with raises(TypeError, text):
            run(decoder, lambda x, h: (x, Hidden(x)), state, k2=k2)


def test_an_output_must_keep_its_shape():
    decoder, calls = make_decoder("gru_cell"), iter(range(100))

    def shrinks(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = decoder.cell(x, h)
        return (h if next(calls) < 2 else h[:1]), h

    with raises(ValueError, "cell must return an output of shape [3, 5], got [1, 5]"):
        run(decoder, shrinks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_function_with_a_module_of_sequences(backend):
    """torch.compile leaves `nn.GRU` out, and so runs such a function in pieces."""
    decoder = make_decoder("gru")
    compiled = torch.compile(decoder.step, backend=backend)
    for options in ({}, {"memory_budget": 4000}):
        given = {"feedback": "greedy", "batch_dim": 1, **options}
        losses = [run(decoder, cell, **given).loss for cell in (compiled, decoder.step)]
        assert relative_distance(*map(decoder.gradients, losses)) < EXACT
