"""What memory is free here: the machine's, or what a container's limit leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flowbench.measure import memory

GIB = 2**30


@pytest.mark.parametrize(
    ("files", "free_gib"),
    [
        ({}, 20),
        ({"memory.max": "max", "memory.current": 3 * GIB, "memory.stat": "inactive_file 0"}, 20),
        ({"memory.max": 8 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 7\ninactive_file {GIB}"}, 6),
        ({"memory.max": 8 * GIB, "memory.current": 9 * GIB, "memory.stat": "anon 7"}, 0),
        ({"memory.max": 80 * GIB, "memory.current": 3 * GIB, "memory.stat": "inactive_file 0"}, 20),
        (
            {
                "memory/memory.limit_in_bytes": 8 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
            },
            6,
        ),
    ],
)
def test_a_container_has_what_its_limit_leaves(
    files: dict[str, object], free_gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * GIB))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert memory.free_bytes() == free_gib * GIB
