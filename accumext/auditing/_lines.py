"""Where a loop is: the user's line that runs."""

from __future__ import annotations

import os
import sys
import sysconfig
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
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OURS):
            place = f"{os.path.basename(path)}:{frame.f_lineno}"
            if is_own(path):
                return place
            innermost = innermost or place
        frame = frame.f_back
    return innermost


def calls() -> list[FrameType]:
    """All calls that have not returned, the innermost first: that of who asks."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
