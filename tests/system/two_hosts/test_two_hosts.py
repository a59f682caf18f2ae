"""train.py across two hosts, with and without ssh: pipeline 2 x data 2 x tensor 2, four ranks on each.

With two ranks per host there is no data parallelism, and with one there is a pipeline alone. `make test` has one such
run, of one rank per host, the tests of the hosts themselves, and the refusals: starting a rank costs two seconds of a
core.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.runs import CONFIG, metrics, write_config
from tests.support.sampling import sampled
from tests.support.two_hosts import ROOT, Finished, Hosts, Names, missing, two_hosts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PYTHON = sys.executable
ALL_THREE = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"
PIPED = "parallel = dict(pipeline=2)\n"
SLOTS = 4
WORLD = 2 * SLOTS
EACH = pytest.mark.parametrize("slots", [2, SLOTS])
MPIRUN = ("mpirun", "--allow-run-as-root", "--prefix", sys.prefix, "--bind-to", "none")


def _parallel(world: int) -> str:
    return PIPED if world == 2 else ALL_THREE


@cache
def losses_on_one_host(world: int) -> list[float]:
    """Return the losses of the same ranks, forked here without a launcher, on the loopback alone."""
    from tests.support.forked_training import start_job

    with TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, _parallel(world) + CONFIG)
        words = ["--config", str(config), f"train.output_dir={folder / 'out'}"]
        with start_job(world, words, folder / "said") as job:
            assert job.wait(120) == [0] * world, (folder / "said").read_text()
        return [line["loss"] for line in metrics(folder / "out")]


def train(tmp_path: Path, names: Names, *words: str, slots: int = SLOTS) -> Finished:
    """Run a launcher on host0, over both hosts; `{hostfile}` and `{program}` are filled in."""
    reports = tmp_path / "reports"
    reports.mkdir()
    config = write_config(tmp_path, _parallel(2 * slots) + CONFIG)
    program = ["train.py", "--config", str(config), f"train.output_dir={tmp_path / 'out'}"]
    with two_hosts(names=names, DSLPAR_REPORTS=str(reports)) as hosts:
        filled = [word.format(hostfile=hosts.hostfile(slots)) for word in words]
        done = hosts.run(0, [*filled, *program])
        wait_until(
            lambda: [hosts.processes(host) for host in (0, 1)] == [{}, {}], "something stays"
        )  # mpirun's own ssh ends after it
    assert done.status == 0, done.output
    return done


def check(folder: Path, output: str, slots: int = SLOTS) -> None:
    """Check that the run equals that on one host, that ranks are in host order, and that only rank 0 prints."""
    lines = metrics(folder / "out")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == pytest.approx(losses_on_one_host(2 * slots), rel=1e-6)
    assert output.count("step 3/3") == 1
    assert ("pipeline 2" if slots == 1 else f"pipeline 2 * data {slots // 2} * tensor 2") in output


def check_places(folder: Path, slots: int) -> None:
    """Check which host ran which rank, by the ranks' own records."""
    born = [json.loads(path.read_text()) for path in (folder / "reports").glob("*.born")]
    assert {rank: host for rank, _, host, *_ in born} == {rank: f"host{rank // slots}" for rank in range(2 * slots)}


# ---- over ssh ----


@pytest.mark.parametrize("slots", sampled([1, 2, SLOTS], {1}))
def test_deepspeed_over_pdsh(tmp_path: Path, slots: int) -> None:
    """Without a .deepspeed_env, gloo's interface is found although host names resolve to loopbacks."""
    done = train(tmp_path, "loopback", "deepspeed", "--hostfile", "{hostfile}", slots=slots)
    check(tmp_path, done.output, slots)
    check_places(tmp_path, slots)


@pytest.mark.prove
@EACH
def test_mpirun_over_ssh(tmp_path: Path, slots: int) -> None:
    """Neither rank 0's address nor the interface is given."""
    words = [*MPIRUN, "--hostfile", "{hostfile}", "-np", str(2 * slots), PYTHON]
    done = train(tmp_path, "loopback", *words, slots=slots)
    check(tmp_path, done.output, slots)
    check_places(tmp_path, slots)


@pytest.mark.prove
def test_mpirun_by_node(tmp_path: Path) -> None:
    """Ranks alternate over the hosts, with rank 0 on the host without mpirun."""
    hosts = f"host1:{SLOTS},host0:{SLOTS}"
    done = train(tmp_path, "known", *MPIRUN, "--host", hosts, "--map-by", "node", "-np", str(WORLD), PYTHON)
    check(tmp_path, done.output)
    born = [json.loads(path.read_text()) for path in (tmp_path / "reports").glob("*.born")]
    assert {rank: host for rank, _, host, *_ in born} == {rank: f"host{(rank + 1) % 2}" for rank in range(WORLD)}


