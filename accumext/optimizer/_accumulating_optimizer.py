"""Gradient accumulation as an optimizer: micro-batches go in, one step per window comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from accumext.master_weights import SteppedTensors
from accumext.optimizer._backward import (
    UNWEIGHTED,
    BackwardPass,
    check_loss_and_weight,
    run_backward,
)
from accumext.optimizer._checkpoint import pack, unpack
from accumext.optimizer._engine import Engine
from accumext.optimizer._micro_batch import open_micro_batch
from accumext.optimizer._nonfinite import POLICIES
from accumext.optimizer._pending import accumulate, zero_grad
from accumext.optimizer._proxy import OptimizerProxy
from accumext.optimizer._reducer import know_parameters, reducer_of
from accumext.optimizer._report import WindowReport
from accumext.optimizer._scaler import create_scale
from accumext.optimizer._settings import OP, check_settings, check_weight
from accumext.optimizer._step import flush, run_step, stepping_at_once
from accumext.optimizer._warnings import warn_of_a_load, warn_of_passes
from accumext.optimizer._wrong_loops import Watch
from accumext.tensors import checks
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import OnNonfinite, Reduction, Synchronize
from accumext.tensors.kinds import Group, main_dtype
from accumext.tensors.torch_private import HAS_STEPPED, STEP_IS_WRAPPED, TAKES_SCALE


def _setting(name: str, doc: str) -> Any:
    """Return a property for a setting of the optimizer, which is checked when it is assigned."""

    def get(self: Any) -> Any:
        return getattr(self._engine.settings, name)

    def assign(self: Any, value: Any) -> None:
        arguments = {**self._engine.settings._asdict(), name: value}
        for derived in ("needs_closure", "names_closure"):
            del arguments[derived]
        settings = check_settings(self.optimizer, **arguments)
        self._engine.settings, self._engine.policy = settings, POLICIES[settings.on_nonfinite]
        if name == "process_group":
            self._engine.reducer.group = None
            self._engine.reducer.share(settings.process_group)

    return property(get, assign, doc=doc)


class AccumulatingOptimizer(OptimizerProxy):
    """Any optimizer, stepping once per window of micro-batches on the gradient of the whole window.

    `gradient = sum(weight_i * grad_i) / sum(weight_i)` over the micro-batches of a window (without
    the division for `reduction="sum"`), unscaled and clipped to `max_norm`. Parameter groups,
    state, hooks and checkpoints are the wrapped optimizer's, `opt.optimizer`.

    With `window=1`, no clipping and finite gradients it is the wrapped optimizer, bit for bit, and
    gradients stay visible in `.grad`. With a larger window, or if windows are summed over
    processes, `.grad` is empty except during a backward pass.

    Autograd adds the gradients of `backward` to the window's sums themselves, so a window of
    full-precision parameters holds one set of gradients, as a loop by hand does. Gradients of half
    precision are added to float32 sums.

    After an exception, of a hook, an allocation or the keyboard, parameters and window are as
    before the call or as after it. But a backward pass that fails while it adds to the window drops
    it, and says so, unless `on_nonfinite` checks micro-batches before they are added.

    Args:
        optimizer: any `torch.optim.Optimizer`, also one that wraps others: this one is outermost.
            If its `step` requires a closure (LBFGS), it takes `window=1`, and no `max_norm`,
            `scaler` or `process_group`.
        window: micro-batches per optimizer step.
        max_norm: global norm to clip the window's gradient to; None does not clip.
        norm_type: p of that norm, nonzero, or `inf`.
        scaler: a `torch.amp.GradScaler` for this optimizer to scale, unscale and update with, once
            per window. None if there is none, or if it is called around this optimizer as usual.
        on_nonfinite: what an inf or NaN does. "skip_window": no step, the window empties.
            "skip_micro_batch": that micro-batch counts nowhere; no step if none is left. "raise":
            RuntimeError with the names of the parameters, before the micro-batch is added. These
            two check a micro-batch before it is added, which costs a second set of gradients.
            "step": nobody looks but a GradScaler, and the step is taken, as by stock PyTorch.
        reduction: "mean" or "sum" over the window, on all processes that it is summed over.
        process_group: group over which to sum each window, once; the gradients must not be
            synchronised already. `micro_batch(model)` does this for DistributedDataParallel.
        accumulate_in_backward: add every gradient of half precision, and free it, as soon as
            `backward` has made it, so that memory peaks at the sums and one layer's gradient. With
            `on_nonfinite` "skip_window" or "step".
        reduce_in_backward: sum the window over the processes while its last backward pass still
            runs, as DistributedDataParallel does. Each micro-batch then has one backward pass, on
            every process, and the window costs memory for a second set of sums.
        synchronize: with `fully_shard`, when gradients are reduced: in every "backward" pass, or
            once per "window", for which every `backward` is inside `micro_batch(model)`. The window
            then costs the memory of unsharded gradients and parameters, see `window_memory`.
        masters: what `accumext.masters` returned, if `optimizer` steps on masters of half-precision
            parameters: it then sees gradients in float32, and the parameters get the rounded
            masters after every step, before the hooks that follow it.

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

    window = _setting("window", "Micro-batches per optimizer step.")
    max_norm = _setting("max_norm", "Global norm to clip the window's gradient to, or None.")
    norm_type = _setting("norm_type", "p of that norm.")
    scaler = _setting("scaler", "The GradScaler, or None if there is none or it is disabled.")
    on_nonfinite = _setting("on_nonfinite", "What an inf or NaN does.")
    reduction = _setting("reduction", '"mean" or "sum" over the window.')
    process_group = _setting("process_group", "The processes to sum each window over, or None.")
    accumulate_in_backward = _setting(
        "accumulate_in_backward", "Whether `backward` frees half-precision gradients at once."
    )
    reduce_in_backward = _setting(
        "reduce_in_backward", "Whether a window is sent while its last backward pass runs."
    )
    synchronize = _setting("synchronize", "When gradients of sharded parameters are reduced.")

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        window: int = 1,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scaler: GradScaler | None = None,
        on_nonfinite: OnNonfinite = "skip_window",
        reduction: Reduction = "mean",
        process_group: Group | None = None,
        accumulate_in_backward: bool = False,
        reduce_in_backward: bool = False,
        synchronize: Synchronize = "backward",
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AccumulatingOptimizer):
            contract = "be a torch.optim.Optimizer that is not wrapped already"
            wrapped = isinstance(optimizer, Optimizer)
            advice = None if wrapped else "Pass one such as torch.optim.AdamW(model.parameters())"
            got = checks.type_name(optimizer)
            if isinstance(optimizer, type):
                got = f"the class {optimizer.__name__}"
                if issubclass(optimizer, Optimizer):
                    advice = f"Make one: {optimizer.__name__}(model.parameters())"
            checks.fail_type(OP, "optimizer", contract, got, advice)
        if not hasattr(optimizer, "param_groups"):
            advice = "Wrap the optimizer that it holds"
            got = checks.type_name(optimizer)
            checks.fail_type(OP, "optimizer", "have param_groups", got, advice)
        settings = check_settings(
            optimizer,
            window=window,
            max_norm=max_norm,
            norm_type=norm_type,
            scaler=scaler,
            on_nonfinite=on_nonfinite,
            reduction=reduction,
            process_group=process_group,
            accumulate_in_backward=accumulate_in_backward,
            reduce_in_backward=reduce_in_backward,
            synchronize=synchronize,
        )
        self.optimizer, target = optimizer, SteppedTensors(OP, optimizer, masters)
        policy, reducer = POLICIES[on_nonfinite], reducer_of(target.parameters())
        watch = Watch(target.parameters())
        self._engine = Engine(optimizer, settings, target, policy, reducer, watch)

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor = UNWEIGHTED,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | GradientEdge | Iterable[Tensor | GradientEdge] | None = None,
    ) -> None:
        """Scale the loss, run its backward pass and add the gradients as one micro-batch.

        Inside `micro_batch()` the gradients join that micro-batch instead.

        Args:
            loss: of one element, with a graph.
            weight: what the micro-batch counts, at least 0, for example its number of tokens if the
                loss is a mean over them. A number, or a 0-dim tensor that stays on its device. It
                need not be the same on every process.
            retain_graph: keep the graph for another backward pass, as in torch.
            create_graph: make gradients that can be differentiated, as in torch, if they stay in
                `.grad`: with `window=1` and one backward pass per step.
            inputs: tensors that alone get a gradient, as in torch: those that the optimizer does
                not hold get it in `.grad`.

        Raises:
            TypeError: `loss` is not a tensor, `weight` neither a number nor a tensor, or an option
                is of the wrong type.
            ValueError: `loss` has several elements or no graph, `weight` is negative, not finite or
                has a graph, `inputs` are empty or require no gradient, or `create_graph` is True
                although gradients leave `.grad`.
            RuntimeError: with `on_nonfinite="raise"`, a gradient is not finite.

        Example:
            >>> opt.backward(F.cross_entropy(logits, targets), weight=targets.numel())
        """
        call = BackwardPass(loss, check_loss_and_weight(loss, weight))
        if retain_graph is not None or create_graph is not False or inputs is not None:
            if isinstance(inputs, (Tensor, GradientEdge)):
                inputs = (inputs,)
            listed = None if inputs is None else tuple(inputs)
            call = BackwardPass(loss, call.weight, retain_graph, create_graph, listed)
            call.check_options()
        run_backward(self._engine, self, call)

    @torch.no_grad()
    def accumulate(self, weight: float | Tensor = UNWEIGHTED) -> None:
        """Add the gradients in `.grad` as one micro-batch, and leave `.grad` empty.

        With a scaler they are unscaled with its present loss scale. If `.grad` is empty, the
        gradients that the latest `backward` of another AccumulatingOptimizer computed for these
        parameters are added, without the loss scale and weight of that optimizer. So two optimizers
        can share one loss.

        Args:
            weight: what the micro-batch counts, as in `backward`; by default 1, or what it counted
                in the other optimizer.

        Raises:
            TypeError: `weight` is neither a number nor a tensor.
            ValueError: `weight` is negative or not finite, or has a graph.
            RuntimeError: `.grad` is empty, or holds only used gradients; the scaler has not scaled
                any loss yet; this is inside `micro_batch()`, or shards synchronize once per window;
                other optimizers have run several backward passes; or, with
                `on_nonfinite="raise"`, a gradient is not finite.

        Example:
            >>> scaler.scale(loss).backward()
            >>> opt.accumulate(weight=len(targets))
        """
        op, engine = f"{OP}.accumulate", self._engine
        engine.refuse(op)
        accumulate(engine, self, op, None if weight is UNWEIGHTED else check_weight(op, weight))

    @contextmanager
    def micro_batch(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Count any number of backward passes inside as one micro-batch, added at the end.

        Their gradients are summed, so divide losses that are means by the number of passes.
        Gradients of half-precision parameters are summed in float32. An exception drops the window,
        and says so, if gradients of this micro-batch have been added to it. Else, or if
        `on_nonfinite` checks micro-batches first, it drops this micro-batch alone.

        Args:
            model: a model, or an nn.ModuleList of several, that is not to synchronise gradients
                after every backward pass. DistributedDataParallel: it does not synchronise at all,
                and the window is summed over `process_group`, or the model's group, once.
                FSDP (`fully_shard`): it reduces every pass, or with `synchronize="window"` the
                window once; an exception inside then drops the window.

        Raises:
            TypeError: `model` is a wrapper that this package does not know, or no module.
            ValueError: the `backward` calls inside have different weights, parts of `model` are in
                different process groups, or have `static_graph=True` before their first backward
                pass, or no part is sharded although `synchronize="window"`.
            RuntimeError: a `micro_batch` is open already.

        Example:
            >>> with opt.micro_batch(ddp_model):
            ...     for chunk in sequence.split(32):
            ...         opt.backward(loss_of(ddp_model(chunk)))
            >>> opt.step()
        """
        op = f"{OP}.micro_batch"
        self._engine.refuse(op)
        with open_micro_batch(op, self._engine, model):
            yield

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Accumulate the gradients pending in `.grad`, then step if the window is full.

        Works under `scaler.step(opt)` too, before or after `scaler.unscale_(opt)`.

        It uses every gradient in `.grad`, as a bare optimizer does, except those of `backward` that
        an earlier step used. With `window=1` the wrapped step is called even without gradients.

        Args:
            closure: evaluated with gradients enabled; not for a step that a GradScaler calls.
                With `window=1` and without `max_norm`, scaler and process group, the wrapped
                optimizer evaluates it, when and as often as it likes; else it is evaluated once,
                before anything else.
            kwargs: for the wrapped optimizer's `step`, if it is called.

        Returns:
            The value of the wrapped `step`, if it was called and returned anything; else that of
            the closure.

        Raises:
            RuntimeError: called through `scaler.step` although this optimizer has a scaler of its
                own or has accumulated already, or inside `micro_batch()`, or if processes do not
                close the same window; the only backward pass since the last step was another
                AccumulatingOptimizer's; the wrapped `step` asks for the closure after it was
                evaluated here, or for the graph of gradients that were summed; or, with
                `on_nonfinite="raise"`, the sum of a window overflows.

        Example:
            >>> loss.backward()
            >>> opt.step()
            >>> opt.zero_grad()
        """
        return run_step(self._engine, self, f"{OP}.step", closure, kwargs)

    def flush(self) -> None:
        """Step on what the window holds so far, normalised by its weights; not if it is empty.

        Raises:
            RuntimeError: inside `micro_batch()`, or if processes do not close the same window.

        Example:
            >>> opt.flush()  # after the last batch of an epoch
        """
        flush(self._engine, self, f"{OP}.flush")
        setattr(self, HAS_STEPPED, True)  # a learning-rate scheduler sees only calls of `step`

    def discard(self) -> None:
        """Drop the open window.

        Raises:
            RuntimeError: inside `micro_batch()`.

        Example:
            >>> opt.discard()
        """
        self._engine.refuse(f"{OP}.discard")
        self._engine.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad`. An open window keeps its sums: `discard` drops them.

        If the wrapped optimizer overrides `zero_grad`, that is called only between windows.

        Between a `loss.backward()` of your own and `step` it clears the gradients of that pass.

        Args:
            set_to_none: as in torch, if the wrapped `zero_grad` takes it. If False, `step` uses the
                zeros left in `.grad` as a gradient, as without the wrapper; `flush` does not.

        Example:
            >>> opt.zero_grad()
        """
        zero_grad(self._engine, set_to_none)

    @property
    def stepped(self) -> bool:
        """True if the last `step` or `flush` closed a window, whether it stepped or skipped.

        Example:
            >>> if opt.stepped:
            ...     scheduler.step()
        """
        return self._engine.state.stepped

    @property
    def last(self) -> WindowReport | None:
        """The report of the last closed window, None before the first.

        Example:
            >>> if opt.stepped and opt.last.skipped:
            ...     print("not finite:", opt.last.nonfinite)
        """
        return self._engine.state.last

    def stats(self) -> dict[str, float]:
        """Return the numbers of the last closed window, for a logger, with one device read.

        Returns:
            {} before the first window, then
            `total_norm`, `clip_coef`, `loss_scale`, `weight`, `micro_batches`, and `skipped`, 0.0
            or 1.0. `WindowReport` says what they mean.

        Example:
            >>> progress_bar.set_postfix(opt.stats())
        """
        last = self._engine.state.last
        return {} if last is None else last.stats()

    @torch.no_grad()
    def main_grad(self, parameter: Tensor) -> Tensor | None:
        """Return `sum(weight_i * grad_i)` of the open window for a parameter, unscaled.

        Args:
            parameter: a parameter of the optimizer.

        Returns:
            A new tensor of the parameter's shape, float32 for half precision; None if it has no
            gradient yet.

        Raises:
            ValueError: the optimizer does not hold `parameter`.

        Example:
            >>> opt.backward(loss)
            >>> opt.main_grad(model.weight)
            tensor([[-16.]])
        """
        engine, parameters = self._engine, self._engine.tensors.parameters()
        index = next((i for i, p in enumerate(parameters) if p is parameter), None)
        if index is None:
            contract = "be a parameter of this optimizer"
            checks.fail_value(f"{OP}.main_grad", "parameter", contract, "another tensor")
        engine.reducer.refuse_while_held(f"{OP}.main_grad")
        window = engine.state.window.of(parameters)
        main = parameter.grad if engine.state.in_grad else window.sums[index]
        if main is None:
            return None
        return main.to(main_dtype(parameter)) * window.ledger.quotient("sum").value()

    @torch.no_grad()
    def accumulation_state_dict(self) -> dict[str, Any]:
        """Return the open window as plain tensors and numbers; a run resumes from it bit for bit.

        `state_dict` does not contain it. It does not contain gradients in `.grad` that have not
        been accumulated yet.

        Returns:
            Copies, for `load_accumulation_state_dict` and `torch.load(weights_only=True)`. Each of
            several processes has its own; with `synchronize="window"` all must make the call.

        Raises:
            RuntimeError: with `reduce_in_backward`, between a window's last `backward` and `step`;
                with `synchronize="window"` before torch 2.15, inside a window.

        Example:
            >>> torch.save({"opt": opt.state_dict(), "open": opt.accumulation_state_dict()}, path)
        """
        op, engine = f"{OP}.accumulation_state_dict", self._engine
        engine.refuse(op)
        engine.reducer.collect(op, engine)
        packed = pack(engine.window_out_of_grad(), engine.state.through_backward)
        engine.update(saved=engine.state.micro_batches)
        return packed

    @torch.no_grad()
    def load_accumulation_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the open window by a saved one. If there is a scaler, load its state first.

        Args:
            state_dict: what `accumulation_state_dict` returned, for the same parameters in order.

        Raises:
            TypeError: an entry is of the wrong type or dtype.
            ValueError: keys, indices, shapes or values are not those of this optimizer.
            RuntimeError: inside `micro_batch()`.

        Example:
            >>> opt.load_accumulation_state_dict(torch.load(path)["open"])
        """
        op = f"{OP}.load_accumulation_state_dict"
        engine = self._engine
        engine.refuse(op)
        parameters, scaler = engine.tensors.parameters(), engine.settings.scaler
        window, through = unpack(op, state_dict, parameters)
        if any(main is not None for main in window.sums):
            create_scale(scaler, parameters[0].device)
        engine.drop(window._replace(sums=engine.tensors.send(list(window.sums))()))
        engine.update(saved=window.ledger.micro_batches, through_backward=through)

    def _expect_passes(self) -> None:
        """Take notice that `tbptt` is about to call `backward` several times."""
        warn_of_passes(self._engine)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name.startswith("_") or not callable(value):
            return value
        if name.endswith("step"):  # such as `first_step` of SAM
            value = stepping_at_once(self._engine, name, value)
        return self._engine.tensors.followed(value)  # such as `eval()` of schedule-free ones

    def state_dict(self) -> dict[str, Any]:
        """Return exactly the wrapped optimizer's, so that checkpoints move both ways.

        With masters it has one entry more, "masters", which optimizers without masters ignore.
        """
        return self._engine.tensors.state_dict(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of the wrapped optimizer, saved with or without this wrapper.

        Masters are loaded, and rounded into their parameters, if the checkpoint has any; else they
        are set to the values of their parameters.

        Raises:
            ValueError: its groups, or its masters, do not fit this optimizer's parameters.
        """
        load, op = self.optimizer.load_state_dict, f"{OP}.load_state_dict"
        warn_of_a_load(self._engine)
        self._engine.tensors.load_state_dict(op, state_dict, load)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer; it may hold masters if others do.

        Raises:
            ValueError: it holds masters and none of the others do, or a parameter would be stepped
                on twice.
        """
        self._engine.tensors.check_added(f"{OP}.add_param_group", param_group)
        try:
            self.optimizer.add_param_group(param_group)
            know_parameters(self._engine)
        except BaseException:  # the optimizer may hold the group already
            know_parameters(self._engine)
            raise

    def __repr__(self) -> str:
        names = ("window", "max_norm", "norm_type", "on_nonfinite", "reduction")
        fields = [f"{name}={getattr(self, name)!r}" for name in names]
        scaler = None if self.scaler is None else f"{type(self.scaler).__name__}()"
        fields.insert(3, f"scaler={scaler}")  # its scale would have to be read from the device
        options = ("accumulate_in_backward", "reduce_in_backward")
        fields += [f"{name}=True" for name in options if getattr(self, name)]
        if self.synchronize != "backward":
            fields.append(f"synchronize={self.synchronize!r}")
        fields.append(f"{self._engine.state.micro_batches}/{self.window} micro-batches")
        return f"{type(self).__name__}({self.optimizer!r}, {', '.join(fields)})"


def _takes_scale(self: AccumulatingOptimizer) -> bool:
    """Return True, so that GradScaler always calls `step`, after it has set `grad_scale` and
    `found_inf`. A `grad_scale` left by a step that did not begin is removed, because GradScaler
    would multiply it into the next one."""
    if "found_inf" in vars(self):
        vars(self).pop("grad_scale", None)
    return True


# Attributes that torch looks up, under names that are not public.
_step = AccumulatingOptimizer.step
setattr(AccumulatingOptimizer, TAKES_SCALE, property(_takes_scale))
setattr(_step, STEP_IS_WRAPPED, True)  # hooks run around the wrapped step alone
# GradScaler asks for the signature in every step: stored here, it is not computed again.
setattr(_step, "__signature__", inspect.signature(_step))  # noqa: B010
