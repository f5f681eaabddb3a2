"""Devices: where a tensor's memory lies and its kernels run."""

from __future__ import annotations

_TYPES = ("cpu",)


class Device:
    """A device, such as `cpu`. Equal devices are the same object, so `is` compares them."""

    __slots__ = ("index", "type")
    _known: dict[tuple[str, int], Device] = {}

    type: str
    index: int

    def __new__(cls, name: str | Device, index: int | None = None) -> Device:
        if isinstance(name, Device):
            return name
        kind, _, number = name.partition(":")
        if kind not in _TYPES or (number and not number.isdigit()):
            raise ValueError(f"no device is called {name!r}; there are {', '.join(_TYPES)}")
        key = (kind, int(number) if number else index or 0)
        if key not in cls._known:
            device = super().__new__(cls)
            device.type, device.index = key
            cls._known[key] = device
        return cls._known[key]

    def __repr__(self) -> str:
        return f"device({str(self)!r})"

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"

    def __reduce__(self) -> tuple:
        return (Device, (str(self),))


cpu = Device("cpu")
