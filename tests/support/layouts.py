"""The layouts of the layer proofs: name -> cuboid, with the way it keeps activations and panels."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from dslpar.core.mesh import TensorMesh

ONE_D = {f"1d-{size}": TensorMesh(y=size, mode="1d") for size in (2, 3, 4, 6)}
SEQUENCE = {f"1d-sequence-{size}": TensorMesh(y=size, mode="1d", residual="sequence") for size in (2, 3, 4, 6)}
TWO_D = {"2d-4": TensorMesh(q=2, y=2, mode="2d", residual="hidden")}
TWO_AND_A_HALF_D = {
    "2.5d-8-depth-2": TensorMesh(d=2, q=2, y=2, mode="2.5d", residual="hidden"),
    "2.5d-3-depth-3": TensorMesh(d=3, mode="2.5d", residual="hidden"),
    "2.5d-12-depth-3": TensorMesh(d=3, q=2, y=2, mode="2.5d", residual="hidden"),
}
THREE_D = {"3d-8": TensorMesh(q=2, y=2, z=2, mode="3d", residual="batch", inner="batch", keep="none")}
CUBOID = {
    "cuboid-2-3-2": TensorMesh(q=2, y=3, z=2, mode="cuboid", residual="hidden", keep="none"),
    "cuboid-1-2-2-replicated": TensorMesh(y=2, z=2, mode="cuboid"),
    "cuboid-1-2-2-sequence-batch": TensorMesh(y=2, z=2, mode="cuboid", residual="sequence", inner="batch"),
    "3d-8-sequence-heads": TensorMesh(q=2, y=2, z=2, mode="3d", residual="sequence"),
}
SPLIT = {
    f"{impl}-{size}": TensorMesh(d=size, mode="sequence", split="sequence", impl=impl)  # type: ignore[arg-type]
    for impl, size in product(("ring", "ulysses"), (2, 3, 4, 6))
}
ZIGZAG = {f"{name}-zigzag": replace(SPLIT[name], zigzag=True) for name in ("ring-2", "ring-3", "ring-4")}
HYBRID = TensorMesh(d=4, mode="sequence", split="sequence", impl="hybrid", ulysses_size=2, zigzag=True)
CONTEXT = {
    "hybrid-4": HYBRID,
    "ring-2-1d-2": replace(ONE_D["1d-2"], d=2, split="sequence", zigzag=True),
    "ulysses-2-1d-2": replace(ONE_D["1d-2"], d=2, split="sequence", impl="ulysses"),
    "ring-2-1d-sequence-2": replace(SEQUENCE["1d-sequence-2"], d=2, split="sequence", zigzag=True),
    "ring-3-1d-sequence-2": replace(SEQUENCE["1d-sequence-2"], d=3, split="sequence", zigzag=True),
    "hybrid-4-1d-2": replace(HYBRID, y=2, mode="1d"),
    "ring-2-2d-4": replace(TWO_D["2d-4"], d=2, split="sequence", zigzag=True),
    "ring-2-cuboid-1-2-2-sequence-batch": replace(
        CUBOID["cuboid-1-2-2-sequence-batch"], d=2, split="sequence", zigzag=True
    ),
}
"""Context parallelism, also beside other modes."""
LAYOUTS = ONE_D | SEQUENCE | TWO_D | TWO_AND_A_HALF_D | THREE_D | CUBOID | SPLIT | ZIGZAG | CONTEXT
EACH_MODE = (
    *("1d-2", "1d-sequence-2", "2d-4", "2.5d-3-depth-3", "3d-8", "cuboid-1-2-2-sequence-batch"),
    *("ring-2", "ulysses-2", "ring-2-zigzag", "ring-2-1d-2"),
)
"""A layout per mode, as `mode_of` names them."""

RESIDUALS = ("replicated", "sequence", "hidden", "batch")
INNERS = ("batch", "heads")


def _cuboid(x: int, y: int, z: int) -> dict[str, TensorMesh]:
    """Return one shape with every way to keep the residual and the inner activations; a cube is mode 3d."""
    mode = "3d" if x == y == z else "cuboid"
    return {
        f"{mode}-{x}-{y}-{z}-{residual}-{inner}": TensorMesh(
            q=x,
            y=y,
            z=z,
            mode=mode,
            residual=residual,
            inner=inner,
            keep="none",  # type: ignore[arg-type]
        )
        for residual in (RESIDUALS if y > 1 else RESIDUALS[:1])
        for inner in (INNERS if z > 1 else INNERS[1:])
    }


CUBOIDS = {
    name: tensor
    for shape in ((2, 3, 1), (1, 2, 3), (2, 2, 2), (2, 3, 2), (3, 2, 2))
    for name, tensor in _cuboid(*shape).items()
    if tensor not in LAYOUTS.values()
}
"""Shapes with different sides, and the cube, with each way to keep the residual and the inner activations."""

KEEPS = ("x", "w", "both", "none")


def kept(names: list[str]) -> dict[str, TensorMesh]:
    """Return the named layouts with each choice of panels that are kept until the backward."""
    return {
        f"{name}-keep-{keep}": replace((LAYOUTS | CUBOIDS)[name], keep=keep) for name, keep in product(names, KEEPS)
    }  # type: ignore[arg-type]


def everything() -> dict[str, TensorMesh]:
    """Return every cuboid up to 8 ranks with axes of 1 or 2, in every way to keep residual and inner activations.

    A batch in 8 pieces is left out, since 8 does not divide the proof's 12 samples.
    """
    return {
        f"d{d}q{q}y{y}z{z}-{residual}-{inner}-{keep}": TensorMesh(
            d=d,
            q=q,
            y=y,
            z=z,
            mode="cuboid",
            residual=residual,  # type: ignore[arg-type]
            inner=inner,  # type: ignore[arg-type]
            keep=keep,  # type: ignore[arg-type]
        )
        for d, q, y, z in product((1, 2), repeat=4)
        if d * q * y * z <= 8
        for residual in (("replicated", "sequence", "hidden", "batch") if y > 1 else ("replicated",))
        for inner in (("batch", "heads") if z > 1 else ("heads",))
        for keep in (("x", "none") if q > 1 else ("x",))
        if not (residual == "batch" and d * q * y == 8)
        if not (inner == "batch" and d * q * z == 8)
    }


def mode_of(tensor: TensorMesh) -> str:
    """Return the mode, counting 1d with sequence, ring and Ulysses as separate modes.

    "context" is context parallelism beside a mode, or ring and Ulysses together.
    """
    if tensor.beside_context != tensor.size or tensor.impl == "hybrid":
        return "context"
    if tensor.split == "sequence":
        return "zigzag" if tensor.zigzag else tensor.impl
    return f"1d, {tensor.residual}" if tensor.mode == "1d" else str(tensor.mode)
