"""Training on several ranks: bringing processes together, and collectives between them.

Start a script on every GPU or core with `python -m framework.distributed.launch --nproc-per-node N script.py`; it calls
`init_process_group()` first.
"""

from framework.distributed import functional
from framework.distributed.collectives import all_gather, all_reduce, barrier, broadcast, recv, reduce_scatter, send
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError
from framework.distributed.groups import Group
from framework.distributed.objects import all_gather_object, broadcast_object
from framework.distributed.reduction import ReduceOp
from framework.distributed.work import Work
from framework.distributed.world import (
    destroy_process_group,
    get_backend,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    new_group,
)

__all__ = [
    "CollectiveError",
    "CollectiveTimeoutError",
    "DistributedError",
    "Group",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "destroy_process_group",
    "functional",
    "get_backend",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce_scatter",
    "send",
]
