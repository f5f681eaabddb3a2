"""Training a module on several ranks."""

from framework.nn.parallel.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
