"""Known inputs whose steps torch's function of the module runs at once, as with cuDNN. Here it runs
on a CPU, and no processor of the tests' asks for it."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import CELLS, Decoder, make_decoder, relative_distance
from support.decoding import EXACT, TARGETS, check, options, parts_of, run, targets_with_holes
from support.device import cpu_as_device
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _call, _known_inputs, _precision
from accumext.decoder._embedding import EmbeddingTable
from accumext.decoder._rnn_weights import rnn_weights_of
from accumext.recurrence import detach

SOME_OPTIONS = [
    (),
    ("sum", "z_loss", "start"),
    ("none", "label_smoothing", "class_weight"),
    ("num_items", "token_weight", "entropy_weight"),
    ("batch_first", "soft_teacher", "ignore_index"),
    ("no state", "soft_words"),
]


class AtOnce:
    """Counts the calls of torch's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(_call, "torch_is_faster", lambda weight, dtype: True)
        counted = tuple(map(self._counted, _known_inputs.FUNCTIONS))
        monkeypatch.setattr(_known_inputs, "FUNCTIONS", counted)

    def _counted(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            assert not torch.is_autocast_enabled(
                "cpu"
            )  # torch's casts for cuDNN know float16 alone
            return function(*args)

        return call


@pytest.fixture
def at_once(monkeypatch):
    return AtOnce(monkeypatch)


@pytest.mark.parametrize("asked", SOME_OPTIONS, ids=" ".join)
@pytest.mark.parametrize("kind", CELLS)
def test_all_results_are_those_of_the_loop(kind, asked, at_once):
    decoder = make_decoder(kind, padding_idx=2, inputs=4)
    call = options(asked, *TARGETS.shape)
    targets = targets_with_holes(len(TARGETS), call.get("ignore_index", -100))
    check(decoder, targets, call, upstream=3.0, twice=True)
    assert at_once.calls == 1


@pytest.mark.parametrize("kind", ["gru_cell", "lstm"])
@pytest.mark.parametrize(("tied", "bias"), [(True, True), (False, False), (True, False)])
def test_tied_weights_and_modules_without_a_bias(kind, tied, bias, at_once):
    check(make_decoder(kind, tied=tied, bias=bias, cell_bias=bias), TARGETS, {})
    assert at_once.calls == 1


@pytest.mark.parametrize(
    ("call", "chosen"),
    [
        ({}, True),
        ({"start": 2, "ignore_index": 3, "return_outputs": True}, True),
        ({"feedback": torch.ones(6, 3, dtype=torch.bool)}, False),
        ({"feedback": "greedy"}, False),
        ({"eos": 1}, False),
        ({"lengths": [6, 6, 6]}, False),
        ({"resets": torch.zeros(6, 3, dtype=torch.bool)}, False),
        ({"k2": 2}, False),
        ({"k2": 2, "truncation": "random"}, False),
        ({"state_grad_clip": 1.0}, False),
        ({"memory_budget": 2**30}, False),
    ],
    ids=str,
)
def test_which_calls_run_at_once(call, chosen, at_once):
    run(make_decoder("gru_cell"), **call).loss.backward()
    assert at_once.calls == chosen


@pytest.mark.parametrize("kind", ["hook", "projections", "half a bias", "a function"])
def test_which_cells_do_not(kind, at_once):
    decoder = make_decoder("lstm" if kind == "projections" else "gru_cell")
    cell, state = decoder.cell, decoder.state
    if kind == "hook":
        cell.register_forward_hook(lambda *_: None)
    elif kind == "projections":
        cell = nn.LSTM(5, 7, proj_size=5, dtype=torch.float64)
        state = torch.zeros(1, 3, 5).double(), torch.zeros(1, 3, 7).double()
    elif kind == "half a bias":
        cell.bias_ih = None
    else:
        cell = decoder.step
    run(decoder, cell, state).loss.backward()
    assert at_once.calls == 0


def by_hand(decoder: Decoder, rates: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The mean loss and the outputs of the cell, whose module reads all inputs."""
    inputs = torch.cat([torch.zeros_like(TARGETS[:1]), TARGETS[:-1]])
    trains = decoder.cell.training
    x = F.dropout(decoder.embedding(inputs), rates[0], trains)
    if isinstance(decoder.cell, nn.RNNBase):
        outputs, _ = decoder.cell(x, decoder.state)
    else:
        state, steps = decoder.state, []
        for of_step in x:
            output, state = decoder.step(of_step, state)
            steps.append(output)
        outputs = torch.stack(steps)
    logits = decoder.head(F.dropout(outputs, rates[1], trains))
    return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()), outputs


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "rnn_relu"])
def test_dropout_is_that_of_torchs_functions_on_all_steps(kind, trains, at_once):
    """Of inputs, between layers and of outputs, with the same random numbers; none in eval mode."""
    decoder, rates = make_decoder(kind, dropout=0.5), (0.3, 0.4)
    decoder.cell.train(trains)
    torch.manual_seed(3)
    out = run(decoder, embedding_dropout=rates[0], output_dropout=rates[1], return_outputs=True)
    torch.manual_seed(3)
    loss, outputs = by_hand(decoder, rates)
    assert relative_distance(detach([out.loss, out.outputs]), detach([loss, outputs])) < EXACT
    assert relative_distance(decoder.gradients(out.loss), decoder.gradients(loss)) < EXACT
    assert at_once.calls == 1


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "rnn"])
def test_half_precision(kind, dtype, autocast, at_once):
    """Dtypes are those of the operators' steps; values and gradients are off by the roundings of
    six steps, each of a state and of its gates."""
    decoder, error = make_decoder(kind, size=16), 8 * torch.finfo(dtype).eps
    for leaf in decoder.leaves:
        leaf.data = leaf.data.to(dtype).double()
    rounded, narrow = copy.deepcopy(decoder), torch.float32 if autocast else dtype
    for leaf in rounded.leaves:
        leaf.data = leaf.data.to(narrow)
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = run(rounded, return_outputs=True)
    expected, outputs = by_hand(decoder, (0.0, 0.0))
    assert at_once.calls == 1
    assert out.loss.dtype == out.outputs.dtype == torch.float32
    assert {part.dtype for part in parts_of(out.state)} == {narrow}
    values = detach([out.loss, out.outputs]), detach([expected, outputs])
    assert relative_distance(*values) < error
    factor = 1024.0 if dtype == torch.float16 else 1.0  # a loss scale
    found = rounded.gradients(out.loss * factor)
    assert [g.dtype for g in found] == [narrow] * len(found)
    assert relative_distance([g / factor for g in found], decoder.gradients(expected)) < error


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_the_results_are_the_same(mode, at_once):
    decoder = make_decoder("lstm", dropout=0.5)
    torch.manual_seed(5)
    with_graph = run(decoder, return_outputs=True)
    torch.manual_seed(5)
    with mode():
        out = run(decoder, return_outputs=True)
    assert torch.equal(out.tokens, with_graph.tokens)
    for part, expected in zip(
        (out.loss, out.outputs, *out.state),
        (with_graph.loss, with_graph.outputs, *with_graph.state),
        strict=True,
    ):
        torch.testing.assert_close(part, expected.detach(), rtol=EXACT, atol=0)
        assert not part.requires_grad
    assert at_once.calls == 2


@pytest.mark.parametrize("trained", ["embedding", "cell", "head", "state", "nothing"])
def test_where_some_parts_are_frozen(trained, at_once):
    decoder = make_decoder("lstm_cell")
    parts = {
        **{name: list(getattr(decoder, name).parameters()) for name in ("embedding", "cell")},
        "head": list(decoder.head.parameters()),
        "state": list(decoder.state),
    }
    for name, tensors in parts.items():
        for tensor in tensors:
            tensor.requires_grad_(name == trained)
    decoder.leaves = parts.get(trained, [])
    check(decoder, TARGETS, {})
    assert at_once.calls == 1


def test_parametrised_weights_are_formed_once(at_once):
    decoder = make_decoder("gru_1")
    parametrizations.weight_norm(decoder.cell, "weight_hh_l0")
    originals = [p for p in decoder.cell.parameters() if p.dim() > 1]
    decoder.leaves = [*originals, decoder.head.weight]
    check(decoder, TARGETS, {})
    assert at_once.calls == 1
    assert parametrize.is_parametrized(decoder.cell)


def test_observations_and_a_sparse_embedding(at_once):
    decoder, x = make_decoder("gru"), torch.randn(6, 3, 5).double().requires_grad_()
    out = accumext.decode_loss(
        None, decoder.cell, decoder.head, TARGETS, decoder.state, feedback="teacher", inputs=x
    )
    logits = decoder.head(decoder.cell(x, decoder.state)[0])
    loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    (found,), (expected,) = (torch.autograd.grad(one, [x]) for one in (out.loss, loss))
    assert relative_distance([found], [expected]) < EXACT
    expected = decoder.gradients(run(decoder).loss)[0]
    decoder.embedding.sparse = True
    found = decoder.gradients(run(decoder).loss)[0]
    assert found.is_sparse
    assert relative_distance([found.to_dense()], [expected]) < EXACT
    assert at_once.calls == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_results_are_the_callers_to_write(dtype, at_once):
    decoder = make_decoder("lstm", dtype=dtype)  # of oneDNN in float32
    expected = decoder.gradients(run(decoder).loss)
    out = run(decoder, return_outputs=True)
    for part in (out.inputs, out.outputs, out.token_losses, *out.state):
        part.detach().zero_()
    assert relative_distance(decoder.gradients(out.loss), expected) == 0


def test_a_changed_parameter_and_a_second_derivative_are_errors(at_once):
    decoder = make_decoder("gru")
    out = run(decoder)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out.loss, decoder.leaves, create_graph=True)
    out = run(decoder)
    with torch.no_grad():
        decoder.cell.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match=r"^decode_loss: parameters must be those"):
        out.loss.backward()
    assert at_once.calls == 2


def test_under_an_accumulating_optimizer(at_once, monkeypatch):
    """The rows of the embedding's gradient are added to the sum of the window, if there is one."""
    returned, take = [], EmbeddingTable.take_gradient
    monkeypatch.setattr(
        EmbeddingTable, "take_gradient", lambda table: returned.append(take(table)) or returned[-1]
    )
    decoder = make_decoder("lstm_cell", dtype=torch.float32, padding_idx=2)
    weights = [leaf for leaf in decoder.leaves if isinstance(leaf, nn.Parameter)]
    opt = accumext.AccumulatingOptimizer(torch.optim.SGD(weights, lr=0.1), window=3)
    expected = torch.autograd.grad(run(decoder).loss, weights)
    for _ in range(2):
        opt.backward(run(decoder).loss)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(opt.main_grad(weight), 2 * gradient)
    assert at_once.calls == 3
    assert [gradient is None for gradient in returned] == [False, False, True]


# --- what cuDNN asks for --------------------------------------------------------------------------


def one_chunk(weights: list[Tensor], *sizes: Any) -> Tensor:
    """As `torch._cudnn_rnn_flatten_weight`, with the weights next to each other."""
    schema = torch.ops.aten._cudnn_rnn_flatten_weight.default._schema
    assert len(schema.arguments) == 1 + len(sizes)
    chunk = torch.cat([weight.flatten() for weight in weights])
    for weight, part in zip(weights, chunk.split([w.numel() for w in weights]), strict=True):
        weight.set_(part.view_as(weight))
    return chunk


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "mode", "layers"),
    [("gru_cell", 3, 1), ("lstm", 2, 2), ("rnn", 1, 1), ("rnn_relu", 0, 2)],
)
def test_weights_become_one_chunk(kind, mode, layers, dtype, monkeypatch):
    """In the dtype of products. The parameters stay where they are, and get the gradients."""
    calls = []

    def flatten(*args: Any) -> Tensor:
        calls.append(args[1:])
        return one_chunk(*args)

    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten)
    module = make_decoder(kind, inputs=4).cell
    rnn = rnn_weights_of(module, torch.float64)
    places = [weight.data_ptr() for weight in rnn.given]
    with cpu_as_device():
        chunk = _known_inputs.chunk_of(rnn, dtype)
    assert calls == [(4, 4, mode, 5, 0, layers, False, False)]
    assert len({weight.untyped_storage().data_ptr() for weight in chunk}) == 1
    assert [weight.data_ptr() for weight in rnn.given] == places
    for copied, weight in zip(chunk, rnn.given, strict=True):
        assert torch.equal(copied, weight.to(dtype))
        (gradient,) = torch.autograd.grad((copied * copied).sum(), [weight])
        assert gradient.dtype == weight.dtype
        assert torch.equal(gradient, 2 * weight.to(dtype).to(weight.dtype))


