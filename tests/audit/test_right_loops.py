"""Right loops: the audit has looked, and has nothing to say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import right_kinds
import right_loops
import torch
from by_definition import Plain
from wrong_loops import N, Watch, of_rows, rows, sgd

import accumext

LOOPS = [  # those that stand in the two files under a name of their own
    loop
    for module in (right_loops, right_kinds)
    for name, loop in inspect.getmembers(module, inspect.isfunction)
    if loop.__module__ == module.__name__
    and list(inspect.signature(loop).parameters)[:1] == ["watch"]
    and inspect.signature(loop).parameters["watch"].default is accumext.audit
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_right_loop(loop: Callable[[Watch], Any]) -> None:
    """No finding; as many windows were seen as steps were made, or as were asked for"""
    torch.manual_seed(0)
    plain = loop(Plain)
    assert plain.steps
    torch.manual_seed(0)
    audit = loop()
    assert audit.findings == (), str(audit)
    audit.check()
    assert len(str(audit).splitlines()) <= 30
    skipped = plain.calls.count("scaler step") and plain.calls.count("scaler step") - len(
        plain.steps
    )
    seen = audit.to_json()["windows"]
    assert len(seen) == min(len(plain.steps) + skipped, plain.windows)


def test_the_loops_are_all_here() -> None:
    """Those of both files"""
    assert len(LOOPS) >= 35


def train(make: Callable[[torch.nn.Module], Any], divisor: int) -> None:
    """A loop that makes its model and optimizer by itself."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    optimizer = make(model)
    for i, (x, y) in enumerate(rows()):
        loss = of_rows(model, x, y) / divisor
        loss.backward()
        if (i + 1) % N == 0:
            optimizer.step()
            optimizer.zero_grad()


MAKERS = {
    "torch": sgd,
    "wrapper": lambda model: accumext.AccumulatingOptimizer(sgd(model)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_named(name: str) -> None:
    """`audit()` looks at the first optimizer that is made inside the block"""
    with accumext.audit() as audit:
        train(MAKERS[name], N)
    assert audit.findings == (), str(audit)
    assert len(audit.to_json()["windows"]) == 4
    with accumext.audit(windows=2) as audit:
        train(MAKERS[name], 1)
    assert [f.name for f in audit.findings] == ["divisor missing"]
    assert audit.findings[0].value == pytest.approx(N)
    assert len(audit.to_json()["windows"]) == 2


def test_the_same_run_twice() -> None:
    """`against` an equal run: nothing differs, bit by bit"""
    first = None
    for _ in range(2):
        torch.manual_seed(0)
        with accumext.audit(against=first) as audit:
            train(sgd, N)
        first = audit
    assert audit.findings == (), str(audit)


def test_findings_are_read_later() -> None:
    """The results wait for the end of the block"""
    with accumext.audit() as audit:
        for ask in (lambda: audit.findings, audit.check, audit.to_json, audit.plot):
            with pytest.raises(RuntimeError):
                ask()
        train(sgd, N)
    assert audit.findings == ()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"windows": 0}, ValueError),
        ({"windows": 1.5}, TypeError),
        ({"model": 1}, TypeError),
        ({"optimizer": "sgd"}, TypeError),
        ({"against": 1}, TypeError),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    """Errors in the form of the other operations"""
    (name,) = arguments
    with pytest.raises(error, match=rf"^audit: {name} must "):
        accumext.audit(**arguments)
