"""`dslpar launch` over two hosts: what each launcher passes to remote ranks, and runs without ssh.

If a test only checks arguments and variables, a probe replaces the training program, and prints what it received.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dslpar.cluster.network import free_port
from tests.support.runs import CONFIG, ROOT, metrics, write_config
from tests.support.two_hosts import Hosts, missing, two_hosts

PIPED = "parallel = dict(pipeline=2)\n"
WORDS = ["--config", "a b.py", "x=[0,1]", "y='q'", 'z=dict(a="1 $HOME")', "100%h", "$HOME", "w=`ls`;*", "back\\slash a"]
"""Arguments that shells, pdsh and DeepSpeed each parse in their own way."""
VALUE = "a \"b\" $HOME `ls` %h \\ 'c' *"
PROBE = """\
import json, os, socket, sys
said = [socket.gethostname(), sys.argv[1:], dict(os.environ), os.getcwd()]
sys.stdout.write("PROBE " + json.dumps(said) + chr(10))
"""
STARTER = """\
import json, os, subprocess, sys, tempfile
from pathlib import Path
from dslpar.cluster import filter, hostfile, request
from dslpar.launch import commands, local_facts
name, path, include, words, value = json.loads(sys.argv[1])
cluster = hostfile.parse(Path(path).read_text(), path)
cluster = filter.filter_hosts(cluster, include, "--include") if include else cluster
wanted = request.Request(name, cluster.world_size, tuple(words), cluster, module="probe")
launch = commands.prepare(wanted, local_facts.find_local_facts(cluster, os.environ))
launch = commands.with_environ(launch, {"DSLPAR_X": value})
with tempfile.TemporaryDirectory() as folder:
    written = [command.with_files_in(Path(folder)) for command in launch.commands]
    running = [subprocess.Popen(one.argv, env={**os.environ, **one.environ}, stdin=-3) for one in written]
    sys.exit(max(abs(process.wait()) for process in running))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    with two_hosts() as both:
        yield both


def probe(hosts: Hosts, folder: Path, launcher: str, include: str = "") -> list[list[Any]]:
    """Return host, arguments, environment and folder of each rank, by rank."""
    (folder / "probe.py").write_text(PROBE)
    asked = json.dumps([launcher, hosts.hostfile(2), include, WORDS, VALUE])
    environ = {"PYTHONPATH": f"{ROOT}:{folder}", "DSLPAR_Y": "of here"}
    done = hosts.run(0, [sys.executable, "-c", STARTER, asked], cwd=folder, environ=environ)
    assert done.status == 0, done.output
    said = [json.loads(line.partition("PROBE ")[2]) for line in done.output.splitlines() if "PROBE " in line]
    return sorted(said, key=lambda one: int(one[2].get("RANK") or one[2]["OMPI_COMM_WORLD_RANK"]))


@pytest.mark.parametrize(
    "launcher", ["openmpi", *(pytest.param(name, marks=pytest.mark.prove) for name in ("deepspeed", "torchrun"))]
)
def test_words_and_variables_arrive_as_they_were(hosts: Hosts, tmp_path: Path, launcher: str) -> None:
    folder = tmp_path / ("folder" if launcher == "deepspeed" else "my folder")  # HST222: DeepSpeed cannot
    folder.mkdir()
    said = probe(hosts, folder, launcher)
    assert [host for host, *_ in said] == ["host0", "host0", "host1", "host1"]
    for _, words, environ, at in said:
        assert at == str(folder)
        assert [word for word in words if not word.startswith("--local")] == WORDS
        assert environ["DSLPAR_X"] == VALUE
        assert environ["DSLPAR_Y"] == "of here"
        assert environ["MASTER_ADDR"] == "host0"
        assert environ["OMP_NUM_THREADS"] == "1"
    assert len({environ["DSLPAR_JOB"] for _, _, environ, _ in said}) == 1
    assert len({environ["MASTER_PORT"] for _, _, environ, _ in said}) == 1


@pytest.mark.prove
@pytest.mark.parametrize("launcher", ["deepspeed", "openmpi", "torchrun"])
def test_the_chosen_slots_are_those_that_run(hosts: Hosts, tmp_path: Path, launcher: str) -> None:
    said = probe(hosts, tmp_path, launcher, "host1:1@host0:1")
    assert [(host, environ["CUDA_VISIBLE_DEVICES"]) for host, _, environ, _ in said] == [("host0", "1"), ("host1", "1")]


# ---- real runs ----


def launch(hosts: Hosts, config: Path) -> list[str]:
    command = [sys.executable, "-m", "dslpar.cli", "launch", str(config), "--hostfile", hosts.hostfile(2)]
    return [*command, f"train.output_dir={config.parent / 'out'}"]


@pytest.mark.prove
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_host_by_host_without_ssh(hosts: Hosts, tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, PIPED + CONFIG)
    command = [*launch(hosts, config), "--launcher", launcher, "--no-ssh", "--master-port", str(free_port())]
    jobs = [hosts.start(host, [*command, "--node-rank", str(host)], tmp_path / f"said_{host}") for host in (0, 1)]
    try:
        said = [(job.process.wait(170), (tmp_path / f"said_{host}").read_text()) for host, job in enumerate(jobs)]
    finally:
        hosts.sweep()
    assert [status for status, _ in said] == [0, 0], said
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3]


@pytest.mark.prove
def test_what_launch_prints_runs_when_it_is_pasted(hosts: Hosts, tmp_path: Path) -> None:
    """DeepSpeed's line, with the file that it needs."""
    done = hosts.run(0, [*launch(hosts, write_config(tmp_path, PIPED + CONFIG)), "--print"])
    assert done.status == 0, done.output
    line = next(line for line in done.output.splitlines() if line.startswith("D=$(mktemp -d)"))
    pasted = hosts.run(0, ["bash", "-c", line])
    assert pasted.status == 0, pasted.output
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3]
