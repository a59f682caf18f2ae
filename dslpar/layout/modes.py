"""Modes of tensor parallelism: the cuboid of ranks for a tensor size, and how its ranks store activations.

docs/architecture.md, The cuboid, explains the axes d, q, y, z and lists the modes with their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from dslpar.core.mesh import Inner, Keep, Residual, TensorMesh
from dslpar.layout.divisors import head_ranks
from dslpar.layout.inferred_value import InferredValue
from dslpar.schema.sections import ContextParallel, TensorParallel
from dslpar.schema.types import SYMMETRIC_MEMORY

Axes = tuple[int, int, int, int]
"""Sizes of the cuboid's axes (d, q, y, z)."""


def _squares(tensor: TensorParallel, depth: int = 1) -> Axes | None:
    side = math.isqrt(tensor.size // depth)
    return (depth, side, side, 1) if depth * side * side == tensor.size else None


def _cube(tensor: TensorParallel) -> Axes | None:
    # Not int(), since 64 ** (1 / 3) is 3.9999999999999996.
    side = round(tensor.size ** (1 / 3))
    return (1, side, side, side) if side**3 == tensor.size else None


def _shaped(tensor: TensorParallel) -> Axes | None:
    shape = tensor.shape or ((1, 1, 1) if tensor.size == 1 else (0, 0, 0))
    return (1, *shape) if math.prod(shape) == tensor.size else None


class TensorMode(NamedTuple):
    """Mode of tensor parallelism: its cuboid for a size, and how activations are stored on it."""

    axes: Callable[[TensorParallel], Axes | None]
    """Function that returns (d, q, y, z) of a TensorParallel, or None if its size does not fit the mode."""
    residual: Residual
    """Default storage of the residual stream over y."""
    keep: Keep = "x"
    """Default of the gathered operands that a layer keeps for the backward."""
    inner: Inner = "heads"
    """Default storage of inner activations over z."""
    options: tuple[str, ...] = ()
    """Keys of parallel.tensor that have an effect in this mode, besides size, mode and keep."""


_OVERLAP = ("comm_overlap",)

MODES: Mapping[str, TensorMode] = {
    "1d": TensorMode(lambda tensor: (1, 1, tensor.size, 1), "replicated", options=("sequence", *_OVERLAP)),
    "2d": TensorMode(_squares, "hidden", options=_OVERLAP),
    "2.5d": TensorMode(lambda tensor: _squares(tensor, tensor.depth or 1), "hidden", options=("depth", *_OVERLAP)),
    "3d": TensorMode(_cube, "batch", "none", "batch", options=("residual", "inner", *_OVERLAP)),
    # Context parallelism under an older name, from when it could not be combined with other modes.
    "sequence": TensorMode(lambda tensor: (tensor.size, 1, 1, 1), "replicated", options=("impl",)),
    "cuboid": TensorMode(_shaped, "hidden", "none", options=("shape", "residual", "inner", *_OVERLAP)),
}


def options_of(tensor: TensorParallel) -> dict[str, InferredValue]:
    """Decide `residual`, `inner`, `keep` and `impl`: the section's value, else the mode's default."""
    mode, why, keys = MODES[str(tensor.mode)], f"the default of mode {tensor.mode!r}", ("parallel.tensor.mode",)
    of_mode = {"residual": mode.residual, "inner": mode.inner, "keep": mode.keep, "impl": "ring"}
    decided = {name: InferredValue(value, why, keys) for name, value in of_mode.items()}
    if tensor.sequence:
        decided["residual"] = InferredValue(
            "sequence", "sequence=True splits it by sequence", ("parallel.tensor.sequence",)
        )
    given = {name: InferredValue(value) for name in of_mode if (value := getattr(tensor, name)) is not None}
    return decided | given


class Heads(NamedTuple):
    """Properties of a model's attention that decide how context parallelism splits it."""

    num_heads: int | None = None
    """Number of query heads; None if not known."""
    num_kv_heads: int | None = None
    """Number of key and value heads; None means as many as query heads."""
    is_causal: bool = False
    """Whether tokens do not attend to later tokens."""


UNKNOWN_HEADS = Heads()


def cuboid_of(
    tensor: TensorParallel | None, context: ContextParallel | None = None, heads: Heads = UNKNOWN_HEADS
) -> TensorMesh:
    """Return the cuboid that the sections request, which lint must have accepted; one rank without parallelism."""
    if context is not None and context.size > 1 and (tensor is None or tensor.size == 1):
        tensor = TensorParallel(size=context.size, mode="sequence", impl=context.impl)
    if tensor is None or tensor.mode is None:
        return TensorMesh()
    axes = MODES[tensor.mode].axes(tensor)
    assert axes is not None, "a size that lint would have refused"
    d, q, y, z = axes
    options = {name: option.value for name, option in options_of(tensor).items()}
    cuboid = TensorMesh(
        d=d,
        q=q,
        y=y,
        z=z,
        mode=tensor.mode,
        comm_overlap=bool(tensor.comm_overlap),
        symmetric_memory=tensor.comm_overlap == SYMMETRIC_MEMORY,
        **options,
    )
    if tensor.mode == "sequence":
        cuboid = replace(cuboid, split="sequence")
    elif context is not None and context.size > 1:
        assert d == 1, "a mode that lint would have refused"
        cuboid = replace(cuboid, d=context.size, split="sequence", impl=context.impl or "ring")  # type: ignore[arg-type]
    if cuboid.impl == "hybrid":
        cuboid = replace(cuboid, ulysses_size=ulysses_size_of(context, cuboid, heads).value)
    return replace(cuboid, zigzag=heads.is_causal and cuboid.ring > 1)


ON_ITS_AXIS: Mapping[str, str] = {
    "sequence": "is context parallelism by another name",
    "2.5d": "has its depth on the same axis",
}
"""Modes that cannot be combined with context parallelism, each with the predicate of a message."""


def combines(tensor: TensorParallel | None, context: ContextParallel) -> bool:
    """Return whether context parallelism can be combined with a tensor mode."""
    return context.size == 1 or tensor is None or tensor.size == 1 or tensor.mode not in ON_ITS_AXIS


Sections = tuple[TensorParallel | None, ContextParallel | None]


def context_forms(
    tensor: TensorParallel | None, context: ContextParallel | None, heads: Heads, per_node: int = 0
) -> dict[str, Sections]:
    """Return the sections for each form of context parallelism on the same ranks; empty without context parallelism.

    The keys are 'ring', 'ulysses' and 'hybrid of N', in which N neighbouring ranks exchange heads. The requested form
    comes first, unchanged. 'hybrid' is included for up to two values of N: the most that the heads allow, and the ranks
    that share a node of `per_node` devices (0 if not known). With all ranks as N it would be 'ulysses', with one rank
    'ring'. `dslpar.layout.family_interface.conditions` checks whether the heads divide as ulysses needs.
    """
    cuboid = cuboid_of(tensor, context, heads)
    size = cuboid.context
    if size == 1:
        return {}
    found: dict[str, Sections] = {_form(cuboid): (tensor, context)}
    if context is None or context.size == 1:
        assert tensor is not None, "the mode of the axis"
        for impl in ("ring", "ulysses"):
            found.setdefault(impl, (replace(tensor, impl=impl), context))
        return found
    for impl in ("ring", "ulysses"):
        found.setdefault(impl, (tensor, ContextParallel(size=size, impl=impl)))
    most = ulysses_size_of(None, cuboid_of(*found["ring"], heads), heads).value
    near = math.gcd(most, max(1, per_node // (cuboid.size // size))) if per_node else 1
    for exchanging in sorted({most, near} - {1, size}, reverse=True):
        given = None if exchanging == most else exchanging
        made = ContextParallel(size=size, impl="hybrid", ulysses_size=given)
        found.setdefault(f"hybrid of {exchanging}", (tensor, made))
    return found


def _form(cuboid: TensorMesh) -> str:
    """Return the name of a cuboid's form of context parallelism."""
    if cuboid.ulysses == 1:
        return "ring"
    return "ulysses" if cuboid.ring == 1 else f"hybrid of {cuboid.ulysses}"


def ulysses_size_of(context: ContextParallel | None, cuboid: TensorMesh, heads: Heads) -> InferredValue:
    """Decide how many neighbouring ranks exchange heads in 'hybrid': as configured, else the most that heads allow."""
    if context is not None and context.ulysses_size is not None:
        return InferredValue(context.ulysses_size)
    each = [count for count in (heads.num_heads, heads.num_kv_heads) if count is not None]
    shared = math.gcd(*each) // head_ranks(replace(cuboid, ulysses_size=1)) if each else 1
    shared = max(shared, 1)  # 0 if heads do not divide over the tensor ranks, which lint reports
    why = f"the most of {cuboid.d} ranks that divide the {shared} heads of a tensor rank"
    return InferredValue(math.gcd(cuboid.d, shared), why, ("parallel.context.size",))
