"""Observers of calls of accumext's functions, such as an auditor.

After `observers.append(see)`, `tbptt` and `decode_loss` call `see(Call(function, arguments))`
before they run. If an observer calls the function itself, it is called for that call as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call that is about to run. Its arguments have not been checked.

    Attributes:
        function: `accumext.tbptt` or `accumext.decode_loss`.
        arguments: all arguments by name, defaults included.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]


observers: list[Callable[[Call], None]] = []


def tell(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call every observer; `arguments` are the `locals()` at the beginning of the function."""
    call = Call(function, dict(arguments))
    for see in tuple(observers):
        see(call)
