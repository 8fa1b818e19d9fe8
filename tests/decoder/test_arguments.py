"""Every wrong argument of decode_loss: the exact sentence, nothing changed. For a doubtful one: one
warning that says what to type."""

# ruff: noqa: E501  (one contract to a line)

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.decoding import WholeModel
from support.recorded_warnings import warnings_as
from support.tensors import assert_equal
from torch import nn

import accumext

T, B, V, H = 4, 3, 7, 5
TARGETS = torch.arange(T * B).view(T, B) % V
MASK = torch.ones(T, B, dtype=torch.bool)
P, AT = torch.ones(T, B, 2) / 2, torch.zeros(T, B, 2, dtype=torch.int64)  # of a teacher: some words
W, X = torch.ones(V, 4), torch.ones(T, B, 4)  # a head, and what it reads
TRANSPOSED = "targets must be [T, B] with B = 4, got [4, 3]. Did you mean"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"embedding": nn.Embedding(V, H, scale_grad_by_freq=True)}, ValueError,
     "embedding must not scale gradients by frequency, got scale_grad_by_freq"),
    ({"embedding": nn.Embedding(V, H + 1)}, ValueError, "embedding must have the cell's input size, 5, got 6"),
    ({"embedding": nn.Embedding(V - 1, H)}, ValueError,
     "embedding must have a row for each of the 7 words that can be fed back, got 6 rows"),
    ({"cell": nn.GRU(H, H, bidirectional=True)}, ValueError, "cell must have one direction, got bidirectional=True"),
    ({"cell": lambda x, s: (x[:1], s)}, ValueError, "cell must return an output of shape [3, 5], got [1, 5]"),
    ({"cell": lambda x, s: (3, s)}, TypeError, "cell must return (output, state) with a tensor output, got int"),
    ({"head": nn.Linear(H + 1, V)}, ValueError, "head must take the cell's output, 5 wide, got [7, 6]"),
    ({"head": 3}, TypeError, "head must be an nn.Linear or a pair (weight, bias), got int"),
    ({"head": nn.Sequential(nn.Linear(H, V))}, TypeError,
     "head must be an nn.Linear or a pair (weight, bias), got Sequential. Pass head[0]"),
    ({"head": nn.Sequential(nn.Tanh(), nn.Linear(H, V))}, TypeError,
     "head must be an nn.Linear or a pair (weight, bias), got Sequential. "
     "Pass head[-1], and let the cell apply the layers before it to its output; or use tbptt"),
    ({"head": nn.ModuleDict({"out": nn.Linear(H, V)})}, TypeError,
     "head must be an nn.Linear or a pair (weight, bias), got ModuleDict. "
     "Pass its last nn.Linear, and let the cell do what comes before; or use tbptt"),
    ({"cell": lambda x, s: x}, TypeError, "cell must return (output, state), got a float32 tensor. "
     "Return both: h = cell(x, s); return h, h"),
    ({"head": (torch.zeros(V, H, dtype=torch.int64), None)}, TypeError,
     "head weight must be a floating-point tensor [V, H], got an int64 tensor"),
    ({"head": (torch.zeros(V, H), torch.zeros(V + 1))}, ValueError, "head bias must have shape [7], got [8]"),
    ({"targets": TARGETS.float()}, TypeError, "targets must be an integer tensor [T, B], got a float32 tensor"),
    ({"targets": TARGETS[0]}, ValueError, "targets must have shape [T, B], got [3]"),
    ({"targets": TARGETS + 1}, ValueError, "targets must be in [0, 7), got 7"),
    ({"targets": TARGETS - 1}, ValueError, "targets must be in [0, 7), got -1. "
     "Pass ignore_index=-1 if it marks ignored targets"),
    ({"targets": TARGETS.where(TARGETS != 2, -3), "ignore_index": -1}, ValueError,
     "targets must be in [0, 7), got -3. Pass ignore_index=-3 if it marks ignored targets"),
    ({"targets": TARGETS.to("meta")}, ValueError, "targets must be on the head's device, cpu, got meta"),
    ({"state": torch.zeros(B, H + 1)}, ValueError, "state must have shape [3, 5], got [3, 6]"),
    ({"cell": nn.LSTMCell(H, H), "state": torch.zeros(B, H)}, TypeError,
     "state must be a pair of tensors (h, c) for this cell, got a float32 tensor"),
    ({"cell": nn.LSTM(H, H, 2), "state": (torch.zeros(2, B, H), torch.zeros(1, B, H))}, ValueError,
     "state[1] must have shape [2, 3, 5], got [1, 3, 5]"),
    ({"feedback": "argmax"}, ValueError,
     "feedback must be one of 'teacher', 'greedy', 'sample', 'scheduled', got 'argmax'"),
    ({"feedback": torch.ones(T, B)}, TypeError,
     "feedback must be a word or a bool mask [T, B], got a float32 tensor. "
     "One is drawn by feedback='scheduled', teacher_forcing=0.5"),
    ({"batch_first": 1}, TypeError, "batch_first must be a bool, got int"),
    ({"return_outputs": "yes"}, TypeError, "return_outputs must be a bool, got str"),
    ({"feedback": torch.ones(B, T, dtype=torch.bool)}, ValueError, "feedback must have shape [4, 3], got [3, 4]"),
    ({"start": V}, ValueError, "start must be in [0, 7), got 7"),
    ({"start": torch.tensor([0, 1])}, ValueError, "start must have shape [3], got [2]"),
    ({"inputs": TARGETS[:2]}, ValueError, "inputs must have shape [4, 3], got [2, 3]"),
    ({"inputs": TARGETS + 1}, ValueError, "inputs must be in [0, 7), got 7"),
    ({"teacher_forcing": 1.5}, ValueError, "teacher_forcing must be at most 1, got 1.5"),
    ({"k1": 0}, ValueError, "k1 must be at least 1, got 0"),
    ({"k1": 4, "k2": 2}, ValueError, "k2 must be at least k1, got k1=4, k2=2"),
    ({"cell": nn.GRU(H, H, batch_first=True), "state": torch.zeros(1, T, H)}, ValueError,
     "targets must be [T, B] with B = 4, got [4, 3]. "
     "Pass batch_first=True if they are [B, T]: that of the cell does not say so"),
    ({"state": torch.zeros(T, H)}, ValueError, f"{TRANSPOSED} targets.t() or batch_first=True?"),
    ({"lengths": [1, 2, 3, 1]}, ValueError, f"{TRANSPOSED} targets.t() or batch_first=True?"),
    ({"start": torch.zeros(T, dtype=torch.int32)}, ValueError, f"{TRANSPOSED} targets.t() or batch_first=True?"),
    ({"cell": lambda x, s: (x, s), "lengths": torch.ones(T).long(), "state": torch.zeros(T, H)}, ValueError,
     f"{TRANSPOSED} targets.t() or batch_first=True?"),
    ({"cell": lambda x, s: (x, s), "batch_dim": 1, "state": torch.zeros(2, T, H)}, ValueError,
     f"{TRANSPOSED} targets.t() or batch_first=True?"),
    ({"state": torch.zeros(T, H), "batch_first": True, "targets": TARGETS.t()}, ValueError,
     "targets must be [B, T] with B = 4, got [3, 4]. Did you mean targets.t() or batch_first=False?"),
    ({"state": torch.zeros(B, H, dtype=torch.complex64)}, TypeError, "state must be floating-point, got a complex64 tensor"),
    ({"cell": nn.LSTM(H, H), "state": (torch.zeros(1, B, H), torch.zeros(1, B, H, dtype=torch.int64))},
     TypeError, "state[1] must be floating-point, got an int64 tensor"),
    ({"cell": lambda x, s: (x, s), "eos": 1, "state": torch.zeros(B, B, H)}, ValueError,
     "batch_dim must be given if dimensions 0 and 1 may both be the batch of 3, got a state of shape [3, 3, 5]"),
    ({"cell": lambda x, s: (x, s), "truncation": "random", "k2": 2, "state": torch.zeros(2, B, H)}, ValueError,
     "state must hold tensors with the batch in dimension 0 to be frozen by row, got shape [2, 3, 5]. "
     "Pass batch_dim=1 if it is there"),
    ({"lengths": torch.tensor([1, 2, 3, 1]), "state": torch.zeros(B, H)}, ValueError,
     "lengths must have shape [3], got [4]"),
    ({"lengths": [1, 2.0, 3]}, TypeError, "lengths[1] must be an int, got float"),
    ({"eos": V}, ValueError, "eos must be in [0, 7), got 7"),
    ({"ignore_index": 1.0}, TypeError, "ignore_index must be an int, got float"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be at most 1, got 1.5"),
    ({"class_weight": torch.ones(V + 1)}, ValueError, "class_weight must have shape [7], got [8]"),
    ({"class_weight": [1.0] * (V - 1) + ["2"]}, TypeError, "class_weight[6] must be a number, got str"),
    ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
    ({"num_items": -1}, ValueError, "num_items must be at least 0, got -1"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items must be None unless reduction is 'mean', got 3"),
    ({"temperature": 0.0}, ValueError, "temperature must be greater than 0, got 0.0"),
    ({"generator": 3}, TypeError, "generator must be a torch.Generator or None, got int"),
    ({"context": (3,)}, TypeError, "context[0] must be a tensor, got int"),
    ({"context": (torch.zeros(3),)}, ValueError, "context must be empty for one of torch's cells, got 1 tensors. "
     "Wrap the cell: lambda x, state, memory: ..."),
    ({"memory_budget": 27}, ValueError, "memory_budget must hold one row of logits, 28 bytes, got 27"),
    ({"cell": lambda x, s: (x, s), "state": torch.zeros(2), "lengths": torch.tensor([1, 2, 3])}, ValueError,
     "state must hold tensors with the batch in dimension 0 to be frozen by row, got shape [2]"),
    ({"embedding_dropout": 1.5}, ValueError, "embedding_dropout must be at most 1, got 1.5"),
    ({"output_dropout": -0.5}, ValueError, "output_dropout must be at least 0, got -0.5"),
    ({"targets": None, "feedback": "sample"}, ValueError, "steps must be given if targets are None, got None"),
    ({"steps": 6}, ValueError, "steps must be None if there are targets, got 6"),
    ({"targets": None, "steps": 4, "feedback": "teacher"}, ValueError,
     "feedback must be 'sample' or 'greedy' if targets are None, got 'teacher'"),
    ({"targets": None, "steps": 4, "inputs": TARGETS}, ValueError, "inputs must be None if targets are None, got an int64 tensor"),
    ({"draw": "sample"}, ValueError, "draw must be left at 'argmax' unless feedback is 'sample', 'scheduled' or a mask, got 'sample'"),
    ({"token_weight": torch.rand(B, T)}, ValueError, "token_weight must have shape [4, 3], got [3, 4]"),
    ({"resets": MASK.t()}, ValueError, "resets must have shape [4, 3], got [3, 4]"),
    ({"truncation": "random", "k1": 2, "k2": 4}, ValueError, "k1 must be None if cuts are random, got 2"),
    ({"truncation": "random", "k2": 1}, ValueError, "k2 must be at least 2, the mean of steps between random cuts, got 1"),
    ({"truncation": "sometimes"}, ValueError, "truncation must be one of 'fixed', 'random', got 'sometimes'"),
    ({"state_grad_clip": 0.0}, ValueError, "state_grad_clip must be greater than 0, got 0.0"),
    ({"state": (torch.zeros(B, H),)}, TypeError, "state must be a tensor for this cell, got tuple"),
    ({"soft_targets": P}, TypeError,
     "soft_targets must be a pair (probabilities [T, B, K], indices [T, B, K] or None) or the head of a teacher, (weight [V, H'], bias [V] or None, hidden [T, B, H']), got a float32 tensor"),
    ({"soft_targets": (P, AT[..., :1])}, ValueError, "soft_targets[1] must have shape [4, 3, 2], got [4, 3, 1]"),
    ({"soft_targets": (P, None)}, ValueError, "soft_targets[0] must have all 7 words if no indices are given, got 2 of them"),
    ({"soft_targets": (-P, AT)}, ValueError, "soft_targets[0] must be at least 0, got -0.5"),
    ({"soft_targets": (P, AT.clone().index_put((torch.tensor(1),) * 3, torch.tensor(V)))}, ValueError,
     "soft_targets[1] must be in [0, 7), got 7"),
    ({"soft_targets": (None, None, X)}, TypeError, "soft_targets[0] must be a floating-point tensor [V, H'], got NoneType"),
    ({"soft_targets": (W[1:], None, X)}, ValueError, "soft_targets[0] must have shape [7, H'], got [6, 4]"),
    ({"soft_targets": (W, W[0], X)}, ValueError, "soft_targets[1] must have shape [7], got [4]"),
    ({"soft_targets": (W, None, X[..., 1:])}, ValueError, "soft_targets[2] must have the teacher's size, 4, got [4, 3, 3]"),
    ({"soft_targets": (P, AT), "soft_weight": 1.5}, ValueError, "soft_weight must be at most 1, got 1.5"),
    ({"soft_targets": (P, AT), "soft_temperature": 0}, ValueError, "soft_temperature must be greater than 0 and finite, got 0"),
    ({"soft_weight": 0.5}, ValueError, "soft_weight must be left at 1.0 unless soft_targets are given, got 0.5"),
    ({"entropy_weight": "0.1"}, TypeError, "entropy_weight must be a number, got str"),
    ({"teacher_forcing": 0.5}, ValueError, "teacher_forcing must be left at 1.0 unless feedback is 'scheduled', got 0.5"),
    ({"feedback": "scheduled", "temperature": 2.0}, ValueError, "temperature must be left at 1.0 unless samples are drawn, got 2.0"),
    ({"batch_dim": "0"}, TypeError, "batch_dim must be an int, got str"),
    ({"cell": lambda x, s: (x, s), "batch_dim": -1}, ValueError, "batch_dim must be at least 0, got -1"),
    ({"cell": lambda x, s: (x, s), "resets": MASK}, ValueError, "state must be given if rows are reset to it, got None"),
]  # fmt: skip
READ = "Pass the module itself, of which only the weights are read"
COMPILED = [  # a part of the call, and what the error has people type
    ("head", nn.Linear(H, V), READ),
    ("embedding", nn.Embedding(V, H), READ),
    ("cell", nn.GRUCell(H, H), "h = compiled(x, s); return h, h"),
    ("cell", nn.LSTMCell(H, H), "h, c = compiled(x, s); return h, (h, c)"),
    ("cell", nn.GRU(H, H), "y, s = compiled(x[None], s); return y[0], s"),
]
BATCH_FIRST = nn.GRU(H, H, batch_first=True)
PADDED = nn.Embedding(V, H, padding_idx=1)
RAGGED = torch.tensor([[2, 3, 2], [3, 2, 4], [4, 1, 2], [2, 1, 1]])
FROM_START = torch.tensor([[3, 3, 3], [1, 2, 4], [2, 4, 1], [4, 1, 2]])
DOUBTFUL: list[tuple[dict[str, Any], str]] = [
    ({"k1": 2}, "k1=2 has no effect without k2: the gradient flows all the way back. "
     "Pass k2=2 to truncate it, or leave k1 out"),
    ({"cell": BATCH_FIRST}, "targets [4, 3] are read as [T, B], though the cell has batch_first=True. "
     "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"),
    ({"cell": BATCH_FIRST, "targets": TARGETS[:3], "state": torch.zeros(1, B, H)},
     "targets [3, 3] are read as [T, B], though the cell has batch_first=True. "
     "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"),
    ({"eos": 2, "ignore_index": 2}, "eos=2 is ignore_index, too: no target 2 has a loss, so to end is not learnt. "
     "Pad targets with -100 behind their eos, or pass lengths, and leave ignore_index out"),
    ({"feedback": "scheduled"}, "teacher_forcing=1.0, the default, feeds targets alone. "
     "Pass the probability of a target, such as teacher_forcing=0.5, or feedback='teacher'"),
    *(({"embedding": PADDED, "targets": targets, **options}, "targets end with padding_idx=1, which counts in "
       "the loss. Pass ignore_index=1, or lengths")
      for targets, options in ((RAGGED, {}), (RAGGED.t(), {"batch_first": True}))),
    ({"targets": FROM_START, "start": 3}, "targets begin with start=3, which is fed before them: its prediction "
     "would be learnt. Pass targets without their first step"),
]  # fmt: skip
CLEAR: list[dict[str, Any]] = [
    {"k2": 2},
    {"eos": 2, "ignore_index": 3},
    {"eos": 2, "ignore_index": 2, "targets": None, "steps": 4, "start": TARGETS[0]},
    {"k1": 2, "k2": 3},
    {"cell": BATCH_FIRST, "state": torch.zeros(1, B, H)},
    {"cell": BATCH_FIRST, "lengths": torch.tensor([1, 2, 3])},
    {"cell": BATCH_FIRST, "start": torch.tensor([1, 2, 3])},
    {"cell": BATCH_FIRST, "batch_first": True, "targets": TARGETS.t()},
    {"batch_first": True, "targets": TARGETS.t()},
    {"feedback": "scheduled", "teacher_forcing": 1.0},  # at the begin of a schedule
    {"feedback": "scheduled", "teacher_forcing": 1},
    *(
        {"embedding": PADDED, "targets": RAGGED, **options}
        for options in (
            {"ignore_index": 1},
            {"lengths": [4, 2, 3]},
            {"eos": 1},
            {"reduction": "none"},
            {"token_weight": (RAGGED != 1).float()},
            {"class_weight": [1.0, 0.0] + [1.0] * (V - 2)},
        )
    ),
    {"targets": RAGGED},  # no padding is known
    {"embedding": PADDED, "targets": RAGGED[:3]},  # one end token in a row
    {"embedding": PADDED, "targets": torch.cat([RAGGED[2:], RAGGED[2:]])},  # a word as others
    {"targets": FROM_START, "start": 2},
    {"targets": FROM_START, "start": torch.tensor([3, 3, 3])},
    {"targets": FROM_START, "start": 3, "inputs": FROM_START},
    {"targets": FROM_START[:, :1], "start": 3},
    {"targets": torch.cat([FROM_START, FROM_START]), "start": 3},
]


def base(**changes: Any) -> dict[str, Any]:
    call = {
        "embedding": nn.Embedding(V, H),
        "cell": nn.GRUCell(H, H),
        "head": nn.Linear(H, V),
        "targets": TARGETS,
        "feedback": "greedy",
    }
    return {**call, **changes}


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[text[:60] for _, _, text in WRONG])
def test_decode_loss(change, kind, text):
    call = base(**change)
    accumext.decode_loss(**base())  # the call is right but for the change
    generator = torch.get_rng_state()
    with pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}$"):
        accumext.decode_loss(**call)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(("change", "text"), DOUBTFUL, ids=[text[:60] for _, text in DOUBTFUL])
