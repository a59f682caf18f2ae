"""What befalls jobs on two hosts: they end in time on both, with a status that is not 0, and name who it was."""

from __future__ import annotations

import pytest

from benchmarks.faults_on_hosts import FAULTS, LAUNCHERS, befall
from tests.two_hosts.hosts import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

QUICK = (("SIGKILL", "mpirun"),)
PROVEN = ("deepspeed", "mpirun")
"""The launchers of the table."""
CELLS = [
    pytest.param(fault, launcher, marks=() if (fault, launcher) in QUICK else pytest.mark.prove)
    for fault in FAULTS
    for launcher in PROVEN
]


@pytest.mark.parametrize(("fault", "launcher"), CELLS)
def test_a_job_ends(fault: str, launcher: str) -> None:
    one = befall(launcher, fault)
    assert one.misses() == [], "\n".join(one.lines)


def test_a_miss_is_told() -> None:
    """The table can tell what falls short."""
    from benchmarks.faults_on_hosts import Outcome

    good = "[rank 2 of 4 on host1, stage 1 (pipe 1), step 3] failed"
    assert Outcome("mpirun", "exception", 1.0, 1, [], ["noise", good]).misses() == []
    assert Outcome("mpirun", "exception", 16.0, 1, [], [good]).misses() == ["16 s"]
    assert Outcome("mpirun", "exception", 1.0, 0, [], [good]).misses() == ["status 0"]
    assert Outcome("mpirun", "exception", 45.0, None, ["python"], [good]).misses()[1:] == ["1 processes left", "no end"]
    (missed,) = Outcome("mpirun", "exception", 1.0, 1, [], [good.replace("rank 2", "rank 3")]).misses()
    assert missed.startswith("not said: rank 2")
    assert set(FAULTS) >= {fault for fault, _ in QUICK}
    assert set(LAUNCHERS) >= set(PROVEN)
