"""What scripts for PyTorch give its DistributedDataParallel: whether it is so here, and the way out where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.device import Device, named_device
from framework.nn.module import Module

_NO_MATTER = "leave it out: it changes no result"
_WAYS_OUT = {
    "batched_grad_copy": _NO_MATTER,
    "bucket_cap_mb_list": "give bucket_cap_mb, one size for all buckets",
    "check_reduction": _NO_MATTER,
    "delay_all_reduce_named_params": _NO_MATTER,
    "device_mesh": "give process_group what flow.distributed.new_group(ranks) returns",
    "dim": "leave it out: each rank gives the module its own part of the data, which is not cut again",
    "forward_sync_buffers": "here it is called broadcast_buffers",
    "init_sync": "leave it out: parameters and buffers always become those of the first rank",
    "mixed_precision": "convert the module, on a GPU, by .to(flow.bfloat16) before it is wrapped",
    "param_to_hook_all_reduce": _NO_MATTER,
    "skip_all_reduce_unused_params": _NO_MATTER,
}


def check_devices(module: Module, device_ids: Sequence[Device | str | int] | None, output_device: Any) -> None:
    """Raises ValueError unless what is given is the one device that the module lies on. None says nothing."""
    if device_ids is not None and not (isinstance(device_ids, list | tuple) and len(device_ids) <= 1):
        raise ValueError(
            f"device_ids is a list with the rank's one device, got {device_ids!r}: start a rank for each GPU"
        )
    for name, given in ("device_ids", device_ids[0] if device_ids else None), ("output_device", output_device):
        if given is None:
            continue
        device = named_device(given)
        held = sorted({str(parameter.device) for parameter in module.parameters()})
        if held != [str(device)]:
            raise ValueError(
                f"{name} says {device}, the module lies on {', '.join(held)}: move it first, by .to('{device}'), or leave"
                f" {name} out"
            )


def refuse(others: Mapping[str, object]) -> None:
    """Raises TypeError for an argument that DistributedDataParallel does not have."""
    for name in others:
        way_out = _WAYS_OUT.get(name, "help(flow.nn.parallel.DistributedDataParallel) says what it takes")
        raise TypeError(f"DistributedDataParallel has no argument {name}: {way_out}")
