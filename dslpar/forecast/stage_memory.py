"""Memory of each pipeline rank at the fullest moment of a step, in bytes and by part.

    made = stage_memory(workload, pipe_rank=0)
    made.total, made.moment                    # 7.1e10, 'backward'
    binding(workload)                          # the pipeline rank that needs the most

Three moments can be the fullest. At all of them a rank also holds weights and optimizer states:

=========  ================================================  ================================================
moment     time                                              memory besides weights and optimizer states
=========  ================================================  ================================================
backward   the backward of the loss or of a layer, with the  activations in flight, logits, gradients of earlier
           most micro-batches in flight                      micro-batches, and partly filled gradient buckets
reduction  after a step's last backward                      gradients, and all buckets
step       during the optimizer's step                       gradients in the form that the optimizer needs
=========  ================================================  ================================================

Megatron-LM's memory report and LLMem (arXiv 2404.10933) also sum by stage, take the worst stage, and count memory
outside torch. The constants for memory outside torch are published measurements (NCCL's issues 964 and 986).
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
"""Bytes of a process's CUDA context with its libraries, including the cuBLAS workspaces that torch allocates, one per
thread that computes matrix products (32 MiB each on Hopper)."""
COMMUNICATOR = 0.55 * 2**30
"""Bytes of NCCL's buffers per communicator."""
FRAGMENTATION = 0.01
"""Overhead of torch's allocator, as a share of the memory that is freed and allocated in a step. nanotron's measured
peaks show no larger share."""


class StageMemory(NamedTuple):
    """Memory of a pipeline rank at its fullest moment, in bytes."""

    pipe_rank: int
    moment: Moment
    weights: float
    gradients: float
    optimizer: float
    """Optimizer moments, and `masters`."""
    masters: float
    """Part of `optimizer`: the fp32 copies of weights that it updates."""
    activations: float
    """Tensors saved for all micro-batches in flight, and `working`."""
    working: float
    """Part of `activations`: temporaries of the running layer."""
    logits: float
    """Logits and tensors made from them, while the loss's backward runs."""
    buffers: float
    """DeepSpeed's buckets, and temporarily gathered weights."""
    fragmentation: float
    """Overhead of torch's allocator."""
    outside: float
    """Memory outside torch: the CUDA context and NCCL's communicators."""

    @property
    def allocated(self) -> float:
        """Bytes allocated by torch."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        """All bytes."""
        return self.allocated + self.fragmentation + self.outside


_Moment = tuple[float, Moment, float, float, float, float, float]
"""Temporary memory at a moment: (sum, moment, gradients, saved activations, temporaries of the running layer, logits,
buffers). The sum is that of the five parts.
"""


class AtRest(NamedTuple):
    """Memory of a rank without activations. It is the same for all layouts that differ only in the micro-batch size, as
    long as a step has several micro-batches.
    """

    held: States
    left: float
    rises: tuple[tuple[float, float], ...]
    """`States.left` and `States.rises` of `held`."""
    fullest: _Moment
    """The fuller of the moments "reduction" and "step", which have no activations."""
    outside: float
    """Memory outside torch."""


def at_rest(workload: Workload, pipe_rank: int) -> AtRest:
    """Return the memory of a pipeline rank without activations."""
    held = states(workload, pipe_rank)
    outside = CONTEXT + COMMUNICATOR * num_communicators(workload.mesh)
    return AtRest(held, held.left, held.rises, max(_reduction(held), _step(held), key=itemgetter(0)), outside)


def stage_memory(workload: Workload, pipe_rank: int, resting: AtRest | None = None) -> StageMemory:
    """Return the memory of a pipeline rank at its fullest moment; `resting` is the result of `at_rest`, if known."""
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
    """Return the fullest moment of a micro-batch's backward: in the loss's backward or in a layer's.

    While a backward proceeds, activations are freed and buckets fill. A step's first backward also allocates gradients.
    """
    held, left = resting.held, resting.left
    saved, first, working, logits, output = needed
    # If all micro-batches are in flight at the fullest moment, it is in the step's first backward.
    is_first = saved >= workload.micro_batches * first * 0.999
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
    """Count the NCCL communicators in which a rank sends activations, weights or gradients.

    - one per tensor axis with several ranks,
    - one for all axes over which layers sum the gradients of vectors, if there are several,
    - one for replicas,
    - two for a pipeline's messages, one per direction (`dslpar.distributed.groups`).

    Groups that only sum single numbers, such as the gradient norm and the loss, are not counted.
    """
    tensor = sum(mesh.sizes[axis] > 1 for axis in TENSOR_AXES)
    summing = sum(mesh.sizes[axis] > 1 for axis in mesh.tensor.summed_by_layers(TENSOR_AXES))
    return tensor + (summing > 1) + (mesh.data > 1) + 2 * (mesh.pipe > 1)
