"""`generate`: tokens of a decoder, greedily, by sampling or by beam search."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accumext.decoder import Model, batch_size, model_from
from accumext.distributed import gathered_once
from accumext.generation._beam_search import beam_search
from accumext.generation._output_layer import output_layer_of
from accumext.generation._sampling import Draw, generate_tokens
from accumext.generation._stepper import OP, Stepper
from accumext.generation._token_filters import TokenFilter
from accumext.recurrence import (
    State,
    check_batch_dim,
    check_tokens,
    lengths_of,
    map_tensors,
    own_generator,
    start_of,
    tensors,
    with_shapes,
)
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import (
    SEARCHES,
    Search,
    bools,
    fail_type,
    fail_value,
    integer,
    number,
    one_of,
    positive_int,
    same_device,
    token_tensor,
    type_name,
    without_effect,
)

_DEVICE = "the head's device"


class GenerateOutput(NamedTuple):
    """The results of `generate`; [B, T] in place of [T, B] with `batch_first`.

    Attributes:
        tokens: int64 [T, B], or [T, B, K] from beam search, best first; padding after the end.
        log_probs: of the tokens, in their shape, 0 after the end; fp32, fp64 in double precision.
        lengths: int64 [B] or [B, K], tokens until each row ended, its `eos` included.
        state: of each row at its end; from beam search that of the best hypothesis.
        scores: [B] or [B, K], sums of `log_probs`, divided by `length ** length_penalty`.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    state: State
    scores: Tensor

    def __repr__(self) -> str:
        return with_shapes(self)


