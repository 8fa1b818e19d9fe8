"""Peak memory of decode_loss: flat in T and V, and what decode_memory says."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import TARGETS, raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _memory, _plan
from accumext.decoder._plan import HeadRows, Plan, fill_budget, keeps_graph, plan_from
from accumext.decoder._precision import Dtypes
from accumext.decoder._rnn_weights import rnn_weights_of

PREDICTION = 0.10  # of the measured peak: the small temporaries that the formula leaves out
STEPS, BATCH, VOCABULARY = 6, 3, 13
ROWS = HeadRows(workspace=256, logits=16)
steps = st.integers(0, 12)
batches = st.integers(0, 40)
row_bytes = st.integers(1, 9)


def modules(vocabulary: int, size: int, dtype: torch.dtype, tied: bool) -> tuple[Any, Any, Any]:
    embedding = nn.Embedding(vocabulary, size, dtype=dtype)
    head = nn.Linear(size, vocabulary, dtype=dtype)
    if tied:
        head.weight = embedding.weight
    return embedding, nn.GRUCell(size, size, dtype=dtype), head


def measured(parts: tuple[Any, Any, Any], targets: torch.Tensor, **call: Any) -> int:
    for part in parts:
        part.zero_grad()

    def run() -> None:
        out = accumext.decode_loss(*parts, targets, **call)  # results may be kept
        out.loss.sum().backward()

    return peak_memory(run)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_predicted_peak_where_gradients_go_straight_into_main_gradients(tied):
    parts = modules(8000, 32, torch.float32, tied)
    parameters = nn.ModuleList(parts).parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    opt = accumext.AccumulatingOptimizer(optimizer, window=2, accumulate_in_backward=True)
    targets = torch.randint(8000, (16, 16))
    call = {"feedback": "greedy"}
    predicted = accumext.decode_memory(*parts, targets.shape, **call)

    def run() -> None:  # the first of a window, which makes the main gradients
        opt.backward(accumext.decode_loss(*parts, targets, **call).loss)

    assert predicted == pytest.approx(peak_memory(run), rel=PREDICTION)


@pytest.mark.parametrize(
    "call",
    [
        {"feedback": "teacher"},
        {"feedback": "sample"},
        {"feedback": "greedy", "reduction": "none"},
        {"feedback": "greedy", "token_weight": torch.ones(120, 32)},
        {"feedback": "teacher", "token_weight": torch.ones(120, 32)},
        {"feedback": "teacher", "lengths": [120] * 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("called", [False, True], ids=["module", "function"])
def test_predicted_peak_of_many_tokens_of_few_words(called, call):
    """Their places, numbers and factors are as large as states and logits."""
    embedding, cell, head = modules(30, 4, torch.float32, False)
    parts = embedding, (lambda x, h: (cell(x, h),) * 2) if called else cell, head
    call = {**call, "state": torch.zeros(32, 4)} if called else call
    targets = torch.randint(30, (120, 32))
    predicted = accumext.decode_memory(*parts, targets, **call)
    for part in (embedding, cell, head):
        part.zero_grad()
    peak = peak_memory(lambda: accumext.decode_loss(*parts, targets, **call).loss.sum().backward())
    assert predicted == pytest.approx(peak, rel=PREDICTION)


def test_predicted_peak_if_outputs_are_zeroed_past_the_ends_of_rows():
    """In a copy, while the others still exist."""
    parts = nn.Embedding(30, 3), nn.RNN(3, 256), nn.Linear(256, 30)
    call = {"feedback": "greedy", "return_outputs": True, "lengths": [150] * 8}
    targets = torch.randint(30, (150, 8))
    predicted = accumext.decode_memory(*parts, targets, **call)
    assert predicted == pytest.approx(measured(parts, targets, **call), rel=0.02)


def test_predicted_peak_if_outputs_of_the_first_step_are_joined_with_the_others():
    """Outputs that no graph saves; the head reads all of them at once, in a copy."""
    embedding, head = nn.Embedding(1000, 32), nn.Linear(256, 1000)
    layers = nn.Sequential(nn.Linear(288, 512), nn.GELU(), nn.Linear(512, 256))
    cell = lambda x, h: (h + layers(torch.cat([x, h], 1)),) * 2  # noqa: E731
    call = {"feedback": "teacher", "state": torch.zeros(64, 256)}
    targets = torch.randint(1000, (33, 64))
    predicted = accumext.decode_memory(embedding, cell, head, targets, **call)

    def run() -> None:
        accumext.decode_loss(embedding, cell, head, targets, **call).loss.backward()

    assert predicted == pytest.approx(peak_memory(run), rel=PREDICTION)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_predicted_peak_of_the_pass_back_in_half_precision(kind, monkeypatch):
    """With as many rows at once as on a GPU, what its products read is rounded into new memory."""
    monkeypatch.setattr(_plan, "CELL_ROWS", {"cpu": 2048})
    parts = nn.Embedding(50, 256), kind(256, 256, 2), nn.Linear(256, 50)
    for part in parts:
        part.bfloat16()
    targets = torch.randint(50, (64, 32))
    predicted = accumext.decode_memory(*parts, (64, 32), feedback="greedy")
    rel = 0.05 if accumext.backend() == "cpu" else PREDICTION
    assert predicted == pytest.approx(measured(parts, targets, feedback="greedy"), rel=rel)


@pytest.mark.parametrize("kept", [False, True])
def test_known_inputs_are_predicted_where_they_are_multiplied_at_once(kept, monkeypatch):
    """Of two layers: what they read and, unless they are kept anyway, their gates, in whole steps,
    at least one, at most all."""
    size, units, batch, steps = 8, 40, 16, 500
    parts = nn.Embedding(3, size), nn.GRU(size, units, 2), nn.Linear(units, 3)
    budget = None if kept else 2**10

    def predicted(rows: int, feedback: str = "teacher", batch: int = batch) -> int:
        monkeypatch.setattr(_memory, "INPUT_ROWS", {"cpu": rows})
        options = {"feedback": feedback, "memory_budget": budget}
        return accumext.decode_memory(*parts, (steps, batch), **options)

    step = batch * (size + units + (0 if kept else 4 * units)) * 4
    assert predicted(6000) - predicted(4800) == 75 * step
    assert predicted(6015) == predicted(6000)
    assert predicted(10**6) == predicted(steps * batch) > predicted(steps * batch - batch)
    assert predicted(0) == predicted(batch)
    assert predicted(0, "greedy") == predicted(10**6, "greedy")


def test_peak_does_not_grow_with_steps_beyond_the_states():
    """Four times the steps add the outputs [T, B, H], their gradients, the tokens, and the gates
    [T, B, 4 H], which are no more than the workspace; it is far below the logits of all steps."""
    batch, size, vocabulary, steps = 16, 32, 8000, 128
    parts = modules(vocabulary, size, torch.float32, False)
    short, long = (
        measured(parts, torch.randint(vocabulary, (steps, batch)), feedback="greedy")
        for steps in (steps // 4, steps)
    )
    states = (steps - steps // 4) * batch * size * 4
    tokens = (steps - steps // 4) * batch * 8
    assert long - short < (4 + 4) * states + 6 * tokens
    assert (long - (1 + 4) * states) / short < 1.1
    assert long < steps * batch * vocabulary * 4 / 4


def test_the_meta_device_predicts_for_a_cpu():
    """From targets, a state and modules without data, or from the shape of the targets alone. So do
    fake tensors."""
    parts = nn.Embedding(50, 64), nn.LSTM(64, 64, 3), nn.Linear(64, 50)
    targets, state = torch.zeros(20, 4, dtype=torch.int64), torch.zeros(3, 4, 64)
    expected = accumext.decode_memory(*parts, targets, (state, state), feedback="sample")
    assert expected > sum(p.nbytes for part in parts for p in part.parameters())  # gradients
    meta = [part.to("meta") for part in parts]
    for shape in ((20, 4), targets.to("meta")):
        for start in (None, (state.to("meta"),) * 2):
            assert accumext.decode_memory(*meta, shape, start, feedback="sample") == expected
    with FakeTensorMode():
        fake = nn.Embedding(50, 64), nn.LSTM(64, 64, 3), nn.Linear(64, 50)
    assert accumext.decode_memory(*fake, (20, 4), feedback="sample") == expected


def test_the_shape_of_targets_is_theirs_where_the_batch_is_first():
    """(B, T), as the tensors that `decode_loss` takes with the same options."""
    parts = modules(50, 8, torch.float32, False)
    weight = torch.ones(20, 3)
    expected = accumext.decode_memory(*parts, (20, 3), feedback="greedy", token_weight=weight)
    call = {"feedback": "greedy", "token_weight": weight.t(), "batch_first": True}
    for targets in ((3, 20), torch.zeros(3, 20, dtype=torch.int64)):
        assert accumext.decode_memory(*parts, targets, **call) == expected


def test_decode_memory_takes_what_decode_loss_takes():
    parts = modules(13, 5, torch.float32, False)
    with pytest.raises(TypeError, match=r"^decode_memory: feedback must be given, got nothing"):
        accumext.decode_memory(*parts, TARGETS)
    with pytest.raises(TypeError, match=r"^decode_memory: arguments must .*Did you mean lengths"):
        accumext.decode_memory(*parts, TARGETS, feedback="greedy", lenghts=[4])
    with raises(TypeError, "embedding must be an nn.Embedding"):
        accumext.decode_memory([1], *parts[1:], TARGETS, feedback="greedy")


@dataclass(eq=False)
class Remembering:
    """A cell that cannot be copied before its first call has set a field."""

    cell: nn.GRUCell
    last: torch.Tensor = field(init=False)

    def __call__(self, x, state):
        self.last = self.cell(x, state)
        return self.last, self.last


def test_a_cell_is_not_copied():
    embedding, cell, head = nn.Embedding(7, 4), nn.GRUCell(4, 5), nn.Linear(5, 7)
    peaks = [
        accumext.decode_memory(embedding, some, head, (6, 3), torch.zeros(3, 5), feedback="greedy")
        for some in (Remembering(cell), lambda x, state: (cell(x, state),) * 2)
    ]
    assert peaks[0] == peaks[1] > 0


def test_decode_memory_has_the_parameters_of_decode_loss():
    of_loss = dict(inspect.signature(accumext.decode_loss).parameters)
    signature = inspect.signature(accumext.decode_memory)
    of_loss["targets"] = signature.parameters["targets"]  # or their shape
    assert list(signature.parameters.values()) == list(of_loss.values())
    assert signature.return_annotation == "int"


@given(steps, batches, row_bytes, row_bytes, st.integers(0, 3000))
def test_a_budget_is_filled(steps, batch, logits, exps, budget):
    """As many of the rows of logits that are wanted as can have a row of exponentials each, then as
    many of those as what is left holds: whole steps of them, unless not even one fits."""
    fitting = [n for n in range(1, ROWS.logits + 1) if n * (logits + exps) <= budget]
    logit_rows = max(fitting, default=1)
    rows = [n for n in range(1, steps * batch + 1) if logit_rows * logits + n * exps <= budget]
    whole = [n for n in rows if n % batch == 0]
    plan = fill_budget(steps, batch, logits, exps, budget, ROWS)
    assert plan == Plan(max(whole or rows, default=1), logit_rows)
    least = fill_budget(steps, batch, logits, exps, 0, ROWS)
    assert (least.rows, least.logit_rows) == (1, 1)
    if budget >= logits + exps:
        assert plan.logit_rows * logits + plan.rows * exps <= budget


@given(st.integers(0, 700), st.integers(0, 700), row_bytes, row_bytes)
def test_without_a_budget_there_are_enough_whole_steps(steps, batch, logits, exps):
    """Whole steps that have the rows that are wanted in the memory that logits take, and as few
    windows as if none were smaller."""
    plan = fill_budget(steps, batch, logits, exps, None, ROWS)
    enough, rows = ROWS.workspace * logits // exps, steps * batch
    assert plan.rows == max(1, rows) or plan.rows % batch == 0
    assert plan.rows >= min(enough, max(1, rows))
    assert plan.rows < 2 * (enough + 1) + batch
    assert -(-rows // plan.rows) <= max(1, rows // enough)
    assert plan.logit_rows == ROWS.logits


FLOATS = Dtypes(*[torch.float32] * 4)
HALVES = FLOATS._replace(exps=torch.bfloat16)


def plan_of(budget: int | None = None, **call: Any) -> Plan:
    """The plan of 4096 steps of 16 rows, 2000 words."""
    given = {"shape": (4096, 16), "words": 2000, "dtypes": FLOATS, "device": "cpu", "rnn": None}
    return plan_from(
        budget, **{**given, "free_running": True, "gradients_in_forward": True, **call}
    )


@given(st.sampled_from(["cpu", "cuda", "meta"]), st.integers(0, 5000))
def test_the_cells_backward_pass_takes_the_fewest_steps_that_are_enough(device, batch):
    wanted = 2048 if device == "cuda" else 256
    needed = next(n for n in range(1, wanted + 1) if n * max(1, batch) >= wanted)
    assert plan_of(device=device, shape=(1, batch)).backward_steps == needed


@pytest.mark.parametrize(
    ("call", "rows", "logit_rows", "kept"),
    [
        ({}, 256, 16, 0),
        ({"device": "cuda"}, 1024, 16, 0),
        ({"device": "cuda", "free_running": False}, 1024, 512, 0),
        ({"device": "meta", "free_running": False}, 256, 32, 0),
        ({"gradients_in_forward": False}, 256, 32, 0),
        ({"free_running": False, "shape": (1, 16)}, 16, 16, 0),
        ({"dtypes": HALVES}, 512, 16, 0),
        ({"dtypes": Dtypes(*[torch.float64] * 4)}, 256, 16, 0),
        ({"budget": 2**20}, 112, 16, 0),
        ({"budget": 2**20, "dtypes": HALVES}, 224, 16, 0),
        ({"budget": 8000}, 1, 1, 0),
        ({"shape": (1, 1)}, 1, 1, 0),
        ({"shape": (0, 16)}, 1, 16, 0),
        ({"shape": (5, 0)}, 1, 1, 0),
        ({"shape": (5, 0), "budget": 2**14}, 1, 1, 0),
        # pre-activations [L, T, B, 4 H] of a GRU or LSTM on a CPU
        ({"kind": nn.GRU}, 256, 16, 2**22),
        ({"kind": nn.LSTM, "layers": 2, "units": 2}, 256, 16, 2**22),
        ({"kind": nn.RNN}, 256, 16, 0),
        ({"kind": nn.GRU, "device": "cuda"}, 1024, 16, 0),
        ({"kind": nn.GRU, "dtypes": Dtypes(*[torch.float64] * 4)}, 256, 16, 2**23),
        # up to 16 MiB, whatever the workspace is; or no larger than that with its logits
        ({"kind": nn.GRU, "units": 16}, 256, 16, 2**24),
        ({"kind": nn.GRU, "units": 17}, 256, 16, 0),
        ({"kind": nn.GRU, "units": 17, "words": 17 * 2**12}, 256, 16, 17 * 2**20),
        ({"kind": nn.GRU, "units": 17, "words": 2**14}, 256, 16, 17 * 2**20),
        ({"kind": nn.GRU, "units": 17, "words": 2**14 - 1}, 256, 16, 0),
        ({"kind": nn.GRU, "units": 17, "words": 2**14, "dtypes": HALVES}, 512, 16, 17 * 2**20),
        # and at most half of a budget, of which one row of logits is left
        ({"kind": nn.GRU, "budget": 2**23}, 496, 16, 2**22),
        ({"kind": nn.GRU, "budget": 2**23 - 2}, 1024, 16, 0),
        ({"kind": nn.GRU, "budget": 2**23 + 1}, 496, 16, 2**22),
        ({"kind": nn.GRU, "units": 17, "words": 20, "budget": 2**30}, 65536, 16, 17 * 2**20),
        ({"kind": nn.GRU, "budget": 8016, "shape": (1, 1), "units": 1}, 1, 1, 16),
        ({"kind": nn.GRU, "budget": 8015, "shape": (1, 1), "units": 1}, 1, 1, 0),
    ],
    ids=str,
)
def test_sizes_of_a_call(call, rows, logit_rows, kept):
    """Of 4096 steps of 16 rows, 2000 words, 4 units."""
    given = {"device": "cpu", "gradients_in_forward": True, **call}
    kind, units, layers = given.pop("kind", None), given.pop("units", 4), given.pop("layers", 1)
    rnn = None
    if kind is not None:
        rnn = rnn_weights_of(kind(3, units, layers), torch.float32, torch.float32)
    budget, batch = given.pop("budget", None), given.get("shape", (4096, 16))[1]
    plan = plan_of(budget, rnn=rnn, **given)
    assert (plan.rows, plan.logit_rows, plan.pre_activation_bytes) == (rows, logit_rows, kept)
    assert plan.bounded == (budget is not None)
    assert plan.gradients_in_forward == given["gradients_in_forward"]
    # Twice as many where pre-activations are kept: of a step, half as much is formed.
    alone = plan_of(device=given["device"], shape=(1, batch)).backward_steps
    assert plan.backward_steps == alone * (1 + (kept > 0))


def test_graphs_that_are_kept_take_sixteen_mebibytes():
    """The first step's bytes for each step, and twice those by which the state will have grown."""
    assert keeps_graph(1, 17, 2**20, 0)
    assert not keeps_graph(1, 17, 2**20 + 1, 0)
    # It has grown by 2**8, and in the middle of as many steps to come by half as much again.
    assert keeps_graph(17, 33, 2**20 - 3 * 2**8, 2**8)
    assert not keeps_graph(17, 33, 2**20 - 3 * 2**8 + 1, 2**8)
