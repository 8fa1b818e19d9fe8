"""The position of a loop: the line of the user's code that runs."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import CodeType, FrameType

import torch

_OURS = tuple(
    os.path.join(folder, "")
    for folder in (torch.__path__[0], os.path.dirname(os.path.dirname(__file__)))
)
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


def is_own(path: str) -> bool:
    """Tell whether a file is the user's: neither installed nor of the standard library."""
    return not path.startswith(_INSTALLED) and "site-packages" not in path


def line() -> str:
    """Return the running line of the loop; if a library has the loop, the user's line above it."""
    outside = [call for call in frames() if not call.f_code.co_filename.startswith(_OURS)]
    own = [call for call in outside if is_own(call.f_code.co_filename)]
    for call in (own or outside)[:1]:
        return f"{os.path.basename(call.f_code.co_filename)}:{call.f_lineno}"
    return ""


def runs_inside(code: CodeType) -> bool:
    """Tell whether a call of this function is running."""
    return any(call.f_code is code for call in frames())


def frames() -> list[FrameType]:
    """Return the frames of all running calls, the innermost first: that of the caller."""
    return [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
