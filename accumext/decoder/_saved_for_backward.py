"""The head's gradients between the forward and the backward pass: those of the loss with respect to
the cell's outputs and the head's parameters, or the tensors from which they are formed later. The
nodes in the graph of a callable's call that read them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, HeadGradients, NeedsGrad
from accumext.decoder._model import OP, parameters_of
from accumext.decoder._precision import no_grad_no_autocast
from accumext.decoder._transcript import Transcript
from accumext.ops.wgrad_fusion import destination
from accumext.recurrence import parameter_tensors
from accumext.tensors.checks import check_first_order, message
from accumext.tensors.torch_private import retains_graph, write_count


class SavedForBackward:
    """The gradients of one call's head, and its parameters with their numbers of writes."""

    def __init__(
        self,
        transcript: Transcript,
        inverse_divisor: Tensor,  # 0-dim
        gradients: HeadGradients | None,  # of the summed loss; None: formed in the backward pass
        # Tensors that a callable's steps use, with their numbers of writes before the first step.
        used: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        self.transcript, self.model = transcript, transcript.model
        self._inverse_divisor, self._gradients = inverse_divisor, gradients
        self._used: list[Tensor] = []
        self._written: set[int] = set()
        for tensor, count in used:
            if tensor is not self.model.table.weight:
                self._used.append(tensor)
            if write_count(tensor) != count:  # steps write it, as by max_norm: replays may, too
                self._written.add(id(tensor))
        self._parameters = self._read_again()
        self._write_counts = list(map(write_count, self._parameters))

    def begin_backward(self, upstream: Tensor) -> None:
        """Check that the backward pass of a callable's call may run, and prepare the gradients of
        the embedding and the states."""
        check_first_order(OP)
        self.check_unchanged()
        self.model.table.discard_gradients()
        self.transcript.gate.begin_backward(upstream)

    def check_unchanged(self) -> None:
        """Raise, as autograd would, if a parameter was written since the forward pass. Raise also
        if a cell that is called again has other parameters. (Operators keep the old tensors.)"""
        contract = "be those of the forward pass until the backward pass has run"
        if list(map(write_count, self._parameters)) != self._write_counts:
            raise RuntimeError(message(OP, "parameters", contract, "changed ones"))
        now = self._parameters if self.model.rnn is not None else self._read_again()
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            advice = "Under functional_call run the backward pass inside of it, too"
            raise RuntimeError(message(OP, "parameters", contract, "others", advice))
        for tensor in now:
            if tensor.untyped_storage().size() or not tensor.numel():
                continue
            contract = "be in memory in the backward pass, which reads them again"
            advice = "Leave set_unshard_in_backward of fully_shard modules True"
            raise RuntimeError(message(OP, "parameters", contract, "freed ones", advice))

    def head_gradients(
        self,
        upstream: Tensor,  # 0-dim or [T, B]
        outputs: Callable[[], Iterable[Tensor]],  # the head's inputs, [n, H] each, [T B, H] in all
        needs: NeedsGrad,
        fuse_weight: bool,  # whether the weight's gradient may go to a main gradient directly
    ) -> tuple[HeadGradients, Tensor | None]:
        """Return the gradients, multiplied by the upstream gradient, and the main gradient to which
        the weight's was added, if any.

        As a rule they come from the forward pass. They are copied if the graph is retained, so that
        a second backward pass has the same bits. They are formed here for `reduction="none"`, whose
        upstream is per token, and for a weight with a main gradient, which is only known here.
        """
        gradients, factor = self._gradients, upstream.to(self.model.dtypes.accumulation)
        if gradients is not None:
            if retains_graph():
                gradients = gradients.clone()
            else:
                self._gradients = None
            divided = self.transcript.objective.known_inverse_divisor is not None
            gradients.scale(factor if divided else factor * self._inverse_divisor)
            return gradients, None
        main = None
        if needs.weight and fuse_weight:
            main = destination(self.model.head_weight, self.model.dtypes.accumulation)
        transcript = self.transcript
        all_counted, weight = transcript.counted(), transcript.objective.token_weight
        factors = (factor * self._inverse_divisor).expand(all_counted.shape)
        if weight is not None:
            factors = factors * weight
        factors = factors.flatten()
        objective, plan = transcript.objective, transcript.plan
        head = FusedCrossEntropy(self.model, objective, plan, len(factors), needs, main)
        done = 0
        for hidden in outputs():
            span = slice(done, done + len(hidden))
            index = torch.arange(span.start, span.stop, device=hidden.device)
            counted = all_counted.flatten()[span]
            if counted.device.type == "cpu":  # on a GPU the host would wait for the number of rows
                index = index[counted]
            local = index - done
            targets = transcript.targets.flatten()[index]
            head.forward(hidden[local], targets, counted[local], index, factors[index])
            done = span.stop
        formed = head.finish()
        assert formed is not None  # as `needs` was given
        return formed, main

    def _read_again(self) -> list[Tensor]:
        """Return the parameters that the backward pass reads again, without a table that lookups
        write into."""
        model = self.model
        parameters = [] if model.table.max_norm is not None else [model.table.weight]
        parameters.append(model.head_weight)
        if model.head_bias is not None:
            parameters.append(model.head_bias)
        if model.rnn is not None and model.cell.module is not None:
            parameters += model.cell.module.parameters()  # frozen ones are read, too
        else:
            parameters += parameter_tensors(model.cell)
            parameters += [*parameters_of(model.table.module), *parameters_of(model.called_head)]
        if not self._used:
            return parameters
        return [t for t in (*parameters, *self._used) if id(t) not in self._written]


class HeadLoss(torch.autograd.Function):
    """The loss as a function of the head's parameters and the cell's outputs.

    Its value and, as a rule, its gradients are known when it is applied. The anchor of the
    embedding's lookups is an argument, so that its backward runs even if no lookup has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        saved: SavedForBackward,
        value: Tensor,  # 0-dim or [T, B]
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        *hiddens: Tensor,  # [steps, B, H] each
    ) -> Tensor:
        ctx.saved = saved
        ctx.save_for_backward(*hiddens)
        ctx.layout = [(hidden.shape, hidden.dtype) for hidden in hiddens]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved: SavedForBackward = ctx.saved
        model = saved.model
        saved.begin_backward(upstream)
        needs_weight, needs_bias, needs_root = ctx.needs_input_grad[2:5]
        needs_hidden = ctx.needs_input_grad[5:]
        with no_grad_no_autocast(upstream.device):
            needs = NeedsGrad(any(needs_hidden), needs_weight, needs_bias)
            gradients, main = saved.head_gradients(
                upstream,
                lambda: (hidden.flatten(0, 1) for hidden in ctx.saved_tensors),
                needs,
                not model.tied,
            )
        weight = gradients.weight if needs_weight and main is None else None
        if weight is not None and model.tied:
            # Tied weights share one buffer: the lookups' rows are added to the head's gradient.
            model.table.tied_gradient, weight = weight, None
        d_hiddens: list[Tensor | None] = []
        done = 0
        for (shape, dtype), needed in zip(ctx.layout, needs_hidden, strict=True):
            rows = slice(done, done + shape[0] * shape[1])
            done = rows.stop
            d_hiddens.append(gradients.hidden[rows].view(shape).to(dtype) if needed else None)
        return (
            *(None, None),
            None if weight is None else weight.to(model.head_weight.dtype),
            gradients.bias_like(model.head_bias) if needs_bias else None,
            model.table.weight.new_zeros(0) if needs_root else None,
            *d_hiddens,
        )


class BeginBackward(torch.autograd.Function):
    """The identity of the loss behind a called head: its backward runs first.

    The anchor of the embedding's lookups is an argument, as in `HeadLoss`.
    """

    @staticmethod
    def forward(ctx: Any, saved: SavedForBackward, loss: Tensor, anchor: Tensor) -> Tensor:
        ctx.saved = saved
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, Tensor | None]:
        saved: SavedForBackward = ctx.saved
        saved.begin_backward(upstream)
        needs_root = ctx.needs_input_grad[2]
        return None, upstream, saved.model.table.weight.new_zeros(0) if needs_root else None
