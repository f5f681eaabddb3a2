"""What `to()` of a tensor or a module is asked for: a device, an element type, or both, in PyTorch's spellings."""

from __future__ import annotations

from typing import Any, NamedTuple

from framework.device import Device, named_device
from framework.dtype import ALL, DType, by_name

_TYPE_NAMES = {dtype.name for dtype in ALL}


class Destination(NamedTuple):
    """Where something is to be, and as what; None for what stays as it is."""

    device: Device | None
    dtype: DType | None


def destination(target: Any, dtype: Any, device: Any) -> Destination:
    """What `to(target, dtype=…, device=…)` means. A target is a device, a type, or something that lies on one and has one.

    Raises TypeError where nothing is asked for, or the same thing twice, and for what is neither.
    """
    if isinstance(target, DType):
        if dtype is not None:
            raise TypeError(f"to() takes a device, then an element type; got two types, {target!r} and {dtype!r}")
        target, dtype = None, target
    elif isinstance(target, str) and target in _TYPE_NAMES:
        raise TypeError(f"to() takes an element type as an object: pass {by_name(target)!r}, not {target!r}")
    elif hasattr(target, "dtype") and isinstance(getattr(target, "device", None), Device):
        target, dtype = target.device, dtype or target.dtype
    if target is not None and device is not None:
        raise TypeError(f"to() takes one device; got {target!r} and {device!r}")
    where = device if target is None else target
    if where is None and dtype is None:
        raise TypeError(
            "to() takes a device, such as 'cuda', an element type, such as flow.float32, or both; got neither"
        )
    if dtype is not None and not isinstance(dtype, DType):
        raise TypeError(f"to() takes an element type as an object, such as flow.float32; got {dtype!r}")
    return Destination(None if where is None else named_device(where), dtype)
