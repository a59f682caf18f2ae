"""Command lines, from a job and its hosts; nothing is started but `mpirun --version`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dslpar.errors import DslparError
from dslpar.hostfile import Cluster, parse
from dslpar.launcher import LAUNCHERS, Facts, Plan, Request, default_launcher, look_around, plan_of

HERE = Facts(
    programs={name: name for name in ("python", "deepspeed", "mpirun", "srun", "torchrun")},
    mpi="openmpi",
    here=frozenset({"localhost"}),
    cores=4,
    port=12345,
)
GPUS = HERE._replace(accelerators=8, cores=64)
WORDS = ("--config", "cfg.py", "--resume", "train.steps=5")
ENDS = "dslpar.train --config cfg.py --resume train.steps=5"
ONE = "localhost slots=8\n"
TWO = "node1 slots=8\nnode2 slots=8\n"


def cluster(text: str) -> Cluster:
    return parse(text, "hosts")


def plan(launcher: str, text: str | None = None, facts: Facts = HERE, world: int = 8) -> Plan:
    hosts = cluster(text) if text is not None else None
    return plan_of(Request(launcher, hosts.world_size if hosts else world, WORDS, hosts), facts)


def lines(*args: object, **named: object) -> list[str]:
    return [command.shell() for command in plan(*args, **named).commands]  # type: ignore[arg-type]


ON_THIS_HOST = {
    "deepspeed": f"OMP_NUM_THREADS=1 deepspeed --quiet --num_gpus 8 --master_port 12345 --module {ENDS}",
    "openmpi": "mpirun -np 8 --bind-to none --oversubscribe -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=12345 "
    f"-x OMP_NUM_THREADS=1 python -m {ENDS}",
    "mpich": "mpirun -n 8 -bind-to none -genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT 12345 "
    f"-genv OMP_NUM_THREADS 1 python -m {ENDS}",
    "slurm": f"OMP_NUM_THREADS=1 srun --nodes 1 --ntasks 8 --ntasks-per-node 8 --kill-on-bad-exit=1 python -m {ENDS}",
    "torchrun": f"OMP_NUM_THREADS=1 torchrun --nproc_per_node 8 --standalone -m {ENDS}",
}


def facts_for(launcher: str) -> Facts:
    return HERE._replace(mpi="mpich") if launcher == "mpich" else HERE


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_this_host(launcher: str) -> None:
    assert lines(launcher, facts=facts_for(launcher)) == [ON_THIS_HOST[launcher]]


def test_a_hostfile_of_this_host_needs_no_ssh() -> None:
    """Both flags, or DeepSpeed runs `ssh localhost hostname -I` (FACTS 1.1)."""
    assert lines("deepspeed", ONE) == [
        "OMP_NUM_THREADS=1 deepspeed --quiet --hostfile hosts --no_ssh_check --master_addr 127.0.0.1 "
        f"--master_port 12345 --module {ENDS}"
    ]


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "slurm", "torchrun"])
def test_elsewhere_a_hostfile_of_this_host_changes_nothing(launcher: str) -> None:
    assert lines(launcher, ONE, facts_for(launcher)) == [ON_THIS_HOST[launcher]]


ON_TWO_HOSTS = {
    "deepspeed": [
        f"OMP_NUM_THREADS=1 deepspeed --quiet --hostfile hosts --master_addr node1 --master_port 12345 --module {ENDS}"
    ],
    "openmpi": [
        "mpirun -np 16 --bind-to none --host node1:8,node2:8 --map-by ppr:8:node -x MASTER_ADDR=node1 "
        f"-x MASTER_PORT=12345 -x OMP_NUM_THREADS=1 python -m {ENDS}"
    ],
    "mpich": [
        "mpirun -n 16 -bind-to none -hosts node1,node2 -ppn 8 -genv MASTER_ADDR node1 "
        f"-genv MASTER_PORT 12345 -genv OMP_NUM_THREADS 1 python -m {ENDS}"
    ],
    "slurm": [
        "OMP_NUM_THREADS=1 srun --nodes 2 --ntasks 16 --ntasks-per-node 8 --kill-on-bad-exit=1 "
        f"--nodelist node1,node2 python -m {ENDS}"
    ],
    "torchrun": [
        f"OMP_NUM_THREADS=1 torchrun --nproc_per_node 8 --nnodes 2 --node_rank {rank} --master_addr node1 "
        f"--master_port 12345 -m {ENDS}"
        for rank in (0, 1)
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_two_hosts(launcher: str) -> None:
    made = plan(launcher, TWO, facts_for(launcher))
    assert [command.shell() for command in made.commands] == ON_TWO_HOSTS[launcher]
    assert made.elsewhere
    hosts = [command.host for command in made.commands]
    assert hosts == (["node1", "node2"] if launcher == "torchrun" else [""])


def test_one_host_that_is_another_is_not_taken_for_this_one() -> None:
    """DeepSpeed runs a single host's ranks here, whatever its name, unless forced."""
    (line,) = lines("deepspeed", "node1 slots=8\n")
    assert "--hostfile hosts --force_multi --master_addr node1" in line
    assert "no_ssh_check" not in line


