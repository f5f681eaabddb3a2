"""The doctor: what it finds on made-up machines, each with a way out; and that it runs on this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flowbench.commands import doctor
from flowbench.commands.doctor import (
    Check,
    Surroundings,
    disturbance_checks,
    engine_checks,
    format_examination,
    gpu_checks,
    library_checks,
    machine_checks,
)
from flowbench.engine_registry import load_engine
from flowbench.measure.disturbance import Counters
from flowbench.nvml import open_driver
from flowbench.record.run import Gpu, Machine

MACHINE = Machine("A CPU", "x86_64", 4, 8, 8, 2**34, (), None, "Linux 6", "CPython 3.11")
QUIET = Surroundings((), 0, 2**34, 2**40, Counters(0, 0, 0, 0, 0), Counters(1, 0.1, 0, 0.1, 0), (), None, True)


def notes(machine: Machine = MACHINE, **around: object) -> list[Check]:
    return [check for check in disturbance_checks(machine, replace(QUIET, **around)) if check.level != "ok"]


def test_a_quiet_machine_has_no_notes() -> None:
    assert notes() == []
    assert notes(governors=("performance",)) == []


@pytest.mark.parametrize(
    ("around", "subject", "said"),
    [
        (
            {"after": Counters(1, 3.1, 0, 0.1, 0), "busiest": ("ffmpeg 12",)},
            "other load",
            "use 3.0 of 8 cores (ffmpeg 12)",
        ),
        ({"after": Counters(1, 0.1, 0.5, 0.1, 0)}, "hypervisor", "0.50 cores are given to other guests"),
        ({"governors": ("powersave", "schedutil")}, "frequency scaling", "governor powersave, schedutil"),
        ({"swap_used_bytes": 2**30}, "swap", "1024 MiB are swapped out"),
        ({"available_bytes": 2**30}, "memory", "1.0 GiB are free"),
        ({"free_disk_bytes": 2**20}, "disk", "1 MiB are free here"),
        ({"openmp_threads": "16"}, "threads", "OMP_NUM_THREADS=16, but 8 cores may be used"),
        ({"peak_resets": False}, "memory peaks", "does not let them be reset"),
    ],
)
def test_each_disturbance_is_named_with_its_way_out(around: dict, subject: str, said: str) -> None:
    (check,) = notes(**around)
    assert check.subject == subject
    assert said in check.message
    assert check.way_out
    assert f"-> {check.way_out}" in format_examination([check])


def test_a_container_with_fewer_cores_than_the_machine_is_noted() -> None:
    (check,) = notes(replace(MACHINE, usable_cores=2))
    assert "2 of 8 cores may be used" in check.message


def test_gpus_and_the_default_run_are_told() -> None:
    checks = list(machine_checks(replace(MACHINE, gpus=(Gpu("NVIDIA H200", 140 * 2**30),), gpu_driver="580.1")))
    assert "NVIDIA H200, 140 GiB, driver 580.1" in [check.message for check in checks]
    assert "4 threads for every engine" in checks[-1].message


def test_a_machine_without_gpu_says_so() -> None:
    assert "none answers: cells run on the CPU" in [check.message for check in machine_checks(MACHINE)]


def test_the_gpu_is_told_with_its_driver_its_cuda_and_the_libraries_for_it() -> None:
    box = replace(MACHINE, gpus=(Gpu("NVIDIA H200", 140 * 2**30),), gpu_driver="580.1", gpu_cuda="13.0")
    assert "NVIDIA H200, 140 GiB, driver 580.1, CUDA 13.0" in [check.message for check in machine_checks(box)]
    found = library_checks(box, {"cupy-cuda13x": "14.2.0", "nvidia-cudnn-cu12": "9.19.1"})
    cupy, cudnn, nccl = found
    assert (cupy.level, cupy.message) == ("ok", "14.2.0 (cupy-cuda13x)")
    assert (cudnn.level, cudnn.message) == ("ok", "9.19.1 (nvidia-cudnn-cu12)")
    assert (nccl.level, nccl.way_out.split(" (")[0]) == ("note", "python -m pip install nvidia-nccl-cu13")


def test_an_older_driver_is_pointed_to_wheels_it_can_run() -> None:
    (cupy, *_) = library_checks(replace(MACHINE, gpus=(Gpu("A GPU", 1),), gpu_driver="570.8"), {})
    assert cupy.way_out == "python -m pip install cupy-cuda12x (or 'flowbench[cuda12]', which has all)"


def test_how_a_gpu_runs_and_who_is_on_it_is_told(gpu_driver: Callable) -> None:
    gpu_driver(
        {"sm": 345, "mem": 3201, "temperature": 31, "power_mw": 75_400, "busy": 0},
        {"sm": 1200, "reasons": 0x20, "busy": 64, "processes": [[77, 2**20]]},
        {},
    )
    quiet, warm, slowed, shared, silent = gpu_checks(open_driver())
    assert (quiet.subject, quiet.message) == ("GPU 0", "345 MHz SM, 3201 MHz memory, 31 °C, 75 W")
    assert (warm.subject, warm.message) == ("GPU 1", "1200 MHz SM")
    assert (slowed.level, slowed.message) == ("note", "slowed down by thermal slowdown")
    assert (shared.level, shared.message) == ("note", "others use it: process 77; it is busy 64 % of the time")
    assert silent.message == "the driver tells nothing of clocks, temperature or power"


def test_a_driver_that_cannot_be_asked_is_noted_with_the_way_out() -> None:
    (check,) = gpu_checks("NVML's Python bindings are not installed")
    assert (check.level, check.way_out) == ("note", "python -m pip install nvidia-ml-py")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_engine_that_cannot_use_the_gpu_is_noted_where_there_is_one(
    on_gpu: bool, toys: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "engine_names", lambda: ["toy"])
    monkeypatch.setattr(type(load_engine("toy")), "gpu_refusal", lambda self: "it is built for CPUs alone")
    assert ("it is built for CPUs alone" in [check.message for check in engine_checks(on_gpu)]) == on_gpu


def test_engines_are_listed_with_what_is_wrong_with_them(toys: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "engine_names", lambda: ["toy", "toy-missing", "toy-no-module"])
    toy, missing, broken, reference = engine_checks()
    assert (toy.level, missing.level, broken.level, reference.level) == ("ok", "note", "note", "note")
    assert "a_library_that_is_nowhere is not installed" in missing.message
    assert "No module named 'no_such_module'" in broken.message
    assert "no ratio" in reference.message
    monkeypatch.setattr(doctor, "engine_names", lambda: ["toy-missing"])
    assert list(engine_checks())[-1].level == "bad"


def test_an_engine_that_raises_when_asked_for_advice_is_noted_and_the_others_follow(
    toys: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> str:
        raise ValueError("broken")

    monkeypatch.setattr(doctor, "engine_names", lambda: ["toy", "toy-missing"])
    monkeypatch.setattr(type(load_engine("toy")), "advice", broken)
    toy, note, missing, _ = engine_checks()
    assert (toy.level, note.level, missing.level) == ("ok", "note", "note")
    assert note.message == "its advice() raised ValueError: broken"
    assert "is not installed" in missing.message


def test_it_runs_here() -> None:
    checks = doctor.examine()
    assert {"machine", "default run", "engine flow-eager"} <= {check.subject for check in checks}
