"""Starts a script on several ranks: `python -m framework.distributed.launch --nproc-per-node N script.py ARGUMENTS`.

Every rank is a process with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. The first that fails
ends the others, its message comes last, and its exit code is the launcher's. Options are torchrun's where they mean the same.
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from framework.distributed.endings import answers_at
from framework.distributed.rank_processes import Plan, make_room, run

# More ranks on one machine are a slip of the hand, and would take all its processes.
MOST_RANKS = 4096

# What torchrun has, and what there is in its place.
_MEETING = "leave it out: the ranks of one machine find each other, those of several by --master-addr and --master-port"
_OUTPUT = "send the launcher's own output to a file, where each line says its rank"
_SCRIPT = "leave it out, and give a Python script, or a module after -m"
_REFUSED = {
    "--rdzv-backend": _MEETING,
    "--rdzv-endpoint": _MEETING,
    "--rdzv-id": _MEETING,
    "--rdzv-conf": _MEETING,
    "--max-restarts": "leave it out: the first rank that fails ends the others, and none is started anew",
    "--log-dir": _OUTPUT,
    "--redirects -r": _OUTPUT,
    "--tee -t": _OUTPUT,
    "--no-python": _SCRIPT,
    "--run-path": _SCRIPT,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the ranks of this machine; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    local_size = _rank_count(parser, options.nproc_per_node)
    command = _command(parser, options)
    refusal = make_room(local_size, prefix=not options.no_prefix)
    if refusal is not None:
        parser.error(refusal)
    try:
        with _reserve(parser, options) as reserved, _claim(parser, options, reserved) as questions:
            port = options.master_port or reserved.getsockname()[1]
            plan = Plan(
                command=command,
                local_size=local_size,
                first_rank=options.node_rank * local_size,
                world_size=options.nnodes * local_size,
                variables={
                    "MASTER_ADDR": options.master_addr,
                    "MASTER_PORT": str(port),
                    "LOCAL_WORLD_SIZE": str(local_size),
                    "GROUP_RANK": str(options.node_rank),
                    **_threads(local_size),
                },
                prefix=not options.no_prefix,
                questions=questions,
            )
            return run(plan)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        parser.error(f"too few open files: {limit} are allowed here (ulimit -n), which has to be raised")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage that would push it out of sight."""
        self.exit(2, f"launch: {message}; --help says more\n")

    def add_option(self, *names: str, help: str, **settings: Any) -> None:
        """An option; its first name may be spelt with underscores too, as torchrun's may, which --help leaves out."""
        self.add_argument(*names, help=help, **settings)
        older = "--" + names[0][2:].replace("-", "_")
        if older not in names:
            self.add_argument(older, help=argparse.SUPPRESS, **settings)


class _Refusal(argparse.Action):
    """An option that is not here; `const` is the way out."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        parser.error(f"{option_string} is torchrun's, and not here: {self.const}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m framework.distributed.launch",
        description="Start a Python script on several ranks, each a process.",
        epilog="Exit codes: that of the first rank that failed (128 + its number for a signal), 130 after Ctrl-C, 2 where"
        " nothing could be started, or the output not be written."
        " OMP_NUM_THREADS is set to the cores divided by the ranks where it is not set.",
        allow_abbrev=False,
    )
    add = parser.add_option
    add("--nproc-per-node", metavar="N", default="1", help="ranks on this machine: a number, or `gpu` for one per GPU")
    add("--nnodes", metavar="N", type=int, default=1, help="machines; each runs this command")
    add("--node-rank", metavar="R", type=int, default=0, help="which of the machines this is, from 0")
    add("--master-addr", metavar="A", default="127.0.0.1", help="the address of machine 0")
    add("--master-port", metavar="P", type=int, help="a free port there; found where not given, on one machine")
    add("--standalone", action="store_true", help="one machine and a port that is found: as without it")
    add("--no-prefix", action="store_true", help="leave the ranks' output as it is, without `[rank 0]` in front")
    add("--module", "-m", action="store_true", help="SCRIPT is a module, as for `python -m`")
    for names, way_out in _REFUSED.items():
        add(*names.split(), action=_Refusal, nargs="?", const=way_out, help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT")
    rest = parser.add_argument("script_arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    rest.required = False  # else said to be missing
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.nnodes < 1 or not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node-rank {options.node_rank} of --nnodes {options.nnodes}: machines count from 0")
    if options.standalone and options.nnodes > 1:
        parser.error(f"--standalone is for one machine, --nnodes {options.nnodes} for several: leave one of them out")
    if options.nnodes > 1 and (options.master_port is None or options.master_addr == "127.0.0.1"):
        parser.error("several machines need --master-addr and --master-port, the same on each")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        parser.error(f"--master-port {options.master_port} is no port: they go from 1 to 65535")
    for name, stream in (("output", sys.stdout), ("error", sys.stderr)):
        if stream is None and not options.no_prefix:  # closed before Python started
            parser.error(
                f"standard {name} is closed, and the ranks' output goes there: send it elsewhere, or --no-prefix"
            )


def _rank_count(parser: argparse.ArgumentParser, text: str) -> int:
    if text == "gpu":
        from framework import cuda

        if not cuda.is_available():
            parser.error(f"--nproc-per-node gpu: {cuda.why()}")
        return cuda.device_count()
    # Its length first: int() refuses thousands of digits.
    if not text.isdecimal() or len(text) > len(str(MOST_RANKS)) or not 1 <= int(text) <= MOST_RANKS:
        parser.error(f"--nproc-per-node takes a number from 1 to {MOST_RANKS}, or `gpu`; got {text!r}")
    return int(text)


def _reserve(parser: argparse.ArgumentParser, options: argparse.Namespace) -> socket.socket:
    """A socket that holds the port until the end, so that nobody else is given it; rank 0 can listen at it all the same."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if options.node_rank > 0:
        return holder
    try:
        holder.bind(("", options.master_port or 0))
    except OSError as refused:
        holder.close()
        parser.error(
            f"port {options.master_port} cannot be had ({refused.strerror}): give a free one, or leave --master-port out"
        )
    return holder


def _claim(parser: argparse.ArgumentParser, options: argparse.Namespace, reserved: socket.socket) -> socket.socket:
    """Where the ranks can ask who has ended.

    It also keeps the machine's other launches off the port until rank 0 listens at it: their ranks would come to ours.
    """
    claim = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        port = options.master_port or reserved.getsockname()[1]
        try:
            claim.bind(answers_at(options.master_addr, port, options.node_rank))
            claim.listen(MOST_RANKS)
        except OSError:
            claim.close()
            parser.error(
                f"port {port} is another launch's on this machine: give a free one, or leave --master-port out"
            )
    return claim


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    if options.module:
        return (sys.executable, "-m", options.script, *options.script_arguments)
    if not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    return (sys.executable, options.script, *options.script_arguments)


def _threads(local_size: int) -> dict[str, str]:
    """The ranks share the cores. Who sets the variable knows better."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // local_size))}


if __name__ == "__main__":
    sys.exit(main())
