"""Fake ranks: single ranks of a world under torch's fake process group, whose collectives return at once.

Shapes are right, and numbers are not. So one process can count traffic and memory for any world, and see what DeepSpeed
refuses at its start. It must not be the test's own process: `on_last_ranks(fn, tensors)` runs `fn(tensor)` for one
cuboid after another in one fork, and `in_forks(fn, items)` runs each item in its own fork.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # once, not in every fork: it takes 1 s

from dslpar.core.fork import fork
from dslpar.core.mesh import TensorMesh
from dslpar.watchdog.cpu_progress import Progress, processor_use
from tests.support.ranks import on_ranks
from tests.support.waiting import IDLE_S

Item = TypeVar("Item")


class LostError(Exception):
    """A fork that ended without an answer, by a signal or at the time-out."""


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Make this process one rank of a world without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_last_ranks(fn: Callable[[TensorMesh], Any], tensors: Sequence[TensorMesh]) -> list[Any]:
    """Return `fn(tensor)` on the last rank of each cuboid, in a world of exactly its ranks."""
    (values,) = on_ranks(1, _one_by_one, fn, tensors, init=None)
    return list(values)


def _one_by_one(fn: Callable[[TensorMesh], Any], tensors: Sequence[TensorMesh]) -> list[Any]:
    values = []
    for tensor in tensors:
        with fake_world(tensor.size - 1, tensor.size):
            values.append(fn(tensor))
    return values


# ---- one fork per item ----


def in_forks(fn: Callable[[Item], Any], items: Sequence[Item], at_once: int = 2, idle_s: float = IDLE_S) -> list[Any]:
    """Return `fn(item)` for each item, run in its own fork, or a LostError if no answer came.

    The output of forks is lost. `fn` must catch exceptions that it wants to report.
    """
    values: dict[int, Any] = {}
    running: dict[int, _Fork] = {}
    try:
        for index, item in enumerate(items):
            while len(running) >= at_once:
                _gather(running, values)
            fork = _Fork(fn, item, index, Progress(idle_s))
            running[fork.pipe] = fork
        while running:
            _gather(running, values)
    finally:
        for fork in running.values():
            fork.end()
    return [values[index] for index in range(len(items))]


class _Fork:
    """A child process at work on one item."""

    def __init__(self, fn: Callable[[Any], Any], item: Any, index: int, progress: Progress) -> None:
        self.index, self.progress, self.data = index, progress, b""
        self.pipe, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = fork()
        if self.pid == 0:
            os.close(self.pipe)
            _answer(writing, fn, item)
        os.close(writing)

    def hangs(self) -> bool:
        """Return whether it has made no progress for too long."""
        return self.progress.is_due() and self.progress.is_stuck(processor_use([self.pid]))

    def end(self) -> int:
        """End the child if it still runs, and return its status."""
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _answer(pipe: int, fn: Callable[[Any], Any], item: Any) -> NoReturn:
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        warnings.resetwarnings()  # pytest turns warnings into errors, a run does not
        answer = pickle.dumps(fn(item))
        with open(pipe, "wb") as writing:
            writing.write(answer)
        status = 0
    finally:
        os._exit(status)


def _gather(running: dict[int, _Fork], values: dict[int, Any]) -> None:
    """Wait until a fork has an answer. Forks that ended, or hung too long, leave `running`."""
    ready, _, _ = select.select(list(running), [], [], 0.5)
    for pipe in list(running):
        fork = running[pipe]
        piece = os.read(pipe, 1 << 20) if pipe in ready else None
        if piece:
            fork.data += piece
        elif piece is not None or fork.hangs():
            status = fork.end()
            values[fork.index] = pickle.loads(fork.data) if fork.data else LostError(f"no answer, status {status}")
            del running[pipe]
