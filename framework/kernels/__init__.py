"""What a device can do: a table of kernels for each device, all with the names and meanings of `reference`."""

from __future__ import annotations

from framework.device import Device
from framework.kernels.table import Kernel, Table, kernel

__all__ = ["Kernel", "Table", "kernel", "table_for"]


def table_for(device: Device) -> Table:
    """The kernel table of `device`. On the CPU, oneDNN's kernels stand before NumPy's where oneDNN is there."""
    if device.type == "cuda":
        from framework.kernels import cuda

        return cuda.table()
    from framework.kernels import onednn, reference

    return onednn.table(reference.TABLE) if onednn.available() else reference.TABLE
