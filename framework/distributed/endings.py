"""Which ranks have ended, as the launch module tells it to those that wait for others.

It answers at a name in Linux's abstract namespace, which goes with its process: a rank that connects gets the numbers of this
machine's ranks that have ended, in one line. That tells a rank that is late from one that will never come.
"""

from __future__ import annotations

import os
import socket

_PATIENCE_S = 1.0


def answers_at(master_addr: str, master_port: int | str, machine: int | str) -> str:
    """Where the launch of a machine (number 0 keeps the port) answers."""
    return f"\0flow launch {master_port}" + (f" of {master_addr}, machine {machine}" if int(machine) else "")


def ended_ranks() -> set[int]:
    """The ranks of this machine that have ended; none where no launch module says so."""
    known = os.environ
    if not {"MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"} <= known.keys() or not known["GROUP_RANK"].isdecimal():
        return set()
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(_PATIENCE_S)
        try:
            asked.connect(answers_at(known["MASTER_ADDR"], known["MASTER_PORT"], known["GROUP_RANK"]))
            line = b""
            while chunk := asked.recv(65536):
                line += chunk
        except (
            OSError
        ):  # started by torchrun, by hand, on another system; or the launcher is busy, and asked again soon
            return set()
    return {int(number) for number in line.split()} if line.endswith(b"\n") else set()
