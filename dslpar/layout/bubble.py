"""The bubble of a job's pipeline: its schedule, simulated with what each stage computes.

    timeline = simulate_job(job)        # of one step; None where there are too many micro-batches
    timeline.bubble

Time is counted in forwards of a mean stage. A stage takes as long as its layers have multiplications (those of a cut by
'cost'), and for the gradients of inputs and for those of weights as long as for the forward: a matmul has one product
of each kind. A layer that is computed again makes its backward longer by a forward. Nothing of a device or a network
is in it: messages take no time.
"""

from __future__ import annotations

from itertools import accumulate

from dslpar.layout.family import pipeline_weights
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Schedule
from dslpar.layout.simulation import Durations, Timeline, simulate
from dslpar.layout.stages import EvenWeights

MOST_ACTIONS = 200_000
"""What is simulated in a second or so."""


def num_actions(schedule: Schedule) -> int:
    """Return the actions of a step on all ranks."""
    return schedule.chunks.stages * schedule.num_micro_batches * (3 if schedule.split else 2)


def simulate_job(job: Job, num_micro_batches: int | None = None) -> Timeline | None:
    """Simulate a step of a job, or one with another number of micro-batches; None if it is too long."""
    schedule = job.schedule
    if num_micro_batches is not None:
        schedule = schedule._replace(num_micro_batches=num_micro_batches)
    if num_actions(schedule) > MOST_ACTIONS:
        return None
    return simulate(schedule.orders(), schedule.chunks, durations_of(job))


def durations_of(job: Job) -> Durations:
    """Return how long the stages of a job take; they are taken to be equal where it is not known what they compute."""
    loads = _loads(job)
    mean = sum(loads) / len(loads)
    forward = [load / mean for load in loads]
    again = 1.0 if job.spec.activation_checkpoint is not None else 0.0
    return Durations(forward, [(1.0 + again) * each for each in forward], forward)


def _loads(job: Job) -> list[int]:
    """Return what each stage computes, in any unit."""
    counts, even = job.stages.counts, [1] * job.chunks.stages
    weights = pipeline_weights(job.spec.model, "cost", job.seq_len)
    if counts is None or weights is None:
        return even
    if isinstance(weights, EvenWeights):
        return list(weights.loads(counts))
    loads = [sum(weights[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True)]
    return loads if any(loads) else even
