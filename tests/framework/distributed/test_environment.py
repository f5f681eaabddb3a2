"""Which rank a process is, read from the variables of every launcher."""

from __future__ import annotations

import re
from typing import Any

import pytest

from framework.distributed import init_process_group, is_initialized
from framework.distributed.environment import Environment, first_node, read_environment
from framework.distributed.errors import DistributedError

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "7",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("variables", "master"),
    [
        (TORCHRUN, "10.0.0.1"),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, "a"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        (MPICH | {"MPI_LOCALNRANKS": "4"}, "127.0.0.1"),
        (SLURM, "gpu07"),
        # srun with MPI's plugin sets both: Slurm knows the nodes.
        (SLURM | MPICH, "gpu07"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
        # Within a Slurm job, another launcher's word counts.
        (SLURM | {"SLURM_PROCID": "0"} | TORCHRUN, "10.0.0.1"),
    ],
)
def test_every_launcher_is_read(variables: dict[str, str], master: str) -> None:
    found = read_environment(variables)
    assert (found.rank, found.world_size, found.local_rank, found.master_addr) == (3, 4, 1, master)


def test_the_port_given_is_the_only_one() -> None:
    assert read_environment(TORCHRUN).ports == (29500,)


def test_beside_torchruns_own_store_another_port_is_agreed_on() -> None:
    agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
    places = [read_environment(agent | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}) for rank in range(4)]
    assert len({(place.ports, place.job) for place in places}) == 1
    assert 29500 not in places[0].ports
    restarted = read_environment(agent | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted.job != places[0].job


def test_jobs_without_a_port_do_not_meet_by_chance() -> None:
    here = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    one, two = (read_environment(OPEN_MPI | here | {"PMIX_NAMESPACE": name}) for name in "78")
    assert one.ports != two.ports
    assert one.job != two.job


def test_the_local_rank_may_be_unknown() -> None:
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}) == Environment(
        0,
        1,
        None,
        "127.0.0.1",
        read_environment({"RANK": "0", "WORLD_SIZE": "1"}).ports,
        "WORLD_SIZE=1",
        "launch or torchrun",
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "RANK and WORLD_SIZE are not set; start the ranks with `python -m framework.distributed.launch"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is no number"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (OPEN_MPI, "MASTER_ADDR is not set, and mpirun (Open MPI) does not say"),
    ],
)
def test_what_is_wrong_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(DistributedError) as refused:
        read_environment(variables)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a[1,2]b", "a1b"),
        ("n-[10]", "n-10"),
    ],
)
def test_slurms_short_notation(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            {"rank": 0, "world_size": 2},
            TypeError,
            "no argument rank: the environment says it; start the ranks with `python",
        ),
        ({"device_id": 1}, TypeError, "no argument device_id: leave it out, the rank's GPU is number LOCAL_RANK"),
        ({"timeuot": 3}, TypeError, "no argument timeuot: help(flow.distributed.init_process_group) says"),
        (
            {"init_method": "tcp://a:1"},
            ValueError,
            "init_method is env://, the environment that launchers set; got 'tcp",
        ),
        ({"backend": "gloo", "init_method": "env://"}, ValueError, "not 'gloo'; in place of gloo leave it out"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_what_scripts_for_pytorch_tell_init_process_group_has_a_way_out(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        init_process_group(**given)
    assert not is_initialized()
