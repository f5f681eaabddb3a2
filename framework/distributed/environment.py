"""Which rank this process is, as its launcher says it in environment variables."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from framework.distributed.errors import DistributedError

# Where a launcher gives no port of its own choice, one of these is taken, which one by the job's name.
_FIRST_PORT = 20000
_PORTS = 9000
_CANDIDATES = 8

HOW_TO_START = "start the ranks with `python -m framework.distributed.launch --nproc-per-node N script.py`"


@dataclass(frozen=True)
class Environment:
    """One rank's place. `ports` are where rank 0's store may listen, the first free one is taken; `job` tells jobs apart.

    `local_rank` is None where the launcher does not say it.
    """

    rank: int
    world_size: int
    local_rank: int | None
    master_addr: str
    ports: tuple[int, ...]
    job: str
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    """The variables by which one kind of launcher tells a rank its place."""

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


_LAUNCHERS = (
    _Launcher(
        "launch or torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("TORCHELASTIC_RUN_ID",)
    ),
    _Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    # Before PMI: srun sets PMI's variables too, and knows more.
    _Launcher(
        "srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), (), ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID")
    ),
    _Launcher(
        "mpirun (MPICH)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID",),
    ),
)


def read_environment(variables: Mapping[str, str]) -> Environment:
    """This process's place, read from the variables of the launch module, torchrun, mpirun or srun.

    Raises DistributedError, naming what is missing or wrong.
    """
    launcher = _find(variables)
    rank = _number(variables, launcher.rank)
    world_size = _number(variables, launcher.world_size)
    if not 0 <= rank < world_size:
        raise DistributedError(
            f"{launcher.rank}={rank} with {launcher.world_size}={world_size}: ranks count from 0 to one less than the"
            f" world size; {HOW_TO_START}"
        )
    local = [_number(variables, name) for name in launcher.local_rank if name in variables]
    return Environment(
        rank,
        world_size,
        local[0] if local else None,
        _master_addr(variables, launcher, world_size),
        _ports(variables, launcher),
        _job(variables, launcher),
        launcher.name,
    )


def _find(variables: Mapping[str, str]) -> _Launcher:
    for launcher in _LAUNCHERS:
        if launcher.rank in variables and launcher.world_size in variables:
            return launcher
    for launcher in _LAUNCHERS:
        pair = (launcher.rank, launcher.world_size)
        if any(name in variables for name in pair) and launcher.name != "srun":
            missing = next(name for name in pair if name not in variables)
            raise DistributedError(f"{' and '.join(pair)} go together, but {missing} is not set; {HOW_TO_START}")
    raise DistributedError(f"no launcher told this process its rank: RANK and WORLD_SIZE are not set; {HOW_TO_START}")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not re.fullmatch(r"\d{1,9}", text):
        raise DistributedError(f"{name}={text!r} is no number; {HOW_TO_START}")
    return int(text)


def _master_addr(variables: Mapping[str, str], launcher: _Launcher, world_size: int) -> str:
    """Where rank 0 is: MASTER_ADDR, or this machine where all ranks are known to be on it, or srun's first node."""
    if variables.get("MASTER_ADDR"):
        return variables["MASTER_ADDR"]
    local_sizes = [_number(variables, name) for name in launcher.local_size if name in variables]
    if world_size in local_sizes or world_size == 1 or variables.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    if launcher.name == "srun" and nodes:
        return first_node(nodes)
    raise DistributedError(
        f"MASTER_ADDR is not set, and {launcher.name} does not say that all {world_size} ranks are on one machine; set it to"
        " the address of rank 0's machine"
    )


def first_node(nodes: str) -> str:
    """The first host of Slurm's short notation: `gpu[03-05,9],login` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise DistributedError(f"SLURM_STEP_NODELIST={nodes!r} names no host; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def _ports(variables: Mapping[str, str], launcher: _Launcher) -> tuple[int, ...]:
    given = _number(variables, "MASTER_PORT") if variables.get("MASTER_PORT") else None
    # torchrun's agent keeps a store of its own at MASTER_PORT; its ranks have to meet beside it.
    taken = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if given is not None and not taken:
        if not 0 < given < 65536:
            raise DistributedError(f"MASTER_PORT={given} is no port: they go from 1 to 65535")
        return (given,)
    seed = zlib.crc32(f"{_job(variables, launcher)} {given}".encode())
    return tuple([_FIRST_PORT + (seed + i * 101) % _PORTS for i in range(_CANDIDATES)])


def _job(variables: Mapping[str, str], launcher: _Launcher) -> str:
    names = (*launcher.job, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", launcher.world_size)
    return " ".join([f"{name}={variables[name]}" for name in names if name in variables])
