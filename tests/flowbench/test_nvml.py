"""What is made of the driver's answers: which GPUs there are, how they ran, and who held their memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from flowbench.measure import gpus
from flowbench.measure.gpu_memory import own_use
from flowbench.measure.gpus import GpuWatch, conditions, gpu_disturbances
from flowbench.nvml import Driver, Holders, Reading, open_driver, process_ids
from flowbench.record import machine
from flowbench.record.gpu import Gpu, GpuProcess, GpuUse, Range

MIB = 2**20
READING = Reading(1980, 3201, 40, 300.0, ())
NOBODY = Holders({}, 600 * MIB)


def opened() -> Driver:
    driver = open_driver()
    assert isinstance(driver, Driver)
    return driver


def test_a_gpu_is_recorded_as_its_driver_describes_it(gpu_driver: Callable) -> None:
    gpu_driver({"sm_max": 1980, "mem_max": 3201, "power_limit_mw": 700_000}, {"name": "Another"})
    box = machine.read_machine()
    assert box.gpus == (Gpu("A GPU", 140 * 2**30, 1980, 3201, 700.0), Gpu("Another", 140 * 2**30))
    assert (box.gpu_driver, box.gpu_cuda) == ("580.1", "13.0")


def test_a_gpu_without_memory_of_its_own_has_the_machines(gpu_driver: Callable) -> None:
    gpu_driver({"memory": None})
    box = machine.read_machine()
    assert box.gpus == (Gpu("A GPU", box.memory_bytes),)
    assert opened().holders(0).used_bytes is None


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, "ABC"),
        ("2,0", "CA"),
        ("GPU-bb", "B"),
        ("GPU-b,0", "BA"),
        ("", ""),
        ("1,-1,0", "B"),  # CUDA reads no further than the first that is none
        ("7,0", ""),
        ("GPU-", ""),  # names three
    ],
)
def test_gpus_are_those_that_cuda_leaves_visible_in_its_order(
    chosen: str | None, names: str, gpu_driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_driver(*({"name": name, "uuid": f"GPU-{name.lower() * 2}"} for name in "ABC"))
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    driver = opened()
    assert "".join(driver.device(gpu).name for gpu in range(len(driver))) == names
    assert len(machine.read_machine().gpus) == len(names)


def test_a_reading_has_what_the_driver_tells_and_none_for_the_rest(gpu_driver: Callable) -> None:
    gpu_driver(
        {"sm": 1410, "mem": 2619, "temperature": 83, "power_mw": 699_500, "reasons": 0x1 | 0x4 | 0x20, "busy": 99}
    )
    assert opened().read(0) == Reading(1410, 2619, 83, 699.5, ("power cap", "thermal slowdown"))
    assert opened().busy_percent(0) == 99
    gpu_driver({})
    assert opened().busy_percent(0) is None
    assert opened().read(0) == Reading(None, None, None, None, ())


def test_an_idle_gpu_is_not_slowed_down(gpu_driver: Callable) -> None:
    gpu_driver({"reasons": 0x1 | 0x2})  # idle, clocks that somebody set
    assert opened().read(0).slowed_by == ()


def test_without_driver_or_bindings_the_reason_is_told(gpu_driver: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_driver({})
    monkeypatch.delenv("GPU_DOUBLE")
    assert open_driver() == "NVML does not answer: Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    assert open_driver() == "NVML's Python bindings are not installed (python -m pip install nvidia-ml-py)"


@pytest.mark.parametrize(
    ("before", "after", "uses", "how"),
    [
        # Its own id is listed: what others hold, and what came meanwhile, is not its own.
        ([{7: 5}], [{7: 5, 100: 2000, 8: 3}], [(0, 2000)], "by its process id"),
        # A stray context on the second GPU shows.
        ([{}, {}], [{100: 2000}, {100: 500}], [(0, 2000), (1, 500)], "by its process id"),
        # In a container the driver knows it by another id.
        ([{7: 5}], [{7: 5, 4242: 2000}], [(0, 2000)], "as the only process that came to its GPU since"),
        ([{}, {}], [{4242: 2000}, {4242: 500, 7: 1}], [(0, 2000), (1, 500)], "as the only process"),
        (
            [{}],
            [{4242: 2000, 4243: 3000}],
            [],
            "not found: 2 processes came to its GPU since, none under an id of its own",
        ),
        # The driver lists it, but not how much it holds.
        ([{}], [{100: None}], [], "by its process id"),
    ],
)
def test_a_process_is_found_among_those_the_driver_lists(before: list, after: list, uses: list, how: str) -> None:
    def holders(listed: list) -> list[Holders]:
        return [Holders({pid: size and size * MIB for pid, size in each.items()}, None) for each in listed]

    found, said = own_use(holders(before), holders(after), frozenset({100}), 0, 1)
    assert found == tuple(GpuUse(gpu, size * MIB) for gpu, size in uses)
    assert said.startswith(how)


def test_where_the_driver_lists_nobody_the_growth_is_taken_if_it_can_be_one_process_only() -> None:
    before, after = [NOBODY, NOBODY], [Holders({}, 2600 * MIB), Holders({}, 600 * MIB + 1)]
    assert own_use(before, after, frozenset({100}), 0, 1) == (
        (GpuUse(0, 2000 * MIB),),
        "as the growth of the memory in use (the driver lists no process)",
    )
    assert own_use(before, after, frozenset({100}), 0, 2)[0] == ()
    assert own_use(before, before, frozenset({100}), 0, 1)[1].endswith("no more memory is in use than before")
    nothing = [Holders({}, None)] * 2
    assert own_use(nothing, nothing, frozenset({100}), 0, 1)[0] == ()
    assert own_use([], [], frozenset({100}), 0, 1)[1] == "not found: the driver lists 0 GPUs, this is rank 0"


def test_each_of_two_ranks_finds_the_process_on_its_own_gpu() -> None:
    before, after = [NOBODY, NOBODY], [Holders({4242: 20 * MIB}, None), Holders({4243: 30 * MIB, 4242: 5 * MIB}, None)]
    assert own_use(before, after, frozenset({100}), 0, 2)[0] == (GpuUse(0, 20 * MIB), GpuUse(1, 5 * MIB))


def test_this_process_knows_its_own_number() -> None:
    assert os.getpid() in process_ids()


def test_readings_become_ranges_and_shares() -> None:
    hot = Reading(1200, None, 88, 700.0, ("thermal slowdown",))
    seen = conditions(0, [READING, READING, READING, hot], NOBODY, NOBODY)
    assert seen.readings == 4
    assert seen.sm_clock_mhz == Range(1200, 1980, 1980)
    assert seen.memory_clock_mhz == Range(3201, 3201, 3201)
    assert seen.slowed_by == {"thermal slowdown": 0.25}
    assert [*gpu_disturbances([seen])] == [
        ("GPU slowed down", "GPU 0: thermal slowdown in 25% of 4 readings, SM clock 1200 to 1980 MHz")
    ]


def test_a_quiet_gpu_has_no_disturbances() -> None:
    rare = Reading(1980, 3201, 40, 300.0, ("power cap",))
    assert [
        *gpu_disturbances([conditions(0, [READING] * 20 + [rare], NOBODY, NOBODY), conditions(1, [], NOBODY, NOBODY)])
    ] == []


def test_a_neighbour_is_named_with_what_it_holds() -> None:
    seen = conditions(1, [READING], Holders({2**30: 512 * MIB}, 900 * MIB), Holders({2**30 + 1: None}, 400 * MIB))
    assert seen.others == (GpuProcess(2**30, 512 * MIB, None), GpuProcess(2**30 + 1, None, None))
    assert [text for _, text in gpu_disturbances([seen])] == [
        f"GPU 1: process {2**30} (name unknown) was on it too, holding 512 MiB",
        f"GPU 1: process {2**30 + 1} (name unknown) was on it too",
    ]


def test_memory_that_is_not_given_back_is_told() -> None:
    (told,) = gpu_disturbances([conditions(0, [READING], NOBODY, Holders({}, 3600 * MIB))])
    assert told == ("GPU memory", "GPU 0: 3000 MiB more are in use than before, though the cell's processes have ended")


def test_gpus_are_read_seldom_while_steps_run_and_once_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])

    class Counting:
        read_at: list[float] = []

        def holders(self, gpu: int) -> Holders:
            return NOBODY

        def read(self, gpu: int) -> Reading:
            self.read_at.append(now[0])
            return READING

    watch = GpuWatch(Counting(), [0])  # type: ignore[arg-type]
    for at, phase in [(0.0, "import"), (0.5, "barrier"), (1.0, "build"), (2.0, "warm-up"), (2.1, "warm-up"), (2.9, "steps"),
                      (3.1, "steps"), (4.2, "barrier"), (4.3, "end"), (4.31, "end"), (4.32, "end")]:  # fmt: skip
        now[0] = at
        watch.look(phase)
    assert Counting.read_at == [2.0, 3.1, 4.2, 4.3], (
        "and not before the first step, when clocks are those of an idle GPU"
    )
    assert watch.finish()[0].readings == 4
