"""Devices: where a tensor's memory lies and its kernels run."""

from __future__ import annotations

_TYPES = ("cpu", "cuda")
# The index that a type without a number stands for.
_current = dict.fromkeys(_TYPES, 0)


class Device:
    """A device, such as `cpu` or `cuda:1`. Equal devices are the same object, so `is` compares them.

    `cuda` without a number is the current CUDA device: the first, or the one given to `flow.cuda.set_device`.
    """

    __slots__ = ("index", "type")
    _known: dict[tuple[str, int], Device] = {}

    type: str
    index: int

    def __new__(cls, name: str | Device, index: int | None = None) -> Device:
        if isinstance(name, Device):
            return name
        if not isinstance(name, str) or isinstance(index, bool):
            wrong = index if isinstance(name, str) else name
            raise TypeError(f"a device is given by its name, such as 'cpu' or 'cuda:1'; got {wrong!r}")
        kind, _, number = name.partition(":")
        if kind not in _TYPES or (number and not number.isdecimal()):
            raise ValueError(f"no device is called {name!r}; there are {', '.join(_TYPES)}")
        if index is not None and index < 0:
            raise ValueError(f"devices of a kind are numbered 0, 1, …; got {index}")
        key = (kind, int(number) if number else _current[kind] if index is None else index)
        if kind == "cpu" and key[1]:
            raise ValueError(f"there is one device 'cpu', whatever its processors; got number {key[1]}")
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


# A CUDA device, by itself, its name or its number; None is the current one.
DeviceLike = Device | str | int | None


def named_device(device: Device | str | int) -> Device:
    """The device that an argument means: by itself, by its name or, as in PyTorch, by the number of a GPU."""
    return Device("cuda", device) if isinstance(device, int) else Device(device)


def cuda_device(device: DeviceLike) -> Device:
    """The CUDA device that an argument means. Raises ValueError for the CPU."""
    wanted = named_device("cuda" if device is None else device)
    if wanted.type != "cuda":
        raise ValueError(f"this takes a CUDA device, such as 'cuda:1', or its number; got {wanted}")
    return wanted


def set_current(device: Device) -> None:
    """Lets the name of the device's type, without a number, stand for `device`."""
    _current[device.type] = device.index


cpu = Device("cpu")
