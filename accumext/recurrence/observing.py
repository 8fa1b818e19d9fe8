"""Who is told of calls of accumext's functions before they run, such as an auditor.

`observers.append(see)`: `tbptt` and `decode_loss` call `see(Call(function, arguments))`. An
observer that calls the function again, with other arguments, is told of that call as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call that is about to run, whose arguments have not been checked.

    Attributes:
        function: `accumext.tbptt` or `accumext.decode_loss`.
        arguments: all of them by name, also those that were left at their defaults.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]


observers: list[Callable[[Call], None]] = []


def tell(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call every observer; `arguments` are the function's `locals()` where it begins."""
    call = Call(function, dict(arguments))
    for see in tuple(observers):
        see(call)
