"""A side of a comparison: ranks that were built once and take steps when they are told to.

    with side(build_ours, world=2) as ours, side(build_theirs, world=2) as theirs:
        ratio(name, [cpu for (cpu,) in in_turns(ours, theirs)], target)

Only one side runs at a time. CPU time is of all ranks of a side, waiting excluded. `on_ranks` runs a function once.
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
"""Steps a turn."""
WARM_UP = 3
FORK = multiprocessing.get_context("fork")

Step = Callable[[], object]


@contextmanager
def side(build: Callable[[], Step], world: int, steps: int = STEPS) -> Iterator[Callable[[], Costs]]:
    """Ranks that are built and warm, as a function: take `steps` steps, and return the CPU seconds of all of them.

    `build` runs on every rank, in the environment that a launcher would give it, over gloo.

    Raises:
        EOFError: a rank ended; what it said is on stderr.
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
    """Return the result of `fn` on every rank.

    Raises:
        EOFError: a rank ended; its output is on stderr.
    """
    with started(world, lambda end: end.send(fn())) as ends:
        return [end.recv() for end in ends]


@contextmanager
def started(world: int, run: Callable[[Connection], None]) -> Iterator[list[Connection]]:
    """Ranks that run it, by the other ends of their pipes; killed in the end."""
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
    """One rank: over gloo, in the environment that a launcher would give it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run(end)
    end.poll(None)  # no rank leaves while another still talks to it: all are ended together


def serve(build: Callable[[], Step], end: Connection) -> None:
    """One rank of a side: builds, warms up, then answers each number of steps with its CPU seconds."""
    step = build()
    cpu_s_of(step, WARM_UP)
    end.send(None)
    while True:
        end.send(cpu_s_of(step, end.recv()))


def cpu_s_of(step: Step, count: int) -> float:
    """CPU seconds of this process, all its threads, for so many steps."""
    began = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - began
