"""PAR: check that the sizes of the mesh fit the world size, and that `parallel` and LiBai's `train.dist` agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule
from dslpar.schema.parallel_forms import stated_replicas


@rule("PAR101", "world-not-a-multiple")
def world_not_a_multiple(cx: Context) -> Iterator[Problem]:
    """The world size is not a multiple of pipeline * tensor."""
    replica, world = _Replica(cx), cx.world.size
    if world > replica.ranks and world % replica.ranks:
        below = world // replica.ranks * replica.ranks
        message = f"a world of {world} is not a multiple of {replica.product}"
        hint = f"choose sizes whose product divides {world}"
        if replica.complete:
            data = cx.spec.parallel.data.size
            worlds = f"{data * replica.ranks}" if data else f"{below} or {below + replica.ranks}"
            hint = f"start {worlds} ranks; or {hint}"
        yield cx.problem(replica.keys, message, hint)


@rule("PAR102", "too-few-ranks")
def too_few_ranks(cx: Context) -> Iterator[Problem]:
    """One replica needs more ranks than the world has."""
    replica = _Replica(cx)
    if cx.world.size < replica.ranks:
        message = f"one replica needs {replica.product} ranks, but the world has {cx.world.size}"
        yield cx.problem(replica.keys, message, f"start at least {replica.ranks} ranks; or choose smaller sizes")


@rule("PAR103", "data-size-differs")
def data_size_differs(cx: Context) -> Iterator[Problem]:
    """The data size is not world / (pipeline * tensor)."""
    for key, size in stated_replicas(cx.spec).items():
        if size != (data := cx.layout.data_size):
            ranks = cx.pipeline.stages * cx.tensor.size
            message = f"data is {cx.world.size} / {ranks} = {data}, not {size}"
            yield cx.problem(key, message, f"write {data}, or leave it out, or start {size * ranks} ranks")


@rule("PAR104", "two-forms-differ")
def two_forms_differ(cx: Context) -> Iterator[Problem]:
    """`parallel` and `train.dist` describe different layouts."""
    if not cx.source.given("parallel"):
        return
    in_parallel = {"pipeline": cx.spec.parallel.pipeline is not None, "tensor": cx.spec.parallel.tensor is not None}
    if not any(in_parallel.values()):
        return
    dist, tensor, pipeline = cx.spec.train.dist, cx.spec.parallel.tensor, cx.spec.parallel.pipeline
    differing = []
    for axis, theirs, ours in (
        ("pipeline", dist.pipeline_parallel_size, pipeline.size if pipeline else 1),
        ("tensor", dist.tensor_parallel_size, tensor.size if tensor else 1),
    ):
        if theirs not in (None, 1, ours):
            differing.append((f"{axis}_parallel_size", axis, f"is {theirs}, but `parallel` has {ours}"))
    if tensor and (dist.tensor_parallel_size or 1) > 1 and tensor.mode not in (None, "1d"):
        differing.append(("tensor_parallel_size", "tensor", f"means mode '1d', but `parallel` has {tensor.mode!r}"))
    ids = dist.custom_pipeline_stage_id
    if ids is not None and ids != (pipeline.stage_ids if pipeline else None):
        difference = "partitions the layers differently from `parallel.pipeline`"
        differing.append(("custom_pipeline_stage_id", "pipeline", difference))
    for name, axis, difference in differing:
        key = f"train.dist.{name}"
        hint = f"keep one of {key} and parallel.{axis}" if in_parallel[axis] else f"leave {key} out"
        if pipeline and key == "train.dist.custom_pipeline_stage_id":
            hint = f"leave {key} out, or write it under parallel.pipeline.stage_ids"
        yield cx.problem(key, f"{key} {difference}", hint)


class _Replica:
    """The number of ranks per replica: the product of all valid sizes.

    Sizes that are invalid are left out, so that they do not hide a mistake in the others.
    """

    def __init__(self, cx: Context) -> None:
        known = []
        with suppress(UnknownValueError):
            known.append((cx.pipeline.stages, "pipeline", cx.pipeline.key))
        with suppress(UnknownValueError):
            context = _context_beside_tensor(cx)
            known += [(context, "context", "parallel.context.size")] if context > 1 else []
            name = "context" if cx.tensor.key == "parallel.context.size" else "tensor"
            known.append((cx.tensor.size // context, name, cx.tensor.key))
        self.complete = len(known) >= 2
        sizes = [axis for axis in known if axis[0] > 1]
        self.ranks = prod(size for size, _, _ in sizes)
        total = f" = {self.ranks}" if len(sizes) > 1 else ""
        self.product = " * ".join(f"{name} {size}" for size, name, _ in sizes) + total
        # The larger axis comes first: if two do not fit, it is the likelier one to change.
        self.keys = tuple(key for _, _, key in sorted(sizes, key=lambda axis: -axis[0]))


def _context_beside_tensor(cx: Context) -> int:
    """Return the ranks of context parallelism if it is combined with a tensor mode, else 1."""
    context = cx.spec.parallel.context
    return context.size if context is not None and cx.tensor.section is not None else 1


RULES = (world_not_a_multiple, too_few_ranks, data_size_differs, two_forms_differ)