@explained
def generate(
    embedding: nn.Embedding | Tensor,
    cell: nn.Module | Callable[..., Any],
    head: nn.Linear | tuple[Tensor, Tensor | None],
    state: State = None,
    *,
    max_length: int,
    start: int | Tensor = 0,
    prompt: Tensor | None = None,  # int64 [P, B]
    eos: int | None = None,
    search: Search = "greedy",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 4,
    length_penalty: float = 0.0,
    generator: torch.Generator | None = None,
    context: tuple[Tensor, ...] = (),
    lengths: Tensor | list[int] | None = None,  # [B]
    batch_dim: int | None = None,
    batch_first: bool = False,
) -> GenerateOutput:
    """Generate tokens: greedily, by sampling, or by beam search.

    The steps are those of `decode_loss`, without a graph. At most 32 rows of logits exist at once
    (64 in a beam search on a GPU), and none are kept, so the memory does not grow with the length.
    Greedy tokens are those of `decode_loss(feedback="greedy")`. With the same generator and without
    `top_k` and `top_p`, samples are those of `decode_loss(feedback="sample")`. Stops when every row
    has ended.

    Args:
        embedding, cell, head, state, context, batch_dim: as in `decode_loss`, except that a
            callable may write into its state, such as a cache: it gets a copy of the given state.
            Modules in training mode apply their own dropout: call `eval()` before.
        max_length: T, the largest number of tokens of a row.
        start: the first input token, an int or int64 [B].
        prompt: int64 [P, B], fed first, in place of `start`; not part of the result.
        eos: a row that emits this token ends with it.
        search: "greedy", "sample" or "beam".
        temperature: only for "sample", like `top_k` and `top_p`: what logits are divided by.
        top_k: samples are drawn from the k likeliest tokens; ties go to the lowest index.
        top_p: samples are drawn from the fewest of these, likeliest first, whose probabilities add
            up to this share of the sum.
        beams: K, the number of hypotheses per row that are active at once in "beam", and of those
            returned. Those of a row's best K continuations that end are finished, and the best K
            that do not end stay active, until none of these could become better than the K best
            finished ones.
        length_penalty: hypotheses are compared by the sum of their log-probabilities divided by
            length ** length_penalty: values above 0 favour long ones.
        generator: of "sample"; by default one seeded from torch's global generator.
        lengths: ints [B], a tensor or a list: the largest number of tokens of each row. With
            `lengths`, `eos` or "beam" every tensor of a callable's state must have the batch in
            `batch_dim` (0-dim tensors belong to all rows). It may grow in one other dimension: a
            row that has ended gets zeros behind its own entries. If a callable's state is None,
            rows of length 0 take a step, too.
        batch_first: prompt and results are [B, T], or [B, T, K].

    Returns:
        A `GenerateOutput`, T being the length of the longest row. `log_probs` are those of the
        model, before temperature, top_k and top_p. If a row has fewer than K hypotheses, the others
        have length 0 and score -inf. A row whose largest logit is infinite or NaN has no
        distribution: its token is that of `torch.argmax`, also in "sample", and its score is NaN.

    Raises:
        ValueError: a value or shape is wrong; on a GPU, token values are device asserts instead.
        TypeError: a type is wrong.

    Example:
        >>> embedding, cell, head = nn.Embedding(100, 8), nn.GRUCell(8, 16), nn.Linear(16, 100)
        >>> out = accumext.generate(embedding, cell, head, max_length=20, eos=1, search="beam")
        >>> out.tokens[:, 0, 0]  # the best hypothesis of row 0

    Sources: Holtzman et al. 2020 (top_p); Fan et al. 2018 (top_k); Wu et al. 2016 (length penalty).
    """
    bools(OP, batch_first=batch_first)
    with gathered_once(OP, cell, read=(embedding, cell, head)):
        model = model_from(OP, {
            "embedding": embedding, "cell": cell, "head": head, "context": context,
            "batch_dim": batch_dim, "embedding_dropout": 0, "output_dropout": 0,
            "feedback": "greedy",
        })  # fmt: skip
        if prompt is not None:
            prompt = _prompt(model, prompt, batch_first)
            batch = prompt.shape[1]
        else:
            batch = batch_size(model.cell, state, start, lengths, model.context)
        steps = integer(OP, "max_length", max_length, 0) if batch else 0
        stepper = _stepper(model, eos, lengths, batch, steps)
        rows, device = len(model.table.weight), model.device
        first = start_of(OP, start, batch, rows, device, _DEVICE) if prompt is None else prompt[-1]
        by_rows = stepper.ends or search == "beam"
        state = _state(model, state, batch, batch_dim, by_rows)
        one_of(OP, "search", search, SEARCHES)
        if math.isinf(number(OP, "length_penalty", length_penalty)):
            fail_value(OP, "length_penalty", "be finite", length_penalty)
        if abs(length_penalty) * math.log(steps + 1) > 700.0:  # float64 ends at exp(709)
            contract = f"have {steps + 1} ** length_penalty in the range of float64"
            fail_value(OP, "length_penalty", contract, length_penalty)
        token_filter = _filter(search, temperature, top_k, top_p, beams)
        beams = positive_int(OP, "beams", beams)
        dtypes = [part.dtype for part in tensors(state)]
        draw = _draw(search, generator, steps, batch, model.device)
        with torch.no_grad():
            if batch and prompt is not None and len(prompt) > 1:
                state = stepper.prefill(state, prompt[:-1])
            if search == "beam":
                generated, scores = beam_search(
                    stepper, state, first, steps, beams, float(length_penalty)
                )
            else:
                generated = generate_tokens(stepper, state, first, steps, draw, token_filter)
                longest = int(generated.lengths.max()) if stepper.ends and batch else steps
                generated = generated._replace(
                    tokens=generated.tokens[:longest], log_probs=generated.log_probs[:longest]
                )
                counts = generated.lengths.clamp(min=1).to(generated.log_probs.dtype)
                scores = generated.log_probs.sum(0) / counts**length_penalty
    last = generated.state
    if stepper.rnn is not None:  # operators have the state in the dtype of sums
        parts = iter(dtypes)
        last = map_tensors(lambda leaf: leaf.to(next(parts)), last)
    tokens, log_probs = generated.tokens, generated.log_probs
    if batch_first:
        tokens, log_probs = tokens.transpose(0, 1), log_probs.transpose(0, 1)
    return GenerateOutput(tokens, log_probs, generated.lengths, last, scores)