@pytest.mark.parametrize("call", [accumext.decode_loss, accumext.decode_memory])
def test_doubtful_arguments(call, change, text):
    with warnings_as("always") as said:
        call(**base(**change))
    (warning,) = said
    assert str(warning.message) == f"decode_loss: {text}"
    assert warning.filename == __file__  # the user's line


@pytest.mark.parametrize("change", CLEAR, ids=[", ".join(change) for change in CLEAR])
def test_nothing_is_said_of_what_is_clear(change):
    accumext.decode_loss(**base(**change))  # a warning is an error in this suite


def test_batch_first_of_the_cell_changes_nothing():
    plain = nn.GRU(H, H)
    plain.load_state_dict(BATCH_FIRST.state_dict())
    state = torch.randn(1, B, H)
    call = base(state=state)
    found, expected = (
        accumext.decode_loss(**{**call, "cell": cell}) for cell in (BATCH_FIRST, plain)
    )
    assert torch.equal(found.token_losses, expected.token_losses)


def test_integers_of_numpy():
    call, given = (
        base(),
        {"k1": 2, "k2": 3, "start": 4, "eos": 2, "ignore_index": 3, "num_items": 5},
    )
    given["memory_budget"] = 100
    expected = accumext.decode_loss(**call, **given)
    found = accumext.decode_loss(**call, **{name: np.int64(n) for name, n in given.items()})
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.inputs, expected.inputs)
    parameters = list(call["cell"].parameters())
    gradients = (torch.autograd.grad(out.loss, parameters) for out in (found, expected))
    assert_equal(*gradients)


