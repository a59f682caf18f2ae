"""PAR: the sizes of the mesh against the world, and the two forms against each other."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("PAR101", "world-not-a-multiple")
def world_not_a_multiple(cx: Context) -> Iterator[Problem]:
    """The world size is no multiple of pipeline * tensor.

    What it does:
        Checks that ranks divide into whole replicas of pipeline * tensor ranks.

    Why:
        Left-over ranks would have no place in the mesh. dslpar never leaves ranks idle, and never changes a size.

    Example:
        parallel = dict(pipeline=3)  # a world of 8

    Use instead:
        parallel = dict(pipeline=4)  # a world of 8
    """
    ranks, world = cx.stages * cx.cuboid.size, cx.world
    if world > ranks and world % ranks:
        below = world // ranks * ranks
        message = f"a world of {world} is not a multiple of {_product(cx)}"
        fix = f"worlds of {below} or {below + ranks} fit; or choose sizes whose product divides {world}"
        yield cx.problem(_sizes(cx), message, fix)


@rule("PAR102", "too-few-ranks")
def too_few_ranks(cx: Context) -> Iterator[Problem]:
    """One replica needs more ranks than the world has.

    What it does:
        Checks that the world has at least pipeline * tensor ranks.

    Why:
        Some frameworks clamp a size to the world, and train another layout than the one asked for. dslpar does not.

    Example:
        parallel = dict(pipeline=16)  # a world of 8

    Use instead:
        parallel = dict(pipeline=8)  # a world of 8
    """
    ranks = cx.stages * cx.cuboid.size
    if cx.world < ranks:
        message = f"{_product(cx)} ranks are one replica, and the world has {cx.world}"
        yield cx.problem(_sizes(cx), message, f"start at least {ranks} ranks, or choose smaller sizes")


@rule("PAR103", "data-size-differs")
def data_size_differs(cx: Context) -> Iterator[Problem]:
    """The data size that is written is not world / (pipeline * tensor).

    What it does:
        Compares parallel.data, and LiBai's data_parallel_size where it is over 1, with what the other sizes leave.

    Why:
        The data size follows from the others. ColossalAI ignores a wrong one, LiBai overwrites it.

    Example:
        parallel = dict(data=3, pipeline=2)  # a world of 8

    Use instead:
        parallel = dict(data=4, pipeline=2)  # a world of 8; or leave data out
    """
    libai = cx.spec.train.dist.data_parallel_size
    for key, size in (
        ("parallel.data.size", cx.spec.parallel.data.size),
        ("train.dist.data_parallel_size", None if libai == 1 else libai),
    ):
        if size is not None and size != cx.data_size:
            ranks = cx.stages * cx.cuboid.size
            message = f"data is {cx.world} / {ranks} = {cx.data_size}, not {size}"
            fix = f"write {cx.data_size}, or leave it out, or start {size * ranks} ranks"
            yield cx.problem(key, message, fix)


@rule("PAR104", "two-forms-differ")
def two_forms_differ(cx: Context) -> Iterator[Problem]:
    """`parallel` and `train.dist` ask for different layouts.

    What it does:
        Where LiBai's form says something (a size over 1, or stage ids), compares it with `parallel`.

    Why:
        Both forms are equal in rights, so neither can win.

    Example:
        parallel = dict(pipeline=2)
        train = dict(dist=dict(pipeline_parallel_size=4))

    Use instead:
        parallel = dict(pipeline=4)
    """
    if not cx.given("parallel") or not (cx.from_parallel("pipeline") or cx.from_parallel("tensor")):
        return
    dist, tensor, pipeline = cx.spec.train.dist, cx.spec.parallel.tensor, cx.spec.parallel.pipeline
    sizes = [
        ("pipeline_parallel_size", dist.pipeline_parallel_size, pipeline.size if pipeline else 1),
        ("tensor_parallel_size", dist.tensor_parallel_size, tensor.size if tensor else 1),
    ]
    for name, theirs, ours in sizes:
        if theirs not in (None, 1, ours):
            message = f"train.dist.{name} is {theirs}, and `parallel` says {ours}"
            yield cx.problem(f"train.dist.{name}", message, "keep one of the two forms")
    if tensor and (dist.tensor_parallel_size or 1) > 1 and tensor.mode not in (None, "1d"):
        message = f"train.dist.tensor_parallel_size means mode '1d', and `parallel` says {tensor.mode!r}"
        yield cx.problem("train.dist.tensor_parallel_size", message, "keep one of the two forms")
    ids = dist.custom_pipeline_stage_id
    if ids is not None and ids != (pipeline.stage_ids if pipeline else None):
        message = "train.dist.custom_pipeline_stage_id is not the cut that `parallel.pipeline` asks for"
        yield cx.problem("train.dist.custom_pipeline_stage_id", message, "keep one of the two forms")


def _product(cx: Context) -> str:
    parts = [("pipeline", cx.stages), ("tensor", cx.cuboid.size)]
    shown = [f"{name} {size}" for name, size in parts if size > 1]
    total = f" = {cx.stages * cx.cuboid.size}" if len(shown) > 1 else ""
    return " * ".join(shown) + total


def _sizes(cx: Context) -> tuple[str, ...]:
    """The keys of the sizes, the larger size first."""
    keys = [(cx.stages, cx.pipeline_key), (cx.cuboid.size, cx.tensor_key)]
    return tuple(key for size, key in sorted(keys, key=lambda pair: -pair[0]) if size > 1)


RULES = (world_not_a_multiple, too_few_ranks, data_size_differs, two_forms_differ)
