"""Low-rank adapters (LoRA) beside frozen linears: the sizes of their matrices on a rank.

An adapter of a linear [in, out] has two matrices: A (r, in) and B (out, r). Their `in` and `out` dims are sharded like
the linear's (`dslpar.layers.lora` has the table). So an adapter adds no collectives of activations. Its gradients are
all-reduced over the axes that do not shard the matrix, like the gradients of biases. A frozen weight has no gradient
and no optimizer state, and its backward has one product instead of two. `dslpar.costs` defines inward, outward and the
axes d, q, y and z.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.costs.collective_traffic import Number, ratio
from dslpar.layout.divisors import ranks
from dslpar.layout.sharding import Letters

Role = Literal["inward", "outward"]
"""A linear's direction: from the residual stream to inner features, or back."""


class Adapter(NamedTuple):
    """Adapter of a linear; a fused linear, such as q, k and v, may have one for each of its parts."""

    r: int
    """Rank of the adapter's matrices."""
    out_features: int
    """Output features of the part of the linear that the adapter belongs to."""


@dataclass(frozen=True, kw_only=True)
class AdapterSizes:
    """Adapters of a block's linears, and whether the token table and the head are trained.

    A linear's value is a tuple of its adapters. It is empty if the linear is frozen without adapters, and None if the
    linear itself is trained.
    """

    qkv: tuple[Adapter, ...] | None = ()
    out: tuple[Adapter, ...] | None = ()
    up: tuple[Adapter, ...] | None = ()
    """Adapters of the MLP's first linear, including those of its gate."""
    down: tuple[Adapter, ...] | None = ()
    trains_table: bool = False
    trains_head: bool = False


class Matrix(NamedTuple):
    """A rank's shard of an adapter's matrix A or B, transposed to [depth, columns] as a product uses it."""

    depth: Number
    columns: Number
    partial: Letters
    """Axes over which the matrix's gradient must be summed."""

    @property
    def elements(self) -> Number:
        """Elements that a rank holds."""
        return self.depth * self.columns


def matrices(
    tensor: TensorMesh, in_features: int, adapters: Sequence[Adapter], role: Role
) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield a rank's shards of A and B for each adapter of a linear."""
    inputs, outputs = ("z", "y") if role == "inward" else ("y", "z")
    for r, out_features in adapters:
        yield (
            Matrix(ratio(in_features, ranks(tensor, (inputs,))), r, ("d", "q", outputs)),
            Matrix(r, ratio(out_features, ranks(tensor, (outputs,))), ("d", "q", inputs)),
        )
