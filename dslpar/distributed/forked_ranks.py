"""Fork CPU ranks from this process: `run_on_ranks(4, fn, *args)` returns the values of `fn`, by rank.

    def rank_sum(x: float) -> float:
        return float(all_reduce(torch.tensor(x), axis))

    run_on_ranks(2, rank_sum, 1.0)      # [2.0, 2.0]

Forking takes a tenth of the time of spawning, because this process has imported torch already. Ranks meet through a
file and end with `os._exit`, so that none of the parent's clean-up runs in them. A fork has only the thread that
forked: call `torch.set_num_threads(1)` before any torch operation in the parent.

Time limits count progress, not wall-clock time, so that a busy machine slows ranks down without ending them:

- Ranks are stuck if, during `idle_s` seconds, none of them has used more than 2 % of that time as CPU time (this
  threshold was measured on deadlocked ranks: `dslpar.watchdog.cpu_progress`). Seconds in which a rank could not run do
  not count: it was ready to run, waited for a disk, or was stopped.
- A rank that uses more than `cpu_s` seconds of CPU time is assumed to loop.

In both cases the error shows the stacks of all ranks. CPU time includes a rank's threads and child processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from dslpar.cluster.network import free_port
from dslpar.core.fork import fork
from dslpar.distributed.gloo_threads import share_device, use_batch_scheduling
from dslpar.watchdog import processes
from dslpar.watchdog.cpu_progress import Progress, processor_use

Init = Literal["torch", "deepspeed"] | None

_GLOO_TIMEOUT = timedelta(days=1)
"""Long enough never to fire first: deadlocks are detected here, and an ended peer closes its connections."""
_STACKS = signal.SIGUSR2  # dslpar's runs use SIGUSR1 and SIGRTMIN + 8
_STACKS_S = 5.0
_LONGEST_PAUSE_S = 0.02


class RankError(RuntimeError):
    """Error of failed or stuck ranks, with the first failing rank's traceback or the stacks of all ranks."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text.partition("\n")[0]
        """One line: a description, or the last line of the traceback."""


