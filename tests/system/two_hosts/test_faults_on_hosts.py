"""Faults of jobs on two hosts: both end in time, with a nonzero status, and name the failed rank."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest

from benchmarks.faults_on_hosts import CONFIG, FAULTS, LAUNCHERS, run_with_fault
from tests.support.runs import TEXT
from tests.support.two_hosts import ROOT, missing, two_hosts
from tests.support.waiting import wait

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PROVEN = ("deepspeed", "mpirun")
"""The launchers of the table."""


@pytest.mark.prove
@pytest.mark.parametrize(
    ("fault", "launcher"),
    [(name, launcher) for name, launcher in product(FAULTS, PROVEN) if launcher in FAULTS[name].launchers],
)
def test_a_job_ends(fault: str, launcher: str) -> None:
    one = run_with_fault(launcher, fault)
    assert one.shortfalls() == [], "\n".join(one.lines)


ELSEWHERE = """\
import importlib.abc, importlib.machinery, sys
class Inject(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "dslpar.launch.supervise":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            receiver = module.Receiver
            module.Receiver = lambda folder, ranks, addresses, file: receiver(folder, ranks, ["10.77.0.250"], file)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Inject())
"""
"""Makes `dslpar launch` give ranks an address that nobody answers at, as behind a firewall."""


@pytest.mark.prove
def test_a_job_whose_guards_cannot_reach_dslpar_launch_is_told_to_stop_by_ssh(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "cfg.py").write_text(CONFIG.format(save_interval=100000, hang_s=60))
    with two_hosts(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])) as hosts:
        path = Path(hosts.hostfile(2))
        path.write_text(path.read_text().splitlines()[1] + "\n")
        words = ["dslpar", "launch", "--no-checks", "--hostfile", str(path), str(tmp_path / "cfg.py")]
        job = hosts.start(0, [*words, f"train.output_dir={out}"], tmp_path / "said")
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert job.process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        os.kill(job.pid, signal.SIGTERM)
        assert wait(job.process) == 128 + signal.SIGTERM
        assert hosts.processes(1) == {}
        assert list(out.glob("checkpoints/step_*"))


def test_a_miss_is_told() -> None:
    """The table detects a job that falls short."""
    from benchmarks.faults_on_hosts import Outcome

    good = "[rank 2 of 4 on host1, stage 1 (pipe 1), step 3] failed"
    assert Outcome("mpirun", "exception", 1.0, 1, [], ["noise", good]).shortfalls() == []
    assert Outcome("mpirun", "exception", 16.0, 1, [], [good]).shortfalls() == ["16 s"]
    assert Outcome("mpirun", "exception", 1.0, 0, [], [good]).shortfalls() == ["status 0"]
    assert Outcome("mpirun", "exception", 45.0, None, ["python"], [good]).shortfalls()[1:] == [
        "1 processes left",
        "no end",
    ]
    (missed,) = Outcome("mpirun", "exception", 1.0, 1, [], [good.replace("rank 2", "rank 3")]).shortfalls()
    assert missed.startswith("not said: rank 2")
    assert set(LAUNCHERS) >= set(PROVEN)
