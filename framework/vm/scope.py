"""Where in the program we are: the modules and the operation at work, so that memory and faults can be named."""

from __future__ import annotations

import threading

# A linked list rather than a stack: an allocation keeps the frame it was made in at the cost of one reference.
Frame = tuple["Frame | None", str]


class _Here(threading.local):
    """The modules that a thread is in, or what backward walks there: the next operation's frame stands in this one."""

    frame: Frame | None = None


here = _Here()

# What is at work now. Every allocation reads it, so it is one variable for all threads: made anew for each operation from its
# own thread's frame, it is wrong at most where two threads compute at the same time, and right again with the next operation.
current: Frame | None = None


def path(frame: Frame | None) -> str:
    """The frame in words, outermost first: `layer1.0.conv1: conv2d`; empty where nothing is known."""
    names: list[str] = []
    while frame is not None:
        frame, name = frame
        names.append(name)
    if not names:
        return ""
    operation, *modules = names
    modules = [name for name in reversed(modules) if name]
    return f"{'.'.join(modules)}: {operation}" if modules else operation
