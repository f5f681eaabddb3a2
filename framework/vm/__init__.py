"""How operations run: instructions and their dependences, streams, and memory."""

from framework.vm.allocator import CachingAllocator, OutOfMemoryError
from framework.vm.array import Array, Layout, channels_last_stride, contiguous_stride, dense_stride_like
from framework.vm.host_stream import HostStream
from framework.vm.instruction import Instruction
from framework.vm.machine import machine
from framework.vm.runtime import Runtime, borrowed, runtime, scratch
from framework.vm.storage import Storage
from framework.vm.stream import Mark, Stream

__all__ = [
    "Array",
    "CachingAllocator",
    "HostStream",
    "Instruction",
    "Layout",
    "Mark",
    "OutOfMemoryError",
    "Runtime",
    "Storage",
    "Stream",
    "borrowed",
    "channels_last_stride",
    "contiguous_stride",
    "dense_stride_like",
    "machine",
    "runtime",
    "scratch",
]
