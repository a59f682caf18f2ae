"""Forked ranks: return values, the first failure, deadlocks, endless loops, and a busy machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from dslpar.distributed.forked_ranks import RankError, run_on_ranks
from dslpar.watchdog.processes import command_line, pids


def rank() -> int:
    return int(os.environ["RANK"])


def _sum(base: float) -> tuple[int, float, str]:
    total = torch.tensor(base + rank())
    dist.all_reduce(total)  # noqa: TID251  # the harness itself, without groups of ours
    return rank(), float(total), os.environ["MARK"]


def test_values_by_rank() -> None:
    assert run_on_ranks(3, _sum, 1.0, env={"MARK": "here"}) == [(0, 6.0, "here"), (1, 6.0, "here"), (2, 6.0, "here")]


def _breaks_on_rank_1() -> None:
    if rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def test_the_first_failure_is_shown_and_ends_the_others() -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed:\n[\s\S]*in _breaks_on_rank_1\n") as error:
        run_on_ranks(3, _breaks_on_rank_1)
    assert error.value.reason == "ValueError: broken on purpose"
    assert not psutil.Process().children()


def _killed_on_rank_1() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_signal_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL"):
        run_on_ranks(2, _killed_on_rank_1)


def _dead_lock() -> None:
    number = torch.zeros(1)
    if rank() == 0:
        dist.recv(number, 1)  # noqa: TID251
    dist.all_reduce(number)  # noqa: TID251


@pytest.mark.parametrize("init", ["torch", "deepspeed"])
def test_a_dead_lock_is_found(init: str) -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] hang: .* 3 s\n-- rank 0 --[\s\S]*in _dead_lock") as error:
        run_on_ranks(2, _dead_lock, init=init, idle_s=3)
    shown = str(error.value)
    assert "in recv" in shown, "of rank 0"
    assert "in all_reduce" in shown.partition("-- rank 1 --")[2]


def _loops() -> None:
    if rank() == 0:
        while True:
            pass
    subprocess.run(["sleep", "1000"], check=True)


def test_an_endless_loop_is_ended_and_nothing_stays() -> None:
    with pytest.raises(RankError, match=r"rank 0 has used \d s of CPU time, and 1 s is the limit\n[\s\S]*in _loops"):
        run_on_ranks(2, _loops, init=None, cpu_s=1)
    commands = [command_line(pid) for pid in pids()]
    assert ["sleep", "1000"] not in commands


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep every core busy with other processes."""
    words = [sys.executable, "-S", "-c", "while True: pass"]
    ones = [subprocess.Popen(words) for _ in range(count)]
    try:
        yield
    finally:
        for one in ones:
            one.kill()
            one.wait()


def _works_on_rank_0(cpu_s: float) -> float:
    """Let one rank compute while the others wait for it, as in a pipeline."""
    if rank() == 0:
        while time.process_time() < cpu_s:
            pass
    dist.barrier()
    return time.process_time()


@pytest.mark.prove  # `make test` has the decision: tests/unit/watchdog, of seconds in which a rank could not run
def test_a_starved_rank_is_not_ended() -> None:
    """It computes for some seconds, with pauses as long as `idle_s`."""
    with _busy(8):
        found = run_on_ranks(2, _works_on_rank_0, 0.3, idle_s=0.5)
    assert found[0] >= 0.3
    assert found[1] < 0.3


def _stops_itself() -> str:
    if rank() == 0:
        if os.fork() == 0:
            time.sleep(2)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    return "goes on"


def test_a_stopped_rank_is_not_ended() -> None:
    assert run_on_ranks(2, _stops_itself, idle_s=1) == ["goes on", "goes on"]
