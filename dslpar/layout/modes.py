"""The modes of tensor parallelism: which cuboid of ranks a size makes, and how activations are kept on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from dslpar.core.mesh import Inner, Keep, Residual, Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout.decision import Decision
from dslpar.schema.sections import TensorParallel

Axes = tuple[int, int, int, int]


def _squares(tensor: TensorParallel, depth: int = 1) -> Axes | None:
    side = math.isqrt(tensor.size // depth)
    return (depth, side, side, 1) if depth * side * side == tensor.size else None


def _cube(tensor: TensorParallel) -> Axes | None:
    # Not int(), which makes 3 of 64 ** (1 / 3) = 3.9999999999999996.
    side = round(tensor.size ** (1 / 3))
    return (1, side, side, side) if side**3 == tensor.size else None


def _shaped(tensor: TensorParallel) -> Axes | None:
    shape = tensor.shape or ((1, 1, 1) if tensor.size == 1 else (0, 0, 0))
    return (1, *shape) if math.prod(shape) == tensor.size else None


class TensorMode(NamedTuple):
    """One mode: the cuboid that its size makes, and how activations are kept on it."""

    axes: Callable[[TensorParallel], Axes | None]
    """(d, q, y, z) of a TensorParallel, None where its size does not fit."""
    residual: Residual
    keep: Keep = "x"
    inner: Inner = "heads"
    options: tuple[str, ...] = ()
    """Keys of parallel.tensor that mean something in this mode, besides size, mode and keep."""


_OVERLAP = ("comm_overlap",)

MODES: Mapping[str, TensorMode] = {
    "1d": TensorMode(lambda tensor: (1, 1, tensor.size, 1), "replicated", options=("sequence", *_OVERLAP)),
    "2d": TensorMode(_squares, "hidden", options=_OVERLAP),
    "2.5d": TensorMode(lambda tensor: _squares(tensor, tensor.depth or 1), "hidden", options=("depth", *_OVERLAP)),
    "3d": TensorMode(_cube, "batch", "none", "batch", options=("residual", "inner", *_OVERLAP)),
    "sequence": TensorMode(lambda tensor: (tensor.size, 1, 1, 1), "replicated", options=("impl",)),
    "cuboid": TensorMode(_shaped, "hidden", "none", options=("shape", "residual", "inner", *_OVERLAP)),
}


def options_of(tensor: TensorParallel) -> dict[str, Decision]:
    """Decide how a mode's cuboid keeps activations: as given, else as the mode has it."""
    mode, why, keys = MODES[str(tensor.mode)], f"as mode {tensor.mode!r} has it", ("parallel.tensor.mode",)
    of_mode = {"residual": mode.residual, "inner": mode.inner, "keep": mode.keep, "impl": "ring"}
    decided = {name: Decision(value, why, keys) for name, value in of_mode.items()}
    if tensor.sequence:
        decided["residual"] = Decision("sequence", "sequence=True keeps it so", ("parallel.tensor.sequence",))
    given = {name: Decision(value) for name in of_mode if (value := getattr(tensor, name)) is not None}
    return decided | given


def cuboid_of(tensor: TensorParallel | None) -> Tensor:
    """Return the cuboid that a legal TensorParallel requests; one rank for None, or for size 1 without a mode."""
    if tensor is None or tensor.mode is None:
        return Tensor()
    axes = MODES[tensor.mode].axes(tensor)
    assert axes is not None, "a size that lint would have refused"
    d, q, y, z = axes
    options = {name: decision.value for name, decision in options_of(tensor).items()}
    split: Literal["batch", "sequence"] = "sequence" if tensor.mode == "sequence" else "batch"
    return Tensor(d=d, q=q, y=y, z=z, mode=tensor.mode, split=split, comm_overlap=bool(tensor.comm_overlap), **options)
