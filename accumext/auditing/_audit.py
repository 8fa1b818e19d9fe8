"""`accumext.audit`: observe a loop, and say what it does wrongly."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accumext.auditing import _report
from accumext.auditing._events import Finding, Record
from accumext.auditing._judge import Judgement, judge
from accumext.auditing._observe import Observer
from accumext.auditing._steps import Done
from accumext.auditing._truncation import of_tbptt, watch_truncation
from accumext.auditing._words import KINDS, some

Ignored: TypeAlias = str | Path | Iterable[str]


def ids_of(ignore: Ignored) -> frozenset[str]:
    """Return the ids in a list, or in a file: one per line, with remarks behind #."""
    if isinstance(ignore, (str, Path)):
        try:
            ignore = Path(ignore).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            contract = "audit: ignore must be a file of ids, or a list of them"
            raise type(error)(f"{contract}, got {str(ignore)!r}, which cannot be read") from error
    ids = frozenset(line.partition("#")[0].strip() for line in ignore) - {""}
    if unknown := ids - {name for id in KINDS for name in names_of(id)}:
        raise ValueError(f"audit: ignore must hold ids of findings, got {some(sorted(unknown))}")
    return ids


def names_of(id: str) -> set[str]:
    """Return the names that select a finding: its id, and the first word of its id."""
    return {id, id.partition(".")[0]}


def verdict(audit: Audit, ignored: Iterable[str]) -> tuple[bool, str]:
    """Tell whether all findings are accepted, and return the report, which names these."""
    accepted = [one.id for one in audit.findings if names_of(one.id) & set(ignored)]
    words = f"{audit}\n\naccepted: {', '.join(dict.fromkeys(accepted))}" if accepted else str(audit)
    return audit.judgement.seen and len(accepted) == len(audit.findings), words


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
        self._observer.enter(watch_truncation(self._observer))
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        observer, self._observer, self._open = self._observer, None, False
        assert observer is not None
        with suppress(Done):  # this may complete the last window
            observer.steps.settle()
        ended = observer.watching and kind is None
        observer.close()
        record = replace(observer.record(ended), before=self._before)
        if observer.joined and kind in (None, Done):
            device = next(observer.joined[0].parameters()).device
            ranks = _of_all_processes(replace(record, before=None), device)
            record = replace(record, ranks=ranks, rank=dist.get_rank())
        self._record = record

    @property
    def record(self) -> Record:
        """The recorded events, for tests of rules and for `against`."""
        if self._record is None:
            state = "an open one" if self._open else "one that was not entered"
            raise RuntimeError(f"audit: the block must be closed, got {state}")
        return self._record

    @cached_property
    def judgement(self) -> Judgement:
        """The findings and questions that follow from the record."""
        return judge(self.record)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Certain mistakes, the worst first; empty for a right loop."""
        return self.judgement.findings

    @property
    def questions(self) -> tuple[Finding, ...]:
        """What may be intended, each with "right if ..." as its cure."""
        return self.judgement.questions

    def check(self, ignore: Ignored = ()) -> None:
        """Raise the report if there is a finding, or if nothing was seen.

        Args:
            ignore: ids of findings that are accepted, or the path of a file with an id per line.
                "clip" stands for all that begin with "clip.".

        Raises:
            RuntimeError: there is a finding that is not accepted, or nothing was seen.
            ValueError: `ignore` holds something that is no id.

        Example:
            >>> audit.check(ignore=["accumulation.partial"])
        """
        right, words = verdict(self, ids_of(ignore))
        if not right:
            raise RuntimeError(words)

    def __str__(self) -> str:
        if self._record is None:
            return "accumext audit: open" if self._open else "accumext audit: not entered"
        return _report.text(self.record, self.judgement)

    def to_json(self) -> dict[str, Any]:
        """Return findings, questions, checks and windows as plain lists, numbers and strings."""
        return _report.as_json(self.record, self.judgement)

    def plot(self, path: str | Path | None = None) -> Any:
        """Return a matplotlib figure: the windows' time line, and the bytes of each pass's graph.

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
        """Return the distance of a truncated gradient from the exact one, for one batch.

        Call it inside the block, with the arguments of `accumext.tbptt`. Gradients, buffers and
        generators stay as they are. Both gradients are computed in segments of steps that are run
        again, so that only the states of all steps are kept.

        Returns:
            `|truncated - exact| / |exact|`, over the parameters of model and optimizer.
        """
        given = locals()
        if self._observer is None or not self._open:
            raise RuntimeError("audit: measure_truncation must be called inside the block")
        if not self._observer.parameters.tensors:
            raise RuntimeError("audit: model must be given to measure before a pass, got None")
        return of_tbptt(self._observer, given)


def audit(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    windows: int = 4,
    against: Audit | None = None,
) -> Audit:
    """Run any training loop under observation, and read what it does wrongly.

    Nothing that the loop computes changes. While the block is open, backward passes, steps,
    `zero_grad`, `clip_grad_norm_`, GradScaler, schedulers and averages of the model are observed:
    passes' gradients as eight numbers per parameter, the factors of the losses, the tensors that
    graphs keep. After `windows` windows the loop runs unobserved. A pass that
    DistributedDataParallel reduces is compared with those of the other processes, which communicate
    once when the block closes: open the block on all of them.

    Args:
        model: names the parameters, and says which of them no optimizer has. None: the modules that
            have the parameters which passes reach.
        optimizer: of torch or accumext, bare or as Accelerate or Lightning wrap it. None: every
            optimizer of torch that steps inside the block.
        windows: steps of the optimizer to observe; with several optimizers, until each has as many,
        or one has four times as many.
        against: an audit of the same loop, closed; gradients that differ are a finding.

    Returns:
        An `Audit`, with `findings`, `questions`, `check()`, `plot()` and `to_json()`, which prints
        as a report of at most 30 lines.

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
        _fail_type("model", "be an nn.Module or None", model)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        _fail_type("optimizer", "be an optimizer or None", optimizer)
    if isinstance(windows, bool) or not isinstance(windows, int):
        _fail_type("windows", "be an int", windows)
    if windows < 1:
        raise ValueError(f"audit: windows must be at least 1, got {windows}")
    if against is not None and not isinstance(against, Audit):
        _fail_type("against", "be an audit or None", against)
    before = None if against is None else replace(against.record, before=None)
    return Audit(Observer(model, optimizer, windows), before)


def _of_all_processes(own: Record, device: torch.device) -> tuple[Record, ...]:
    """Return the records of all processes, sent as bytes: torch's `all_gather_object` needs NumPy,
    which torch itself does not."""
    if "cpu:" in dist.get_backend_config():
        device = torch.device("cpu")
    data = bytearray(pickle.dumps(own))

    def gather(mine: Tensor) -> list[Tensor]:
        each = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(each, mine.to(device))
        return [one.cpu() for one in each]

    most = max(int(size) for size in gather(torch.tensor([len(data)])))
    sent = torch.frombuffer(data.ljust(most, b"\0"), dtype=torch.uint8)
    buffers = [bytearray(most) for _ in range(dist.get_world_size())]
    for buffer, received in zip(buffers, gather(sent), strict=True):
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(received)
    return tuple(pickle.loads(buffer) for buffer in buffers)


def _fail_type(argument: str, contract: str, got: object) -> NoReturn:
    kind = f"a {str(got.dtype)[6:]} tensor" if isinstance(got, Tensor) else type(got).__name__
    raise TypeError(f"audit: {argument} must {contract}, got {kind}")
