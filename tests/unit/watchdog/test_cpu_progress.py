"""Progress of processes, by their CPU time: from given samples, and of this machine's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dslpar.watchdog.cpu_progress import Progress, Use, processor_use


def test_progress_of_one_is_progress_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(idle_s=60)
    stuck = []
    for second in range(1, 200):
        now = float(second)
        assert progress.is_due()
        busy = min(second, 100) * 0.05  # one process uses a twentieth of a core until second 100
        stuck.append(progress.is_stuck({1: Use(second * 0.005, False), 2: Use(busy, False)}))
    # from some second after 76, it has used less than the allowance of 1.2 s
    assert 76 + 60 <= stuck.index(True) + 1 <= 100 + 60


def test_time_that_nobody_could_use_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    starved, paused = Progress(idle_s=60), Progress(idle_s=60)
    for second in range(1, 1000):
        now = float(second)
        assert not starved.is_stuck({1: Use(0.0, True), 2: Use(0.0, False)})
    now += 10_000  # this process did not run either
    assert not paused.is_stuck({1: Use(0.0, False)})


def test_cpu_time_is_that_of_a_process_and_all_below() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    below = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {burn!r}])\nprint(flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", below], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.18 < processor_use([process.pid])[process.pid].cpu_s < 2
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert processor_use([process.pid])[process.pid].held_back
        process.kill()
    assert processor_use([process.pid]) == {}
