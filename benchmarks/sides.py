"""One side of a comparison: ranks that are built once and take steps on demand.

    with side(build_ours, world=2) as ours, side(build_theirs, world=2) as theirs:
        ratio(name, [cpu for (cpu,) in in_turns(ours, theirs)], target)

Only one side runs at a time. CPU time is summed over a side's ranks, without waiting. `on_ranks` runs a function once.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Costs

STEPS = 2
"""Steps per turn."""
WARM_UP = 3
FORK = multiprocessing.get_context("fork")

Step = Callable[[], object]


@contextmanager
def side(build: Callable[[], Step], world: int, steps: int = STEPS) -> Iterator[Callable[[], Costs]]:
    """Return warm ranks as a function that takes `steps` steps and returns the CPU seconds of all ranks.

    `build` runs on every rank, in a launcher's environment, over gloo.

    Raises:
        EOFError: a rank ended; its output is on stderr.
    """
    with started(world, partial(serve, build)) as ends:

        def take_steps() -> Costs:
            for end in ends:
                end.send(steps)
            return (sum(end.recv() for end in ends),)

        for end in ends:
            end.recv()  # built and warm
        yield take_steps


def on_ranks(world: int, fn: Callable[[], Any]) -> list[Any]:
    """Return `fn()` on every rank.

    Raises:
        EOFError: a rank ended; its output is on stderr.
    """
    with started(world, lambda end: end.send(fn())) as ends:
        return [end.recv() for end in ends]


@contextmanager
def started(world: int, run: Callable[[Connection], None]) -> Iterator[list[Connection]]:
    """Start ranks that run a function, and return this end of their pipes. The ranks are killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe() for _ in range(world)]
        ranks = [
            FORK.Process(target=start, args=(rank, world, Path(folder), run, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, theirs in pipes:
            theirs.close()  # so that a rank that dies is an EOFError here
        try:
            yield [ours for ours, _ in pipes]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def start(rank: int, world: int, folder: Path, run: Callable[[Connection], None], end: Connection) -> None:
    """Run one rank over gloo, in a launcher's environment."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run(end)
    end.poll(None)  # no rank leaves while another still talks to it: all are ended together


def serve(build: Callable[[], Step], end: Connection) -> None:
    """Run one rank of a side: build, warm up, then answer each number of steps with its CPU seconds."""
    step = build()
    cpu_s_of(step, WARM_UP)
    end.send(None)
    while True:
        end.send(cpu_s_of(step, end.recv()))


def cpu_s_of(step: Step, count: int) -> float:
    """Return this process's CPU seconds, all threads included, for so many steps."""
    began = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - began
