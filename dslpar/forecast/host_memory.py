"""Memory of the host that offloaded state takes: optimizer states, weights, and inputs of recomputed layers.

offloads_of(workload)                  # ("optimizer", "weights")
host_bytes(workload, pipe_rank=0)      # of one rank; a node's ranks share their host's memory
"""

from __future__ import annotations

from dslpar.forecast.model_states import owner_of
from dslpar.forecast.workload import Workload


def offloads_of(workload: Workload) -> tuple[str, ...]:
    """Return the names of what is offloaded."""
    framework = workload.framework
    found = {
        "optimizer": framework.offloads_optimizer,
        "weights": framework.buckets is not None and framework.buckets.offloads_weights,
        "inputs": workload.offloads_inputs,
    }
    return tuple(name for name, is_offloaded in found.items() if is_offloaded)


def host_bytes(workload: Workload, pipe_rank: int) -> float:
    """Return the bytes of a pipeline rank's offloaded state, without what the host needs to read data and to run.

    An offloaded optimizer keeps its masters, its moments, and with ZeRO 2 and 3 the gradients, all in fp32.
    """
    offloaded, owner = offloads_of(workload), owner_of(workload, pipe_rank)
    found = 0.0
    if "optimizer" in offloaded:
        numbers = 1 + workload.framework.moments + (workload.zero >= 2)
        found += 4 * numbers * owner.shard
    if "weights" in offloaded:
        found += owner.bytes * (owner.shard + owner.frozen / owner.replicas)
    if "inputs" in offloaded:
        layers = sum(workload.counts[stage] for stage in workload.chunks.held_by(pipe_rank))
        groups = layers / workload.interval * workload.schedule.held(pipe_rank).total
        found += workload.element_bytes * float(workload.costs.boundary) * groups
    return found
