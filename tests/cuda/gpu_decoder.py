"""decode_loss beside plain autograd in float64 on the tokens that it fed: rows of gpu_checks.py.

Every case runs in two or five precisions, twice in each: the second time, any wait for the GPU is
an error. Errors are relative to float64 on the same rounded parameters, and at most ALLOWED times
those of plain autograd in the same precision. There are training steps in a user's CUDA graph, too,
the peak memory beside decode_memory, and other options, generate and rollout beside the CPU.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu_decoder_cases as cases
import torch
from gpu_decoder_cases import PRECISIONS, Case, Precision
from gpu_rows import Checks, Facts
from support.decode_oracle import Decoder, decode, relative_distance
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import accumext
from accumext._peak_memory import peak_memory

# Known inputs run by cuDNN, whose float32 would be TF32; plain autograd runs cells by cuBLAS.
torch.backends.cudnn.allow_tf32 = False

ALLOWED = 2.0
PREDICTION = 0.10  # of the measured peak: the small temporaries that the formula leaves out
SEED, LOSS_SCALE = 5, 2.0**10


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
            self.cell = stacked(size, size, case.layers, **options)
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

    def call_cell(self, x: Tensor, state: Any, context: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Advance as a user's function may, with extras."""
        state = self.cell(x + context, state)
        return (state[0] if isinstance(state, tuple) else state) * context, state, context.sum(1)

    def plain(self) -> Decoder:
        """With torch's functions for the steps of cells."""
        layers = range(self.case.layers)
        suffixes = [f"_l{layer}" for layer in layers] or [""]
        advance = KINDS[self.case.cell][2]

        def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
            parts = state if isinstance(state, tuple) else (state,)
            found = []
            for layer, suffix in enumerate(suffixes):
                here = tuple(part[layer] if self.case.layers else part for part in parts)
                weights = [getattr(self.cell, name + suffix) for name in WEIGHTS]
                new = advance(x, here if len(here) == 2 else here[0], *weights)
                found.append(new if isinstance(new, tuple) else (new,))
                x = found[-1][0]
            stacked = [torch.stack(p) if self.case.layers else p[0] for p in zip(*found)]
            return x, tuple(stacked) if len(stacked) == 2 else stacked[0]

        def called(*arguments: Any) -> tuple[Tensor, Any]:
            return self.call_cell(*arguments)[:2]

        step = called if self.case.called else step
        return Decoder(*self.parts, self.state(), step, self.given, self.leaves())

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The context of a cell that is called."""
        return (self.context,) if self.case.called else ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """Embedding, cell and head."""
        return self.embedding, self.call_cell if self.case.called else self.cell, self.head

    def ours(self, targets: Tensor | None, options: dict[str, Any]) -> accumext.DecodeOutput:
        model = *self.parts, targets, self.state()
        return accumext.decode_loss(*model, context=self.given, **options)


class Found(NamedTuple):
    out: accumext.DecodeOutput
    loss: Tensor  # 0-dim
    gradients: list[Tensor]


class Plain(NamedTuple):
    loss: Tensor
    gradients: list[Tensor]
    logits: Tensor  # [T, B, V]
    tokens: Tensor  # int64 [T, B]: those predicted by accumext


class Check:
    """One case in one precision."""

    def __init__(self, case: Case, precision: Precision, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.case, self.precision, self.device = case, precision, device
        self.model = Model(case).to(device, precision.parameters)
        shape, words = (case.steps, case.batch), case.vocabulary
        self.targets: Tensor | None = torch.randint(words, shape).to(device)
        self.targets[case.steps // 2, 0] = case.options.get("ignore_index", cases.IGNORED)
        self.upstream = torch.randn(shape).to(device)
        ended = torch.arange(case.batch) * case.steps // max(1, case.batch - 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape).to(precision.parameters)

        make: dict[Any, Callable[[], Any]] = {
            "mask": lambda: torch.rand(shape) < 0.5,
            "lengths": lambda: case.steps - ended,  # from all steps to none
            "class_weight": lambda: torch.linspace(0.2, 2.0, words),
            "token_weight": lambda: normal(*shape),
            "resets": lambda: torch.rand(shape) < 0.3,
            "words": lambda: (normal(*shape, 20).softmax(2), torch.randint(words, (*shape, 20))),
            "all words": lambda: (normal(*shape, words).softmax(2), None),
            "head": lambda: (normal(words, 24), normal(words), normal(*shape, 24)),
        }
        made = {
            name: make[value]() if isinstance(value, str) and value in make else value
            for name, value in case.options.items()
        }
        self.options = tree_map_only(Tensor, lambda leaf: leaf.to(device), made)
        if self.options.get("eos") == "seen":
            tokens = self.run(contextlib.nullcontext(), eos=None).out.tokens
            self.options["eos"] = int(tokens[case.steps // 2, case.batch // 2])

    def __call__(self) -> Facts:
        found = self.run(contextlib.nullcontext())
        again = self.run(no_waits(self.device))
        self.check_tokens(found.out)
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
        both = zip([found.loss, *found.gradients], [again.loss, *again.gradients], strict=True)
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
        with around:
            with autocast(self.precision, self.device):
                out = self.model.ours(self.targets, options)
            loss = out.loss
            if loss.dim():
                loss = (loss * self.upstream).sum()
            if out.outputs is not None:
                loss = loss + out.outputs.square().mean()
            backward(loss)
        if optimizer is not None:
            gradients = [optimizer.main_grad(leaf) for leaf in leaves]
        else:
            gradients = [leaf.grad / scale for leaf in leaves]
        return Found(out, loss.detach(), gradients)

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
        decoder = model.plain()
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
        teacher = targets[:-1].where(
            targets[:-1] != self.options.get("ignore_index", cases.IGNORED), 0
        )
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
    return {
        "off by": off,
        "same bits": all(torch.equal(*pair) for pair in zip(plain, replayed, strict=True)),
    }


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


# --- beside the CPU -------------------------------------------------------------------------------

# The CPU's results are held against plain loops by the tests of tests/decoder. Where tokens are
# chosen, those of the GPU are scored on the CPU: a near tie may fall either way.
OFF = {torch.float64: 1e-12, torch.float32: 1e-4}  # sums of hundreds of float32 in two orders


def here_and_there(case: Case, precision: Precision, device: torch.device) -> tuple[Check, Check]:
    """On the CPU in float64 and on the device, of the same parameters."""
    exact = Check(case, PRECISIONS["float64"], torch.device("cpu"))
    return exact, Check(case, precision, device)


def check_beside(case: Case, precision: Precision, device: torch.device) -> Facts:
    """The same call here and there."""
    results = []
    for check in here_and_there(case, precision, device):
        found = check.run(contextlib.nullcontext(), feedback="teacher")
        extras = [found.out.extras.detach()] if case.called else []
        results.append([found.loss, *found.gradients, *extras])
    return distance(*results, precision)


def check_own_tokens(case: Case, precision: Precision, device: torch.device) -> Facts:
    """To be fed one's own tokens is to be taught them."""
    here, there = here_and_there(case, precision, device)
    there.targets = None
    mine = there.run(contextlib.nullcontext(), steps=case.steps)
    here.targets = mine.out.tokens.cpu()
    taught = here.run(contextlib.nullcontext(), feedback="teacher")
    return distance([taught.loss, *taught.gradients], [mine.loss, *mine.gradients], precision)


