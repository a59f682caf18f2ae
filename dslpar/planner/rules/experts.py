"""PERF116: experts over several nodes, though fewer ranks, within a node, are faster and have the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dslpar.layout.divisors import divisors
from dslpar.layout.resolve import with_experts, with_zero
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, require
from dslpar.linter.rule import rule
from dslpar.planner.rules.fit import known_machine
from dslpar.schema.sections import ExpertParallel

if TYPE_CHECKING:
    from dslpar.forecast.plan import Forecast, Machine

WORTH = 1.05
"""Smallest ratio of step times that is reported. All sizes compute the same."""


@rule("PERF116", "experts-across-nodes", "warning")
def experts_across_nodes(cx: Context) -> Iterator[Problem]:
    """Tokens are sent to experts on other nodes, although fewer ranks within a node could hold all experts."""
    expert = require(cx.spec.parallel.expert, ExpertParallel)
    machine = known_machine(cx)
    if machine is None or not cx.job.mesh.tensor.exchanges_tokens:
        return
    from dslpar.forecast.links import group_of

    if not group_of(cx.job.mesh, machine.nodes, "e", "d", "q", "y", "z").across:
        return
    own = _forecast(cx, machine, expert)
    smaller = [size for size in divisors(expert.size) if size % cx.tensor.cuboid.size == 0 and size < expert.size]
    found = [(size, _forecast(cx, machine, replace(expert, size=size))) for size in smaller]
    within = [(made.time.step_s, size, made) for size, made in found if not made.thrashes and not _is_across(made)]
    if not within:
        return
    least_s = min(step_s for step_s, _, _ in within)
    # Of sizes that are about as fast, the largest needs the least memory.
    step_s, size, made = max((each for each in within if each[0] < WORTH * least_s), key=lambda each: each[1])
    times = own.time.step_s / step_s
    if times < WORTH:
        return
    per_node, device = machine.nodes.per_node, machine.device
    message = (
        f"all experts are on {expert.size} ranks, and {per_node} ranks are on a node ({device.name}): a step takes"
        f" {times:.2f} times as long as with {size}, by the forecast of `dslpar plan`; there a rank needs"
        f" {made.binding.total / 2**30:.1f} GiB of {device.memory_bytes / 2**30:.1f}"
    )
    key = "parallel.expert" if expert.chunks == 1 else "parallel.expert.size"
    yield cx.problem("parallel.expert.size", message, f"{key}={size}")


def _is_across(made: Forecast) -> bool:
    from dslpar.forecast.links import group_of

    return group_of(made.workload.mesh, made.machine.nodes, "e", "d", "q", "y", "z").across


def _forecast(cx: Context, machine: Machine, expert: ExpertParallel) -> Forecast:
    """Return the forecast of the job with experts over other ranks."""
    from dslpar.forecast.plan import forecast
    from dslpar.forecast.workload import workload_of

    job = cx.job
    cuboid = with_zero(
        with_experts(job.mesh.tensor, job.spec.model, expert), job.spec.model, job.spec.zero.stage, job.mesh.pipe
    )
    workload = workload_of(replace(job, mesh=replace(job.mesh, tensor=cuboid)))
    assert workload is not None, "the costs are known"
    return forecast(workload, machine)


RULES = (experts_across_nodes,)
