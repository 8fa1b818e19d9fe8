"""The decoder's operators. Each has a reference kernel in plain PyTorch, which defines its results
and is the fallback of compiled kernels, and behind it a schema.

They change their arguments in place. Callers have checked the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from accumext.decoder._rnn_weights import GRU, LSTM, RNN_TANH
from accumext.recurrence import sample
from accumext.tensors.torch_private import has_kernel

# Rows of a half-precision operand that are converted at once: enough for full speed, and few
# compared with a vocabulary. On a GPU, rows of float32 sums of float16 operands: more, since each
# slice takes three launches.
SLICE = 1024
CUDA_SLICE = 8192


def define_operator(reference: Callable[..., Any], schema: str) -> Any:
    """Define the operator whose default kernel is `<its name>_reference`, and return it.

    These operators write all results into arguments, so the fake kernel does nothing.
    """
    name = reference.__name__.removesuffix("_reference")
    torch.library.define(f"accumext::{name}", schema)
    torch.library.impl(f"accumext::{name}", "default", reference)
    result = 0 if schema.endswith("-> int") else None
    torch.library.register_fake(f"accumext::{name}", lambda *_: result)
    return getattr(torch.ops.accumext, name).default


def define_cuda_operator(reference: Callable[..., Any], schema: str) -> Callable[..., Any]:
    """Define an operator that has no kernel for a CPU. The function that is returned calls its
    reference there: torch's dispatcher would take 10 to 25 us longer to do so."""
    operator = define_operator(reference, schema)

    @functools.cache
    def has_cpu_kernel() -> bool:  # the CUDA kernel, where a test runs it on the host
        return has_kernel(operator.name(), "CPU")

    def call(first: Tensor, *others: Any) -> Any:
        directly = first.device.type == "cpu" and not has_cpu_kernel()
        return (reference if directly else operator)(first, *others)

    return call