def test_slurm_chooses_hosts_itself() -> None:
    assert plan("slurm").elsewhere
    assert not plan("deepspeed").elsewhere


def test_what_does_not_travel_is_said() -> None:
    (note,) = plan("deepspeed", TWO).notes
    assert (note.code, note.severity) == ("HST209", "info")
    assert "OMP_NUM_THREADS=1" in note.help
    assert ".deepspeed_env" in note.help
    assert plan("deepspeed", ONE).notes == ()


# ---- the host ----


@pytest.mark.parametrize(
    ("facts", "threads"),
    [(HERE, "1"), (GPUS, "8"), (HERE._replace(threads="3"), "3"), (GPUS._replace(cores=20), "2")],
    ids=["more ranks than cores", "ranks share the cores", "as the environment says", "whole cores"],
)
def test_threads(facts: Facts, threads: str) -> None:
    assert plan("torchrun", facts=facts).commands[0].environ == {"OMP_NUM_THREADS": threads}


def test_mpirun_oversubscribes_only_where_it_must() -> None:
    assert "--oversubscribe" not in lines("openmpi", facts=GPUS)[0]
    assert "--oversubscribe" in lines("openmpi", facts=HERE)[0]


def test_mpirun_as_root() -> None:
    assert "--allow-run-as-root" in lines("openmpi", facts=HERE._replace(root=True))[0]
    assert "--allow-run-as-root" not in lines("openmpi")[0]


@pytest.mark.parametrize("text", [None, "localhost slots=2\n"])
def test_visible_devices_stay_those_that_are_used(text: str | None) -> None:
    """With --num_gpus or a hostfile, DeepSpeed would take devices 0 and 1."""
    facts = GPUS._replace(visible=("2", "3", "5"), accelerators=3)
    (line,) = lines("deepspeed", text, facts=facts, world=2)
    assert "--include localhost:2,3 --master_port" in line
    assert "--hostfile" not in line
    assert "--num_gpus" not in line


def test_the_hostfile_that_deepspeed_finds_by_itself_is_not_read() -> None:
    (line,) = lines("deepspeed", facts=HERE._replace(job_hostfile=True))
    assert "--hostfile /dev/null --num_gpus 8" in line


def test_words_are_quoted_for_a_shell() -> None:
    words = ("--config", "my cfg.py", "train.dist.custom_pipeline_stage_id=[0, 1]")
    line = plan_of(Request("torchrun", 2, words), HERE).commands[0].shell()
    assert shlex.split(line)[-3:] == list(words)


def test_the_default_is_deepspeed_then_torchrun() -> None:
    assert default_launcher(HERE) == default_launcher(GPUS) == default_launcher(Facts({})) == "deepspeed"
    assert default_launcher(Facts({"torchrun": "torchrun"})) == "torchrun"


