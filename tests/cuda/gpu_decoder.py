"""decode_loss beside plain autograd in float64 on the tokens that it fed: rows of gpu_checks.py.

Every case runs in two or five precisions, twice in each: the second time, any wait for the GPU is
an error. Errors are relative to float64 on the same rounded parameters, and at most ALLOWED times
those of plain autograd in the same precision. There are training steps in a user's CUDA graph, too,
and the peak memory beside decode_memory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_decoder_cases import (
    IGNORED,
    PRECISIONS,
    TWO_PRECISIONS,
    Case,
    Precision,
    captured,
    large,
    modes,
    others,
    remembered,
)
from gpu_rows import Checks, Facts
from support.decode_oracle import Decoder, decode, relative_distance
from torch import Tensor, nn

import accumext
from accumext.decoder import _rnn_path
from accumext.demo.memory import peak_memory

ALLOWED = 2.0
PREDICTION = 0.10  # of the measured peak: the small temporaries that the formula leaves out
SEED, LOSS_SCALE = 5, 2.0**10
SHARE = 0.1  # ten standard deviations of the share of 2,000 units that dropout keeps


KINDS: dict[str, tuple[Any, Any, Callable[..., Any], dict[str, str]]] = {
    "gru": (nn.GRUCell, nn.GRU, torch.gru_cell, {}),
    "lstm": (nn.LSTMCell, nn.LSTM, torch.lstm_cell, {}),
    "rnn": (nn.RNNCell, nn.RNN, torch.rnn_tanh_cell, {}),
    "relu": (nn.RNNCell, nn.RNN, torch.rnn_relu_cell, {"nonlinearity": "relu"}),
}
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class Model(nn.Module):
    """The parameters of a case, the initial state and the context among them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        one_step, stacked, _, options = KINDS[case.cell]
        size, shape = case.size, (case.batch, case.size)
        self.embedding = nn.Embedding(case.vocabulary, size)
        self.head = nn.Linear(size, case.vocabulary)
        self.head.bias.data += case.bias
        if case.tied:
            self.head.weight = self.embedding.weight
        if case.layers:
            self.cell = stacked(size, size, case.layers, dropout=case.dropout, **options)
            shape = (case.layers, *shape)
        else:
            self.cell = one_step(size, size, **options)
        parts = 2 if case.cell == "lstm" else 1
        self.states = nn.ParameterList(torch.randn(shape) for _ in range(parts))
        self.context = nn.Parameter(torch.randn(case.batch, size))

    def leaves(self) -> list[nn.Parameter]:
        """All that has a gradient."""
        return [p for p in self.parameters() if self.case.called or p is not self.context]

    def state(self) -> Any:
        return tuple(self.states) if len(self.states) == 2 else self.states[0]

    def call_cell(self, x: Tensor, state: Any, context: Tensor) -> tuple[Tensor, Any]:
        """Advance as a user's function may."""
        state = self.cell(x + context, state)
        return (state[0] if isinstance(state, tuple) else state) * context, state

    def plain(self, masks: Masks) -> Decoder:
        """With torch's functions for the steps of cells."""
        between, of_inputs, of_outputs = (iter(() if m is None else m) for m in masks)
        keep = 1 - self.case.dropout
        keep_input, keep_output = (
            1 - self.case.options.get(f"{name}_dropout", 0.0) for name in ("embedding", "output")
        )
        layers = range(self.case.layers)
        suffixes = [f"_l{layer}" for layer in layers] or [""]
        advance = KINDS[self.case.cell][2]

        def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
            mask = next(between, None)
            if (of_input := next(of_inputs, None)) is not None:
                x = x * of_input / keep_input
            parts = state if isinstance(state, tuple) else (state,)
            found = []
            for layer, suffix in enumerate(suffixes):
                here = tuple(part[layer] if self.case.layers else part for part in parts)
                weights = [getattr(self.cell, name + suffix) for name in WEIGHTS]
                if layer and mask is not None:
                    x = x * mask[layer - 1] / keep
                new = advance(x, here if len(here) == 2 else here[0], *weights)
                found.append(new if isinstance(new, tuple) else (new,))
                x = found[-1][0]
            stacked = [torch.stack(p) if self.case.layers else p[0] for p in zip(*found)]
            if (of_output := next(of_outputs, None)) is not None:
                x = x * of_output / keep_output
            return x, tuple(stacked) if len(stacked) == 2 else stacked[0]

        call, context = (self.call_cell, (self.context,)) if self.case.called else (step, ())
        return Decoder(
            self.embedding, self.cell, self.head, self.state(), call, context, self.leaves()
        )

    def ours(self, targets: Tensor, options: dict[str, Any]) -> accumext.DecodeOutput:
        cell = self.call_cell if self.case.called else self.cell
        context = (self.context,) if self.case.called else ()
        model = self.embedding, cell, self.head, targets, self.state()
        return accumext.decode_loss(*model, context=context, **options)


