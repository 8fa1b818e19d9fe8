"""`pytest_plugins = ["accumext.auditing.pytest_plugin"]` in conftest.py: the fixture `audited`.

The ini option `audit_ignore` lists ids of findings that a project has accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accumext.auditing._audit import Audit, audit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("audit_ignore", "ids of accepted findings", type="linelist", default=[])


@pytest.fixture
def audited(request: pytest.FixtureRequest) -> Iterator[Callable[..., Audit]]:
    """Yield `accumext.audit` for `with audited(model, optimizer): ...`; check it at the end."""
    audits: list[Audit] = []

    def opened(*args: Any, **options: Any) -> Audit:
        audits.append(audit(*args, **options))
        return audits[-1]

    yield opened
    for one in audits:
        one.check(ignore=request.config.getini("audit_ignore"))
