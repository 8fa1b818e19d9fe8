"""What the forward pass of either path leaves for its backward pass: the loss's gradients by the
cell's outputs and the head's parameters, or what forms them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from accumext._checks import message
from accumext._torch_private import write_count
from accumext._wgrad_fusion import destination
from accumext.decoder._arguments import OP
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, HeadGradients, NeedsGrad
from accumext.decoder._memory import WorkspacePlan
from accumext.decoder._token_buffers import TokenBuffers
from accumext.recurrence import parameter_tensors


class SavedForBackward:
    """The gradients of one call's head, and the parameters as they were."""

    def __init__(
        self,
        tokens: TokenBuffers,
        plan: WorkspacePlan,
        inverse_divisor: Tensor,  # 0-dim
        gradients: HeadGradients | None,  # of the summed loss; None: to be formed
        # What a callable's steps use, and how often it had been written when they began.
        used: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        self.args, self.tokens = tokens.args, tokens
        self.plan, self._inverse_divisor, self._gradients = plan, inverse_divisor, gradients
        self._divided = tokens.known_inverse_divisor is not None
        self._used = [tensor for tensor, _ in used if tensor is not self.args.table.weight]
        # Steps write into what they renormalise, and may do so again.
        self._written = {id(tensor) for tensor, count in used if write_count(tensor) != count}
        self._parameters = [(p, write_count(p)) for p in self._read_again()]

    def check_unchanged(self) -> None:
        """Raise, as autograd would, if a parameter was written or replaced since the forward."""
        now = self._read_again()
        if len(now) != len(self._parameters) or any(
            tensor is not then or write_count(tensor) != count
            for tensor, (then, count) in zip(now, self._parameters, strict=True)
        ):
            contract = "be those of the forward pass until the backward pass has run"
            raise RuntimeError(message(OP, "parameters", contract, "changed ones"))
        if any(tensor.numel() and not tensor.untyped_storage().size() for tensor in now):
            contract = "be in memory in the backward pass, which reads them again"
            advice = "Leave set_unshard_in_backward of fully_shard modules True"
            raise RuntimeError(message(OP, "parameters", contract, "freed ones", advice))

    def head_gradients(
        self,
        upstream: Tensor,  # 0-dim or [T, B]
        outputs: Iterable[Tensor],  # that the head read: [n, H] each, [T B, H] together
        needs: NeedsGrad,
        fuse_weight: bool,  # whether the weight's gradient may go to a main gradient directly
    ) -> tuple[HeadGradients, Tensor | None]:
        """The gradients under an upstream gradient, and where the weight's went, if to a main
        gradient.

        The first time they are those of the forward pass. They are formed again for
        `reduction="none"`, whose upstream is per token, for a weight whose main gradient was not
        there before, and in the second backward pass through a retained graph.
        """
        gradients, self._gradients = self._gradients, None
        factor = upstream.to(self.args.dtypes.accumulation)
        if gradients is not None:
            gradients.scale(factor if self._divided else factor * self._inverse_divisor)
            return gradients, None
        main = None
        if needs.weight and fuse_weight:
            main = destination(self.args.head_weight, self.args.dtypes.accumulation)
        all_counted = self.tokens.counted()
        factors = (factor * self._inverse_divisor).expand(all_counted.shape)
        if self.args.token_weight is not None:
            factors = factors * self.args.token_weight
        factors = factors.flatten()
        cross_entropy = FusedCrossEntropy(self.args, self.plan, needs, main)
        done = 0
        for hidden in outputs:
            span = slice(done, done + len(hidden))
            index = torch.arange(span.start, span.stop, device=hidden.device)
            counted = all_counted.flatten()[span]
            if counted.device.type == "cpu":  # on a GPU the host would wait for their number
                index = index[counted]
            local = index - done
            targets = self.tokens.targets.flatten()[index]
            cross_entropy.forward(hidden[local], targets, counted[local], index, factors[index])
            done = span.stop
        formed = cross_entropy.finish()
        assert formed is not None  # as `needs` was given
        return formed, main

    def table_destination(self) -> Tensor | None:
        """The main gradient to add the embedding's gradient to; None: autograd takes it."""
        table = self.args.table
        return None if table.sparse else destination(table.weight, self.args.dtypes.accumulation)

    @property
    def needs_outputs(self) -> bool:
        """Whether `head_gradients` will read the outputs."""
        return self._gradients is None

    def _read_again(self) -> list[Tensor]:
        """What the backward pass reads again. A table with a maximal norm is written by lookups."""
        args = self.args
        table = [] if args.table.max_norm is not None else [args.table.weight]
        head = [args.head_weight, *([] if args.head_bias is None else [args.head_bias])]
        trained = parameter_tensors(args.cell)
        if args.rnn_weights is not None and args.cell.module is not None:
            trained = list(args.cell.module.parameters())  # frozen or not, they are all read
        used = [t for t in (*trained, *self._used) if id(t) not in self._written]
        return [*table, *head, *used]
