"""Where a loop is: the user's line that runs."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import FrameType

import torch

_OURS = tuple(
    os.path.join(folder, "")
    for folder in (torch.__path__[0], os.path.dirname(os.path.dirname(__file__)))
)
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


def is_own(path: str) -> bool:
    """Whether a file is the user's, and not of the standard library or installed."""
    return not path.startswith(_INSTALLED) and "site-packages" not in path


def line() -> str:
    """The line of the loop that is running: the user's own if it is in a library's loop."""
    outside = [call for call in calls() if not call.f_code.co_filename.startswith(_OURS)]
    own = [call for call in outside if is_own(call.f_code.co_filename)]
    for call in (own or outside)[:1]:
        return f"{os.path.basename(call.f_code.co_filename)}:{call.f_lineno}"
    return ""


def calls() -> list[FrameType]:
    """All calls that have not returned, the innermost first: that of who asks."""
    return [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
