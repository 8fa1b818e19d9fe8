"""Gradient accumulation as an optimizer: micro-batches go in, one step per window comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from accumext import _checks
from accumext import _wgrad_fusion as straight
from accumext.optimizer import _distributed
from accumext.optimizer._arguments import (
    OP,
    UNWEIGHTED,
    check_closure_optimizer,
    check_in_backward,
    check_loss,
    check_policy,
    check_weight,
    needs_closure,
)
from accumext.optimizer._backward_pass import times
from accumext.optimizer._grad_slots import Consumed, param_grads
from accumext.optimizer._product_memory import ProductMemory
from accumext.optimizer._taking import Progress
from accumext.optimizer._window import Window
from accumext.optimizer._window_report import WindowReport
from accumext.optimizer._window_state_dict import Resuming


class AccumulatingOptimizer(Resuming):
    """Any optimizer, stepping once per window of micro-batches on the gradient of the whole window.

    `gradient = sum(weight_i * grad_i) / sum(weight_i)` over the micro-batches of a window (without
    the division for `reduction="sum"`), unscaled and clipped to `max_norm`. Parameter groups,
    state, hooks and checkpoints are the wrapped optimizer's, `opt.optimizer`.

    With `window=1`, no clipping and finite gradients it is the wrapped optimizer, bit for bit, and
    gradients stay visible in `.grad`. With more, or where windows are summed over processes,
    `.grad` is empty except during a backward pass.

    An exception, of a hook, an allocation or the keyboard, leaves the window, `.grad` and the
    parameters as before the call or as after it.

    Args:
        optimizer: any `torch.optim.Optimizer`. One whose `step` requires a closure (LBFGS) goes
            with `window=1`, and without `max_norm`, `scaler` and `process_group`.
        window: micro-batches per optimizer step.
        max_norm: global norm to clip the window's gradient to; None does not clip.
        norm_type: p of that norm, nonzero, or `inf`.
        scaler: a `torch.amp.GradScaler` for this optimizer to scale, unscale and update with, once
            per window. None if there is none, or if it is called around this optimizer as usual.
        on_nonfinite: what an inf or NaN does. "skip_window": no step, the window empties.
            "skip_micro_batch": that micro-batch counts nowhere; no step if none is left. "raise":
            RuntimeError with the names of the parameters, before the micro-batch is taken in.
        reduction: "mean" or "sum" over the window, on all processes that it is summed over.
        process_group: group over which to sum each window, once; the gradients given must not be
            synchronised already. `micro_batch(model)` does this for DistributedDataParallel.
        accumulate_in_backward: take every gradient in, and free it, as soon as `backward` has made
            it, so that memory peaks at the main gradients and one layer's gradient. With
            `on_nonfinite="skip_window"` alone.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a value is out of range, or does not go with another or with an optimizer that
            needs a closure.

    Example:
        >>> adam = torch.optim.AdamW(model.parameters())
        >>> opt = accumext.AccumulatingOptimizer(adam, window=4, max_norm=1.0)
        >>> for inputs, targets in batches:
        ...     opt.backward(criterion(model(inputs), targets), weight=len(targets))
        ...     opt.step()
        >>> opt.flush()

    Unscaling when accumulating, not when stepping, keeps the sum right if the loss scale changes
    inside a window.
    """

    _step_supports_amp_scaling = True  # so GradScaler always calls step, and sets found_inf

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        window: int = 1,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scaler: GradScaler | None = None,
        on_nonfinite: str = "skip_window",
        reduction: str = "mean",
        process_group: _distributed.Group | None = None,
        accumulate_in_backward: bool = False,
        reduce_in_backward: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AccumulatingOptimizer):
            contract = "be a torch.optim.Optimizer that is not wrapped already"
            _checks.fail_type(OP, "optimizer", contract, _checks.type_name(optimizer))
        if not (scaler is None or isinstance(scaler, GradScaler)):
            contract = "be a torch.amp.GradScaler or None"
            _checks.fail_type(OP, "scaler", contract, _checks.type_name(scaler))
        super().__init__(optimizer)
        self.window = _checks.positive_int(OP, "window", window)
        self.max_norm = None if max_norm is None else _checks.number(OP, "max_norm", max_norm, 0.0)
        self.norm_type = _checks.number(OP, "norm_type", norm_type)
        if self.norm_type == 0.0:
            _checks.fail_value(OP, "norm_type", "be nonzero", norm_type)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        policies = ("skip_window", "skip_micro_batch", "raise")
        self.on_nonfinite = _checks.one_of(OP, "on_nonfinite", on_nonfinite, policies)
        check_policy(on_nonfinite, self._parameters())
        self.reduction = _checks.one_of(OP, "reduction", reduction, ("mean", "sum"))
        self.process_group = _distributed.check_group(OP, process_group)
        self.accumulate_in_backward = check_in_backward(
            "accumulate_in_backward", accumulate_in_backward, on_nonfinite
        )
        self.reduce_in_backward = check_in_backward(
            "reduce_in_backward", reduce_in_backward, on_nonfinite
        )
        if accumulate_in_backward:
            straight.mark(p for group in optimizer.param_groups for p in group["params"])
        self._needs_closure = needs_closure(optimizer)
        if self._needs_closure:
            check_closure_optimizer(
                optimizer,
                window,
                max_norm,
                self.scaler,
                process_group,
                accumulate_in_backward=accumulate_in_backward,
                reduce_in_backward=reduce_in_backward,
            )
        # Kept memory is what `accumulate_in_backward` is there to do without.
        self._progress = Progress(ProductMemory(keeps=not accumulate_in_backward))

    def backward(self, loss: Tensor, weight: float | Tensor = UNWEIGHTED) -> None:
        """Scale the loss, run its backward pass and take in the gradients as one micro-batch.

        Inside `micro_batch()` the gradients join that micro-batch instead.

        Args:
            loss: 0-dim, with a graph.
            weight: what the micro-batch counts, at least 0, for example its number of tokens if the
                loss is a mean over them. A number, or a 0-dim tensor that stays on its device. With
                sharded parameters (`fully_shard`), give one on all processes or on none.

        Raises:
            TypeError: `loss` is not a tensor, or `weight` neither a number nor a tensor.
            ValueError: `loss` is not 0-dim or has no graph, or `weight` is negative or not finite.
            RuntimeError: with `on_nonfinite="raise"`, a gradient is not finite.

        Example:
            >>> opt.backward(F.cross_entropy(logits, targets), weight=targets.numel())
        """
        op = f"{OP}.backward"
        self._refuse_closure_optimizer(op)
        check_loss(op, loss, None if self.scaler is None else self.scaler._get_scale_async())
        count = check_weight(op, weight)
        progress = self._progress
        self._refuse_while_reducing(op)
        self._refuse_second_unscale(op)
        if weight is not UNWEIGHTED:
            share, count = _distributed.shared_weight(count, self._parameters())
            loss = times(loss, share)
        if progress.part is not None:
            self._check_part_weight(op, count)
        slots, still = (None, []) if progress.part is not None else self._clear_consumed()
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        reduction = self._reduction_of_the_last(op, count)
        if progress.part is not None and reduction is None:
            self._backward_part(op, scaled)
            return
        scale = self._own_scale(op)
        if self.accumulate_in_backward or reduction is not None:
            with self._atomic():
                self._detach()
        if reduction is not None:
            self._backward_taking(op, scaled, count, scale, still, reduction)
        elif self._adds_in_place(count, scale, not still):
            self._backward_in_place(scaled, count, scale)
        elif self.accumulate_in_backward and not self._attaches():
            self._backward_taking(op, scaled, count, scale, still)
        else:
            self._backward_then_take(op, scaled, count, scale, slots, still)
        progress.accumulated = True

    def accumulate(self, weight: float | Tensor = 1.0) -> None:
        """Take in the gradients that lie in `.grad` as one micro-batch, and leave `.grad` empty.

        With a scaler they are unscaled with the loss scale in force now.

        Args:
            weight: what the micro-batch counts, as in `backward`.

        Raises:
            TypeError: `weight` is neither a number nor a tensor.
            ValueError: `weight` is negative or not finite.
            RuntimeError: `.grad` holds nothing, or only what is used up, the scaler has not scaled
                any loss yet, this is inside `micro_batch()`, or, with `on_nonfinite="raise"`, a
                gradient is not finite.

        Example:
            >>> scaler.scale(loss).backward()
            >>> opt.accumulate(weight=len(targets))
        """
        op = f"{OP}.accumulate"
        self._refuse_closure_optimizer(op)
        self._refuse_inside_micro_batch(op)
        self._refuse_while_reducing(op)
        count = check_weight(op, weight)
        self._refuse_second_unscale(op)
        foreign = self._foreign()
        grads = self._grads()
        if not grads:
            advice = "Run a backward pass first; backward() has accumulated already"
            raise RuntimeError(_checks.message(op, ".grad", "hold new gradients", "none", advice))
        self._take(op, grads, count, self._own_scale(op), foreign)
        self._progress.accumulated = True

    @contextmanager
    def micro_batch(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Any number of backward passes inside count as one micro-batch, taken in at the end.

        Gradients of half-precision parameters are summed in float32. An exception drops what this
        micro-batch brought, and nothing else.

        Args:
            model: a model whose synchronisation after every backward pass is to be held back.
                DistributedDataParallel: it does not synchronise at all, and the window is summed
                over `process_group`, or the model's group, once. FSDP (`fully_shard`): it goes on
                reducing every pass, since gradients held back there are out of reach.

        Raises:
            TypeError: `model` is a wrapper whose gradients are not understood, or no module.
            ValueError: the `backward` calls inside have different weights, or parts of `model` are
                in different process groups.
            RuntimeError: a `micro_batch` is open already.

        Example:
            >>> with opt.micro_batch(ddp_model):
            ...     for chunk in sequence.split(32):
            ...         opt.backward(loss_of(ddp_model(chunk)))
            >>> opt.step()
        """
        op = f"{OP}.micro_batch"
        self._refuse_closure_optimizer(op)
        self._refuse_inside_micro_batch(op)
        progress = self._progress
        self._refuse_while_reducing(op)
        held, group = _distributed.hold_back(op, model, self.process_group)
        progress.group = group or progress.group
        slots, still = self._clear_consumed()
        with self._atomic(slots) as atomic:
            self._detach()
            atomic.keep_contents(still)
            try:
                progress.part, progress.part_weight, progress.part_failed = Window(), None, False
                with held:
                    yield
                self._take_part(op, held_back=model is not None)
            finally:
                progress.part = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take in gradients not yet accumulated, then step if the window is full; else do nothing.

        Works under `scaler.step(opt)` too, before or after `scaler.unscale_(opt)`.

        It takes whatever lies in `.grad`, as a bare optimizer does, but for what `backward` brought
        and an earlier step used. With `window=1` the wrapped step is called without gradients, too.

        Args:
            closure: evaluated with gradients enabled; not for a step that is already under a
                GradScaler. With `window=1`, no `max_norm`, scaler and process group, the wrapped
                optimizer evaluates it, when and as often as it likes; else it is evaluated once,
                before anything else.
            kwargs: for the wrapped optimizer's `step`, if it is called.

        Returns:
            What the wrapped `step` returned, if it was called and returned anything; else what the
            closure did.

        Raises:
            RuntimeError: called through `scaler.step` although this optimizer has a scaler of its
                own or has accumulated already, or inside `micro_batch()`, or where processes do not
                close the same window.

        Example:
            >>> loss.backward()
            >>> opt.step()
            >>> opt.zero_grad()
        """
        return self._step(f"{OP}.step", closure, kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # hooks run around the wrapped step alone

    @torch.no_grad()
    def flush(self) -> None:
        """Step on what the window holds so far, normalised by just that; nothing if it is empty.

        Raises:
            RuntimeError: inside `micro_batch()`, or where processes do not close the same window.

        Example:
            >>> opt.flush()  # after the last batch of an epoch
        """
        self._refuse_inside_micro_batch(f"{OP}.flush")
        self._flush(f"{OP}.flush")
        self._opt_called = True  # what a learning-rate scheduler looks for; it wraps only `step`

    def discard(self) -> None:
        """Drop the open window.

        Raises:
            RuntimeError: inside `micro_batch()`.

        Example:
            >>> opt.discard()
        """
        self._refuse_inside_micro_batch(f"{OP}.discard")
        self._drop_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad`. An open window keeps what it has: see `discard`.

        Args:
            set_to_none: as in torch. Zeros that are left in `.grad` instead are a gradient to
                `step`, as without the wrapper, but nothing new to `flush`.

        Example:
            >>> opt.zero_grad()
        """
        with self._atomic():
            self._detach()
            self._forget()
            self.optimizer.zero_grad(set_to_none)
            self._progress.consumed = Consumed(param_grads(self._parameters()))

    @property
    def stepped(self) -> bool:
        """Whether the last `step` or `flush` closed a window, taken or skipped.

        Example:
            >>> if opt.stepped:
            ...     scheduler.step()
        """
        return self._progress.stepped

    @property
    def last(self) -> WindowReport | None:
        """The last closed window, None before the first.

        Example:
            >>> if opt.last.skipped:
            ...     print("not finite:", opt.last.nonfinite)
        """
        return self._progress.last

    def stats(self) -> dict[str, float]:
        """The last closed window for any logger, in one device read; {} before the first.

        Returns:
            total_norm, clip_coef, loss_scale, weight, micro_batches and skipped (0.0 or 1.0).

        Example:
            >>> progress_bar.set_postfix(opt.stats())
        """
        return {} if self._progress.last is None else self._progress.last.stats()

    @torch.no_grad()
    def main_grad(self, parameter: Tensor) -> Tensor | None:
        """`sum(weight_i * grad_i)` of the open window for a parameter, unscaled, as a new tensor.

        Args:
            parameter: one of the optimizer's.

        Returns:
            Of the parameter's shape, float32 for half precision; None if it has no gradient yet.

        Raises:
            ValueError: the optimizer does not hold `parameter`.

        Example:
            >>> opt.backward(loss)
            >>> opt.main_grad(model.weight)
            tensor([[-16.]])
        """
        if not any(parameter is p for p in self._parameters()):
            contract = "be a parameter of this optimizer"
            _checks.fail_value(f"{OP}.main_grad", "parameter", contract, "another tensor")
        window = self._progress.window
        main = parameter.grad if window.attached else window.main.get(parameter)
        return None if main is None else main * window.normaliser("sum")

    def __repr__(self) -> str:
        names = ("window", "max_norm", "norm_type", "on_nonfinite", "reduction")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({self.optimizer!r}, {fields})"