@pytest.mark.parametrize(("name", "module", "cure"), COMPILED)
def test_modules_that_torch_has_compiled(name, module, cure):
    call = base(**{name: torch.compile(module, backend="eager")})
    with pytest.raises(TypeError, match=f"got a compiled .*{re.escape(cure)}$"):
        accumext.decode_loss(**call)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8], ids=str)
def test_integers_of_any_dtype(dtype):
    """Tokens and lengths; lists of lengths and of class weights, and weights of any dtype."""
    start, lengths = torch.tensor([1, 2, 3]), torch.tensor([4, 1, 3])
    weight = torch.rand(V, dtype=torch.float64)
    call = base(feedback="scheduled", teacher_forcing=0.5, class_weight=weight)
    few = {**call, "targets": TARGETS.to(dtype)}
    parameters = list(call["cell"].parameters())

    def results(call: dict[str, Any]) -> list[torch.Tensor]:
        out = accumext.decode_loss(**call, generator=torch.Generator().manual_seed(0))
        loss_and_tokens = [out.loss, out.token_losses, out.tokens, out.inputs, out.lengths]
        return [*loss_and_tokens, *torch.autograd.grad(out.loss, parameters)]

    expected = results({**call, "start": start, "lengths": lengths})
    for some in (lengths.to(dtype), lengths.tolist(), tuple(lengths.tolist())):
        found = results({**few, "start": start.to(dtype), "lengths": some})
        assert_equal(found, expected)
    expected = results({**call, "inputs": TARGETS.flip(0)})
    found = results({**few, "inputs": TARGETS.flip(0).to(dtype), "class_weight": weight.tolist()})
    assert_equal(found, expected)
    assert all(t.dtype == torch.int64 for t in found[2:5])
    memory = accumext.decode_memory(**{**few, "lengths": [4, 1, 3]})
    assert memory == accumext.decode_memory(**call, lengths=lengths)


