"""Tensor sizes for helps: the nearest ones over which a model divides whose own sizes cannot change.

A model whose weights exist has the sizes of these weights. A help for it changes the layout, and never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from dslpar.core.mesh import TensorMesh
from dslpar.layout.modes import MODES, combines, cuboid_of
from dslpar.layout.resolve import heads_of, with_experts
from dslpar.linter.context import Context
from dslpar.linter.problem import UnknownValueError

Holds = Callable[[TensorMesh], bool]
_MOST_TRIED = 4096


def dividing(cx: Context, holds: Holds) -> str:
    """Return a help with the nearest tensor sizes whose cuboid `holds`; if there is none, to leave the axis out."""
    key = cx.tensor.key
    now = _size_now(cx)
    fitting = [size for size in _candidates(cx, now) if _holds(cx, size, holds)]
    below = max((size for size in fitting if 1 < size < now), default=None)
    above = min((size for size in fitting if size > now), default=None)
    sizes = [str(size) for size in (below, above) if size is not None]
    axis = key.removesuffix(".size")
    return f"{key}={' or '.join(sizes)}" if sizes else f"{key}=1" if axis == key else f"leave {axis} out"


def _size_now(cx: Context) -> int:
    section = cx.tensor.section if cx.tensor.key != "parallel.context.size" else cx.spec.parallel.context
    return section.size if section is not None else 1


def _candidates(cx: Context, now: int) -> Iterator[int]:
    """Yield sizes with which the replicas of the model fill the world; of an unknown world, the smaller sizes."""
    world = cx.world.size_if_given
    for size in range(2, min(world or now, _MOST_TRIED) + 1):
        if size != now and (world is None or world % (size * cx.pipeline.stages * _others(cx)) == 0):
            yield size


def _others(cx: Context) -> int:
    """Return the ranks of context parallelism beside those of a tensor mode, which are in one group."""
    context = cx.spec.parallel.context
    return context.size if context is not None and cx.tensor.key != "parallel.context.size" else 1


def _holds(cx: Context, size: int, holds: Holds) -> bool:
    with suppress(UnknownValueError):
        cuboid = _cuboid(cx, size)
        return cuboid is not None and holds(cuboid)
    return False


def _cuboid(cx: Context, size: int) -> TensorMesh | None:
    """Return the cuboid with another size of the axis; None if the mode has no such size."""
    tensor, context = cx.tensor.section, cx.spec.parallel.context
    if cx.tensor.key == "parallel.context.size":
        assert context is not None, "its key is the axis's"
        context = replace(context, size=size)
        if size % (context.ulysses_size or 1):
            return None
    elif tensor is None or tensor.mode is None:
        return None
    else:
        mode, tensor = tensor.mode, replace(tensor, size=size)
        if MODES[mode].axes(tensor) is None or (mode == "2.5d" and tensor.depth is None):
            return None
    if context is not None and not combines(tensor, context):
        return None
    made = with_experts(cuboid_of(tensor, context, heads_of(cx.spec.model)), cx.spec.model, None)
    return replace(made, exchanges_tokens=True) if cx.spec.parallel.expert is not None else made
