"""DistributedDataParallel: the same module on every rank, each with its own data, trained as if it were one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import inf
from typing import Any

import numpy as np

from framework import distributed
from framework.autograd import is_grad_enabled
from framework.device import Device
from framework.distributed.world import chosen_group
from framework.nn.module import Module
from framework.nn.parallel.agreement import check_agreement
from framework.nn.parallel.arguments import check_devices, refuse
from framework.nn.parallel.buffers import FlatBuffers
from framework.nn.parallel.join import BUCKETS, BUFFERS, Join
from framework.nn.parallel.reducer import Reducer, tensors_in
from framework.nn.sync_batch_norm import SyncBatchNorm
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.words import kind_of

_MB = 1024 * 1024


class DistributedDataParallel(Module):
    """Averages the gradients of `module` over the ranks of a group during backward, and keeps its buffers alike.

    Made on every rank, with the same module on each: parameters and buffers become those of the group's first rank. From then
    on every rank calls it on data of its own, and its optimizer does the same step as all others'. A parameter that no rank
    used has no gradient; one that some used has a gradient on all.

    `broadcast_buffers`: before each forward of a training the buffers become those of the first rank again (counters of
    batches apart, which every rank counts alike). `bucket_cap_mb` (MiB): so much is averaged at once.
    `gradient_as_bucket_view`: gradients lie where they are averaged, and backward writes them there; without it they are
    copied there and back. `process_group`: the ranks to train with, all of them where it is None.

    `device_ids` and `output_device` may name the device that the module lies on; inputs are not moved there.
    `find_unused_parameters` and `static_graph` change nothing: each backward may use other parameters, on each rank.

    Its parameters may be frozen, unfrozen, converted and moved later, on all ranks alike, but not replaced by others.

    Raises ValueError, on every rank, where the ranks' modules have not the same parameters and buffers; ValueError for another
    device than the module's, and TypeError for what PyTorch's takes besides, each with the way out.
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[Device | str | int] | None = None,
        output_device: Device | str | int | None = None,
        *,
        broadcast_buffers: bool = True,
        process_group: distributed.Group | None = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse(others)
        if not isinstance(module, Module):
            raise TypeError(f"DistributedDataParallel takes a Module; got {kind_of(module)}")
        if not (isinstance(bucket_cap_mb, int | float) and 0 < bucket_cap_mb < inf):
            raise ValueError(f"bucket_cap_mb is a size in MiB above 0, not {bucket_cap_mb!r}")
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{type(module).__name__} has no parameters, so there is nothing to average")
        check_devices(module, device_ids, output_device)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.bucket_cap_mb = bucket_cap_mb
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.group = chosen_group(process_group)
        self.joining: Join | None = None
        self._averages = True
        # What the buckets were made for; None where there are none that the ranks agree on.
        self._kinds: tuple[list[Any], ...] | None = None
        # Walking through all modules in every step would take longer than all else here.
        self._all = list(module.parameters())
        self._changes = Module.changes
        check_agreement(module, self.group)
        self._flat_buffers = FlatBuffers(module)
        self.broadcast_all_from(self.group.ranks[0])
        self._make_reducer()

    @property
    def device(self) -> Device:
        """The device of its first parameter."""
        return self._all[0].device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on this rank's data."""
        records = is_grad_enabled()
        averages = records and self._averages
        seen = None
        if averages:
            if self._changes != Module.changes:
                self._check_same_parameters()
            if self.training:
                seen = [parameter.array for parameter in self._all]
                if self._is_stale(seen):
                    self._remake_reducer()
                if self.broadcast_buffers:
                    first = self.joining.announce(BUFFERS) if self.joining else self.group.ranks[0]
                    self.broadcast_buffers_from(first)
        outputs = self.module(*args, **kwargs)
        if averages and self._has_changed(seen):
            # Not in training: one rank may evaluate alone. What takes them all waits for backward.
            for output in tensors_in(outputs):
                if output.node is not None:
                    output.register_hook(self._remake_in_backward)
        elif records:
            self.reducer.prepare(outputs, averages=averages)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward of a forward within it adds to this rank's gradients alone; the next one outside averages the sum."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def join(self) -> Join:
        """A context for the loop over data of which ranks have different amounts.

        Ranks that have none left take part in the averages with zeros until all are done; then every rank has the parameters
        and buffers of the last one. Raises ValueError where the module synchronises batch statistics, which needs data.
        """
        for name, module in self.module.named_modules():
            if isinstance(module, SyncBatchNorm):
                raise ValueError(
                    f"join() cannot be used with SyncBatchNorm ({name}): a rank without data has no statistics to give"
                )
        return Join(self)

    def broadcast_buffers_from(self, src: int) -> None:
        """Replaces the buffers of all ranks by those of rank `src`."""
        self._flat_buffers.broadcast(src, self.group)

    def broadcast_all_from(self, src: int) -> None:
        """Replaces parameters and buffers of all ranks, counters too, by those of rank `src`."""
        for held in (*self.module.parameters(), *self.module.buffers()):
            distributed.broadcast(held.detach(), src, self.group)

    def load_state_dict(self, state: Mapping[str, Tensor | np.ndarray], *, strict: bool = True) -> None:
        """As a module does; the names may begin with `module.` or not. Called on every rank, with the same state."""
        super().load_state_dict(state, strict=strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Another one over a copy of the module, made on every rank."""
        return DistributedDataParallel(
            deepcopy(self.module, memo),
            broadcast_buffers=self.broadcast_buffers,
            process_group=self.group,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedDataParallel belongs to running processes: pickle its .module, or its state_dict()"
        )

    def describe(self) -> str:
        return f"{self.group.size} ranks, buckets of {self.bucket_cap_mb:g} MiB"

    def _make_reducer(self) -> None:
        learned = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.reducer = Reducer(
            learned, self.group, int(self.bucket_cap_mb * _MB), as_views=self.gradient_as_bucket_view
        )
        self.reducer.joining = self.joining
        self._kinds = self._read_kinds([parameter.array for parameter in self._all])

    def make_buckets_again(self) -> None:
        """For parameters that were frozen, unfrozen, moved or converted since, on every rank."""
        # Where they are refused, all ask again in the next forward, also those whose parameters are as they were by then.
        self._kinds = None
        check_agreement(self.module, self.group)
        self.reducer.close()
        self._make_reducer()

    def _remake_reducer(self) -> None:
        if self.joining is not None:
            self.joining.announce(BUCKETS)
        self.make_buckets_again()

    def _remake_in_backward(self, gradient: Tensor) -> None:
        if self._has_changed(None):
            self._remake_reducer()
            self.reducer.prepare(None, averages=True)
        self.reducer.reached(gradient)

    def _check_same_parameters(self) -> None:
        known = set(map(id, self._all))
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in known:
                raise RuntimeError(
                    f"parameter {name} came into the module after DistributedDataParallel was made, which averages those it"
                    " was made with: change the module first, then wrap it"
                )
        self._changes = Module.changes

    def _has_changed(self, seen: list[Array] | None) -> bool:
        """As `_is_stale`, at less cost where buckets fit the arrays in `seen` and the parameters still have these."""
        arrays = [parameter.array for parameter in self._all]
        if arrays != seen or self._kinds is None:
            return self._is_stale(arrays)
        return self._kinds[0] != [parameter.requires_grad for parameter in self._all]

    def _is_stale(self, arrays: list[Array]) -> bool:
        """Whether the buckets are not made for the parameters, which have these arrays, as they are."""
        return self._kinds != self._read_kinds(arrays)

    def _read_kinds(self, arrays: list[Array]) -> tuple[list[Any], ...]:
        """What buckets depend on."""
        return (
            [parameter.requires_grad for parameter in self._all],
            [array.layout for array in arrays],
            [array.storage.device for array in arrays],
        )