def test_weights_that_are_one_chunk_stay():
    module = make_decoder("gru_1", inputs=4).cell
    rnn = rnn_weights_of(module, torch.float64)
    assert _known_inputs.chunk_of(rnn, torch.float64) is rnn.given  # on a CPU, wherever they are
    with torch.no_grad():
        one_chunk(rnn.given, *range(8))
    with cpu_as_device():
        assert _known_inputs.chunk_of(rnn, torch.float64) is rnn.given


@pytest.mark.parametrize(
    ("acceptable", "dtype", "version", "capability", "faster"),
    [
        (False, torch.float32, 91900, (9, 0), False),
        (True, torch.float32, 8000, (7, 0), True),
        (True, torch.float64, 8000, (7, 0), True),
        (True, torch.float16, 8000, (7, 0), True),
        (True, torch.bfloat16, 91300, (8, 0), True),
        (True, torch.bfloat16, 91300, (7, 5), False),
        (True, torch.bfloat16, 91200, (9, 0), False),
        (True, torch.bfloat16, None, (9, 0), False),
    ],
)
def test_torch_is_faster_where_it_has_cudnn(
    acceptable, dtype, version, capability, faster, monkeypatch
):
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda tensor: acceptable)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _call.torch_is_faster(torch.ones(2), dtype) == faster


