"""Mesh of ranks with named axes, as pure arithmetic without torch or processes.

A job's ranks form a grid with the axes `pipe`, `data` and `tensor`. The tensor axis is itself a cuboid with the axes
`d q y z` (see docs/architecture.md). The standard order, from slowest to fastest axis, is::

    pipe  data  d  q  y  z          rank = (pipe * D + data) * T + tensor

as in DeepSpeed's PipeModelDataParallelTopology and LiBai's documentation. Two names stand for several axes: `tensor`
for d q y z, and `x` for d q. The data axis may be divided in turn: along `e`, neighbouring data ranks hold different
experts, and along `expert_data`, data ranks hold the same ones. `expert` stands for e and the tensor axes. Every group
is a slice of one reshaped range of ranks, as in picotron and torch's DeviceMesh. Slices are computed one at a time, so
a mesh of a million ranks costs nothing.

    >>> mesh = Mesh(pipe=2, data=2, tensor=TensorMesh(y=2, mode="1d"))
    >>> list(mesh.groups("tensor"))
    [(0, 1), (2, 3), (4, 5), (6, 7)]
    >>> mesh.peers(5, "pipe")
    (1, 5)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal

from dslpar.core.frozen import keeping_hash

Residual = Literal["replicated", "sequence", "hidden", "batch"]
Inner = Literal["batch", "heads"]
Keep = Literal["x", "w", "both", "none"]
Split = Literal["batch", "sequence"]
Impl = Literal["ring", "ulysses", "hybrid"]

STANDARD_ORDER = ("pipe", "data", "tensor")
LEGACY_ORDER = ("data", "pipe", "tensor")
ORDERS = (STANDARD_ORDER, LEGACY_ORDER)

TENSOR_AXES = ("d", "q", "y", "z")
_COMPOUND = {"tensor": TENSOR_AXES, "x": ("d", "q"), "expert": ("e", *TENSOR_AXES)}


@keeping_hash
@dataclass(frozen=True, kw_only=True, eq=False)
class TensorMesh:
    """Mesh of one tensor group, a cuboid, and the sharding of activations on it. x = d * q; d is the slower axis."""

    d: int = 1
    """Splits tokens: samples or each sequence, depending on `split`. Weights are replicated over d."""
    q: int = 1
    """Splits samples. Weights are sharded over q too, and gathered for each product."""
    y: int = 1
    """Splits inner features: heads, MLP hidden, vocabulary."""
    z: int = 1
    """Splits the features of the residual stream."""
    mode: str | None = None
    """The mode that makes this cuboid; None without tensor parallelism."""
    residual: Residual = "replicated"
    """Storage of the residual stream over y."""
    inner: Inner = "heads"
    """Storage of inner activations over z."""
    keep: Keep = "x"
    """Gathered operands that a linear keeps for its backward: its input ("x"), its weight ("w"), both or none."""
    split: Split = "batch"
    """Dim that d splits: samples, as the depth of 2.5d does, or each sequence, as context parallelism does."""
    impl: Impl = "ring"
    """Attention algorithm for a split sequence."""
    ulysses_size: int = 1
    """For impl "hybrid": number of neighbouring ranks of d that exchange heads; a ring connects these groups."""
    zigzag: bool = False
    """Whether each rank of the ring stores a piece from both ends of a sequence, for equal work under a causal mask."""
    comm_overlap: bool = False
    """Whether collectives overlap with matmuls: those of tokens in parts, those of weights with other linears."""
    symmetric_memory: bool = False
    """Whether torch's fused matmuls exchange parts of tokens through symmetric memory, instead of around a ring."""
    zero_over_d: bool = False
    """Whether ZeRO shards over d as well as data, and sums gradients over both axes. If not, layers sum over d."""
    e: int = 1
    """Number of neighbouring data ranks over which experts are divided, as well as over this mesh. Other weights are
    replicated over e. It does not count in `size`."""
    exchanges_tokens: bool = False
    """Whether mixtures send each token to the ranks that hold its experts, instead of gathering the tensor group's."""
    expert_chunks: int = 1
    """Number of parts of a rank's tokens that a mixture sends one after the other, to bound its memory."""

    @property
    def x(self) -> int:
        """Number of ranks that split tokens."""
        return self.d * self.q

    @property
    def context(self) -> int:
        """Number of ranks that split each sequence, not counting y if the residual is stored by sequence."""
        return self.d if self.split == "sequence" else 1

    @property
    def beside_context(self) -> int:
        """Tensor parallel size without the factor of context parallelism.

        In mode 'sequence', where the tensor size itself requests context parallelism, it is the whole size.
        """
        return self.size if self.mode == "sequence" else self.size // self.context

    @property
    def ulysses(self) -> int:
        """Number of neighbouring ranks along d that exchange pieces of the sequence for heads (Ulysses)."""
        return {"ring": 1, "ulysses": self.context, "hybrid": self.ulysses_size}[self.impl]

    @property
    def ring(self) -> int:
        """Length of the ring that passes keys and values on; each place in the ring is a group of `ulysses` ranks."""
        return self.context // self.ulysses

    @property
    def size(self) -> int:
        """Number of ranks of one tensor group."""
        return self.d * self.q * self.y * self.z

    def summed_by_layers(self, letters: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes over which layers sum a weight's gradient, given all axes over which it is partial."""
        return tuple([letter for letter in letters if letter != "d"]) if self.zero_over_d else letters

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes over which linears gather and sum pieces of tokens (samples or parts of sequences)."""
        over_y = self.y > 1 and self.residual in ("sequence", "batch")
        over_z = self.z > 1 and self.inner == "batch"
        return ("y",) * over_y + ("z",) * over_z

    @property
    def shape(self) -> tuple[int, int, int]:
        """The cuboid as (x, y, z)."""
        return self.x, self.y, self.z


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Immutable mesh of all ranks of a job. Sizes are at least 1, and `order` is one of ORDERS."""

    pipe: int = 1
    """Number of ranks per pipeline, each with one stage or several chunks of the model (`dslpar.layout.chunks`)."""
    data: int = 1
    """Number of data-parallel replicas."""
    tensor: TensorMesh = field(default_factory=TensorMesh)
    """The cuboid of each tensor group."""
    order: tuple[str, str, str] = STANDARD_ORDER
    """Axes from slow to fast."""

    def __post_init__(self) -> None:
        assert self.order in ORDERS, self.order
        assert min(self.sizes.values()) >= 1, self.sizes
        assert self.data % self.tensor.e == 0 or self.data == 1, (self.data, self.tensor.e)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis; the slowest axis comes first."""
        tensor = {axis: getattr(self.tensor, axis) for axis in TENSOR_AXES}
        outer = {axis: getattr(self, axis) for axis in self.order[:2]}
        return outer | tensor

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes of the ranks with equal weights: DeepSpeed sums gradients over them, and ZeRO shards over them."""
        return ("data", "d") if self.tensor.zero_over_d else ("data",)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Axes of the ranks that together step one copy of all weights: all axes that are not in `zero_axes`."""
        return ("pipe", "q", "y", "z") if self.tensor.zero_over_d else ("pipe", "tensor")

    @cached_property
    def strides(self) -> Mapping[str, int]:
        """Difference between the ranks of neighbours on each axis."""
        strides, stride = {}, 1
        for axis, size in reversed(tuple(self.sizes.items())):
            strides[axis] = stride
            stride *= size
        return strides

    @cached_property
    def _axes(self) -> Mapping[str, tuple[int, int]]:
        """(Size, stride) of each axis, and of the two parts of the data axis, from slow to fast."""
        axes: dict[str, tuple[int, int]] = {}
        for axis, size in self.sizes.items():
            axes[axis] = (size, self.strides[axis])
            if axis == "data":
                e = min(self.tensor.e, size)  # a mesh of one replica has one part of the experts
                axes["expert_data"] = (size // e, self.strides[axis] * e)
                axes["e"] = (e, self.strides[axis])
        return axes

    def extent(self, axis: str) -> tuple[int, int]:
        """Return (size, stride) of one axis; the parts "e" and "expert_data" of the data axis count as axes."""
        return self._axes[axis]

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coord(self, rank: int) -> dict[str, int]:
        """Return the rank's index on each axis."""
        return {axis: rank // self.strides[axis] % size for axis, size in self.sizes.items()}

    def rank(self, coord: Mapping[str, int]) -> int:
        """Return the rank at `coord`; a missing axis counts as 0."""
        return sum(index * self.strides[axis] for axis, index in coord.items())

    def size(self, *names: str) -> int:
        """Return the number of ranks in a group over the named axes (`tensor`, `x` and `expert` name several)."""
        return math.prod(self._axes[axis][0] for axis in self._in_order(names))

    def index(self, rank: int, *names: str) -> int:
        """Return the rank's position in its group over the named axes."""
        position = 0
        for size, stride in map(self._axes.__getitem__, self._in_order(names)):
            position = position * size + rank // stride % size
        return position

    def peers(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return, in order, `rank` and all ranks that differ from it only on the named axes."""
        axes = self._in_order(names)
        sizes = [self._axes[axis] for axis in axes]
        origin = rank - sum(rank // stride % size * stride for size, stride in sizes)
        return tuple(origin + offset for offset in self._offsets(axes))

    def groups(self, *names: str) -> Iterator[tuple[int, ...]]:
        """Yield every group over the named axes, in the order of their first ranks."""
        axes = self._in_order(names)
        divided = "e" in axes or "expert_data" in axes
        every = self._in_order((*self.order, *(("expert_data", "e") if divided else ())))
        others = tuple(axis for axis in every if axis not in axes)
        for origin in self._offsets(others):
            yield tuple(origin + offset for offset in self._offsets(axes))

    def _in_order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        wanted = {*expand(names)}
        if {"e", "expert_data"} <= wanted:
            wanted.discard("data")
        elif "data" in wanted:
            wanted -= {"e", "expert_data"}
        return tuple(axis for axis in self._axes if axis in wanted)

    def _offsets(self, axes: tuple[str, ...]) -> Iterator[int]:
        steps = [range(0, size * stride, stride) for size, stride in map(self._axes.__getitem__, axes)]
        return map(sum, product(*steps))


def expand(names: tuple[str, ...]) -> tuple[str, ...]:
    """Expand `tensor`, `x` and `expert` in axis names; each axis is returned once."""
    return tuple(dict.fromkeys(axis for name in names for axis in _COMPOUND.get(name, (name,))))


def __getattr__(name: str) -> type[TensorMesh]:
    """Return TensorMesh under its old name, `Tensor`, which programs may import."""
    if name != "Tensor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("dslpar.core.mesh.Tensor is now called TensorMesh", DeprecationWarning, stacklevel=2)
    return TensorMesh
