"""`decode_loss`: an autoregressive decoder's loss and exact gradients in flat memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accumext.decoder._call import call_from, steps_first
from accumext.decoder._callable import decode_with_callable
from accumext.decoder._known_inputs import decode_at_once
from accumext.decoder._model import OP
from accumext.decoder._observations import rows_of
from accumext.decoder._rnn_backward import decode_with_rnn
from accumext.decoder._transcript import Decoded, Transcript
from accumext.distributed import gathered_once
from accumext.recurrence import (
    ALL_TARGETS,
    State,
    map_leaves,
    observing,
    tensors,
    with_shapes,
    zero_dependency,
)
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import DrawWord, FeedbackWord, TokenReduction, TruncationWord, bools


class DecodeOutput(NamedTuple):
    """The results of `decode_loss`; [B, T] in place of [T, B] with `batch_first`.

    Attributes:
        loss: 0-dim, or [T, B] with `reduction="none"`; fp32, fp64 in double precision. Its backward
            pass gives parameters, state and context their gradients.
        tokens: int64 [T, B], predicted at each step, also if the target was fed.
        inputs: int64 [T, B], the tokens that were fed: passed as `inputs` with
            `feedback="teacher"`, they repeat the run. Observations are returned as they were given.
        token_losses: [T, B], detached, 0 for ignored tokens; fp32, fp64 in double precision.
        state: after the last step; detached if k2 cuts gradients.
        lengths: int64 [B], steps until each row ended: they repeat a run that `eos` stopped.
        outputs: [T, B, H] of the cell, with a graph, 0 past a row's end; None unless
            `return_outputs` asks for it.
        extras: what a callable cell returned as third value, stacked over T; else None.
        entropies: [T, B] of each counted token's distribution, detached, 0 for other tokens; None
            unless `entropy_weight` asks for it.
    """

    loss: Tensor
    tokens: Tensor
    inputs: Tensor
    token_losses: Tensor
    state: State
    lengths: Tensor
    outputs: Tensor | None = None
    extras: State = None
    entropies: Tensor | None = None

    def __repr__(self) -> str:
        return with_shapes(self)


_PER_TOKEN = ("loss", "tokens", "inputs", "token_losses", "outputs", "entropies")


@explained
def decode_loss(
    embedding: nn.Embedding | Tensor | None,
    cell: nn.Module | Callable[..., Any],
    head: nn.Linear | tuple[Tensor, Tensor | None],
    targets: Tensor | None,  # [T, B]
    state: State = None,
    *,
    feedback: FeedbackWord | Tensor,
    start: int | Tensor = 0,
    inputs: Tensor | None = None,  # [T, B], or floating-point [T, B, E]
    teacher_forcing: float = ALL_TARGETS,
    k1: int | None = None,
    k2: int | None = None,
    truncation: TruncationWord = "fixed",
    state_grad_clip: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,  # [B]
    eos: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | Sequence[float] | None = None,  # [V]
    reduction: TokenReduction = "mean",
    num_items: int | Tensor | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    context: tuple[Tensor, ...] = (),
    memory_budget: int | None = None,
    batch_first: bool = False,
    steps: int | None = None,
    token_weight: Tensor | None = None,  # [T, B]
    draw: DrawWord = "argmax",
    embedding_dropout: float = 0.0,
    output_dropout: float = 0.0,
    resets: Tensor | None = None,  # bool [T, B]
    batch_dim: int | None = None,
    return_outputs: bool = False,
    soft_targets: tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor] | None = None,
    soft_weight: float = 1.0,
    soft_temperature: float = 1.0,
    entropy_weight: float = 0.0,
) -> DecodeOutput:
    """Run a decoder on its own predictions, or the targets, for a loss with exact gradients.

    At step t the cell maps the embedded input and the state to an output [B, H], the head maps that
    to V logits, the loss is that of `F.cross_entropy` against `targets[t]`, plus `z_loss *
    logsumexp**2` per counted token, and the next input is the target or the prediction. The logits
    of a few steps at a time are turned into gradients and overwritten. Only the cell's states and
    outputs, T x B x H each, and the tokens grow with T. (Without a `memory_budget`, the cell's
    intermediate results are kept as well, up to the size of the workspace or 16 MiB; all of them if
    cuDNN runs steps whose inputs are known.)
    `out.loss.backward()` gives every parameter, the state and the context the gradient that plain
    autograd would give on the same tokens.

    Args:
        embedding: `nn.Embedding`, or a [V, E] tensor; None if `inputs` are observations. Embedding
            and head are computed from their weights; one whose call does more (hooks, an adapter,
            quantised weights) is called.
        cell: `nn.GRUCell`, `LSTMCell` or `RNNCell`; `nn.GRU`, `LSTM` or `RNN` with one direction,
            any layers, dropout; or any callable `(x [B, E], state, *context) -> (output [B, H],
            state)`. It is called again in the backward pass, and must write neither into its state
            nor into its context. It may return a third value, any nesting of tensors such as
            attention weights, which `out.extras` holds for every step.
        head: `nn.Linear(H, V)`, or `(weight [V, H], bias [V] or None)`; may share the embedding's
            weight.
        targets: ints [T, B]; every integer dtype is taken, here and below. None: the tokens that
            the decoder itself emits in `steps` steps, for policy gradients and minimum risk
            training.
        state: initial state, a tensor or any nesting of tuples, lists, dicts and dataclasses; None
            starts torch's cells at zero, and a callable gets it as None. Gradients reach the state.
        feedback: "teacher" feeds the target, "greedy" the argmax, "sample" a sample, "scheduled"
            the target with probability `teacher_forcing`, drawn per token, and the prediction
            otherwise; a bool mask [T, B] feeds the target where it is True. Without targets it is
            "sample" or "greedy".
        start: the first input token, an int or ints [B].
        inputs: ints [T, B], the tokens fed in place of targets; by default `start` followed by
            `targets[:-1]`, with `embedding.padding_idx` (or 0) for ignored targets. Or
            observations, floating-point [T, B, E]: what the cell reads, with `embedding=None` and
            `feedback="teacher"`. Gradients reach them, and those past a row's end are not read. One
            of torch's cells must have their dtype, or be called under autocast.
        teacher_forcing: only for "scheduled": the probability of feeding the target.
        k1: steps between the ends of two windows of truncated BPTT; by default k2. If k2 is None,
            it has no effect, and there is a warning.
        k2: steps a gradient flows back from the end of a window, at least k1 (Williams & Peng 1990;
            docs/decoder.md, "k1 and k2"). With k1 = k2 the state is simply detached every k1 steps.
            None: all the way, exact BPTT.
        truncation: "fixed" by k1 and k2; "random" cuts each row's gradient between any two steps
            with probability 1 / k2 and otherwise weights it by 1 / (1 - 1 / k2), so that its
            expectation is the exact gradient (ARTBP).
        state_grad_clip: bound on each element of the gradient that a state passes on to the step
            before. It is a bound on gradients of `out.loss`: a loss scale, or another upstream
            factor, multiplies the bound, too (not for `reduction="none"`).
        lengths: ints [B], a tensor or a list. A row past its length keeps its state, adds nothing
            to the loss, and reads the padding token. With `lengths`, `eos` or `resets` a callable's
            state must be given, not None, and every tensor of it must have the batch in `batch_dim`
            (0-dim tensors belong to all rows). A tensor may grow in one other dimension, such as a
            cache of keys [B, n, E]: a row that has ended gets zeros behind its own entries.
        eos: a row that predicted this token stops after that step, as if its length ended there.
        ignore_index, label_smoothing, class_weight, reduction: as in `F.cross_entropy`. Class
            weights are floats [V], a tensor or a list; the reduction is "mean", "sum" or "none".
        z_loss: coefficient of `logsumexp**2` per counted token, under the same divisor.
        num_items: divisor of "mean" instead of this call's token count (or sum of class weights),
            for windows of several calls.
        temperature: only for samples: what their logits are divided by.
        generator: source of random numbers for samples, "scheduled" and random truncation, and for
            nothing else; by default one seeded from torch's global generator.
        context: tensors handed to the cell at every step, such as attention memory. Gradients reach
            them.
        memory_budget: bytes of the workspace, at least those of one row of logits; None chooses.
        batch_first: targets, inputs, a feedback mask, `token_weight`, `resets` and the results are
            [B, T]. The state keeps the layout of the cell, whose own `batch_first` has no effect.
        steps: T if `targets` is None.
        token_weight: float [T, B], such as an advantage: multiplies the loss of each token before
            the reduction, and gets no gradient. "mean" still divides by the number of tokens. This
            is cheaper than multiplying losses of `reduction="none"`, for which logits are computed
            twice.
        draw: what "scheduled" and a mask feed instead of the target: "argmax" or "sample".
        embedding_dropout: probability with which an element of the cell's input is zeroed; the
            others are scaled, as by `nn.Dropout`. Off if the cell is a module in eval mode.
        output_dropout: the same for the input of the head.
        resets: bool [T, B], best on the CPU: the rows whose state is set back to their initial
            state before step t. Gradients of the initial state come from there, too. The inputs of
            these rows are not changed, and no tensor of the state may grow.
        batch_dim: dimension of the batch in the tensors of a callable's state. None: dimension 0,
            or an error if another but the last may be meant, as in [layers, B, H] with B layers.
        return_outputs: whether to return the outputs of the cell, before any dropout, in
            `out.outputs`. `out.extras` then has a graph, too.
        soft_targets: the distributions of a teacher, for distillation: a pair of probabilities
            [T, B, K] and the tokens that have them, ints [T, B, K] or None for all words; or a
            frozen head (weight [V, H'], bias [V] or None, hidden [T, B, H']), whose logits are
            formed a few rows at a time. Probabilities are those at `soft_temperature`, and need not
            add up to 1.
        soft_weight: the loss of a counted token is (1 - soft_weight) times its cross-entropy plus
            soft_weight times `soft_temperature**2 * KL(teacher || model)`, both distributions at
            that temperature.
        soft_temperature: what logits are divided by for the KL divergence (Hinton et al. 2015).
        entropy_weight: minus this times the entropy of each counted token's distribution is added
            to its loss; `out.entropies` has the entropies.

    Returns:
        A `DecodeOutput`. A call in which no token counts has loss 0 and zero gradients. Ties of the
        argmax go to the lowest index. A row whose largest logit is infinite or NaN predicts the
        token that `torch.argmax` finds, also if tokens are sampled. There are no second
        derivatives.

    Raises:
        ValueError: a value or shape is wrong; on a GPU, token values are device asserts instead.
        TypeError: a type is wrong.
        RuntimeError: a callable writes into its state, its context or an earlier result of its own;
            in the backward pass, if a parameter has changed since the call, or with
            `create_graph=True`.

    Example:
        >>> embedding, cell, head = nn.Embedding(100, 8), nn.GRUCell(8, 16), nn.Linear(16, 100)
        >>> targets = torch.randint(100, (5, 3))
        >>> out = accumext.decode_loss(embedding, cell, head, targets, feedback="greedy")
        >>> out.loss.backward()

    Sources: Williams & Peng 1990 (k1, k2); Tallec & Ollivier 2017 (ARTBP); Bengio et al. 2015
    (scheduled sampling); Rennie et al. 2017 (self-critical training); Hinton et al. 2015 (soft
    targets); the derivation is in docs/decoder_inside.md.
    """
    args = dict(locals())
    if observing.observers:
        observing.tell(decode_loss, args)
    if batch_first.__class__ is not bool or return_outputs.__class__ is not bool:
        bools(OP, batch_first=batch_first, return_outputs=return_outputs)
    if batch_first:
        args = steps_first(args)
    observed = args["inputs"] if embedding is None else None
    if embedding is None:
        args["embedding"], args["inputs"] = rows_of(args)
    with gathered_once(OP, cell, read=(embedding, cell, head)) as gathered:
        call = call_from(args)
        model, tokens = call.model, call.tokens
        # Random numbers are drawn only after all checks: a call that fails one draws none.
        transcript = Transcript(call)
        if tokens.feedback.word == "teacher":  # before the head reads a shared weight
            model.table.renormalise(transcript.padded(slice(None), tokens.feedback.teacher))
        if transcript.losses.numel() == 0:
            decoded = _decode_nothing(transcript, return_outputs)
        elif model.rnn is not None and call.at_once:
            decoded = decode_at_once(transcript, model.rnn, return_outputs)
        elif model.rnn is not None:
            decoded = decode_with_rnn(transcript, model.rnn, return_outputs)
        else:
            decoded = decode_with_callable(transcript, return_outputs)
        outputs = decoded.outputs
        if outputs is not None and transcript.active is not None:
            outputs = torch.where(transcript.active[:, :, None], outputs, 0)
        if gathered is not None:
            others = tensors((decoded.state, outputs, decoded.extras))
            decoded = decoded._replace(loss=gathered.finish(decoded.loss, others))
    # The backward pass reads the inputs again. The caller may write into the result: it is a copy.
    fed = transcript.inputs.clone() if observed is None else observed.detach()
    out = DecodeOutput(
        decoded.loss, transcript.predicted, fed, transcript.losses, decoded.state,
        decoded.lengths, outputs, decoded.extras, transcript.entropies,
    )  # fmt: skip
    return _with_batch_first(out) if batch_first else out


def _with_batch_first(out: DecodeOutput) -> DecodeOutput:
    """Return the same results, with those of shape [T, B, ...] as [B, T, ...]."""
    shape = out.tokens.shape

    def turned(result: Any) -> Any:
        per_token = isinstance(result, Tensor) and result.shape[:2] == shape
        return result.transpose(0, 1) if per_token else result

    per_token = {name: turned(getattr(out, name)) for name in _PER_TOKEN}
    return out._replace(**per_token, extras=map_leaves(turned, out.extras))


def _decode_nothing(transcript: Transcript, return_outputs: bool) -> Decoded:
    """Return the results of a call in which T or B is 0: loss 0, and gradients of zeros."""
    model, losses, state = transcript.model, transcript.losses, transcript.tokens.state
    loss = losses if transcript.objective.reduction == "none" else losses.sum()
    reached = [*model.parameters(), *tensors(state), *model.context]
    dependency = zero_dependency(reached) if torch.is_grad_enabled() else None
    if dependency is not None:
        loss = loss + dependency.to(loss.dtype)
    lengths, outputs = transcript.finish().lengths, None
    if return_outputs:
        outputs = model.head_weight.new_zeros(*losses.shape, model.head_weight.shape[1])
    return Decoded(loss, state, lengths, outputs)