# ---- what must not start ----


def refused(launcher: str, text: str | None = None, facts: Facts = HERE) -> Mapping[str, str]:
    with pytest.raises(DslparError) as caught:
        plan(launcher, text, facts)
    (finding,) = caught.value.findings
    return {"code": finding.code, "said": finding.message, "help": finding.help, "at": str(finding.location)}


@pytest.mark.parametrize(
    ("launcher", "missing", "install"),
    [
        ("deepspeed", "deepspeed", "pip install deepspeed"),
        ("openmpi", "mpirun", "dslpar[mpi]"),
        ("mpich", "mpirun", "pip install mpich"),
        ("slurm", "srun", "Slurm"),
        ("torchrun", "torchrun", "pip install torch"),
    ],
)
def test_a_launcher_that_is_not_installed(launcher: str, missing: str, install: str) -> None:
    programs = {name: name for name in HERE.programs if name != missing}
    found = refused(launcher, facts=HERE._replace(programs=programs, mpi="openmpi" if missing != "mpirun" else ""))
    assert found["code"] == "HST204"
    assert found["said"] == f"{launcher}: no {missing} here"
    assert install in found["help"]
    assert "here are" in found["help"]
    assert launcher not in found["help"].partition("here are")[2]


def test_the_other_mpi() -> None:
    found = refused("mpich")
    assert found["code"] == "HST205"
    assert "mpirun is openmpi" in found["said"]
    assert found["help"].startswith("--launcher openmpi, or")
    assert "Intel(R) MPI Library" in refused("openmpi", facts=HERE._replace(mpi="Intel(R) MPI Library"))["said"]


def test_more_ranks_than_accelerators() -> None:
    found = refused("torchrun", facts=GPUS._replace(accelerators=4))
    assert found["code"] == "HST206"
    assert "8 ranks on this host, and it has 4 accelerators" in found["said"]
    assert refused("torchrun", ONE, GPUS._replace(accelerators=4))["code"] == "HST206"
    assert plan("torchrun", TWO, GPUS._replace(accelerators=4)).elsewhere, "what others have is not known here"


def test_localhost_among_hosts() -> None:
    found = refused("deepspeed", "localhost slots=8\nnode2 slots=8\n")
    assert (found["code"], found["at"]) == ("HST207", "hosts:1:1")


def test_devices_that_have_no_number() -> None:
    facts = GPUS._replace(visible=("GPU-8f2c",) * 8)
    assert refused("deepspeed", facts=facts)["code"] == "HST208"
    assert lines("torchrun", facts=facts)


# ---- looking around ----


def test_this_host() -> None:
    facts = look_around(cluster("localhost slots=1\n127.0.0.1 slots=1\nno-such-host.invalid slots=1\n"), os.environ)
    assert facts.here == {"localhost", "127.0.0.1"}
    assert facts.mpi == "openmpi"
    assert {"python", "deepspeed", "torchrun", "mpirun"} <= set(facts.programs)
    assert facts.programs["deepspeed"] == "deepspeed", "the tests' PATH has it"
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.root == (os.geteuid() == 0)
    assert 1024 < facts.port < 65536


def test_two_jobs_on_one_host_meet_at_different_ports() -> None:
    first, second = look_around(None, os.environ), look_around(None, os.environ)
    assert first.port != second.port


def test_programs_outside_of_path_are_called_in_full() -> None:
    facts = look_around(None, {"PATH": "/nowhere"})
    assert facts.programs["deepspeed"] == str(Path(sys.executable).parent / "deepspeed")


def test_the_cpu_is_no_accelerator() -> None:
    facts = look_around(None, {"PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert (facts.accelerators, facts.visible) == (0, None)
    assert look_around(None, {"CUDA_VISIBLE_DEVICES": "-1"}).accelerators == 0
