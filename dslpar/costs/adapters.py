"""Low-rank adapters (LoRA) beside frozen linears: the sizes of their matrices on a rank.

An adapter of a linear [in, out] is A (r, in) and B (out, r). Both are sharded as the linear's own dims are
(`dslpar.layers.lora` has the table), so an adapter sends nothing for activations, and its gradients are summed as those
of vectors are. A frozen weight has no gradient and no optimizer state, and its backward has one product instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dslpar.core.mesh import Tensor
from dslpar.costs.ring import Number, ratio
from dslpar.layout.divisors import ranks
from dslpar.layout.sharding import Letters

Role = Literal["inward", "outward"]


class Adapter(NamedTuple):
    """Adapter of some of a linear's output features."""

    r: int
    out_features: int


@dataclass(frozen=True, kw_only=True)
class AdapterSizes:
    """Adapters of each block by their linear (None: it is trained whole), and whether table and head are trained."""

    qkv: tuple[Adapter, ...] | None = ()
    out: tuple[Adapter, ...] | None = ()
    up: tuple[Adapter, ...] | None = ()
    """Beside up, and beside a gate."""
    down: tuple[Adapter, ...] | None = ()
    trains_table: bool = False
    trains_head: bool = False


class Matrix(NamedTuple):
    """A or B, sharded on a rank."""

    depth: Number
    columns: Number
    partial: Letters
    """Axes over which its gradient is a partial sum."""

    @property
    def elements(self) -> Number:
        """Elements that a rank holds."""
        return self.depth * self.columns


def matrices(
    tensor: Tensor, in_features: int, adapters: Sequence[Adapter], role: Role
) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield A and B of each adapter of a linear, with a rank's sizes."""
    inputs, outputs = ("z", "y") if role == "inward" else ("y", "z")
    for r, out_features in adapters:
        yield (
            Matrix(ratio(in_features, ranks(tensor, (inputs,))), r, ("d", "q", outputs)),
            Matrix(r, ratio(out_features, ranks(tensor, (outputs,))), ("d", "q", inputs)),
        )
