"""`accumext.audit`: observe a loop, and say what it does wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accumext import _checks
from accumext.audit import _report
from accumext.audit._events import Finding, Record
from accumext.audit._infer import findings
from accumext.audit._observe import Done, Observer
from accumext.audit._truncation import watch_tbptt, write_distance

OP = "audit"


class Audit:
    """A loop under observation; see `accumext.audit`."""

    def __init__(self, observer: Observer, before: Record | None) -> None:
        self._observer: Observer | None = observer
        self._before = before
        self._record: Record | None = None
        self._open = False

    def __enter__(self) -> Audit:
        if self._open or self._observer is None:
            raise RuntimeError("audit: a block must be entered once, got a second time")
        self._observer.open()
        watch_tbptt(self._observer)
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        observer, self._observer, self._open = self._observer, None, False
        assert observer is not None
        with suppress(Done):  # the window that it completes may be the last one
            observer.close()
        record = replace(observer.record(), before=self._before)
        if observer.joined is not None and kind in (None, Done):
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, replace(record, before=None))
            record = replace(record, ranks=tuple(ranks), rank=dist.get_rank())
        self._record = record

    @property
    def record(self) -> Record:
        """What was seen; for tests of rules, and for `against`."""
        if self._record is None:
            raise RuntimeError("audit: the block must be closed, got an open one")
        return self._record

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All that is wrong, the worst first; empty for a right loop."""
        return findings(self.record)

    def check(self) -> None:
        """Raise RuntimeError, with the report, if there is a finding."""
        if self.findings:
            raise RuntimeError(str(self))

    def __str__(self) -> str:
        if self._record is None:
            return "accumext audit: open"
        return _report.text(self.record, self.findings)

    def to_json(self) -> dict[str, Any]:
        """Findings and windows as plain lists, numbers and strings."""
        return _report.as_json(self.record, self.findings)

    def plot(self, path: str | Path | None = None) -> Any:
        """The time line of the windows, and the bytes of each pass's graph, as a matplotlib figure.

        Args:
            path: where to write it as well; its ending gives the format.
        """
        return _report.plot(self.record, path)

    def measure_truncation(
        self,
        step: Callable[..., tuple[Tensor, Any]],
        targets: Tensor,
        state: Any,
        *,
        criterion: Callable[[Tensor, Tensor], Tensor],
        k1: int,
        k2: int | None = None,
        feedback: str = "greedy",
        start: int | Tensor = 0,
        inputs: Tensor | None = None,
        resets: Tensor | None = None,
        context: Sequence[Tensor] = (),
        batch_dim: int | None = None,
    ) -> float:
        """The distance of a truncated gradient from the exact one, for one batch.

        Inside the block, with the arguments of `accumext.tbptt`. Gradients, buffers and generators
        stay as they are; both gradients are made in segments of steps that are computed again, so
        that only the states of all steps are kept.

        Returns:
            `|truncated - exact| / |exact|`, over the parameters of model and optimizer.
        """
        if self._observer is None or not self._open:
            raise RuntimeError("audit: measure_truncation must be called inside the block")
        return write_distance(
            self._observer,
            step,
            targets,
            state,
            criterion,
            k1,
            k2,
            feedback,
            start,
            inputs,
            context,
            resets,
            batch_dim,
        )


def audit(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    windows: int = 4,
    against: Audit | None = None,
) -> Audit:
    """Run any training loop under observation, and read what it does wrongly.

    Nothing that the loop computes changes. While the block is open, backward passes, steps,
    `zero_grad`, `clip_grad_norm_`, GradScaler and schedulers are observed: passes' gradients as
    eight numbers per parameter, the factors of the losses, the tensors that graphs keep. After so
    many windows the loop runs free. A pass that DistributedDataParallel reduces is compared with
    those of the other processes, which communicate once when the block closes: open it on all.

    Args:
        model: names the parameters, and says which of them no optimizer has. None: the module that
            holds the optimizer's parameters.
        optimizer: of torch or accumext, bare or as Accelerate or Lightning wrap it. None: the first
            that is made inside the block.
        windows: steps of the optimizer that are observed.
        against: an audit of the same loop, closed; gradients that differ are a finding.

    Returns:
        An `Audit`, with `findings`, `check()`, `plot()` and `to_json()`, which prints as a report
        of at most 30 lines.

    Raises:
        ValueError: `windows` is below 1.
        TypeError: a type is wrong.
        RuntimeError: the block is entered twice, or its results are asked for before it closes.

    Example:
        >>> with accumext.audit(model, optimizer) as audit:
        ...     train(steps=8)
        >>> print(audit)
    """
    if model is not None and not isinstance(model, nn.Module):
        _checks.fail_type(OP, "model", "be an nn.Module or None", _checks.type_name(model))
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        contract = "be an optimizer or None"
        _checks.fail_type(OP, "optimizer", contract, _checks.type_name(optimizer))
    if isinstance(windows, bool) or not isinstance(windows, int):
        _checks.fail_type(OP, "windows", "be an int", _checks.type_name(windows))
    if windows < 1:
        raise ValueError(_checks.message(OP, "windows", "be at least 1", windows))
    if against is not None and not isinstance(against, Audit):
        _checks.fail_type(OP, "against", "be an audit or None", _checks.type_name(against))
    before = None if against is None else replace(against.record, before=None)
    return Audit(Observer(model, optimizer, windows), before)
