"""Starts ranks for a test: `on_ranks(4, fn, *args)` returns what `fn` returned, by rank.

Ranks fork from this process, which has imported torch already (spawning takes ten times as long), meet through a file,
and end with `os._exit`, so nothing of pytest runs in them. The parent must not have run threaded torch operations,
hence one thread for everything here. The first failing rank's traceback becomes the parent's exception; its peers are
killed, as are all ranks at the time-out, with the stack of each shown.

    def rank_sum(groups_of: int) -> int: ...
    assert on_ranks(2, rank_sum, 2) == [2, 2]
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from dslpar.cluster.network import free_port
from dslpar.distributed.gloo_device import share_device
from tests.support import warm
from tests.support.fork import fork

Init = Literal["torch", "deepspeed"] | None

torch.set_num_threads(1)


class RankError(AssertionError):
    """A rank failed; the text holds its traceback."""


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    init: Init = "torch",
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(*args)` on `n` ranks; the values it returned (anything that pickles), by rank.

    `init`: what each rank starts before `fn`: torch.distributed over gloo, DeepSpeed over it as well, or nothing.
    `timeout`, in seconds, is for everything. RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* are set, and `env`.
    """
    warm.import_deepspeed() if init == "deepspeed" else warm.import_torch()
    with tempfile.TemporaryDirectory(prefix="dslpar_ranks_") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        ranks = _Ranks(Path(folder), time.monotonic() + timeout)
        port = str(free_port())
        try:
            for rank in range(n):
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(n),
                    "LOCAL_SIZE": str(n),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    **(env or {}),
                }
                pid = fork()
                if pid == 0:
                    _child(Path(folder), rank, variables, init, timeout, fn, args)
                ranks.alive[pid] = rank
            ranks.wait()
        finally:
            ranks.kill()
        return [pickle.loads((Path(folder) / f"{rank}.value").read_bytes()) for rank in range(n)]


class _Ranks:
    """The children of one `on_ranks`: process id to rank."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self.deadline = folder, deadline
        self.alive: dict[int, int] = {}

    def wait(self) -> None:
        """Until all have ended well. Raises: RankError, for the first that did not."""
        pause = 0.001
        while self.alive:
            for pid in list(self.alive):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    rank = self.alive.pop(pid)
                    if status:
                        self._fail(rank, status)
            if time.monotonic() > self.deadline:
                self._hang()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _fail(self, rank: int, status: int) -> NoReturn:
        time.sleep(0.1)  # the peer that broke first may still be writing why
        errors = sorted(self.folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise RankError(f"rank {errors[0].stem} failed:\n{errors[0].read_text()}")
        raise RankError(f"rank {rank} ended with status {os.waitstatus_to_exitcode(status)} and said nothing")

    def _hang(self) -> NoReturn:
        stacks = [path.read_text() for path in sorted(self.folder.glob("*.stack"))]
        raise RankError(f"ranks {sorted(self.alive.values())} hang; their stacks:\n" + "\n".join(stacks))

    def kill(self) -> None:
        """Ends what is still alive, by process id."""
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        for pid in self.alive:
            os.waitpid(pid, 0)
        self.alive.clear()


def _child(
    folder: Path, rank: int, variables: dict[str, str], init: Init, timeout: float, fn: Callable[..., Any], args: Any
) -> NoReturn:
    status = 1
    stack = (folder / f"{rank}.stack").open("w")
    try:
        stack.write(f"-- rank {rank} --\n")
        stack.flush()
        faulthandler.dump_traceback_later(max(timeout - 1, timeout / 2), file=stack)
        os.environ.update(variables)
        torch.set_num_threads(1)
        _start(folder, rank, int(variables["WORLD_SIZE"]), init, timeout)
        value = pickle.dumps(fn(*args))
        if dist.is_initialized():
            dist.barrier()  # no rank leaves while another still talks to it
        (folder / f"{rank}.value").write_bytes(value)
        status = 0
    except BaseException:
        unready = folder / f"{rank}.unready"
        unready.write_text(traceback.format_exc())
        unready.rename(folder / f"{rank}.error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _start(folder: Path, rank: int, world: int, init: Init, timeout: float) -> None:
    if init is None:
        return
    share_device()
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    if init == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
