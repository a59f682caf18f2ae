"""Step time of a pipeline under each schedule, over the simulated time: the waits between actions.

    python -m benchmarks bubble

Four ranks over gloo run 8 micro-batches through a tiny GPT. Each action does its work and then sleeps until it has
taken exactly its simulated time. So a few cores suffice for all ranks, and the remaining time is that of the executor,
the messages and the sums at the end. A step takes as long as its slowest rank. A line's name has the measured and the
simulated bubble: the idle time of a rank over its busy time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Ratio
from benchmarks.overhead import start_deepspeed
from benchmarks.sides import on_ranks
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.pipeline_executor import PipelineExecutor
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Action
from dslpar.layout.simulation import Durations, Timeline, even_durations, simulate
from dslpar.linter import check

TARGET = 1.02
WORLD, MICRO_BATCHES, STEPS = 4, 8, 2
FORWARD_S = 0.6
"""Of all stages of a rank together, and as long as each half of a backward; long, so that work fits in."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
CONFIG = """
model = dict(type='GPT', num_layers=8, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=8)
parallel = dict(pipeline={world})
schedule = dict(type={schedule!r}, num_model_chunks={chunks})
optimizer = dict(type='SGD', lr=0.1)
batch = dict(micro_size=1, accumulation={micro_batches})
train = dict(steps=1000)
"""


def ratios() -> Iterator[Ratio]:
    """One line a schedule."""
    for schedule, chunks in SCHEDULES:
        yield measured(schedule, chunks)


def measured(schedule: str, chunks: int) -> Ratio:
    """Time of the best step over that of the simulation; the interval is of all steps."""
    job = job_of(schedule, chunks)
    timeline = ideal(job)
    steps = step_times(job)
    best, busy = min(steps), max(timeline.busy)
    name = f"{schedule} {chunks}, bubble {best / busy - 1:.4f}, simulated {timeline.bubble:.4f}"
    over = [step_s / timeline.makespan for step_s in steps]
    return Ratio(name, min(over), min(over), max(over), TARGET, strict=True)


def measured_bubble(schedule: str, chunks: int) -> float:
    """Idle over busy time of the best step."""
    job = job_of(schedule, chunks)
    return min(step_times(job)) / max(ideal(job).busy) - 1


def job_of(schedule: str, chunks: int) -> Job:
    """The Job of a schedule."""
    text = CONFIG.format(world=WORLD, schedule=schedule, chunks=chunks, micro_batches=MICRO_BATCHES)
    return check.resolve(check.load_text(text, "bubble.py"), WORLD)


def durations(job: Job) -> Durations:
    """Return the time that each action is made to take."""
    each_s = FORWARD_S / job.schedule.chunks.num
    return even_durations(job.schedule.chunks.stages, each_s, each_s, each_s)


def ideal(job: Job) -> Timeline:
    """A step whose messages take no time."""
    return simulate(job.schedule.orders(), job.schedule.chunks, durations(job))


# ---- a rank ----


def step_times(job: Job) -> list[float]:
    """Seconds of steps, after one that takes what work it takes; of each the slowest rank's."""
    return [max(seconds) for seconds in zip(*on_ranks(WORLD, partial(rank_times, job)), strict=True)]


def rank_times(job: Job) -> list[float]:
    """Seconds of this rank's steps, which all ranks begin together."""
    warnings.simplefilter("ignore")
    start_deepspeed()
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, 8, dtype=torch.int64)
    batches = [(ids, ids)] * MICRO_BATCHES
    engine.train_batch(batches)
    pad(job)
    return [step_s(partial(engine.train_batch, batches)) for _ in range(STEPS)]


def step_s(step: Callable[[], object]) -> float:
    """Wall seconds of a step."""
    dist.barrier()
    began = time.monotonic()
    step()
    return time.monotonic() - began


def pad(job: Job) -> None:
    """Have each action sleep after its work, until it has taken its time."""
    take_s = partial(durations(job).of, split=job.schedule.split)
    for name in ("_forward", "_backward", "_weight_gradients"):
        setattr(PipelineExecutor, name, padded(getattr(PipelineExecutor, name), take_s))


def padded(method: Callable[..., None], take_s: Callable[[Action], float]) -> Callable[..., None]:
    """Return an action that sleeps before it sends, counted from when what it takes in was there."""

    def run(self: Any, action: Action, *args: Any) -> None:
        messages = self._messages
        receive, send, began = messages.receive, messages.send, [time.monotonic()]

        def sleep() -> None:
            time.sleep(max(0.0, began[0] + take_s(action) - time.monotonic()))

        def received(*of: Any) -> Any:
            values = receive(*of)
            began[0] = time.monotonic()
            return values

        def sent(*of: Any) -> None:
            sleep()
            send(*of)

        messages.receive, messages.send = received, sent
        try:
            method(self, action, *args)
        finally:
            del messages.receive, messages.send
        sleep()

    return run
