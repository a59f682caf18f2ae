"""Pipeline bubble: the share of a step's forwards and backwards in which a rank is idle.

    bubble_of(job.schedule, recomputes=False)        # for equal stages: what lint, show and plan print
    simulate_job(job)                                # one step; None where there are too many micro-batches

A simulation has the compute of each stage. Its time is counted in forwards of a mean stage. A stage's forward takes as
long as its layers have multiplications (the weights of a partition by 'cost'). The gradients of inputs and those of
weights take as long as the forward each: one product each per matmul. Recomputation makes a stage's backward longer by
one forward. The simulation ignores devices and networks: messages take no time.
"""

from __future__ import annotations

from itertools import accumulate

from dslpar.layout.family_interface import pipeline_weights
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Schedule
from dslpar.layout.simulation import Durations, Timeline, even_durations, simulate
from dslpar.layout.stages import EvenWeights

MOST_ACTIONS = 200_000
"""The most actions to simulate: about a second's work."""


def bubble_of(schedule: Schedule, *, recomputes: bool) -> float:
    """Return the bubble of a schedule with equal stages; `recomputes` is True with activation checkpointing.

    This function alone computes what is printed as a bubble. Uneven stages wait for the busiest one in addition.
    """
    inputs = 2.0 if recomputes else 1.0  # the gradients of inputs, after another forward
    if schedule.split and schedule.num_micro_batches < schedule.chunks.pipe:
        return simulate(schedule.orders(), schedule.chunks, even_durations(schedule.chunks.stages, 1.0, inputs)).bubble
    return schedule.bubble(backward=inputs)


def num_actions(schedule: Schedule) -> int:
    """Return the number of actions of a step on all ranks."""
    return schedule.chunks.stages * schedule.num_micro_batches * (3 if schedule.split else 2)


def simulate_job(job: Job, num_micro_batches: int | None = None) -> Timeline | None:
    """Simulate a step of a job, optionally with another number of micro-batches; None if the step is too long."""
    schedule = job.schedule
    if num_micro_batches is not None:
        schedule = schedule._replace(num_micro_batches=num_micro_batches)
    if num_actions(schedule) > MOST_ACTIONS:
        return None
    return simulate(schedule.orders(), schedule.chunks, durations_of(job))


def durations_of(job: Job) -> Durations:
    """Return how long each stage of a job takes; stages count as equal if their compute is unknown."""
    loads = _loads(job)
    mean = sum(loads) / len(loads)
    forward = [load / mean for load in loads]
    again = 1.0 if job.spec.activation_checkpoint is not None else 0.0
    return Durations(forward, [(1.0 + again) * each for each in forward], forward)


def _loads(job: Job) -> list[int]:
    """Return the compute of each stage, in any unit."""
    counts, even = job.stages.counts, [1] * job.chunks.stages
    weights = pipeline_weights(job.spec.model, "cost", job.seq_len)
    if counts is None or weights is None:
        return even
    if isinstance(weights, EvenWeights):
        return list(weights.loads(counts))
    loads = [sum(weights[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True)]
    return loads if any(loads) else even
