"""Time of a pipeline step under each schedule, relative to the simulation.

    python -m benchmarks bubble

Four ranks over gloo send 8 micro-batches through a tiny GPT. Each action does its work and then sleeps until it has
taken exactly its simulated time. So few cores suffice for all ranks, and the excess is the time of the executor, the
messages and the final sums. A step's time is that of its slowest rank. A line's name has the measured and the simulated
bubble: the share of the step in which a rank is idle.
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
"""Forward time of all stages of a rank together, equal to each half of a backward; long, so that the work fits in."""
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
    """Yield a line per schedule."""
    for schedule, chunks in SCHEDULES:
        yield measured(schedule, chunks)


def measured(schedule: str, chunks: int) -> Ratio:
    """Return the time of the best step over the simulation's; the interval is over all steps."""
    job = job_of(schedule, chunks)
    timeline = ideal(job)
    steps = step_times(job)
    best, busy = min(steps), max(timeline.busy)
    name = f"{schedule} {chunks}, bubble {1 - busy / best:.4f}, simulated {timeline.bubble:.4f}"
    over = [step_s / timeline.makespan for step_s in steps]
    return Ratio(name, min(over), min(over), max(over), TARGET, strict=True)


def measured_bubble(schedule: str, chunks: int) -> float:
    """Return the share of the best step in which the busiest rank is idle."""
    job = job_of(schedule, chunks)
    return 1 - max(ideal(job).busy) / min(step_times(job))


def job_of(schedule: str, chunks: int) -> Job:
    """Return the job of a schedule."""
    text = CONFIG.format(world=WORLD, schedule=schedule, chunks=chunks, micro_batches=MICRO_BATCHES)
    return check.resolve(check.load_text(text, "bubble.py"), WORLD)


def durations(job: Job) -> Durations:
    """Return the duration of each action."""
    each_s = FORWARD_S / job.schedule.chunks.num
    return even_durations(job.schedule.chunks.stages, each_s, each_s, each_s)


def ideal(job: Job) -> Timeline:
    """Return the simulated step with instant messages."""
    return simulate(job.schedule.orders(), job.schedule.chunks, durations(job))


# ---- a rank ----


def step_times(job: Job) -> list[float]:
    """Return the seconds of each step on its slowest rank, after a warm-up step."""
    return [max(seconds) for seconds in zip(*on_ranks(WORLD, partial(rank_times, job)), strict=True)]


def rank_times(job: Job) -> list[float]:
    """Return the seconds of this rank's steps, which all ranks begin together."""
    warnings.simplefilter("ignore")
    start_deepspeed()
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, 8, dtype=torch.int64)
    batches = [(ids, ids)] * MICRO_BATCHES
    engine.train_batch(batches)
    pad(job)
    return [step_s(partial(engine.train_batch, batches)) for _ in range(STEPS)]


def step_s(step: Callable[[], object]) -> float:
    """Return the wall seconds of a step."""
    dist.barrier()
    began = time.monotonic()
    step()
    return time.monotonic() - began


def pad(job: Job) -> None:
    """Make each action sleep after its work, until its time is over."""
    take_s = partial(durations(job).of, split=job.schedule.split)
    for name in ("_forward", "_backward", "_weight_gradients"):
        setattr(PipelineExecutor, name, padded(getattr(PipelineExecutor, name), take_s))


def padded(method: Callable[..., None], take_s: Callable[[Action], float]) -> Callable[..., None]:
    """Return an action that sleeps before it sends, counted from the arrival of its input."""

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