def test_operators_run_all_steps_on_a_cpu():
    assert not _call.torch_is_faster(torch.ones(2), torch.float32)


class Reserving(torch.autograd.Function):
    """Takes the memory that a function of torch takes with cuDNN, and computes nothing: per row and
    layer 14 tensors [H] of an LSTM, 11 of a GRU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: int, *weights: Tensor) -> Tensor:
        units = weights[1].shape[1]
        gates = len(weights[1]) // units
        reserved = x.new_empty(x.shape[:2].numel() * layers * {4: 14, 3: 11}[gates] * units)
        outputs = x.new_zeros(*x.shape[:2], units)
        ctx.save_for_backward(x, outputs, reserved, *weights)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, _, _, *weights = ctx.saved_tensors
        return torch.zeros_like(x), None, *map(torch.zeros_like, weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(
    ("kind", "layers", "words", "rates"),
    [
        (nn.LSTM, 2, 50, (0.0, 0.0)),
        (nn.GRU, 1, 50, (0.3, 0.2)),
        (nn.GRUCell, 0, 4000, (0.0, 0.0)),
        (nn.LSTMCell, 0, 50, (0.0, 0.2)),
    ],
)
def test_predicted_peak(kind, layers, words, rates, precision, monkeypatch, at_once):
    """With what cuDNN would keep in place of what the CPU keeps."""

    def function(x: Tensor, state: Any, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
        return Reserving.apply(x, options[1], *weights), *(state if len(state) == 2 else [state])

    monkeypatch.setattr(_known_inputs, "FUNCTIONS", [function] * 4)
    # Plain PyTorch's products would widen bfloat16 exponentials on a CPU, and not on a GPU.
    monkeypatch.setattr(_precision, "cpu_multiplies_bfloat16", lambda: False)
    parts = nn.Embedding(words, 64), kind(64, 64, *[layers] * (layers > 0)), nn.Linear(64, words)
    for part in parts:
        part.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    targets = torch.randint(words, (128, 16))
    call = {"feedback": "teacher", "embedding_dropout": rates[0], "output_dropout": rates[1]}

    def peak() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            out = accumext.decode_loss(*parts, targets, **call)
        out.loss.backward()

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        predicted = accumext.decode_memory(*parts, targets.shape, **call)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", one_chunk)
    with cpu_as_device():
        measured = peak_memory(peak)
    assert predicted == pytest.approx(measured, rel=0.10)
