"""Memory of each pipeline rank at the fullest moment of a step: a waterfall in bytes.

    made = stage_memory(workload, pipe_rank=0)
    made.total, made.moment                    # 7.1e10, 'backward'
    binding(workload)                          # the rank of the pipeline that needs the most

Three moments can be the fullest:

=========  ===========================================  ==========================================
moment     when                                         beside weights and optimizer states
=========  ===========================================  ==========================================
backward   a loss, or a layer's backward, with as many  activations in flight, logits; gradients of
           micro-batches in flight as there can be      micro-batches before, and buckets, as they fill
reduction  the last backward is over                    whole gradients, and all buckets
step       the optimizer steps                          gradients as it takes them
=========  ===========================================  ==========================================

Megatron-LM's memory report and LLMem (arXiv 2404.10933) also sum by stage, take the worst stage, and count memory
outside torch. The constants outside torch are published measurements (NCCL's issues 964 and 986).
"""

from __future__ import annotations

from operator import itemgetter
from typing import Literal, NamedTuple

from dslpar.core.mesh import TENSOR_AXES, Mesh
from dslpar.forecast.activations import Activations, activations
from dslpar.forecast.model_states import States, states
from dslpar.forecast.workload import Workload

Moment = Literal["backward", "reduction", "step"]

CONTEXT = 1.1e9
"""Bytes of a process's CUDA context with its libraries, including the cuBLAS workspaces that torch allocates: one per
thread that multiplies (32 MiB each on Hopper)."""
COMMUNICATOR = 0.55 * 2**30
"""Bytes of NCCL's buffers per communicator."""
FRAGMENTATION = 0.01
"""Share of what comes and goes in a step that torch's allocator holds besides; nanotron's peaks show no more of it."""


class StageMemory(NamedTuple):
    """Memory of a pipeline rank at its fullest moment, in bytes."""

    pipe_rank: int
    moment: Moment
    weights: float
    gradients: float
    optimizer: float
    """Moments, and masters."""
    masters: float
    """Part of `optimizer`: the weights in fp32."""
    activations: float
    """Saved for all micro-batches in flight, and needed by the running layer."""
    working: float
    """Part of `activations` that the running layer needs."""
    logits: float
    buffers: float
    """DeepSpeed's buckets, and temporarily gathered weights."""
    fragmentation: float
    outside: float
    """Outside torch: the device's context, communicators."""

    @property
    def allocated(self) -> float:
        """Bytes allocated by torch."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        """All bytes."""
        return self.allocated + self.fragmentation + self.outside


_Moment = tuple[float, Moment, float, float, float, float, float]
"""Everything that comes and goes, the moment, and its parts: gradients, saved activations, those of the running layer,
logits, buffers.
"""


class AtRest(NamedTuple):
    """Memory of a rank besides activations; all micro-batch sizes share it, if a step has several micro-batches."""

    held: States
    left: float
    rises: tuple[tuple[float, float], ...]
    """`States.left` and `States.rises` of `held`."""
    fullest: _Moment
    """The fuller of the two moments without activations."""
    outside: float


def at_rest(workload: Workload, pipe_rank: int) -> AtRest:
    """Return what a pipeline rank holds besides activations."""
    held = states(workload, pipe_rank)
    outside = CONTEXT + COMMUNICATOR * num_communicators(workload.mesh)
    return AtRest(held, held.left, held.rises, max(_reduction(held), _step(held), key=itemgetter(0)), outside)


def stage_memory(workload: Workload, pipe_rank: int, resting: AtRest | None = None) -> StageMemory:
    """Return the memory of a pipeline rank at its fullest moment; `resting`: the part computed before, if any."""
    if resting is None:
        resting = at_rest(workload, pipe_rank)
    held, backward = resting.held, _backward(workload, resting, activations(workload, pipe_rank))
    fullest = backward if backward[0] >= resting.fullest[0] else resting.fullest
    come_and_go, moment, gradients, saved, working, logits, buffers = fullest
    return StageMemory(
        pipe_rank,
        moment,
        weights=held.weights,
        gradients=held.allocated + gradients,
        optimizer=held.optimizer + held.masters,
        masters=held.masters,
        activations=saved + working,
        working=working,
        logits=logits,
        buffers=held.constant + buffers,
        fragmentation=FRAGMENTATION * (come_and_go + (held.allocated + held.constant)),
        outside=resting.outside,
    )


def binding(workload: Workload) -> StageMemory:
    """Return the memory of the pipeline rank that needs the most."""
    return max((stage_memory(workload, rank) for rank in range(workload.mesh.pipe)), key=lambda each: each.total)


def _backward(workload: Workload, resting: AtRest, needed: Activations) -> _Moment:
    """Return the fullest moment of a micro-batch's backward: the loss's backward or that of a layer.

    As a backward proceeds, activations are freed, gradients come in a step's first backward, and buckets fill.
    """
    held, left = resting.held, resting.left
    saved, first, working, logits, output = needed
    is_first = saved >= workload.micro_batches * first * 0.999  # all forwards come before any backward
    at_loss = 0.0 if is_first else held.gradients
    fullest: _Moment = (at_loss + saved + logits + left, "backward", at_loss, saved, 0.0, logits, left)
    for done, buffers in resting.rises:
        gradients = held.gradients if done or held.at_once else at_loss
        waiting = saved - done * first
        total = gradients + waiting + working + output + buffers
        if total > fullest[0]:
            fullest = total, "backward", gradients, waiting, working, output, buffers
    return fullest


def _reduction(held: States) -> _Moment:
    gradients = min(held.gradients, held.reduced)
    return held.reduced, "reduction", gradients, 0.0, 0.0, 0.0, held.reduced - gradients


def _step(held: States) -> _Moment:
    gradients = min(held.gradients, held.stepped)
    return held.stepped, "step", gradients, 0.0, 0.0, 0.0, held.stepped - gradients


def num_communicators(mesh: Mesh) -> int:
    """Count the communicators in which a rank sends activations, weights or gradients.

    There is one per tensor axis with several ranks; one for all of these axes together, in which vectors' gradients are
    summed; one for replicas; and two for a pipeline's messages, one per direction (`dslpar.distributed.groups`). Groups
    that only sum numbers, such as norms and the loss, are not counted.
    """
    tensor = sum(mesh.sizes[axis] > 1 for axis in TENSOR_AXES)
    summing = sum(mesh.sizes[axis] > 1 for axis in mesh.tensor.summed_by_layers(TENSOR_AXES))
    return tensor + (summing > 1) + (mesh.data > 1) + 2 * (mesh.pipe > 1)