def _stepper(model: Model, eos: Any, lengths: Any, batch: int, steps: int) -> Stepper:
    """Check `eos` and `lengths`, and return the decoder with them, to be run step by step."""
    device, words = model.device, len(model.head_weight)
    if lengths is None:
        limits = torch.full((batch,), steps, device=device)
    else:
        limits = lengths_of(OP, lengths, (steps, batch), device, _DEVICE)
    if eos is not None and not 0 <= (eos := integer(OP, "eos", eos)) < words:
        fail_value(OP, "eos", f"be in [0, {words})", eos)
    rnn = model.rnn
    if rnn is not None and rnn.dropout > 0 and rnn.layers > 1:
        rnn = None  # in training mode, the module is called for its dropout between layers
    ends = lengths is not None or eos is not None
    layer = output_layer_of(model)
    return Stepper(model, layer, rnn, eos, limits, ends)


def _prompt(model: Model, value: Any, batch_first: bool) -> Tensor:
    """Check the prompt, and return it as int64 [P, B] with P >= 1."""
    prompt = token_tensor(OP, "prompt", value, "be an integer tensor [P, B]")
    if prompt.dim() != 2:
        fail_value(OP, "prompt", "have shape [P, B]", list(prompt.shape))
    prompt = prompt.t() if batch_first else prompt
    if len(prompt) == 0:
        fail_value(OP, "prompt", "have at least one token", list(prompt.shape))
    check_tokens(OP, "prompt", prompt, len(model.table.weight), model.device, _DEVICE)
    return prompt


def _state(model: Model, state: State, batch: int, batch_dim: Any, by_rows: bool) -> State:
    if state is None:
        return model.cell.initial_state(batch, model.table.weight)
    state = map_tensors(lambda leaf: leaf.detach().clone(), state)  # a cell may write into it
    model.cell.check_state(OP, state, batch)
    same_device(OP, "state", tensors(state), model.device)
    if model.cell.state_shapes is None and by_rows:
        check_batch_dim(OP, state, batch, batch_dim)
    return state


# A search, an option of it, and the values that other searches accept. (Greedy search is one beam.)
_OF_ONE_SEARCH = (
    ("sample", "temperature", 1.0),
    ("sample", "top_k", None),
    ("sample", "top_p", None),
    ("beam", "beams", 4, 1),
)


def _filter(search: str, temperature: Any, top_k: Any, top_p: Any, beams: Any) -> TokenFilter:
    """Check the options of searches, and return the filter of sampled tokens."""
    if not 0 < number(OP, "temperature", temperature) < math.inf:
        advice = 'search="greedy" is the limit of 0' if temperature == 0 else None
        fail_value(OP, "temperature", "be greater than 0 and finite", temperature, advice)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "beams": beams}
    for word, name, *neutral in _OF_ONE_SEARCH:
        if search != word:
            without_effect(OP, name, given[name], tuple(neutral), f"search is {word!r}")
    top_k = None if top_k is None else positive_int(OP, "top_k", top_k)
    if top_p is not None and not 0 < (share := number(OP, "top_p", top_p)) <= 1:
        fail_value(OP, "top_p", "be in (0, 1]", top_p)
    return TokenFilter(float(temperature), top_k, None if top_p is None else share)


def _draw(search: str, generator: Any, steps: int, batch: int, device: torch.device) -> Draw | None:
    """Return a function that draws uniform numbers [n, B] for n more steps. The numbers are the
    same as if those of all steps were drawn at once."""
    if generator is not None and not isinstance(generator, torch.Generator):
        fail_type(OP, "generator", "be a torch.Generator or None", type_name(generator))
    if search != "sample":
        return None
    own = own_generator(generator, device)

    def drawn(count: int) -> Tensor:
        return torch.rand(count, batch, dtype=torch.float64, device=device, generator=own)

    if device.type == "cpu":
        return drawn
    numbers, begin = drawn(steps), 0  # a GPU would draw other numbers in several smaller draws

    def next_numbers(count: int) -> Tensor:
        nonlocal begin
        begin += count
        return numbers[begin - count : begin]

    return next_numbers
