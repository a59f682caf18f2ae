"""Sums of a rank after the last backward: of gradients over tensor ranks and over stages, and of the mean loss.

DeepSpeed's own operations are left out: the reduction over replicas (and over the tensor axis d if ZeRO shards over
it), gradient norms, and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.dry_run.recorder import Call, recording
from dslpar.dry_run.stage import DTYPES, META
from dslpar.engine.stage_layers import TIED_WEIGHT, shared_params
from dslpar.layers.parameter import deferred_vectors
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayerSpec


def record_model_parallel_sums(
    job: Job, groups: Groups, specs: Sequence[LayerSpec], modules: Sequence[nn.Module]
) -> list[Call]:
    """Return the operations after the last backward; `modules` are the rank's stages after their backward."""
    with recording(groups) as calls:
        if job.mesh.pipe > 1:
            _sum_tied(job, groups, specs, modules)
        _sum_vectors(job, groups, modules)
        if job.mesh.pipe > 1:
            _mean_loss(job, groups)
    return calls


def _gradient(job: Job, p: Tensor) -> Tensor:
    """Return an empty tensor with the form of a parameter's gradient in reductions.

    In half precision with ZeRO 1 to 3 the gradient is in fp32, otherwise in the parameter's dtype.
    """
    wide = job.spec.zero.stage > 0 and job.spec.precision.dtype != "fp32"
    return torch.empty(p.shape, dtype=torch.float32 if wide else p.dtype, device=META)


def _sum_tied(job: Job, groups: Groups, specs: Sequence[LayerSpec], modules: Sequence[nn.Module]) -> None:
    """Sum the gradients of a tied weight over the pipeline ranks that hold it, as DeepSpeed's pipeline engine does."""
    pipe = groups.coord["pipe"]
    for names in shared_params(specs, job.stages.counts or (), job.chunks):
        indices = sorted(names)
        group = groups.subgroup("pipe", indices)
        if group is not None:
            peers = tuple(groups.axis("pipe").peers[index] for index in indices)
            axis = Axis(len(indices), indices.index(pipe), peers, group)
            collectives.start_all_reduce_(_gradient(job, _weight(specs, names[pipe], modules)), axis).wait()


def _weight(specs: Sequence[LayerSpec], name: str, modules: Sequence[nn.Module]) -> Tensor:
    layer = name.removesuffix(f".{TIED_WEIGHT}")
    owner = next(spec.owner for spec in specs if spec.name == layer).replace(".", "/")
    return next(p for module in modules for key, p in module.named_parameters() if key == f"{owner}.{TIED_WEIGHT}")


def _sum_vectors(job: Job, groups: Groups, modules: Sequence[nn.Module]) -> None:
    """Sum the gradients of vectors over tensor ranks, as `dslpar.engine.vector_reduction` does."""
    gradients_over: dict[tuple[str, ...], list[Tensor]] = {}
    for module in modules:
        for letters, vectors in deferred_vectors(module).items():
            gradients_over.setdefault(letters, []).extend(_gradient(job, p) for p in vectors if p.requires_grad)
    for letters, gradients in gradients_over.items():
        if gradients:
            collectives.start_all_reduce_coalesced_(gradients, groups.axis(*letters))()


def _mean_loss(job: Job, groups: Groups) -> None:
    """Send the mean loss from the last stage to all pipeline ranks, as the pipeline's executor does."""
    data, pipe = groups.axis("data"), groups.axis("pipe")
    loss = torch.zeros((), device=META)
    if groups.coord["pipe"] == pipe.size - 1:
        collectives.all_reduce(torch.zeros((), dtype=DTYPES["fp32"], device=META), data)
    collectives.broadcast(loss, pipe, source=pipe.size - 1)
