"""Where in the program we are: the modules and the operation at work, so that memory and faults can be named."""

from __future__ import annotations

Frame = tuple["Frame | None", str]

# A linked list rather than a stack: an allocation keeps the frame it was made in at the cost of one reference.
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
