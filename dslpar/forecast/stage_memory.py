"""Peak memory of each pipeline rank in a step, in bytes and by part.

    made = stage_memory(workload, pipe_rank=0)
    made.total, made.moment                    # 7.1e10, 'backward'
    binding(workload)                          # the pipeline rank that needs the most

Memory can peak at three moments. At all of them a rank also holds weights and optimizer states:

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

The peak is the larger of two candidates: the backward, which depends on activations, and the larger one of reduction
and step, which does not. A search for layouts computes the second candidate once per layout (`WithoutActivations`).
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Literal, NamedTuple

from dslpar.core.mesh import TENSOR_AXES, Mesh
from dslpar.forecast.activations import Activations, activations
from dslpar.forecast.model_states import States, states
from dslpar.forecast.workload import Workload
from dslpar.schema.sections import Model

Moment = Literal["backward", "reduction", "step"]

CONTEXT = 1.1e9
"""Bytes of a process's CUDA context with its libraries, including the cuBLAS workspaces that torch allocates, one per
thread that computes matrix products (32 MiB each on Hopper)."""
COMMUNICATOR = 0.55 * 2**30
"""Bytes of NCCL's buffers per communicator."""
FRAGMENTATION = 0.01
"""Overhead of torch's allocator, as a share of the memory that is freed and allocated in a step. nanotron's measured
peaks show no larger share."""
UNEVEN = 2.0
"""Load of the fullest rank's experts, in all of its layers and relative to the even load, for which memory is reported.
A balance loss keeps loads well below it. Only a capacity bounds them."""
ROUNDING = 1e-3
"""Relative tolerance for comparing two sums of the same activations that were added in different orders."""


class StageMemory(NamedTuple):
    """Peak memory of a pipeline rank, in bytes."""

    pipe_rank: int
    """Index of the rank on the "pipe" axis."""
    moment: Moment
    """The moment at which memory peaks."""
    weights: float
    """Weights, trained and frozen."""
    gradients: float
    """Gradients that exist at that moment."""
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


class PeakCandidate(NamedTuple):
    """Memory that is allocated and freed within a step, at one of the moments that may be the peak, in bytes."""

    total: float
    """Sum of the parts below."""
    moment: Moment
    """The moment."""
    gradients: float
    """Gradients, without those that exist from the start of the run."""
    saved: float = 0.0
    """Tensors saved for all micro-batches in flight."""
    working: float = 0.0
    """Temporaries of the running layer."""
    logits: float = 0.0
    """Logits and tensors made from them."""
    buffers: float = 0.0
    """Buckets and gathered weights, without those that exist from the start of the run."""


class WithoutActivations(NamedTuple):
    """Everything that does not depend on the micro-batch size; the planner's search computes it once per layout.

    It also depends on whether a step has several micro-batches, because then gradients accumulate.
    """

    held: States
    """Model states and buffers."""
    left: float
    """`held.left`: bytes of buffers at the start of a backward."""
    rises: tuple[tuple[float, float], ...]
    """`held.rises`: bytes of buffers during a backward; pairs (share of the layers whose backward is done, bytes)."""
    peak: PeakCandidate
    """The larger of "reduction" and "step", the moments at which no activations exist."""
    outside: float
    """Memory outside torch."""


def without_activations(workload: Workload, pipe_rank: int) -> WithoutActivations:
    """Return the part of a pipeline rank's memory that does not depend on the micro-batch size."""
    held = states(workload, pipe_rank)
    return WithoutActivations(
        held,
        left=held.left,
        rises=held.rises,
        peak=max(_reduction(held), _step(held), key=attrgetter("total")),
        outside=CONTEXT + COMMUNICATOR * num_communicators(workload.mesh),
    )


