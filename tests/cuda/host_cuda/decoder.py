"""The decoder's kernels of csrc/cuda on the host, one at a time; see __init__.py. The arguments are
those of accumext/decoder/_operators.py, then what the kernels alone can do."""

from dataclasses import dataclass

from torch import Tensor

from accumext.decoder._operators import logits_of
from host_cuda import RUNS, Driver

SHARED_BYTES = 227 << 10  # of a block on an H100


@dataclass
class Lookup:
    """Rows of a table, and where they go."""

    table: Tensor
    rows: Tensor  # [rows, width]
    kept: Tensor | None = None
    scale: float = 1.0

    def arguments(self) -> list[object]:
        return [self.table, self.rows, *self.table.shape, self.kept, self.scale]


@dataclass
class FeedBack:
    """The consequences of a step's tokens: FeedBack of feed_back.cuh."""

    later: int
    batch: int
    pad: int
    eos: int
    rows: Tensor
    live: Tensor | None
    live_later: Tensor | None
    teacher: Tensor | None
    teacher_mask: Tensor | None
    inputs: Tensor
    lookup: Lookup

    def arguments(self) -> list[object]:
        *before, lookup = vars(self).values()
        return [*before, *lookup.arguments()]


class HostDecoder(Driver):
    """The kernels, by decoder.cpp."""

    def softmax_stats(
        self, logits, targets, uniforms, temperature, exps, tokens, stats, *, bias=None,
        feed_back=None, runs=RUNS,
    ) -> None:  # fmt: skip
        """The second number of a run is how many blocks share a band of rows."""
        following = (0,) if feed_back is None else feed_back.arguments()
        self.call(
            "softmax_stats", runs, logits.dtype, *logits.shape, temperature, logits, targets,
            uniforms, exps, tokens, stats, bias, *following,
        )  # fmt: skip

    def head_objective(
        self, hidden, weight, bias, targets, share, z_loss, entropy_weight, soft_scale, temperature,
        probabilities, indices, teacher_hidden, teacher_weight, teacher_bias, gradients,
        logit_rows, tokens, stats, *, runs=RUNS,
    ) -> None:  # fmt: skip
        """Run all that follows the products, of all rows at once. The second number of a run is
        that of blocks which share a band of rows."""
        logits, taught = (
            None if rows is None else logits_of(rows, matrix, None)
            for rows, matrix in ((hidden, weight), (teacher_hidden, teacher_weight))
        )
        self.call(
            "head_objective", runs, hidden.dtype, *gradients.shape, temperature, z_loss,
            entropy_weight, soft_scale, logits, bias, taught, teacher_bias, targets, share,
            0 if indices is None else indices.shape[1], probabilities, indices, gradients, tokens,
            stats,
        )  # fmt: skip

    def rnn_advance(
        self, kind, from_x, from_h, live, h, c, h_next, c_next, *, bias_x=None, bias_h=None,
        operand=None, output=None, kept=None, scale=1.0, runs=RUNS,
    ) -> None:  # fmt: skip
        self.call(
            "rnn_advance", runs, h.dtype, kind, *h.shape, from_x, from_h, live, h, c, h_next,
            c_next, bias_x, bias_h, operand, output, kept, scale,
        )  # fmt: skip

    def rnn_gradient(
        self, kind, d_out, pre, h, c, c_next, live, dh, dc, d_x, d_h, *, operand=None,
        product=None, gate=None, limit=None, runs=RUNS,
    ) -> None:  # fmt: skip
        self.call(
            "rnn_gradient", runs, dh.dtype, kind, *dh.shape, d_out, pre, h, c, c_next, live, dh, dc,
            d_x, d_h, operand, product, gate, limit,
        )  # fmt: skip

    def rnn_pass_on(self, dh, dc, product, gate=None, limit=None, *, runs=RUNS) -> None:
        self.call("rnn_pass_on", runs, dh.dtype, *dh.shape, dh, dc, product, gate, limit)

    def rnn_backward(
        self, kind, d_out, pre, h, c, live, gate, limit, weight, dh, dc, d_x, d_h, *, bands=0, runs
    ) -> None:  # fmt: skip
        """In one launch, of so many bands if not 0. The second number of a run is how many
        multiprocessors there are."""
        self.call(
            "rnn_backward", runs, kind, *d_out.shape, d_out, pre, h, c, live, gate, limit, weight,
            dh, dc, d_x, d_h, bands,
        )  # fmt: skip

    def look_up(self, lookup: Lookup, tokens, *, runs=RUNS) -> None:
        self.call("look_up", runs, len(tokens), tokens, *lookup.arguments())

    def clear_tokens(self, exps, tokens, *, runs=RUNS) -> None:
        self.call("clear_tokens", runs, *exps.shape, exps, tokens)


class HostPersistent(Driver):
    """decode_steps with a head, by persistent.cpp."""

    def decode_steps(
        self, table, cell, states, kind, dropout_masks, dropout_scales, inputs, teacher,
        teacher_mask, live, eos, pad, uniforms, temperature, head_weight, head_bias, targets,
        tokens, exps, stats, rows, logit_rows, begin, end, *, runs, shared_bytes=SHARED_BYTES,
        resident=True, stages=0,
    ) -> int:  # fmt: skip
        """The second number of a run is how many blocks there are. Of `shared_bytes` of shared
        memory follows whether the cells' weights stay there, and how many stages the head's has:
        `resident` and `stages` are what is expected, 0 anything."""
        of_inputs, between, of_outputs = dropout_masks
        assert (of_inputs, of_outputs) == (None, None)  # the loop's work
        steps, batch = inputs.shape
        layers = len(cell) // 4
        parts = len(states) // layers
        of_layers: list[object] = []
        for layer in range(layers):
            biases = (
                bias if bias.numel() else None for bias in cell[4 * layer + 2 : 4 * layer + 4]
            )
            mine = states[layer * parts : (layer + 1) * parts]
            of_layers += [*cell[4 * layer : 4 * layer + 2], *biases, *mine, *[None] * (2 - parts)]
        self.call(
            "decode_steps", runs, shared_bytes, resident, stages, kind, layers, batch,
            table.shape[1], states[0].shape[2], head_weight.shape[0], steps, begin, end, eos, pad,
            len(table), temperature, dropout_scales[1], table, *of_layers, between, inputs,
            teacher, teacher_mask, live, uniforms, head_weight, head_bias, targets, tokens, exps,
            stats, rows,
        )  # fmt: skip
        return (end - begin) * batch