def head_forward_reference(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor | None,
    uniforms: Tensor | None, temperature: float, exps: Tensor | None, logit_rows: int,
    tokens: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    for begin in range(0, len(hidden), logit_rows):
        piece = slice(begin, begin + logit_rows)
        softmax_stats(
            logits_of(hidden[piece], weight, bias), None if targets is None else targets[piece],
            None if uniforms is None else uniforms[piece], temperature,
            None if exps is None else exps[piece], tokens[piece], stats[:, piece],
        )  # fmt: skip


# Rows of the output layer: logits and their statistics in the accumulation dtype, the token that
# they predict (the argmax, or with `uniforms` a sample by inversion), and exp(z - peak), 0 at the
# target, for the deferred products. At most `logit_rows` rows of logits exist at once.
head_forward = define_operator(
    head_forward_reference,
    "(Tensor hidden, "  # [M, H]
    "Tensor weight, "  # [V, H]; hidden is rounded to its dtype
    "Tensor? bias, "  # [V]
    "Tensor? targets, "  # int64 [M], in [0, V); None: the tokens
    "Tensor? uniforms, float temperature, "  # fp64 [M], in [0, 1)
    "Tensor(a!)? exps, "  # [M, V], rows next to each other in memory
    "int logit_rows, Tensor(b!) tokens, "  # int64 [M]
    "Tensor(c!) stats"  # [3, M]: peak, sum of exp(z - peak), target's logit
    ") -> ()",
)


def logits_of(hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return logits [m, V]: operands are rounded to the weight's dtype, sums are in the dtype of
    `hidden`. Without a weight, `hidden` has the logits of a head that was called: copy them."""
    if weight is None:
        return hidden.clone()
    h = hidden.t()
    if weight.dtype == hidden.dtype:
        z = torch.mm(weight, h) if bias is None else torch.addmm(bias[:, None], weight, h)
        return z.t()
    h = h.to(weight.dtype).to(hidden.dtype)
    z = hidden.new_empty(weight.shape[0], len(hidden))
    for rows in slices(len(weight)):
        torch.mm(weight[rows].to(hidden.dtype), h, out=z[rows])
    return z.t() if bias is None else z.add_(bias[:, None]).t()


def softmax_stats(
    logits: Tensor, targets: Tensor | None, uniforms: Tensor | None, temperature: float,
    exps: Tensor | None, tokens: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    """Write the results of head_forward for logits [M, V], and overwrite the logits."""
    peak, argmax = logits.max(1)
    tokens.copy_(argmax if uniforms is None else sample(logits, uniforms, temperature))
    targets = tokens if targets is None else targets
    stats[0], stats[2] = peak, logits.gather(1, targets[:, None])[:, 0]
    logits.sub_(peak[:, None]).exp_()
    stats[1] = logits.sum(1)
    if exps is not None:
        exps.copy_(logits).scatter_(1, targets[:, None], 0.0)


def head_objective_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, share: Tensor,
    z_loss: float, entropy_weight: float, soft_scale: float, temperature: float,
    probabilities: Tensor | None, indices: Tensor | None, teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None, teacher_bias: Tensor | None, gradients: Tensor | None,
    logit_rows: int, tokens: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    for begin in range(0, len(hidden), logit_rows):
        piece = slice(begin, begin + logit_rows)
        z = logits_of(hidden[piece], weight, bias)
        tokens[piece] = z.max(1).indices
        lse, log_p = z.logsumexp(1), z.log_softmax(1)
        p = log_p.exp()
        entropy = -_weighted(p, log_p).sum(1)
        d_z = p * (share[piece] + 2 * z_loss * lse)[:, None]
        if entropy_weight != 0:
            d_z += entropy_weight * _weighted(p, log_p + entropy[:, None])
        divergence, log_p = torch.zeros_like(lse), (z / temperature).log_softmax(1)
        if teacher_hidden is not None and teacher_weight is not None:
            u = logits_of(teacher_hidden[piece], teacher_weight, teacher_bias)
            log_q = (u / temperature).log_softmax(1)
            q = log_q.exp()
            divergence += _weighted(q, log_q - log_p).sum(1)
            d_z += soft_scale * (log_p.exp() - q)
        if probabilities is not None and indices is not None:
            q, at = probabilities[piece], indices[piece]
            divergence += _weighted(q, q.log() - log_p.gather(1, at)).sum(1)
            d_z += soft_scale * q.sum(1, keepdim=True) * log_p.exp()
            d_z.scatter_add_(1, at, -soft_scale * q)
        target = targets[piece, None]
        rows = (lse, z.gather(1, target)[:, 0], entropy, divergence, d_z.gather(1, target)[:, 0])
        stats[:, piece] = torch.stack(rows)
        if gradients is not None:
            gradients[piece] = d_z.scatter_(1, target, 0.0)


# A loss of whole distributions: the logsumexp, entropy and KL divergence from a teacher of each
# row, and the gradient with respect to the logits of
#
#     share * logsumexp + z_loss * logsumexp^2 - entropy_weight * entropy
#     + soft_scale * temperature * KL(teacher || model), both at the temperature.
#
# The teacher is given by the probabilities of some tokens, or by a head of its own. At most
# `logit_rows` rows of its logits exist at once, too.
head_objective = define_operator(
    head_objective_reference,
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, "  # as in head_forward
    "Tensor share, float z_loss, float entropy_weight, "  # [M]
    "float soft_scale, float temperature, "
    "Tensor? probabilities, Tensor? indices, "  # [M, K], int64 [M, K] in [0, V)
    "Tensor? teacher_hidden, Tensor? teacher_weight, Tensor? teacher_bias, "  # [M, H'], [V, H']
    "Tensor(a!)? gradients, "  # [M, V], rows next to each other in memory: 0 at the target
    "int logit_rows, Tensor(b!) tokens, "  # int64 [M]: the argmax
    # [5, M]: logsumexp, target's logit, entropy, KL, and, with gradients, the one at the target
    "Tensor(c!) stats"
    ") -> ()",
)


def _weighted(weight: Tensor, x: Tensor) -> Tensor:
    """Return weight * x, and 0 where the weight is 0: x may be infinite there."""
    return torch.where(weight == 0, 0, weight * x)


def add_matmul_reference(sums: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    if left.dtype == right.dtype == sums.dtype:
        torch.addmm(sums, left, right, beta=0 if overwrite else 1, out=sums)
        return
    if sums.is_cuda and left.dtype != sums.dtype:
        _add_half_matmul(sums, left, right, overwrite)
        return
    if left.dtype != sums.dtype:
        right = right.to(left.dtype)
    # A product of half-precision operands would round its sums: convert a slice at a time.
    if overwrite:
        sums.zero_()
    for terms in slices(left.shape[1]):
        wide = right[terms].to(sums.dtype)
        for rows in slices(left.shape[0]):
            sums[rows].addmm_(left[rows, terms].to(sums.dtype), wide)


# sums = (0 if overwrite else sums) + left @ right, computed in the dtype of `sums`. If the left
# operand is of half precision, the right one is rounded to its dtype; to float16 on a GPU after a
# division by its largest magnitude, since the range of float16 is small.
add_matmul = define_operator(
    add_matmul_reference, "(Tensor(a!) sums, Tensor left, Tensor right, bool overwrite) -> ()"
)


def _add_half_matmul(sums: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """Compute add_matmul on a GPU, which sums products of half-precision operands in float32."""
    if left.dtype == right.dtype or left.dtype == torch.bfloat16:
        right = right.to(left.dtype)
        if overwrite:
            torch.mm(left, right, out_dtype=sums.dtype, out=sums)
        else:
            torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)
        return
    # float16 has a small range: the right operand is divided by its largest magnitude first.
    scale = right.abs().amax()
    right = (right / torch.where(scale == 0, 1, scale)).to(left.dtype)
    for rows in slices(left.shape[0], CUDA_SLICE):
        part = torch.mm(left[rows], right, out_dtype=sums.dtype).mul_(scale)
        sums[rows] = part if overwrite else sums[rows].add_(part)


def slices(size: int, length: int = SLICE) -> Iterator[slice]:
    return (slice(begin, begin + length) for begin in range(0, size, length))


def add_rows_reference(
    sums: Tensor, to: Tensor | None, factor: Tensor | None, rows: Tensor, source: Tensor | None
) -> None:
    if source is not None:
        rows = rows[source]  # a copy
    rows = rows.to(sums.dtype)
    if factor is not None:
        rows = rows * factor[:, None] if source is None else rows.mul_(factor[:, None])
    if to is None:
        sums += rows
    else:
        sums.index_add_(0, to, rows)


# sums[to[i]] += factor[i] * rows[source[i]], one i after the other, so that sums have the same bits
# in every run. On a GPU torch's index_add_ adds rows of the same number in any order.
add_rows = define_operator(
    add_rows_reference,
    "(Tensor(a!) sums, "  # [R, H], in the accumulation dtype, its rows dense
    "Tensor? to, "  # int64 [M], in [0, R); None: all R = M rows in their order
    "Tensor? factor, "  # [M], in the dtype of the sums; None: 1
    "Tensor rows, "  # [Q, H], its rows dense
    "Tensor? source) -> ()",  # int64 [M], in [0, Q); None: all Q = M rows in their order
)


def large_pages_reference(memory: Tensor) -> None:
    """Do nothing: PyTorch cannot ask for large pages."""


# Asks for large pages for a tensor of many megabytes before it is first written. With ordinary
# pages, page faults would take longer than the matrix product that writes the tensor.
large_pages = define_operator(large_pages_reference, "(Tensor memory) -> ()")


def decode_steps_reference(
    table: Tensor, cell: list[Tensor], states: list[Tensor], kind: int,
    dropout_masks: list[Tensor | None], dropout_scales: list[float], inputs: Tensor,
    teacher: Tensor | None, teacher_mask: Tensor | None, active: Tensor | None, eos: int, pad: int,
    uniforms: Tensor | None, temperature: float, head_weight: Tensor, head_bias: Tensor | None,
    targets: Tensor | None, tokens: Tensor, exps: Tensor | None, stats: Tensor | None,
    rows: Tensor | None, logit_rows: int, begin: int, end: int, pre: Tensor | None = None,
) -> int:  # fmt: skip
    (of_inputs, between, of_outputs), scales = dropout_masks, dropout_scales
    steps, batch = inputs.shape
    everyone = torch.arange(batch, device=inputs.device)
    used = 0
    for t in range(begin, end):
        if active is not None and none_active(active[t]):
            for state in states:
                state[t + 1 : end + 1] = state[t]
            if stats is not None:
                inputs[t + 1 : end + 1] = pad
            break
        x = table[inputs[t]].to(states[0].dtype)
        if of_inputs is not None:
            x = x * of_inputs[t] * scales[0]
        now = None if active is None else active[t]
        for layer in range(len(cell) // 4):
            of_step = None if pre is None else pre[layer, t]
            x = _advance_layer(kind, cell, states, layer, t, x, now, of_step)
            if between is not None and layer < between.shape[1]:
                x = x * between[t, layer] * scales[1]
        if stats is None:
            continue
        assert rows is not None
        if of_outputs is not None:
            x = x * of_outputs[t] * scales[2]
        named = everyone
        if now is not None and now.device.type == "cpu":  # no wait for a GPU
            named = everyone[now]
        span = slice(used, used + len(named))
        rows[span] = t * batch + named
        token = tokens.new_empty(len(named))
        head_forward_reference(
            x[named], head_weight, head_bias, None if targets is None else targets[t][named],
            None if uniforms is None else uniforms[t][named], temperature,
            None if exps is None else exps[span], logit_rows, token, stats[:, span],
        )  # fmt: skip
        used = span.stop
        tokens[t, named] = token if now is None else torch.where(now[named], token, pad)
        if t + 1 == steps:
            break
        if eos >= 0:
            assert active is not None
            active[t + 1 :] &= active[t] & (tokens[t] != eos)
        fed = tokens[t]
        if teacher is not None and teacher_mask is None:
            fed = teacher[t + 1]
        elif teacher is not None and teacher_mask is not None:
            fed = torch.where(teacher_mask[t + 1], teacher[t + 1], fed)
        inputs[t + 1] = fed if active is None else torch.where(active[t + 1], fed, pad)
    return used


# Steps [begin, end) of a recurrent decoder: look up the input, advance every layer, and, if `stats`
# are given, compute the head for the active rows and choose the next input. The result is the
# number of rows of the head; `rows` has their positions t * B + b. On a GPU the head computes every
# row, for the host would have to wait for the number of active ones.
decode_steps = define_operator(
    decode_steps_reference,
    "(Tensor table, "  # [R, E]
    # Per layer weight_ih and weight_hh, to whose dtype x and h are rounded, and bias_ih and bias_hh
    # in the dtype of the states and of sums. An empty tensor stands for no bias.
    "Tensor[] cell, "
    "Tensor(a!)[] states, "  # per layer h, and c of an LSTM, [T + 1, B, H]: before and after steps
    "int kind, "  # index into _rnn_weights.py: KINDS
    # Elements that dropout keeps, bool, and their factors: of the looked-up rows [T, B, E], of the
    # outputs of all layers but the last [T, L - 1, B, H], and of the head's inputs [T, B, H].
    "Tensor?[] dropout_masks, float[] dropout_scales, "
    "Tensor(b!) inputs, "  # int64 [T, B]
    "Tensor? teacher, "  # int64 [T, B]: fed where `teacher_mask` is true, or everywhere if None
    "Tensor? teacher_mask, "  # bool [T, B]
    "Tensor(c!)? active, "  # bool [T, B]: the other rows keep their state and skip the head
    "int eos, "  # token that ends a row; -1: none
    "int pad, "  # read by inactive rows
    "Tensor? uniforms, float temperature, "  # fp64 [T, B]
    "Tensor head_weight, Tensor? head_bias, "
    "Tensor? targets, "  # int64 [T, B], in [0, V); None: the tokens
    "Tensor(d!) tokens, "  # int64 [T, B]
    "Tensor(e!)? exps, "  # [rows, V] as in head_forward
    "Tensor(f!)? stats, "  # [3, rows]
    "Tensor(g!)? rows, "  # int64 [rows]
    "int logit_rows, int begin, int end, "
    # [L, T, B, 4 H] of a GRU or LSTM on a CPU: pre-activations of active rows, for rnn_backward
    "Tensor(h!)? pre=None) -> int",
)


def _advance_layer(
    kind: int, cell: list[Tensor], states: list[Tensor], layer: int, t: int, x: Tensor,
    active: Tensor | None, pre: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write a layer's state after step t, and its pre-activations. Return its output [B, H]."""
    w_ih, w_hh, b_ih, b_hh = cell[4 * layer : 4 * layer + 4]
    h, c = states[layer], None
    if kind == LSTM:
        h, c = states[2 * layer : 2 * layer + 2]
    from_x, from_h = linear(x, w_ih, b_ih), linear(h[t], w_hh, b_hh)
    if pre is not None:
        add_pre_activations(from_x, from_h, pre)
    rnn_advance(
        kind, from_x, from_h, active, h[t], None if c is None else c[t], h[t + 1],
        None if c is None else c[t + 1],
    )  # fmt: skip
    return h[t + 1]


def add_pre_activations(from_x: Tensor, from_h: Tensor, pre: Tensor) -> None:
    """Write pre-activations [M, 4 H], the arguments of a layer's nonlinearities, from W_ih x + b_ih
    and W_hh h + b_hh: i, f, g, o of an LSTM; r, z, n's part of x and n's part of h of a GRU."""
    if from_x.shape == pre.shape:
        torch.add(from_x, from_h, out=pre)
        return
    units = pre.shape[1] // 4
    torch.add(from_x[:, : 2 * units], from_h[:, : 2 * units], out=pre[:, : 2 * units])
    pre[:, 2 * units : 3 * units] = from_x[:, 2 * units :]
    pre[:, 3 * units :] = from_h[:, 2 * units :]


def none_active(active: Tensor) -> bool:
    """Tell whether no row [B] is active. False on a GPU, for which the host would have to wait."""
    return active.device.type == "cpu" and not bool(active.any())


def of_chosen_rows(
    function: Callable[..., tuple[Any, ...]], chosen: Tensor, *columns: Tensor | None
) -> tuple[Any, ...]:
    """Return the results [M, ...] of a function of rows, computed on a CPU for the chosen rows [M]
    alone; others are 0. On a GPU the host would have to wait for their number: all are computed."""
    if chosen.device.type != "cpu" or bool(chosen.all()):
        return function(*columns)
    rows = chosen.nonzero().squeeze(1)
    parts = function(*(None if column is None else column[rows] for column in columns))
    zeros = (part.new_zeros(len(chosen), *part.shape[1:]) for part in parts)
    return tuple(zero.index_copy_(0, rows, part) for zero, part in zip(zeros, parts, strict=True))


def rnn_advance(
    kind: int, from_x: Tensor, from_h: Tensor, active: Tensor | None, h: Tensor, c: Tensor | None,
    h_next: Tensor, c_next: Tensor | None,
) -> None:  # fmt: skip
    """Write a layer's state after a step from W_ih x + b_ih and W_hh h + b_hh, [B, gates H]."""
    units = h.shape[1]
    new_c = None
    if kind == GRU:
        r_x, z_x, n_x = from_x.split(units, 1)
        r_h, z_h, n_h = from_h.split(units, 1)
        n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        new_h = n + torch.sigmoid(z_x + z_h) * (h - n)
    elif kind == LSTM:
        assert c is not None
        i, f, g, o = (from_x + from_h).split(units, 1)
        new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
    else:
        pre = from_x + from_h
        new_h = pre.tanh() if kind == RNN_TANH else pre.relu()
    for after, new, before in ((h_next, new_h, h), (c_next, new_c, c)):
        if after is not None and new is not None and before is not None:
            after.copy_(new if active is None else torch.where(active[:, None], new, before))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x @ weight.t() + bias, with sums in x's dtype; an empty bias stands for none."""
    product = product_transposed(x, weight)
    return product + bias if bias.numel() else product


def product_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.t(), with operands rounded to the weight's dtype and sums in x's dtype."""
    return torch.mm(x.to(weight.dtype).to(x.dtype), weight.t().to(x.dtype))


def rnn_backward_reference(
    kind: int, d_out: Tensor, pre: Tensor | None, h: Tensor, c: Tensor | None,
    active: Tensor | None, gate: Tensor | None, limit: Tensor | None, weight: Tensor, dh: Tensor,
    dc: Tensor | None, d_x: Tensor, d_h: Tensor | None,
) -> None:  # fmt: skip
    for t in reversed(range(len(d_out))):
        rnn_gradient(
            kind, d_out[t], None if pre is None else pre[t],
            h[t] if kind in (GRU, LSTM) else h[t + 1], None if c is None else c[t],
            None if c is None else c[t + 1], None if active is None else active[t], dh, dc, d_x[t],
            None if d_h is None else d_h[t],
        )  # fmt: skip
        dh += product_transposed(d_x[t] if d_h is None else d_h[t], weight)
        for gradient in (dh, dc):
            if gradient is None:
                continue
            if gate is not None:
                factor = gate[t][:, None]
                gradient.copy_(torch.where(factor == 0, 0, gradient * factor))
            if limit is not None:
                gradient.copy_(torch.clamp(gradient, -limit, limit))


# The backward pass of some steps of one layer. d_out is the gradient of the layer's output. dh and
# dc are gradients of the state: on entry after the last step, on return before the first one.
rnn_backward = define_operator(
    rnn_backward_reference,
    "(int kind, Tensor d_out, "  # [q, B, H]
    "Tensor? pre, "  # [q, B, 4 H], as decode_steps writes them; None for a plain RNN
    "Tensor h, "  # [q + 1, B, H]
    "Tensor? c, "  # [q + 1, B, H] of an LSTM
    "Tensor? active, "  # bool [q, B]
    "Tensor? gate, "  # [q, B]: factor of the gradient of the state before the step
    "Tensor? limit, "  # 0-dim: largest magnitude of an element of that gradient
    "Tensor weight, "  # [H, gates H]: weight_hh, transposed; d_h is rounded to its dtype
    "Tensor(a!) dh, Tensor(b!)? dc, "  # [B, H]
    "Tensor(c!) d_x, "  # [q, B, gates H]: gradient of W_ih x + b_ih, to be written
    "Tensor(d!)? d_h"  # [q, B, gates H]: of W_hh h + b_hh, which differs for a GRU alone
    ") -> ()",
)


def rnn_gradient(
    kind: int, d_out: Tensor, pre: Tensor | None, h: Tensor, c: Tensor | None,
    c_next: Tensor | None, active: Tensor | None, dh: Tensor, dc: Tensor | None, d_x: Tensor,
    d_h: Tensor | None,
) -> None:  # fmt: skip
    """Compute one step of rnn_backward without the product with weight_hh: dh and dc become the
    gradients of the state before the step, but for the part that comes through weight_hh. h is the
    state before the step, but for a plain RNN the one after it."""
    units = dh.shape[1]
    up, up_c = dh + d_out, None
    if kind == GRU:
        assert pre is not None
        r_pre, z_pre, n_x, n_h = pre.split(units, 1)
        r, z = r_pre.sigmoid(), z_pre.sigmoid()
        n = torch.tanh(n_x + r * n_h)
        d_n = up * (1 - z) * (1 - n * n)
        d_r = d_n * n_h * r * (1 - r)
        d_z = up * (h - n) * z * (1 - z)
        parts, parts_h = [d_r, d_z, d_n], [d_r, d_z, d_n * r]
        down = up * z
    elif kind == LSTM:
        assert pre is not None
        assert c is not None
        assert c_next is not None
        assert dc is not None
        i, f, g, o = pre.split(units, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        tanh_c = c_next.tanh()
        all_c = dc + up * o * (1 - tanh_c * tanh_c)
        d_i, d_f = all_c * g * i * (1 - i), all_c * c * f * (1 - f)
        d_g, d_o = all_c * i * (1 - g * g), up * tanh_c * o * (1 - o)
        parts = parts_h = [d_i, d_f, d_g, d_o]
        down, up_c = torch.zeros_like(up), all_c * f
    else:
        parts = parts_h = [up * (1 - h * h) if kind == RNN_TANH else up * (h > 0)]
        down = torch.zeros_like(up)
    written = [(d_x, torch.cat(parts, 1))]
    if d_h is not None:
        written.append((d_h, torch.cat(parts_h, 1)))
    for gradient, value in written:
        gradient.copy_(value if active is None else torch.where(active[:, None], value, 0))
    passed_on = [(dh, down)]
    if dc is not None and up_c is not None:
        passed_on.append((dc, up_c))
    for gradient, value in passed_on:  # inactive rows pass their gradient on
        gradient.copy_(value if active is None else torch.where(active[:, None], value, gradient))
