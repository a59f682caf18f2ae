"""Overhead of the schedule executor: CPU time of a 1F1B step against DeepSpeed's own, on the same kind of engine.

    python -m benchmarks schedule_overhead

Both sides are dslpar's engine of the GPT of `overhead`, as a pipeline of two stages, with the same micro-batches. Only
the code that takes a step differs. DeepSpeed's is `train_batch`: 1F1B, sums of tied gradients, the optimizer's step,
the mean loss on all ranks. dslpar's is `PipelineExecutor.forward_backward`, which returns the same mean loss, and
`optimizer_step`. Neither side includes the work of dslpar's engine around a step (seeds, checks of batches, reading the
loss), which `overhead` measures. Before anything is timed, both must give the same losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.measure import Ratio, in_turns, ratio
from benchmarks.overhead import batches_of_step, job_for, start_deepspeed
from benchmarks.sides import on_ranks, side
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.engine.executor import optimizer_step

TARGET = 1.03
WORLD = 2

Step = Callable[[], torch.Tensor]


def ratios() -> Iterator[Ratio]:
    """One line."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ours, theirs = (on_ranks(WORLD, partial(losses, build)) for build in (by_executor, by_deepspeed))
    assert ours == theirs, f"the two take other steps: {ours}, {theirs}"
    with side(by_executor, WORLD) as executor, side(by_deepspeed, WORLD) as reference:
        name = "1F1B by the executor / by DeepSpeed, CPU time a step"
        yield ratio(name, [cpu for (cpu,) in in_turns(executor, reference)], TARGET)


def losses(build: Callable[[], Step]) -> list[float]:
    """Of three steps."""
    step = build()
    return [float(step()) for _ in range(3)]


def by_executor() -> Step:
    """A step by the executor's actions."""
    engine, batches = built(), batches_of_step()
    pipeline = engine._pipeline
    assert pipeline is not None

    def step() -> torch.Tensor:
        loss = pipeline.forward_backward(engine._loss_fn, batches).loss
        optimizer_step(engine.deepspeed)
        return loss

    return step


def by_deepspeed() -> Step:
    """A step by DeepSpeed's instructions, which ask the rank for its stage, as they do of themselves."""
    engine, batches = built(), batches_of_step()
    del engine.deepspeed.is_first_stage, engine.deepspeed.is_last_stage
    return lambda: engine.deepspeed.train_batch(iter(batches))


def built() -> Engine:
    """The engine of both."""
    start_deepspeed()
    job = job_for(WORLD)
    return build_engine(job, Groups(job.mesh), all_counted=True)
