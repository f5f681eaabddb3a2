"""The fingerprint of the machine, of the libraries and of the working tree a run was measured with."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import psutil

from flowbench import nvml
from flowbench.errors import used_up
from flowbench.git import git_environment, why_unread
from flowbench.record.gpu import Gpu
from flowbench.record.run import Git, Machine

# Whose versions decide what is measured; those that are installed are recorded.
_DISTRIBUTIONS = (
    "flowbench",
    "numpy",
    "torch",
    "onednn-cpu-gomp",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-ml-py",
)


def read_machine() -> Machine:
    """The machine this runs on."""
    logical = psutil.cpu_count() or 1
    gpus, driver, cuda = _read_gpus()
    return Machine(
        cpu_model=_cpu_model(),
        architecture=platform.machine(),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        logical_cores=logical,
        usable_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        gpu_driver=driver,
        system=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        gpu_cuda=cuda,
    )


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container (cgroup 2 or 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join(Path("/sys/fs/cgroup", file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return max(1, min(cores, int(quota) // int(period)))
    return cores


def default_threads(machine: Machine) -> int:
    """One thread per physical core that may be used: more only get in each other's way in arithmetic."""
    return max(1, min(machine.physical_cores, machine.usable_cores))


def read_versions() -> dict[str, str]:
    """The versions of the libraries at hand, read from their metadata: nothing is imported."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_git(directory: Path) -> Git | None:
    """The commit of the working tree around `directory`; None outside of one, or without git."""
    root, commit = _git(directory, "rev-parse", "--show-toplevel"), _git(directory, "rev-parse", "HEAD")
    if root is None or commit is None:
        return None
    branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD")
    changes = _changes(Path(root))
    return Git(commit, None if branch in (None, "HEAD") else branch, changes is not None, changes)


def why_no_commit(directory: Path) -> str | None:
    """Why the commit of the repository around `directory` is not known; None where it is, and where there is no repository."""
    place = directory.resolve()
    if not any(os.path.exists(folder / ".git") for folder in (place, *place.parents)):
        return None
    try:
        done = _run(directory, "rev-parse", "HEAD")
    except subprocess.TimeoutExpired as error:
        return f"git does not answer within {error.timeout:.0f} s"
    except OSError as error:
        return f"git does not run: {error.strerror or error}{used_up(error)}"
    return why_unread(done.stderr) if done.returncode != 0 else None


def _changes(root: Path) -> str | None:
    """A digest of how the working tree differs from its commit: the diff, and name, size and time of new files.

    Reports are left out: a run writes them, and they change nothing that is measured.
    """
    where = ("--", ".", ":(exclude)reports")
    status = _git(root, "status", "--porcelain", *where)
    if status is None:
        return "unknown"  # git fails, or takes too long: not to be taken for a clean tree
    if not status:
        return None
    digest = hashlib.sha256((_git(root, "diff", "HEAD", "--binary", *where) or "").encode())
    names = (_git(root, "ls-files", "--others", "--exclude-standard", "-z", *where) or "").split("\0")
    for name in filter(None, names):
        with contextlib.suppress(OSError):  # it may be gone again
            state = (root / name).stat()
            digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = _run(directory, *arguments)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", directory, *arguments],
        capture_output=True, text=True, errors="replace", timeout=30, env=git_environment(),
    )  # fmt: skip


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def _read_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """The GPUs to use, their driver's version and its CUDA's; by the driver's own word, as this process must not open one."""
    driver = nvml.open_driver()
    if isinstance(driver, str):
        return _listed_gpus()
    gpus = tuple(Gpu(**asdict(driver.device(gpu))) for gpu in range(len(driver)))
    return (gpus, driver.version(), driver.cuda_version()) if gpus else ((), None, None)


def _listed_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """The same by the driver's tool, where NVML cannot be asked; it knows nothing of CUDA_VISIBLE_DEVICES."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return (), None, None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return (), None, None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if done.returncode == 0]
    rows = [row for row in rows if len(row) == 3 and row[1].isdigit()]
    gpus = tuple(Gpu(name, int(memory) * 2**20) for name, memory, _ in rows)
    return gpus, rows[0][2] if rows else None, None
