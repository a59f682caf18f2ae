"""Rank and world size of a process, from each launcher's environment."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.core.errors import DslparError
from dslpar.distributed.bootstrap import local_device_index, read_distributed_env
from dslpar.distributed.distributed_env import DistributedEnv
from tests.support.runs import mpirun, start

LAUNCHED = {
    "nobody": ({}, DistributedEnv()),
    "deepspeed": (
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_SIZE": "4",
            "MASTER_ADDR": "n0",
            "MASTER_PORT": "29501",
        },
        DistributedEnv(5, 8, 1, 4, "n0", 29501),
    ),
    "torchrun": (
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "n0",
            "MASTER_PORT": "1",
        },
        DistributedEnv(5, 8, 1, 4, "n0", 1),
    ),
    "mpirun with an address": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "n0",
        },
        DistributedEnv(3, 4, 1, 2, "n0", 29500),
    ),
    "mpiexec of MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        DistributedEnv(1, 2, 1, 2, "127.0.0.1", 29500),
    ),
    "srun": (
        {
            "SLURM_PROCID": "9",
            "SLURM_STEP_NUM_TASKS": "16",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS_PER_NODE": "8",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
        },
        DistributedEnv(9, 16, 1, 8, "gpu07", 29500),
    ),
    "srun with a list of tasks": (
        {
            "SLURM_PROCID": "9",
            "SLURM_STEP_NUM_TASKS": "11",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "2",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
            "SLURM_STEP_NODELIST": "gpu[07-09]",
            "SLURM_JOB_ID": "71",
        },
        DistributedEnv(9, 11, 1, 3, "gpu07", 27707),
    ),
    "torchrun inside Slurm": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "LOCAL_WORLD_SIZE": "4"}
        | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "TORCHELASTIC_RUN_ID": "none"}
        | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1"},
        DistributedEnv(3, 4, 1, 4, "n0", 1),
    ),
    "a script that srun starts, and that sets what torch wants": (
        {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,2"}
        | {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1"},
        DistributedEnv(5, 6, 1, 2, "n0", 1),
    ),
    "a script that sets what torch wants, on several hosts": (
        {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1"},
        DistributedEnv(1, 8, 1, 7, "n0", 1),
    ),
    "a script that sets what torch wants, on one": (
        {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        DistributedEnv(1, 8, 1, 8, "127.0.0.1", 1),
    ),
    "a batch script of Slurm, without srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        DistributedEnv(),
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_the_environment_of_each_launcher_is_read(launcher: str) -> None:
    environ, expected = LAUNCHED[launcher]
    assert read_distributed_env(environ) == expected


OMPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_two_mpi_jobs_on_one_host_meet_at_different_ports() -> None:
    ports = {
        read_distributed_env(OMPI | {"PMIX_NAMESPACE": name}).master_port for name in ("prterun-a-1@1", "prterun-a-2@1")
    }
    assert len(ports) == 2
    assert all(10_000 <= port < 30_000 for port in ports)


def test_two_steps_of_one_slurm_job_meet_at_different_ports() -> None:
    """`srun -n 4 ... & srun -n 4 ... &` on one host."""
    step = dict(LAUNCHED["srun"][0]) | {"SLURM_JOB_ID": "71"}
    assert len({read_distributed_env(step | {"SLURM_STEP_ID": number}).master_port for number in ("0", "1", "2")}) == 3


def test_a_rank_that_sees_its_own_accelerator_alone_takes_that() -> None:
    """With Slurm's --gpus-per-task, each rank sees only its own accelerator, as device 0."""
    dist_env = DistributedEnv(5, 16, 5, 8)
    assert [local_device_index(dist_env, seen) for seen in (0, 1, 4, 8)] == [5, 0, 5, 5]


def test_several_hosts_need_an_address() -> None:
    with pytest.raises(DslparError, match="MASTER_ADDR") as caught:
        read_distributed_env(OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert "-x MASTER_ADDR" in caught.value.findings[0].help


def test_openmpi_knows_rank_0_s_host() -> None:
    code = "import os; from dslpar.cluster import pmix; print(pmix.host_of_rank_0(os.environ))"
    done = start([*mpirun(2), sys.executable, "-c", code], 60)
    assert (done.status, done.output.split()) == (0, [socket.gethostname()] * 2)


def test_ranks_of_mpirun_do_not_run_alone_because_of_variables_that_are_left_over() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = start([*mpirun(2), sys.executable, "-m", "dslpar.training", "--config", "configs/gpt_3d.py"], 60, **environ)
    assert done.status == 1
    assert done.output.count("HST229 launchers-disagree") == 1, "only rank 0 reports it"


def test_openmpi_s_variables_without_its_daemon() -> None:
    """A shell left over from a rank may have them. The start is refused, without waiting."""
    code = "import os; from dslpar.distributed import bootstrap; bootstrap.read_distributed_env(os.environ)"
    environ = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "gone", "PMIX_RANK": "0"}
    done = start([sys.executable, "-c", code], 60, **environ, OMPI_LIBDIR_LOC=str(Path(sys.prefix, "lib")))
    assert done.status == 1
    assert "HST202" in done.output


def test_tasks_at_arbitrary_nodes_need_an_address() -> None:
    """Slurm's list of nodes is sorted, but rank 0 is on the first node of the user's own list."""
    environ = dict(LAUNCHED["srun"][0]) | {"SLURM_DISTRIBUTION": "arbitrary"}
    with pytest.raises(DslparError, match="HST202"):
        read_distributed_env(environ)
    assert read_distributed_env(environ | {"MASTER_ADDR": "gpu08"}).master_addr == "gpu08"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE is 4, but LOCAL_RANK is not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_SIZE is 4, but MPI_LOCALRANKID is not set"),
        ({"WORLD_SIZE": "all"}, "WORLD_SIZE is 'all', not a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "", "LOCAL_RANK": "0"}, "RANK is '', not a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "MASTER_PORT": "any"}, "MASTER_PORT is 'any'"),
    ],
)
def test_half_a_place_is_refused_not_run_as_many_worlds_of_one(environ: dict[str, str], message: str) -> None:
    with pytest.raises(DslparError, match=message) as caught:
        read_distributed_env(environ)
    assert caught.value.findings[0].code == "HST201"


def test_nobody_imports_torch_or_mpi_to_find_out() -> None:
    code = "import sys, dslpar.training; assert not {'torch', 'deepspeed', 'mpi4py', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- leaving ----

_LEAVES = """
import atexit, sys, threading, time
from dslpar.distributed.bootstrap import exit_process

class Destroyed:
    def __del__(self): print("destroyed")

kept = Destroyed()
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("said, ")
exit_process(3)
"""


def test_leaving_is_an_exit_without_destructors() -> None:
    """A destructor of torch sometimes aborts after a successful run."""
    done = subprocess.run([sys.executable, "-c", _LEAVES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said, thread\nexit function\n", "")


_LEAVES_A_POOL = """
from concurrent.futures import ThreadPoolExecutor
from dslpar.distributed.bootstrap import exit_process

pool = ThreadPoolExecutor(1)
pool.submit(print, "worked").result()
exit_process(3)
"""


def test_threads_of_a_pool_that_nobody_has_shut_down_end() -> None:
    """They wait for a callback of the interpreter. torch.compile leaves such a pool, which kept runs from ending."""
    command = [sys.executable, "-c", _LEAVES_A_POOL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "worked\n", "")
