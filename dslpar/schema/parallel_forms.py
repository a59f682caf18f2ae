"""The two forms of a layout, dslpar's `parallel` and LiBai's `train.dist`, read as one.

    pipeline_of(spec), tensor_of(spec)      # the requested sizes, in whichever form they are written
    keys_of(spec).pipeline                  # the key with the size: 'train.dist.pipeline_parallel_size'

All code that reads a layout uses these functions. If a config has both forms and they differ, lint reports it (PAR104).
"""

from __future__ import annotations

from typing import NamedTuple

from dslpar.schema.sections import PipelineParallel, Spec, TensorParallel

_LIBAI = "train.dist"


def pipeline_of(spec: Spec) -> PipelineParallel | None:
    """Return the pipeline that the config requests in either form, or None."""
    if spec.parallel.pipeline is not None:
        return spec.parallel.pipeline
    dist = spec.train.dist
    size, ids = dist.pipeline_parallel_size or 1, dist.custom_pipeline_stage_id
    if size == 1 and ids is None:
        return None
    return PipelineParallel(size=size, stage_ids=ids, method=None if ids else "libai")


def tensor_of(spec: Spec) -> TensorParallel | None:
    """Return the tensor parallelism that the config requests in either form, or None."""
    if spec.parallel.tensor is not None:
        return spec.parallel.tensor
    size = spec.train.dist.tensor_parallel_size or 1
    return TensorParallel(size=size, mode="1d") if size > 1 else None


def is_of_libai(spec: Spec) -> bool:
    """Return whether `train.dist` has a pipeline or tensor size above 1. LiBai's form has only tensor mode '1d'."""
    dist = spec.train.dist
    return max(dist.pipeline_parallel_size or 1, dist.tensor_parallel_size or 1) > 1


def stated_replicas(spec: Spec) -> dict[str, int]:
    """Return key -> number of replicas that it requests. LiBai's data_parallel_size=1 counts as absent."""
    libai = spec.train.dist.data_parallel_size or 1
    stated = {"parallel.data.size": spec.parallel.data.size}
    stated |= {f"{_LIBAI}.data_parallel_size": libai if libai > 1 else None}
    return {key: size for key, size in stated.items() if size is not None}


class ParallelKeys(NamedTuple):
    """The keys of the sizes of a layout, in the form that the config uses."""

    pipeline: str
    stage_ids: str
    tensor: str


def keys_of(spec: Spec) -> ParallelKeys:
    """Return the key of each axis: in `parallel` if the axis is there, else in `train.dist`."""
    pipeline, stage_ids = "parallel.pipeline.size", "parallel.pipeline.stage_ids"
    if spec.parallel.pipeline is None:
        pipeline, stage_ids = f"{_LIBAI}.pipeline_parallel_size", f"{_LIBAI}.custom_pipeline_stage_id"
    tensor = f"{_LIBAI}.tensor_parallel_size" if spec.parallel.tensor is None else "parallel.tensor.size"
    return ParallelKeys(pipeline, stage_ids, tensor)