def check_generate(case: Case, precision: Precision, device: torch.device) -> Facts:
    """The log-probabilities of the tokens, scored step by step on the CPU."""
    here, there = here_and_there(case, precision, device)
    if "lengths" in there.options:
        there.options["lengths"] = there.options["lengths"].clamp(min=1)
    model = there.model
    out = accumext.generate(
        *model.parts, model.state(), context=model.given, max_length=case.steps, **there.options
    )
    tokens, log_probs = (
        part.cpu().reshape(*part.shape[:2], -1) for part in (out.tokens, out.log_probs)
    )
    scored = []
    for beam, lengths in enumerate(out.lengths.cpu().reshape(case.batch, -1).unbind(1)):
        options = {"feedback": "teacher", "lengths": lengths, "reduction": "none"}
        scored.append(-here.model.ours(tokens[:, :, beam], options).loss.detach())
    return distance([torch.stack(scored, 2)], [log_probs], precision)


def check_rollout(options: dict[str, Any], precision: Precision, device: torch.device) -> Facts:
    """A cell that is fed its own state, which is to follow a goal."""

    def results(check: Check) -> list[Tensor]:
        torch.manual_seed(SEED)
        cell, state = check.model.cell, check.model.state()
        goal = torch.randn(cases.STEPS, *state.shape).to(state)
        out = accumext.rollout(
            lambda x, h: (cell(x, h),) * 2, state, len(goal), start=goal[0],
            loss=lambda x, t: nn.functional.mse_loss(x, goal[t]), **options,
        )  # fmt: skip
        return [out.loss, *torch.autograd.grad(out.loss, [*cell.parameters(), state])]

    return distance(*map(results, here_and_there(Case({}), precision, device)), precision)


def distance(expected: list[Tensor], mine: list[Tensor], precision: Precision) -> Facts:
    off = relative_distance([t.detach().cpu() for t in mine], [t.detach() for t in expected])
    if not off <= OFF[precision.parameters]:  # a NaN, too
        raise AssertionError(f"off by {off:.2e}, more than {OFF[precision.parameters]:.0e}")
    return {"off by": off}


def checks_beside(device: torch.device, quick: bool) -> Checks:
    weighted = {"token_weight": "token_weight"}
    own = {f"own tokens, {name}": cases.MODES[name] | weighted for name in ("greedy", "sample")}
    for check, rows in (
        (check_beside, cases.beside(cases.BESIDE)),
        (check_rollout, cases.ROLLOUTS.items()),
        (check_own_tokens, cases.beside(own)),
        (check_generate, cases.beside(cases.SEARCHES)),
    ):
        for name, case in rows:
            for precision in ("float32",) if quick else ("float32", "float64"):
                row = functools.partial(check, case, PRECISIONS[precision], device)
                yield f"{name}: {precision}", row


# --- the rows -------------------------------------------------------------------------------------


def compare(*args: Any) -> Facts:
    return Check(*args)()


def checks(device: torch.device, quick: bool) -> Checks:
    """Yield the checks; those that matter most come first. To be quick, each case takes one of its
    precisions in turn."""
    for prefix, check, named_cases, precisions in (
        ("", compare, cases.large(quick), PRECISIONS),
        ("captured, ", check_captured, cases.captured(), PRECISIONS),
        ("memory, ", check_memory, cases.remembered(), PRECISIONS),
        ("", compare, cases.modes(), PRECISIONS),
        ("", compare, cases.others(quick), cases.TWO_PRECISIONS),
    ):
        turns = itertools.cycle(precisions)
        for name, case in named_cases:
            for precision in (next(turns),) if quick else precisions:
                row = functools.partial(check, case, PRECISIONS[precision], device)
                yield f"{prefix}{name}: {precision}", row