def test_mpirun_where_nobody_knows_rank_0_s_host(tmp_path: Path) -> None:
    with two_hosts(names="unknown") as hosts:
        words = [*MPIRUN, "--hostfile", hosts.hostfile(1), "-np", "2", PYTHON, "train.py", "--config", "cfg.py"]
        done = hosts.run(0, words)
    assert done.status == 1, done.output
    assert "HST202 no-meeting-place: the ranks are on several hosts, but host" in done.output
    assert " cannot resolve host0, the host of rank 0" in done.output
    assert "-x MASTER_ADDR" in done.output


# ---- a launcher on each host, without ssh ----


def train_by_node(tmp_path: Path, names: Names, words: str) -> str:
    """Run the same command line on both hosts, with `{node}` filled in. Return host0's output."""
    config = write_config(tmp_path, ALL_THREE + CONFIG)
    with two_hosts(names=names) as hosts:
        jobs = [
            hosts.start(
                node,
                shlex.split(
                    words.format(
                        node=node,
                        hostfile=hosts.hostfile(SLOTS),
                        program=f"train.py --config {config} train.output_dir={tmp_path / 'out'}",
                    )
                ),
                tmp_path / f"output_{node}",
            )
            for node in (0, 1)
        ]
        statuses = [job.process.wait(240) for job in jobs]
    outputs = [(tmp_path / f"output_{node}").read_text(errors="replace") for node in (0, 1)]
    assert statuses == [0, 0], outputs
    return outputs[0]


@pytest.mark.prove
def test_deepspeed_without_ssh(tmp_path: Path) -> None:
    words = "deepspeed --hostfile {hostfile} --no_ssh --node_rank {node} --master_addr 10.77.0.10 {program}"
    check(tmp_path, train_by_node(tmp_path, "known", words))


@pytest.mark.prove
def test_torchrun(tmp_path: Path) -> None:
    words = f"torchrun --nnodes 2 --node_rank {{node}} --nproc_per_node {SLOTS} --master_addr host0 {{program}}"
    check(tmp_path, train_by_node(tmp_path, "loopback", words))


# ---- dslpar launch ----


@pytest.mark.prove
@pytest.mark.parametrize("launcher", ["deepspeed", "openmpi", "torchrun"])
def test_dslpar_launch(tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, ALL_THREE + CONFIG)
    words = ["dslpar", "launch", "--launcher", launcher, str(config), f"train.output_dir={tmp_path / 'out'}"]
    with two_hosts(names="loopback") as hosts:
        done = hosts.run(0, [*words, "--hostfile", hosts.hostfile(SLOTS)])
        left = [hosts.processes(host) for host in (0, 1)]
    assert done.status == 0, done.output
    assert left == [{}, {}], "`dslpar launch` waits for all that it started"
    check(tmp_path, done.output)


# ---- the hosts themselves ----


def reaches(hosts: Hosts) -> bool:
    """Return whether host0 reaches host1."""
    return hosts.run(0, ["ssh", "-o", "ConnectTimeout=1", "host1", "hostname"]).output.strip() == "host1"


def test_a_host_that_is_cut_off_or_killed_is_gone_and_comes_back() -> None:
    with two_hosts() as hosts:
        assert reaches(hosts)
        for lose in (hosts.cut, hosts.kill):
            lose(1)
            assert not reaches(hosts)
            hosts.restore(1)
            assert reaches(hosts)


def test_what_a_host_has_is_its_own(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        hosts.small_disk(1, tmp_path, 8192)
        fill = f"head -c 100000 /dev/zero > {tmp_path}/file"
        assert "No space left" in hosts.run(0, ["ssh", "host1", fill]).output
        assert hosts.run(0, ["sh", "-c", fill]).status == 0
        (tmp_path / "shared").mkdir()
        hosts.shared_disk(tmp_path / "shared", 8192)
        hosts.run(0, ["touch", str(tmp_path / "shared/seen")])
        assert hosts.run(0, ["ls", str(tmp_path / "shared")]).output == "seen\n"
        assert not list((tmp_path / "shared").iterdir())
        job = hosts.start(1, ["sleep", "600"], tmp_path / "output")
        wait_until(lambda: list(hosts.processes(1).values()) == [["sleep", "600"]], "no such process")
        assert hosts.processes(0) == {}
        assert os.readlink(f"/proc/{job.pid}/ns/uts") != os.readlink("/proc/self/ns/uts")
        hosts.sweep()
        assert job.process.wait(10) == -signal.SIGKILL


ABANDONED = """\
import os, sys, time
sys.path.insert(0, {root!r})
from tests.support.two_hosts import two_hosts
with two_hosts() as hosts:
    job = hosts.start(1, ["sleep", "600"], hosts.folder / "output")
    print(job.pid, flush=True)
    time.sleep(600)
"""


def test_hosts_die_with_whoever_made_them() -> None:
    """Even SIGKILL ends them, as at the time-out of a whole test run."""
    with subprocess.Popen(
        [PYTHON, "-c", ABANDONED.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} stays")
