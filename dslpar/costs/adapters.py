"""What is trained of a transformer whose weights are frozen: low-rank adapters beside its linears (LoRA).

An adapter of a linear [in, out] is A (r, in) and B (out, r), cut as the linear's own dims are (`dslpar.layers.lora` has
the table): it sends nothing for activations, and its gradients are summed as vectors are. What is frozen has no
gradient and no state of an optimizer, and its backward one product in place of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from dslpar.core.frozen import frozen
from dslpar.core.mesh import Tensor
from dslpar.costs.ring import Number, ratio
from dslpar.layout.divisors import ranks
from dslpar.layout.sharding import Letters

Role = Literal["inward", "outward"]


class Adapter(NamedTuple):
    """An adapter of some of a linear's output features."""

    r: int
    out_features: int


@frozen
class AdapterSizes:
    """Those of each block, by the linear that they stand beside; None: it is trained whole. And what else is."""

    qkv: tuple[Adapter, ...] | None = ()
    out: tuple[Adapter, ...] | None = ()
    up: tuple[Adapter, ...] | None = ()
    """Beside a gate, too."""
    down: tuple[Adapter, ...] | None = ()
    trains_table: bool = False
    trains_head: bool = False


class Matrix(NamedTuple):
    """A or B, on a rank."""

    depth: Number
    columns: Number
    partial: Letters
    """Axes over which its gradient is left in parts."""

    @property
    def elements(self) -> Number:
        """What a rank holds of it."""
        return self.depth * self.columns


def matrices(
    tensor: Tensor, in_features: int, adapters: Sequence[Adapter], role: Role
) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield A and B of each adapter of a linear, as products of a rank."""
    inputs, outputs = ("z", "y") if role == "inward" else ("y", "z")
    for r, out_features in adapters:
        yield (
            Matrix(ratio(in_features, ranks(tensor, (inputs,))), r, ("d", "q", outputs)),
            Matrix(r, ratio(out_features, ranks(tensor, (outputs,))), ("d", "q", inputs)),
        )