def test_modules_that_torch_has_scripted_or_traced():
    example = torch.zeros(B, H), torch.zeros(B, H)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.LSTM(H, H))
        traced = torch.jit.trace(nn.GRUCell(H, H), example)
    for cell, text in (
        (scripted, r"of one step, got a scripted LSTM, which reads"),
        (
            traced,
            r"got a scripted GRUCell, which returns h\. .*: h = scripted\(x, s\); return h, h",
        ),
    ):
        with pytest.raises(TypeError, match=rf"cell must return \(output, state\),? {text}"):
            accumext.decode_loss(**base(cell=cell))


def made_in_inference_mode() -> nn.Embedding:
    with torch.inference_mode():
        return nn.Embedding(V, H)


def unlike_torchs(x: torch.Tensor, state: Any) -> Any:
    raise RuntimeError(
        "input must have 3 dimensions, got 2"
    )  # as quantised modules of sequences do


WHOLE, LSTM, GRU, ZEROS = WholeModel(V, H), nn.LSTMCell(H, H), nn.GRU(H, H), torch.zeros(B, H)
BATCH_FIRST = nn.GRU(H, H, batch_first=True)
PARTS = "Pass the parts of the model, model.words, model.rnn, model.out, or use tbptt"
CURES: list[tuple[dict[str, Any], str]] = [  # what people pass, and what the error has them type
    ({"embedding": WHOLE}, PARTS),
    ({"cell": WHOLE}, PARTS),
    ({"head": WHOLE}, PARTS),
    ({"cell": lambda x, s: WHOLE(x, s)}, "leave its nn.Embedding out, or use tbptt"),
    ({"cell": lambda x, s: LSTM(x, s), "state": (ZEROS, ZEROS)}, "h, c = cell(x, s); return h, (h, c)"),
    ({"cell": lambda x, s: GRU(x, s), "state": ZEROS[None]}, "y, s = rnn(x[None], s); return y[0], s"),
    ({"cell": unlike_torchs}, "y, s = rnn(x[None], s); return y[0], s"),
    ({"cell": [WHOLE.rnn, WHOLE.rnn]}, "Pass nn.GRU, LSTM or RNN with num_layers, or one function"),
    ({"cell": nn.ModuleList([WHOLE.rnn])}, "Pass nn.GRU, LSTM or RNN with num_layers, or one function"),
    ({"cell": nn.Sequential(WHOLE.rnn)}, "Pass nn.GRU, LSTM or RNN with num_layers, or one function"),
    ({"cell": nn.GRUCell(H, H).double()}, "Pass cell.to(torch.float32), or call it under torch.autocast"),
    ({"head": WHOLE.words}, "Pass (embedding.weight, None)"),
    ({"head": WHOLE.out.weight}, "Pass (weight, None)"),
    ({"head": nn.Sequential(nn.Dropout(0.1), WHOLE.out)}, "Pass head[1] and output_dropout=0.1"),
    ({"head": nn.Sequential(WHOLE.out, nn.LogSoftmax(1))}, "leave the softmax out"),
    ({"head": nn.AdaptiveLogSoftmaxWithLoss(H, V, [3])}, "use tbptt, or chunked_loss"),
    ({"head": lambda h: WHOLE.out(h)}, "Pass the module itself"),
    ({"embedding": nn.Sequential(WHOLE.words, nn.Dropout(0.1))}, "Pass embedding[0] and embedding_dropout=0.1"),
    ({"embedding": nn.Embedding(V, H, device="meta")}, "accumext.decode_memory takes such tensors"),
    ({"embedding": made_in_inference_mode()}, "Make the module outside, or copy.deepcopy(module)"),
    ({"state": ZEROS.to_sparse()}, "Pass state.to_dense()"),
    ({"feedback": 0.5}, "feedback='scheduled', teacher_forcing=0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "cure"), CURES)
def test_what_to_type_instead(change, cure):
    call = {"embedding": WHOLE.words, "cell": WHOLE.rnn, "head": WHOLE.out, "feedback": "greedy"}
    with pytest.raises((TypeError, RuntimeError), match=re.escape(cure)) as caught:
        accumext.decode_loss(**{**call, "targets": TARGETS, **change})
    assert re.match(r"decode_loss: \w+ must .*, got ", str(caught.value))


def test_modules_with_a_forward_of_their_own_are_cells():
    class Stack(nn.Sequential):
        def forward(self, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            s = self[0](x, s)
            return s, s

    call = (WHOLE.words, Stack(WHOLE.rnn), WHOLE.out, TARGETS, ZEROS)
    assert accumext.decode_loss(*call, feedback="greedy").loss.isfinite()


def test_losses_of_one_element():
    """As torch takes them."""
    x, y = torch.randn(6, H), torch.arange(6)
    out, opt = WHOLE.out, accumext.AccumulatingOptimizer(torch.optim.SGD(WHOLE.parameters(), 0.1))

    def rolled_out(one):
        return accumext.rollout(lambda _, s: (out(s), s), x, 2, loss=lambda z, t: one(z, y)).loss

    def sliced(one):
        return accumext.chunked_loss(lambda h, t: one(out(h), t), x, y, chunks=2)

    for backward in (
        lambda one: opt.backward(one(out(x), y)),  # a window of one: into `.grad`
        lambda one: accumext.tbptt(lambda _, s: (out(s), s), y[None], x, criterion=one),
        lambda one: rolled_out(one).backward(),
        lambda one: sliced(one).backward(),
    ):
        found = []
        for one in (F.cross_entropy, lambda z, t: F.cross_entropy(z, t).view(1, 1)):
            WHOLE.zero_grad()
            backward(one)
            found.append(out.weight.grad.clone())
            opt.discard()
        torch.testing.assert_close(*found)
