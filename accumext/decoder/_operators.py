"""The decoder's operations: of each the schema and the default kernel. They change their arguments
in place and are called by the decoder alone, which has checked what it was given."""

from __future__ import annotations

import torch

from accumext.decoder import _operators_reference


def _define(name: str, schema: str) -> None:
    """Register an operator with the kernel of its name in `_operators_reference`.

    Everything that these operators make is an argument, so the fake kernel has nothing to do."""
    torch.library.define(f"accumext::{name}", schema)
    kernel = getattr(_operators_reference, name)
    torch.library.impl(f"accumext::{name}", "default", kernel)
    result = 0 if schema.endswith("-> int") else None
    torch.library.register_fake(f"accumext::{name}", lambda *_: result)


# Rows of the output layer: logits and their statistics in the accumulation dtype, the token that
# they predict (the argmax, or a sample by inversion where there are uniform numbers), and exp(z -
# peak), 0 at the target, for the deferred products. At most `logit_rows` rows of logits exist at
# once.
_define(
    "head_forward",
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

# A loss of whole distributions: of rows their logsumexp, entropy and distance to a teacher, and the
# gradient by the logits of
#
#     share * logsumexp + z_loss * logsumexp^2 - entropy_weight * entropy
#     + soft_scale * temperature * KL(teacher || model), both at the temperature.
#
# The teacher is given by the probabilities of some tokens, or by a head of its own, whose logits no
# more than the others exist.
_define(
    "head_objective",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, "  # as in head_forward
    "Tensor share, float z_loss, float entropy_weight, "  # [M]
    "float soft_scale, float temperature, "
    "Tensor? probabilities, Tensor? indices, "  # [M, K], int64 [M, K] in [0, V)
    "Tensor? teacher_hidden, Tensor? teacher_weight, Tensor? teacher_bias, "  # [M, H'], [V, H']
    "Tensor(a!)? gradients, "  # [M, V], rows next to each other in memory: 0 at the target
    "int logit_rows, Tensor(b!) tokens, "  # int64 [M]: the argmax
    "Tensor(c!) stats"  # [5, M]: logsumexp, target's logit, entropy, KL, gradient at the target
    ") -> ()",
)

# The largest logits of rows, largest first and of equal ones the first in the vocabulary, and what
# their probabilities are found with.
_define(
    "head_top",
    "(Tensor hidden, Tensor weight, Tensor? bias, "  # as in head_forward
    "int logit_rows, "
    "Tensor(a!) logits, "  # [M, k], k <= V
    "Tensor(b!) tokens, "  # int64 [M, k]: whose logits they are
    "Tensor(c!) stats"  # [2, M]: peak, sum of exp(z - peak)
    ") -> ()",
)

# Samples of the top_k most probable tokens, and of these of the fewest whose probabilities reach
# top_p, by inversion in the order of the vocabulary.
_define(
    "head_sample",
    "(Tensor hidden, Tensor weight, Tensor? bias, "  # as in head_forward
    "Tensor uniforms, float temperature, "
    "int top_k, float top_p, "  # in [1, V] and (0, 1]
    "int logit_rows, Tensor(a!) tokens, Tensor(b!) stats) -> ()",
)

# sums = (0 if overwrite else sums) + left @ right, sums in the dtype of `sums`. A left operand of
# half precision has the right one rounded to its dtype; on a GPU to float16 relative to its largest
# magnitude, since the range of float16 is small.
_define("add_matmul", "(Tensor(a!) sums, Tensor left, Tensor right, bool overwrite) -> ()")

# Asks for large pages behind a tensor of many megabytes that nothing has been written to: the first
# write to an ordinary page takes longer than a product writes it.
_define("large_pages", "(Tensor memory) -> ()")

# Steps [begin, end) of a recurrent decoder: look up the input, advance every layer, and, where
# `stats` are given, push the live rows through the head and choose the next input. The result is
# the number of rows that the head has seen; `rows` names them, t * B + b. Where the host does not
# wait for the device, the head sees every row.
_define(
    "decode_steps",
    "(Tensor table, "  # [R, E]
    # Per layer weight_ih, weight_hh, to whose dtype x and h are rounded, and bias_ih, bias_hh of
    # the states' dtype, in which sums are; no bias: empty.
    "Tensor[] cell, "
    "Tensor(a!)[] states, "  # per layer h, and c of an LSTM, [T + 1, B, H]: before and after steps
    "int kind, "  # index into _rnn_weights.KINDS
    "Tensor? dropout_mask, float dropout_scale, "  # bool [T, L - 1, B, H]: units that are kept
    "Tensor? input_mask, float input_scale, "  # bool [T, B, E]: of the looked-up rows
    "Tensor? output_mask, float output_scale, "  # bool [T, B, H]: of what the head reads
    "Tensor(b!) inputs, "  # int64 [T, B]
    "Tensor? teacher, "  # int64 [T, B]: fed where `teacher_mask`, everywhere if that is None
    "Tensor? teacher_mask, "  # bool [T, B]
    "Tensor(c!)? live, "  # bool [T, B]: the other rows keep their state and see no head
    "int eos, "  # ends a row; -1: nothing does
    "int pad, "  # read by rows that have ended
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

# Steps of one layer backward. d_out is the gradient of its output; dh and dc come in as those of
# the state after the last step and go out as those of the state before the first.
_define(
    "rnn_backward",
    "(int kind, Tensor d_out, "  # [q, B, H]
    "Tensor? pre, "  # [q, B, 4 H], as decode_steps writes them; not of a plain RNN
    "Tensor h, "  # [q + 1, B, H]
    "Tensor? c, "  # [q + 1, B, H] of an LSTM
    "Tensor? live, "  # bool [q, B]
    "Tensor? gate, "  # [q, B]: factor of what goes on to the state before the step
    "Tensor? limit, "  # 0-dim: largest magnitude of that
    "Tensor weight, "  # [H, gates H]: weight_hh, transposed; d_h is rounded to its dtype
    "Tensor(a!) dh, Tensor(b!)? dc, "  # [B, H]
    "Tensor(c!) d_x, "  # [q, B, gates H]: gradient of W_ih x + b_ih, to be written
    "Tensor(d!)? d_h"  # [q, B, gates H]: of W_hh h + b_hh, where that differs: a GRU
    ") -> ()",
)

head_forward = torch.ops.accumext.head_forward.default
head_objective = torch.ops.accumext.head_objective.default
head_top = torch.ops.accumext.head_top.default
head_sample = torch.ops.accumext.head_sample.default
add_matmul = torch.ops.accumext.add_matmul.default
large_pages = torch.ops.accumext.large_pages.default
decode_steps = torch.ops.accumext.decode_steps.default
rnn_backward = torch.ops.accumext.rnn_backward.default