def run_on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    init: Init = "torch",
    idle_s: float = 60,
    cpu_s: float = 900,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `n` ranks and return its (picklable) values, by rank.

    Args:
        init: what each rank starts before `fn`: torch.distributed over gloo, DeepSpeed on top of it, or nothing.
        idle_s: end all ranks after this many seconds without progress on any rank.
        cpu_s: end all ranks if one has used this many seconds of CPU time.
        env: additional environment variables of the ranks, besides RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE and
            MASTER_*.

    Raises:
        RankError: a rank raised, was killed by a signal or loops, or all ranks are stuck. No rank is left running.
    """
    with tempfile.TemporaryDirectory(prefix="dslpar_ranks_") as name:
        folder = Path(name)
        sys.stdout.flush()  # else ranks would print it again
        sys.stderr.flush()
        world = {
            "WORLD_SIZE": str(n),
            "LOCAL_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ranks = _Ranks(folder, idle_s, cpu_s)
        try:
            for rank in range(n):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world, **(env or {})}
                (folder / f"{rank}.stack").write_text(f"-- rank {rank} --\n")
                pid = fork()
                if pid == 0:
                    _child(folder, rank, variables, init, fn, args)
                ranks.alive[pid] = rank
            ranks.wait()
        finally:
            ranks.kill()
        return [pickle.loads((folder / f"{rank}.value").read_bytes()) for rank in range(n)]


class _Ranks:
    """The processes of one `run_on_ranks`."""

    def __init__(self, folder: Path, idle_s: float, cpu_s: float) -> None:
        self.folder, self.idle_s, self.cpu_s = folder, idle_s, cpu_s
        self.alive: dict[int, int] = {}
        """Process id to rank."""

    def wait(self) -> None:
        """Wait until all ranks have succeeded. Raises RankError."""
        pause_s, progress = 0.001, Progress(self.idle_s)
        while self.alive:
            statuses = self._reap()
            if any(statuses.values()):
                self._raise_failure(statuses)
            if progress.is_due():
                used = processor_use(self.alive)
                if progress.is_stuck(used):
                    self._raise_stuck()
                for pid, use in used.items():
                    if use.cpu_s > self.cpu_s:
                        self._raise_looping(self.alive[pid], use.cpu_s)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _reap(self) -> dict[int, int]:
        """Return the exit codes of ranks that have ended since the last call, by rank."""
        found = {}
        for pid in list(self.alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[self.alive.pop(pid)] = os.waitstatus_to_exitcode(status)
        return found

    def _raise_failure(self, statuses: dict[int, int]) -> NoReturn:
        # Reap again: a killed rank's peer may have been reaped before the killed rank itself.
        statuses |= self._reap()
        killed = [
            f"rank {rank} was killed by {signal.Signals(-status).name}"
            for rank, status in sorted(statuses.items())
            if status < 0
        ]
        errors = sorted(pickle.loads(path.read_bytes()) for path in self.folder.glob("*.error"))
        if errors:
            _, rank, text = errors[0]
            last = text.strip().rpartition("\n")[2]
            raise RankError("\n".join([*killed, f"rank {rank} failed:", text]), "; ".join([*killed, last]))
        if killed:
            raise RankError("; ".join(killed))
        rank, status = next((rank, status) for rank, status in statuses.items() if status)
        raise RankError(f"rank {rank} ended with status {status} and no traceback")

    def _raise_stuck(self) -> NoReturn:
        waiting = sorted(self.alive.values())
        raise RankError(f"ranks {waiting} hang: none has made progress for {self.idle_s:g} s\n{self._stacks()}")

    def _raise_looping(self, rank: int, used_s: float) -> NoReturn:
        limit = f"rank {rank} has used {used_s:.0f} s of CPU time, and {self.cpu_s:g} s is the limit"
        raise RankError(f"{limit}\n{self._stacks()}")

    def _stacks(self) -> str:
        """Request all ranks' stacks; return those that arrive within seconds. A stopped rank writes none."""
        paths = [self.folder / f"{rank}.stack" for rank in sorted(self.alive.values())]
        before = [path.stat().st_size for path in paths]
        for pid in self.alive:
            os.kill(pid, _STACKS)
        ends, sizes = time.monotonic() + _STACKS_S, list[int]()
        while time.monotonic() < ends:
            time.sleep(0.2)
            sizes, old = [path.stat().st_size for path in paths], sizes
            if sizes == old and all(size > least for size, least in zip(sizes, before, strict=True)):
                break
        return "\n".join(path.read_text() for path in paths)

    def kill(self) -> None:
        """Kill the ranks that are still alive and the processes that they have started."""
        below = [pid for rank in self.alive for pid in processes.descendants(rank)] if os.path.isdir("/proc") else []
        for pid in [*self.alive, *below]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.alive:
            os.waitpid(pid, 0)
        self.alive.clear()


def _child(
    folder: Path, rank: int, variables: dict[str, str], init: Init, fn: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    """Run a rank from fork to exit."""
    status = 1
    try:
        faulthandler.register(_STACKS, (folder / f"{rank}.stack").open("a"), all_threads=True)
        os.environ.update(variables)
        torch.set_num_threads(1)
        _start(folder, rank, int(variables["WORLD_SIZE"]), init)
        value = pickle.dumps(fn(*args))
        if dist.is_initialized():
            dist.barrier()  # no rank leaves while another still communicates with it
        (folder / f"{rank}.value").write_bytes(value)
        status = 0
    except BaseException:
        # All processes share this clock: peers that fail because this rank ends have a later time.
        error = time.monotonic_ns(), rank, traceback.format_exc()
        unready = folder / f"{rank}.unready"
        unready.write_bytes(pickle.dumps(error))
        unready.rename(folder / f"{rank}.error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _start(folder: Path, rank: int, world: int, init: Init) -> None:
    if init is None:
        return
    share_device()
    use_batch_scheduling()
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_GLOO_TIMEOUT)
    if init == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