class Masks(NamedTuple):
    """The masks of dropout: 1 where it keeps."""

    between: Tensor | None = None  # [T, L - 1, B, H]
    of_inputs: Tensor | None = None  # [T, B, E]
    of_outputs: Tensor | None = None  # [T, B, H]


class Found(NamedTuple):
    out: accumext.DecodeOutput
    loss: Tensor  # 0-dim
    gradients: list[Tensor]
    masks: Masks


class Check:
    """One case in one precision."""

    def __init__(self, case: Case, precision: Precision, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.case, self.precision, self.device = case, precision, device
        self.model = Model(case).to(device, precision.parameters)
        shape = case.steps, case.batch
        self.targets = torch.randint(case.vocabulary, shape).to(device)
        self.targets[case.steps // 2, 0] = case.options.get("ignore_index", IGNORED)
        self.upstream = torch.randn(shape).to(device)
        made = {"mask": torch.rand(shape) < 0.5}
        ended = torch.arange(case.batch) * case.steps // max(1, case.batch - 1)
        made["lengths"] = case.steps - ended  # from all steps to none
        made["class_weight"] = torch.linspace(0.2, 2.0, case.vocabulary)
        self.options = {
            name: made[value].to(device) if isinstance(value, str) and value in made else value
            for name, value in case.options.items()
        }
        if self.options.get("eos") == "seen":
            tokens = self.run(contextlib.nullcontext(), eos=None).out.tokens
            self.options["eos"] = int(tokens[case.steps // 2, case.batch // 2])

    def __call__(self) -> Facts:
        found = self.run(contextlib.nullcontext())
        again = self.run(no_waits(self.device))
        self.check_tokens(found.out)
        around = (self.case.options.get(f"{name}_dropout", 0.0) for name in ("embedding", "output"))
        for probability, mask in zip((self.case.dropout, *around), found.masks, strict=True):
            kept = 0.0 if mask is None else mask.float().mean().item()
            if probability:
                assert abs(kept - (1 - probability)) < SHARE, f"dropout keeps {kept:.0%}"
        truth, usual = self.plain(found, torch.float64), self.plain(found, None)
        facts: Facts = {}
        pairs = {"loss": ([found.loss], [usual.loss], [truth.loss])}
        for name, part in {"head": self.of_head(True), "others": self.of_head(False)}.items():
            lists = found.gradients, usual.gradients, truth.gradients
            pairs[name] = tuple([one[i] for i in part] for one in lists)
        for name, (mine, theirs, exact) in pairs.items():
            facts[f"{name} off by"] = relative_distance(mine, exact)
            facts[f"plain {name} off by"] = relative_distance(theirs, exact)
        gap = (
            truth.logits.amax(-1) - truth.logits.gather(-1, truth.tokens[..., None])[..., 0]
        ).max()
        if self.greedy:
            facts["below the argmax"] = gap.item()
        allowed = 2 * (usual.logits.double() - truth.logits).abs().max().item()
        allowed += self.precision.last_places * truth.logits.abs().max().item()
        for name in pairs:
            limit = ALLOWED * facts[f"plain {name} off by"] + self.precision.last_places
            if not facts[f"{name} off by"] <= limit:  # a NaN, too
                raise AssertionError(f"more than {limit:.2e} of the {name}: {facts}")
        if self.greedy and not gap <= allowed:
            raise AssertionError(f"a token {gap:.2e} below the argmax, not {allowed:.2e}: {facts}")
        both = zip([found.loss, *found.gradients], [again.loss, *again.gradients])
        facts["same bits again"] = all(torch.equal(one, other) for one, other in both)
        if not torch.equal(found.out.tokens, again.out.tokens):
            raise AssertionError(f"other tokens in the second run: {facts}")
        return facts

    @property
    def greedy(self) -> bool:
        return self.options["feedback"] != "sample"

    def of_head(self, wanted: bool) -> list[int]:
        head = set(map(id, self.model.head.parameters()))
        leaves = enumerate(self.model.leaves())
        return [i for i, leaf in leaves if (id(leaf) in head) == wanted]

    def run(self, around: Any, **changes: Any) -> Found:
        """Forward and backward by accumext, unscaled."""
        options = self.options | changes
        torch.manual_seed(SEED)  # of what is drawn
        leaves = self.model.leaves()
        for leaf in leaves:
            leaf.grad = None
        scale = LOSS_SCALE if self.precision.autocast == torch.float16 else 1.0
        kind = self.device.type
        scaler = torch.amp.GradScaler(kind, init_scale=LOSS_SCALE) if scale != 1.0 else None
        backward = Tensor.backward if scaler is None else lambda loss: scaler.scale(loss).backward()
        optimizer = None
        if self.case.accumulated:
            optimizer = accumext.AccumulatingOptimizer(
                torch.optim.SGD(leaves), window=2, scaler=scaler, accumulate_in_backward=True
            )
            backward = optimizer.backward
        with around, dropout_masks() as masks:
            with autocast(self.precision, self.device):
                out = self.model.ours(self.targets, options)
            loss = out.loss
            if loss.dim():
                loss = (loss * self.upstream).sum()
            backward(loss)
        if optimizer is not None:
            gradients = [optimizer.main_grad(leaf) for leaf in leaves]
        else:
            gradients = [leaf.grad / scale for leaf in leaves]
        return Found(out, loss.detach(), gradients, masks[-1] if masks else Masks())

    def plain(self, found: Found, dtype: torch.dtype | None) -> Plain:
        """The same tokens by autograd, in another dtype or in the precision of the check."""
        model, options = self.model, self.options
        if dtype is not None:
            model = copy.deepcopy(model).to(dtype)
        steps = torch.arange(self.case.steps, device=self.device)
        live = steps[:, None] < found.out.lengths
        names = "ignore_index", "label_smoothing", "z_loss", "class_weight"
        criterion = {name: options[name] for name in names if name in options}
        if criterion.get("class_weight") is not None:
            criterion["class_weight"] = criterion["class_weight"].to(model.head.weight.dtype)
        if "k2" in options:
            criterion["windows"] = options.get("k1", options["k2"]), options["k2"]
        decoder = model.plain(found.masks)
        with contextlib.nullcontext() if dtype else autocast(self.precision, self.device):
            losses, divisor, logits = decode(
                decoder, self.targets, found.out.inputs, live, **criterion
            )
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        if options.get("reduction") == "none":
            loss = (losses * self.upstream.to(losses.dtype)).sum()
        else:
            loss = losses.sum() / divisor.to(losses.dtype)
        gradients = decoder.gradients(loss)
        # Rows that have ended predict nothing.
        tokens = found.out.tokens.where(live, logits.argmax(-1))
        return Plain(loss.detach(), gradients, logits, tokens)

    def check_tokens(self, out: accumext.DecodeOutput) -> None:
        """Check that tokens fed follow from those predicted, and that rows end where they
        should."""
        tokens, inputs, targets = out.tokens.cpu(), out.inputs.cpu(), self.targets.cpu()
        steps = torch.arange(self.case.steps)[:, None]
        lengths = self.options.get("lengths", torch.full((self.case.batch,), self.case.steps))
        expected = lengths.cpu().clone()
        if self.options.get("eos") is not None:
            ends = (tokens == self.options["eos"]) & (steps < expected)
            first = torch.where(ends, steps, self.case.steps).amin(0)
            expected = torch.minimum(expected, first + 1)
        assert torch.equal(out.lengths.cpu(), expected), f"lengths {out.lengths.tolist()}"
        live = (steps < expected)[1:]
        teacher = targets[:-1].where(targets[:-1] != self.options.get("ignore_index", IGNORED), 0)
        teacher = teacher.where((steps < lengths.cpu())[:-1], 0)
        fed, predicted, feedback = inputs[1:], tokens[:-1], self.options["feedback"]
        right = (fed == teacher) | (fed == predicted)  # scheduled
        if isinstance(feedback, Tensor):
            right = fed == teacher.where(feedback.cpu()[1:], predicted)
        elif feedback != "scheduled":
            right = fed == (teacher if feedback == "teacher" else predicted)
        assert right[live].all(), "an input is not what should be fed"
        assert not fed[~live].any(), "an input after the end of its row"
        assert not inputs[0].any(), "the first input"
        assert ((tokens >= 0) & (tokens < self.case.vocabulary)).all(), "a token of no word"


class Plain(NamedTuple):
    loss: Tensor
    gradients: list[Tensor]
    logits: Tensor  # [T, B, V]
    tokens: Tensor  # int64 [T, B]: those predicted by accumext


def autocast(precision: Precision, device: torch.device) -> Any:
    if precision.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, precision.autocast)


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Where torch sees the host wait for a GPU, an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def dropout_masks() -> Iterator[list[Masks]]:
    """The masks that calls draw: those of cuDNN, which modules draw, are others."""
    masks: list[Masks] = []
    buffers = _rnn_path.rnn_buffers

    def spy(*args: Any) -> Any:
        made = buffers(*args)
        steps = made.steps
        masks.append(Masks(steps.between.mask, steps.of_inputs.mask, steps.of_outputs.mask))
        return made

    _rnn_path.rnn_buffers = spy  # type: ignore[assignment]
    try:
        yield masks
    finally:
        _rnn_path.rnn_buffers = buffers


# --- a training step in a CUDA graph --------------------------------------------------------------

TRAINED = 3  # steps


def check_captured(case: Case, precision: Precision, device: torch.device) -> Facts:
    """Training steps replayed from a user's graph, against the same steps without it."""
    check = Check(case, precision, device)
    models = [copy.deepcopy(check.model) for _ in range(3)]
    generators = [torch.Generator(device) for _ in range(3)]
    scale = LOSS_SCALE if precision.autocast == torch.float16 else 1.0

    def trainer(model: Model, generator: torch.Generator) -> Callable[[], Tensor]:
        optimizer = torch.optim.SGD(model.leaves(), lr=0.1 / scale)
        options = check.options | {"generator": generator}

        def step() -> Tensor:
            optimizer.zero_grad()
            with autocast(precision, device):
                loss = model.ours(check.targets, options).loss
            (loss * scale).backward()
            optimizer.step()
            return loss.detach()

        return step

    steps = [trainer(*pair) for pair in zip(models, generators)]
    steps[1] = record(steps[1], generators[1], warm_up=steps[2], device=device)
    losses = []
    for step, generator in zip(steps[:2], generators):
        generator.manual_seed(SEED)
        losses.append([step().clone() for _ in range(TRAINED)])
    plain, replayed = ([*one, *model.leaves()] for one, model in zip(losses, models))
    off = relative_distance([t.detach() for t in replayed], [t.detach() for t in plain])
    if not off <= precision.last_places:
        raise AssertionError(f"off by {off:.2e} after {TRAINED} steps")
    return {"off by": off, "same bits": all(map(torch.equal, plain, replayed))}


def record(
    step: Callable[[], Tensor],
    generator: torch.Generator,
    warm_up: Callable[[], Tensor],
    device: torch.device,
) -> Callable[[], Tensor]:
    """Return a function that replays a step; on a CPU the step."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


# --- peak memory ----------------------------------------------------------------------------------


def check_memory(case: Case, precision: Precision, device: torch.device) -> Facts:
    """The peak of a call and its backward pass, against decode_memory."""
    check = Check(case, precision, device)
    model, targets = check.model, check.targets

    def run() -> None:
        model.zero_grad()
        with autocast(precision, device):
            loss = model.ours(targets, check.options).loss
        loss.backward()

    run()  # libraries take their workspaces at the first call
    model.zero_grad()
    parts = model.embedding, model.cell, model.head
    with autocast(precision, device):
        predicted = accumext.decode_memory(*parts, targets.shape, model.state(), **check.options)
    measured = peak_memory(run, device)
    if not abs(predicted / measured - 1) <= PREDICTION:
        raise AssertionError(f"{measured} bytes, where {predicted} were predicted")
    return {"bytes": measured, "over predicted": measured / predicted}


# --- the rows -------------------------------------------------------------------------------------


def compare(*args: Any) -> Facts:
    return Check(*args)()


def checks(device: torch.device, quick: bool) -> Checks:
    """Yield the checks; those that matter most come first. To be quick, each case takes one of its
    precisions in turn."""
    for prefix, check, named_cases, precisions in (
        ("", compare, large(quick), PRECISIONS),
        ("captured, ", check_captured, captured(), PRECISIONS),
        ("memory, ", check_memory, remembered(), PRECISIONS),
        ("", compare, modes(), PRECISIONS),
        ("", compare, others(quick), TWO_PRECISIONS),
    ):
        turns = itertools.cycle(precisions)
        for name, case in named_cases:
            for precision in (next(turns),) if quick else precisions:
                row = functools.partial(check, case, PRECISIONS[precision], device)
                yield f"{prefix}{name}: {precision}", row
