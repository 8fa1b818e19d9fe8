"""generate, rollout and decode_loss, teacher-forced or of functions, beside the loops that people
write.

    python bench/loops.py [--json FILE] [--device cpu|cuda] [--threads N] [--quick]
                          [generate|rollout|teacher|function|known|precision]...

In every repetition each way of a job runs twice, in rotated order (_timing.py), and its second run
is timed: a program repeats one way, and the first run after another pays for the memory that this
has left behind. Before that, all ways of a job are found to compute the same, save for samples.
Peak memory is what a call holds at its highest point over what there was before it, with the
gradients that it leaves.

- generate: V words, B rows, embedding and state of H. The loop calls nn.GRUCell, nn.Linear,
  log_softmax, and multinomial, topk, sort or gather.
- rollout: a GRU that is fed its own state, beside the loop. By default the graph is kept, as the
  loop keeps it; with a budget or in segments, steps run again.
- teacher: two layers of nn.LSTM and nn.GRU on known tokens, beside the module with nn.Linear and
  cross_entropy, and with F.linear_cross_entropy, which has no logits of all steps either.
- function: an nn.GRUCell in a function, alone or with dot-product attention over a memory, on its
  own argmax and on known tokens, beside the loop that calls it and the head step by step. The
  vocabularies are small: what a step costs beside its arithmetic shows.
- known: nn.LSTM with one layer and with two on known tokens at many sizes, under bfloat16 autocast
  as well where the device multiplies that faster; minutes on a CPU: only if it is asked for.
  Here and in "teacher", steps run by torch's function and by accumext's operators, both measured:
  "the other steps" are those that accumext does not choose.
- precision: accumext alone, a GRU in half precision and under autocast beside itself in float32, by
  the rows of a batch: only if it is asked for.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import _results
import _timing
import torch
import torch.nn.functional as F
from _facts import machine
from _report import contender_rows, figure_lines, memory_table
from _timing import UNKNOWN, Clock, Contender, Patience, Result, Shape, clock
from torch import Tensor, nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _call
from accumext.tensors.torch_private import cpu_multiplies_bfloat16

OURS = "accumext"
OTHER = f"{OURS}, the other steps"


class Job(NamedTuple):
    """One thing to be done; the first way is the usual one."""

    name: str
    ways: dict[str, Callable[[], Sequence[Tensor]]]  # each returns what it computed
    forget: Callable[[], None] = lambda: None  # before every run
    figures: Sequence[tuple[str, float]] = ()  # ours is so many times as fast as these, at least
    same: bool = True  # whether all compute the same
    repetitions: int = 11


def generate_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield jobs of tokens of a decoder that reads its own."""
    words, batch, size, steps = (997, 4, 32, 6) if quick else (50_000, 16, 512, 32)
    embedding, head = nn.Embedding(words, size).to(device), nn.Linear(size, words).to(device)
    cell = nn.GRUCell(size, size).to(device)
    state = torch.randn(batch, size, device=device)

    def ours(**options: Any) -> Sequence[Tensor]:
        out = accumext.generate(embedding, cell, head, state, max_length=steps, **options)
        return out.log_probs, out.scores

    def loop(choose: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        """Generate the tokens that `choose` takes of logits [B, V]."""
        h, tokens = state, torch.zeros(batch, dtype=torch.long, device=device)
        log_probs = []
        with torch.no_grad():
            for _ in range(steps):
                h = cell(embedding(tokens), h)
                logits = head(h)
                tokens = choose(logits)
                log_probs.append(logits.log_softmax(1).gather(1, tokens[:, None])[:, 0])
        return torch.stack(log_probs), torch.stack(log_probs).sum(0)

    def any_token(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.softmax(1), 1)[:, 0]

    def of_fifty(logits: Tensor) -> Tensor:
        best = logits.topk(50)
        return best.indices.gather(1, torch.multinomial(best.values.softmax(1), 1))[:, 0]

    def of_nine_tenths(logits: Tensor) -> Tensor:
        shares, order = logits.softmax(1).sort(1, descending=True)
        shares = shares.masked_fill(shares.cumsum(1) - shares >= 0.9, 0)
        return order.gather(1, torch.multinomial(shares, 1))[:, 0]

    def beams(count: int) -> Sequence[Tensor]:
        with torch.no_grad():
            h = state.repeat_interleave(count, 0)
            tokens = torch.zeros(batch * count, dtype=torch.long, device=device)
            scores = torch.full((batch, count), -torch.inf, device=device)
            scores[:, 0] = 0
            for _ in range(steps):
                h = cell(embedding(tokens), h)
                log_probs = head(h).log_softmax(1).view(batch, count, words)
                best = (scores[:, :, None] + log_probs).flatten(1).topk(count)
                scores, tokens = best.values, (best.indices % words).flatten()
                rows = torch.arange(batch, device=device)[:, None] * count
                h = h[(rows + best.indices // words).flatten()]
        return (scores,)

    def job(name: str, usual: Callable[[], Sequence[Tensor]], same: bool, **options: Any) -> Job:
        ways = {"the loop": usual, OURS: functools.partial(ours, **options)}
        return Job(f"generate, {name}", ways, figures=[("the loop", 3.0)], same=same)

    yield job("greedy", functools.partial(loop, lambda logits: logits.argmax(1)), True)
    yield job("samples", functools.partial(loop, any_token), False, search="sample")
    yield job("top_k=50", functools.partial(loop, of_fifty), False, search="sample", top_k=50)
    yield job(
        "top_p=0.9", functools.partial(loop, of_nine_tenths), False, search="sample", top_p=0.9
    )
    ways = {
        "the loop": functools.partial(beams, 4),
        OURS: lambda: ours(search="beam", beams=4)[1:],
    }
    yield Job("generate, 4 beams", ways, figures=[("the loop", 3.0)])


def rollout_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield the job of a model that is fed its own output."""
    size, batch, steps = (16, 4, 24) if quick else (256, 32, 256)
    cell = nn.GRUCell(size, size).to(device)
    hidden, first = torch.randn(2, batch, size, device=device)
    goal = torch.randn(steps, batch, size, device=device)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    def loop() -> Sequence[Tensor]:
        x, h, loss = first, hidden, torch.zeros((), device=device)
        for t in range(steps):
            x, h = step(x, h)
            loss = loss + F.mse_loss(x, goal[t])
        return _differentiated(loss / steps, cell)

    def ours(**options: Any) -> Sequence[Tensor]:
        out = accumext.rollout(
            step, hidden, steps, loss=lambda x, t: F.mse_loss(x, goal[t]), start=first, **options
        )
        return _differentiated(out.loss, cell)

    ways: dict[str, Callable[[], Sequence[Tensor]]] = {"the loop": loop, OURS: ours}
    for options in ({"checkpoint": 32}, {"checkpoint": 16}, {"memory_budget": 3 * 2**20}):
        ((name, value),) = options.items()
        ways[f"{OURS}, {name}={value}"] = functools.partial(ours, **options)
    yield Job("rollout", ways, lambda: cell.zero_grad(), [("the loop", 0.95)])


def teacher_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield jobs of known tokens and modules of torch."""
    words, batch, size, steps = (499, 4, 32, 8) if quick else (10_000, 20, 650, 35)
    embedding, head = nn.Embedding(words, size).to(device), nn.Linear(size, words).to(device)
    tokens = torch.randint(words, (steps + 1, batch), device=device)
    for kind in (nn.LSTM, nn.GRU):
        module = kind(size, size, 2).to(device)
        name = f"teacher, nn.{kind.__name__}"
        yield module_job(name, embedding, module, head, tokens)


def function_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield jobs of a cell that is a function, with or without attention."""
    for name, batch, size, words in (
        ("GRU", 8, 64, 64), ("GRU", 8, 64, 1000), ("attention", 16, 256, 1000)
    ):  # fmt: skip
        for feedback in ("greedy", "teacher"):
            shape = (4, 3, 16, 30) if quick else (20, batch, size, words)
            ways, modules = _ways_of_function(name == "attention", feedback, shape, device)
            text = f"function, {name}, {feedback}, V={shape[3]:,}"
            yield Job(text, ways, _forgetter(*modules), [("the loop", 1.0)])


def _ways_of_function(
    attends: bool, feedback: Any, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[dict[str, Callable[[], Sequence[Tensor]]], list[nn.Module]]:
    steps, batch, size, words = shape
    embedding, head = nn.Embedding(words, size).to(device), nn.Linear(size, words).to(device)
    gru = nn.GRUCell(2 * size if attends else size, size).to(device)
    targets = torch.randint(words, (steps, batch), device=device)
    zeros, start = torch.zeros(batch, size, device=device), torch.zeros_like(targets[0])
    context = (torch.randn(batch, 20, size, device=device),) if attends else ()

    def cell(x: Tensor, h: Tensor, *context: Tensor) -> tuple[Tensor, Tensor]:
        for memory in context:
            weights = torch.einsum("bsh,bh->bs", memory, h).softmax(1)
            x = torch.cat([x, torch.einsum("bs,bsh->bh", weights, memory)], 1)
        h = gru(x, h)
        return h, h

    def loop() -> Sequence[Tensor]:
        token, h, loss = start, zeros, torch.zeros((), device=device)
        for target in targets:
            output, h = cell(embedding(token), h, *context)
            logits = head(output)
            loss = loss + F.cross_entropy(logits, target)
            token = target if feedback == "teacher" else logits.detach().argmax(1)
        return _differentiated(loss / steps, *modules)

    def ours() -> Sequence[Tensor]:
        out = accumext.decode_loss(
            embedding, cell, head, targets, zeros, feedback=feedback, context=context
        )
        return _differentiated(out.loss, *modules)

    modules = [embedding, gru, head]
    return {"the loop": loop, OURS: ours}, modules


KNOWN = (  # steps, rows, embedding and state, vocabulary
    (20, 16, 64, 1_000),
    (50, 1, 512, 50_000),
    (64, 8, 256, 50_000),
    (50, 16, 512, 8_000),
    (50, 16, 512, 50_000),
    (32, 32, 512, 50_000),
    (50, 64, 512, 32_000),
    (200, 16, 256, 50_000),
)


def known_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield jobs of known tokens at many sizes."""
    bfloat16 = device.type == "cuda" or cpu_multiplies_bfloat16()
    for steps, batch, size, words in ((6, 3, 16, 97),) if quick else KNOWN:
        embedding, head = nn.Embedding(words, size).to(device), nn.Linear(size, words).to(device)
        tokens = torch.randint(words, (steps + 1, batch), device=device)
        for layers, autocast in itertools.product((1, 2), (False, True)[: 1 + bfloat16]):
            name = "known in bfloat16" if autocast else "known"
            name = f"{name}, {steps}, {batch}, {size}, {words}, {layers}"
            module = nn.LSTM(size, size, layers).to(device)
            job = module_job(name, embedding, module, head, tokens, autocast)
            logits = steps * batch * words  # seconds or milliseconds
            repetitions = 2 if logits > 1e8 else 3 if logits > 3e7 else 5 if logits > 1e6 else 101
            yield job._replace(repetitions=repetitions)


def precision_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield jobs of the same calls in every precision."""
    words, size, steps, rows = (997, 32, 4, (2, 8)) if quick else (8_000, 256, 20, PRECISION_ROWS)
    float32 = nn.Embedding(words, size), nn.GRU(size, size), nn.Linear(size, words)
    for batch in rows:
        targets = torch.randint(words, (steps, batch), device=device)
        for call in ("generate", "greedy", "teacher"):
            ways = {}
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for autocast in (False, True) if dtype != torch.float32 else (False,):
                    name = str(dtype).removeprefix("torch.") + (", autocast" if autocast else "")
                    parts = [copy.deepcopy(p).to(device) for p in float32]
                    parts = [p if autocast else p.to(dtype) for p in parts]
                    ways[name] = functools.partial(
                        _in_precision, call, parts, targets, dtype if autocast else None
                    )
            yield Job(f"precision, {call}, {batch}", ways, same=False, repetitions=15)


PRECISION_ROWS = (1, 2, 4, 6, 8, 16, 32, 64)


def _in_precision(
    call: str, modules: list[nn.Module], targets: Tensor, autocast: torch.dtype | None
) -> Sequence[Tensor]:
    """Run one call of accumext, with its backward pass if it has one."""
    (steps, batch), embedding = targets.shape, modules[0].weight
    state = embedding.new_zeros(1, batch, embedding.shape[1])
    _forgetter(*modules)()
    with torch.autocast(targets.device.type, autocast, enabled=autocast is not None):
        if call == "generate":
            return (accumext.generate(*modules, state, max_length=steps).scores,)
        out = accumext.decode_loss(*modules, targets, state, feedback=call)
    return _differentiated(out.loss, *modules)


def module_job(
    name: str, embedding: nn.Module, module: nn.Module, head: nn.Linear, tokens: Tensor,
    autocast: bool = False,
) -> Job:  # fmt: skip
    """Return the job of a recurrent module of torch on known tokens [T + 1, B]."""
    modules, inputs, targets = (embedding, module, head), tokens[:-1], tokens[1:]
    precision = functools.partial(torch.autocast, tokens.device.type, torch.bfloat16, autocast)

    def ours() -> Sequence[Tensor]:
        with precision():
            out = accumext.decode_loss(*modules, targets, start=inputs[0], feedback="teacher")
        return _differentiated(out.loss, *modules)

    def other() -> Sequence[Tensor]:
        chosen = _call.torch_is_faster
        _call.torch_is_faster = lambda *call: not chosen(*call)
        try:
            return ours()
        finally:
            _call.torch_is_faster = chosen

    def plain() -> Sequence[Tensor]:
        with precision():
            logits = head(module(embedding(inputs))[0])
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return _differentiated(loss, *modules)

    def fused() -> Sequence[Tensor]:
        with precision():
            hidden = module(embedding(inputs))[0].flatten(0, 1)
            loss = F.linear_cross_entropy(
                hidden, head.weight, targets.flatten(), linear_bias=head.bias
            )
        return _differentiated(loss, *modules)

    ways: dict[str, Callable[[], Sequence[Tensor]]] = {"the module": plain}
    if hasattr(F, "linear_cross_entropy"):
        ways["with F.linear_cross_entropy"] = fused
    figures = [(against, 1.0) for against in ways]
    ways |= {OURS: ours, OTHER: other}
    return Job(name, ways, _forgetter(*modules), figures, same=not autocast)


def _differentiated(loss: Tensor, *modules: nn.Module) -> Sequence[Tensor]:
    loss.backward()
    parameters = (parameter for module in modules for parameter in module.parameters())
    return [loss.detach(), *(p.grad for p in parameters if p.grad is not None)]


def _forgetter(*modules: nn.Module) -> Callable[[], None]:
    def forget() -> None:
        for module in modules:
            module.zero_grad()

    return forget


def measure(job: Job, device: torch.device, seconds_of: Clock, repetitions: int) -> Result:
    """Time all ways of a job, with the peaks of their memory."""

    def peak(way: Callable[[], Sequence[Tensor]]) -> int:
        job.forget()
        return peak_memory(way, device)

    contenders = {
        name: Contender(way, UNKNOWN, list if job.same else None, functools.partial(peak, way))
        for name, way in job.ways.items()
    }
    timed = _timing.Job(job.name, Shape(0, 0), contenders, job.forget, again=True)
    return _timing.measure(timed, seconds_of, Patience(0.0, repetitions, repetitions))


def figures_of(job: Job, result: Result) -> list[dict[str, Any]]:
    """Return figures as _report prints them."""
    rows = []
    for against, target in job.figures:
        q1, median, q3 = result.ratio(OURS, against)
        text = f"{job.name}: {OURS} over {against}"
        rows.append(
            {"figure": text, "target": round(target, 3), "measured": median, "quartiles": [q1, q3]}
        )
    return rows


def rows_of(result: Result) -> list[dict[str, Any]]:
    """Return a row for each way of a job."""
    quantities = ("job", "contender", "runs", "seconds", "times_faster", "time_over_first")
    return [
        {name: row[name] for name in quantities} | {"peak_bytes": result.memory[row["contender"]]}
        for row in contender_rows(result)
    ]


JOBS = {
    "generate": generate_jobs,
    "rollout": rollout_jobs,
    "teacher": teacher_jobs,
    "function": function_jobs,
    "known": known_jobs,
    "precision": precision_jobs,
}
ASKED_FOR = ("known", "precision")  # take minutes


def main() -> int:
    parser = _results.parser(__doc__, "job")
    parser.add_argument("jobs", nargs="*", choices=[[], *JOBS], help="which; else the shorter ones")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch; as many as it chooses")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    facts, seconds_of = machine(device), clock(device, ahead=False)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    for name in args.jobs or [name for name in JOBS if name not in ASKED_FOR]:
        for job in JOBS[name](device, args.quick):
            repetitions = 2 if args.quick else job.repetitions
            result = measure(job, device, seconds_of, repetitions)
            print(memory_table(result, "MiB", 2**20, over=False), flush=True)
            rows += rows_of(result)
            figures += figures_of(job, result)
            _results.write(args.json, {"machine": facts, "rows": rows, "figures": figures})
    print(figure_lines(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
