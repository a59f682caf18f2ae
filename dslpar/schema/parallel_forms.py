"""The two forms of a layout, dslpar's `parallel` and LiBai's `train.dist`, read as one.

    pipeline_of(spec), tensor_of(spec)      # the requested sizes, in whichever form they are written
    pipeline_key(spec)                      # the key with the size: 'train.dist.pipeline_parallel_size'

All code that reads a layout uses these functions. If a config has both forms and they differ, lint reports it (PAR104).
"""

from __future__ import annotations

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


# Each function reads one axis only: lint reports the mistakes of one axis although the other axis is invalid.


def pipeline_key(spec: Spec) -> str:
    """Return the key of the number of stages: in `parallel` if the pipeline is there, else in `train.dist`."""
    return "parallel.pipeline.size" if spec.parallel.pipeline is not None else f"{_LIBAI}.pipeline_parallel_size"


def stage_ids_key(spec: Spec) -> str:
    """Return the key of the list of stage ids, in the form of `pipeline_key`."""
    if spec.parallel.pipeline is not None:
        return "parallel.pipeline.stage_ids"
    return f"{_LIBAI}.custom_pipeline_stage_id"


def tensor_key(spec: Spec) -> str:
    """Return the key of the tensor-parallel size: in `parallel` if `parallel.tensor` is given, else in `train.dist`."""
    return "parallel.tensor.size" if spec.parallel.tensor is not None else f"{_LIBAI}.tensor_parallel_size"