def stage_memory(workload: Workload, pipe_rank: int, fixed: WithoutActivations | None = None) -> StageMemory:
    """Return the peak memory of a pipeline rank; `fixed` is the result of `without_activations`, if known."""
    if fixed is None:
        fixed = without_activations(workload, pipe_rank)
    held, backward = fixed.held, _backward(workload, fixed, activations(workload, pipe_rank))
    peak = backward if backward.total >= fixed.peak.total else fixed.peak
    return StageMemory(
        pipe_rank,
        peak.moment,
        weights=held.weights,
        gradients=held.allocated + peak.gradients,
        optimizer=held.optimizer + held.masters,
        masters=held.masters,
        activations=peak.saved + peak.working,
        working=peak.working,
        logits=peak.logits,
        buffers=held.constant + peak.buffers,
        fragmentation=FRAGMENTATION * (peak.total + (held.allocated + held.constant)),
        outside=fixed.outside,
    )


def binding(workload: Workload) -> StageMemory:
    """Return the memory of the pipeline rank that needs the most."""
    return max((stage_memory(workload, rank) for rank in range(workload.mesh.pipe)), key=lambda each: each.total)


def uneven_load(workload: Workload) -> float:
    """Return `UNEVEN`, or less if the experts have a capacity; at least 1."""
    model = workload.model
    capacity = model.capacity_factor if isinstance(model, Model) else None
    return UNEVEN if capacity is None else min(UNEVEN, max(1.0, capacity))


def binding_at_uneven_load(workload: Workload) -> StageMemory | None:
    """Return the memory of the rank that needs the most if its experts get `uneven_load` times the even load.

    It is None unless the workload sends tokens to experts, whose load may be uneven.
    """
    load = uneven_load(workload)
    if load == 1 or not float(workload.costs.layer.memory.of_rows):
        return None
    return binding(replace(workload, expert_load=load))


def _backward(workload: Workload, fixed: WithoutActivations, needed: Activations) -> PeakCandidate:
    """Return the peak of a micro-batch's backward: in the loss's backward or in a layer's.

    While a backward proceeds, activations are freed and buckets fill. A step's first backward also allocates gradients.
    """
    held, left = fixed.held, fixed.left
    saved, first, working, logits, output = needed
    # If all micro-batches are in flight at the peak, it is in the step's first backward. Its loss finds no gradients.
    is_first = saved >= workload.micro_batches * first * (1 - ROUNDING)
    at_loss = 0.0 if is_first else held.gradients
    peak = PeakCandidate(at_loss + saved + logits + left, "backward", at_loss, saved, logits=logits, buffers=left)
    for done, buffers in fixed.rises:
        gradients = held.gradients if done or held.at_once else at_loss
        waiting = saved - done * first
        total = gradients + waiting + working + output + buffers
        if total > peak.total:
            peak = PeakCandidate(total, "backward", gradients, waiting, working, output, buffers)
    return peak


def _reduction(held: States) -> PeakCandidate:
    gradients = min(held.gradients, held.reduced)
    return PeakCandidate(held.reduced, "reduction", gradients, buffers=held.reduced - gradients)


def _step(held: States) -> PeakCandidate:
    gradients = min(held.gradients, held.stepped)
    return PeakCandidate(held.stepped, "step", gradients, buffers=held.stepped - gradients)


def num_communicators(mesh: Mesh) -> int:
    """Count the NCCL communicators in which a rank sends activations, weights or gradients.

    - one per tensor axis with several ranks,
    - one for all axes over which layers sum the gradients of vectors, if there are several,
    - one for replicas,
    - with experts over data ranks, one for the exchange of tokens and one for the replicas of experts,
    - two for a pipeline's messages, one per direction (`dslpar.distributed.groups`).

    Groups that only sum single numbers, such as the gradient norm and the loss, are not counted.
    """
    tensor = sum(mesh.sizes[axis] > 1 for axis in TENSOR_AXES)
    summing = sum(mesh.sizes[axis] > 1 for axis in mesh.tensor.summed_by_layers(TENSOR_AXES))
    experts = (mesh.size("expert") > 1) + (mesh.size("expert_data") > 1) if mesh.tensor.e > 1 else 0
    return tensor + (summing > 1) + (mesh.data > 1) + experts + 2 * (mesh.pipe > 1)
