"""PAR: the sizes of the mesh against the world size, and `parallel` against LiBai's `train.dist`."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("PAR101", "world-not-a-multiple")
def world_not_a_multiple(cx: Context) -> Iterator[Problem]:
    """The world size is not a multiple of pipeline * tensor."""
    ranks, world = cx.stages * cx.cuboid.size, cx.world
    if world > ranks and world % ranks:
        below = world // ranks * ranks
        message = f"a world of {world} is not a multiple of {_product(cx)}"
        hint = f"worlds of {below} or {below + ranks} fit; or choose sizes whose product divides {world}"
        yield cx.problem(_size_keys(cx), message, hint)


@rule("PAR102", "too-few-ranks")
def too_few_ranks(cx: Context) -> Iterator[Problem]:
    """One replica needs more ranks than the world has."""
    ranks = cx.stages * cx.cuboid.size
    if cx.world < ranks:
        message = f"one replica needs {_product(cx)} ranks, and the world has {cx.world}"
        yield cx.problem(_size_keys(cx), message, f"start at least {ranks} ranks, or choose smaller sizes")


@rule("PAR103", "data-size-differs")
def data_size_differs(cx: Context) -> Iterator[Problem]:
    """The data size is not world / (pipeline * tensor)."""
    libai = cx.spec.train.dist.data_parallel_size
    for key, size in (
        ("parallel.data.size", cx.spec.parallel.data.size),
        ("train.dist.data_parallel_size", None if libai == 1 else libai),
    ):
        if size is not None and size != cx.data_size:
            ranks = cx.stages * cx.cuboid.size
            message = f"data is {cx.world} / {ranks} = {cx.data_size}, not {size}"
            yield cx.problem(key, message, f"write {cx.data_size}, or leave it out, or start {size * ranks} ranks")


@rule("PAR104", "two-forms-differ")
def two_forms_differ(cx: Context) -> Iterator[Problem]:
    """`parallel` and `train.dist` describe different layouts."""
    if not cx.given("parallel") or not (cx.from_parallel("pipeline") or cx.from_parallel("tensor")):
        return
    dist, tensor, pipeline = cx.spec.train.dist, cx.spec.parallel.tensor, cx.spec.parallel.pipeline
    differing = []
    for name, theirs, ours in (
        ("pipeline_parallel_size", dist.pipeline_parallel_size, pipeline.size if pipeline else 1),
        ("tensor_parallel_size", dist.tensor_parallel_size, tensor.size if tensor else 1),
    ):
        if theirs not in (None, 1, ours):
            differing.append((name, f"is {theirs}, and `parallel` has {ours}"))
    if tensor and (dist.tensor_parallel_size or 1) > 1 and tensor.mode not in (None, "1d"):
        differing.append(("tensor_parallel_size", f"means mode '1d', and `parallel` has {tensor.mode!r}"))
    ids = dist.custom_pipeline_stage_id
    if ids is not None and ids != (pipeline.stage_ids if pipeline else None):
        differing.append(("custom_pipeline_stage_id", "is another partition of the layers than `parallel.pipeline`"))
    for name, difference in differing:
        yield cx.problem(f"train.dist.{name}", f"train.dist.{name} {difference}", "keep one of the two forms")


def _product(cx: Context) -> str:
    sizes = [f"{name} {size}" for name, size in (("pipeline", cx.stages), ("tensor", cx.cuboid.size)) if size > 1]
    total = f" = {cx.stages * cx.cuboid.size}" if len(sizes) > 1 else ""
    return " * ".join(sizes) + total


def _size_keys(cx: Context) -> tuple[str, ...]:
    """The keys of the sizes over 1, that of the larger size first."""
    keys = [(cx.stages, cx.pipeline_key), (cx.cuboid.size, cx.tensor_key)]
    return tuple(key for size, key in sorted(keys, key=lambda pair: -pair[0]) if size > 1)


RULES = (world_not_a_multiple, too_few_ranks, data_size_differs, two_forms_differ)
