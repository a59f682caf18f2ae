"""Process groups for the axes of a mesh, as `collectives.Axis` handles that are passed as arguments, never global.

    groups = Groups(Mesh(data=2, tensor=TensorMesh(y=2, mode="1d")))
    groups.axis("y")                        # this rank's tensor group
    groups.axis("d", "q")                   # ranks that differ on d and q alone; also written axis("x")
    groups.axis("model")                    # pipe and tensor: all ranks of one replica of the model
    groups.axis("expert")                   # the ranks that together hold all experts of a stage
    Groups.without_processes(mesh, rank=5)  # who belongs to rank 5's groups, in a process that is in none of them

d, q, y and z are the tensor axes, and x is d and q together (docs/architecture.md, The cuboid).

Every process makes only the groups that it belongs to, and all processes make them in the same order. This costs a few
messages per rank in a job of any size. A single process (world size 1) needs no `init_process_group`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from datetime import timedelta
from itertools import combinations, permutations
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dslpar.core.mesh import TENSOR_AXES, Mesh, TensorMesh, expand
from dslpar.distributed.collectives import Axis
from dslpar.distributed.gloo_threads import share_device
from dslpar.layout.chunks import Chunks
from dslpar.watchdog.status_page import place_name

_MODEL = ("pipe", "tensor")


class Groups:
    """This rank's process groups on `mesh`.

    All ranks must construct it together, with equal arguments except for `rank`. `rank` and `timeout`, the limit of
    each collective, are torch.distributed's by default. `num_chunks` is the number of stages per rank in the pipeline
    schedule; only `stage_name` uses it.
    """

    mesh: Mesh
    rank: int
    coord: dict[str, int]
    """This rank's index on each axis of the mesh."""

    def __init__(
        self, mesh: Mesh, rank: int | None = None, timeout: timedelta | None = None, num_chunks: int = 1
    ) -> None:
        running = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if running else 1
        assert mesh.world_size == world, f"a mesh of {mesh.world_size} ranks in a world of {world}"
        self.mesh, self._num_chunks = mesh, num_chunks
        self.rank = (dist.get_rank() if running else 0) if rank is None else rank
        self.coord = mesh.coord(self.rank)
        share_device()
        # An axis of one rank needs a group, too: torch's functions take group=None as the whole world.
        alone = _new_group([self.rank], timeout) if running else None
        self._axes = {frozenset[str](): Axis(1, 0, (self.rank,), alone)}
        for names in _needed_axes(mesh):
            self._axes.setdefault(self._key(names), self._make_axis(names, timeout))
        self._context = self._context_axes(lambda peers, name: _new_group(peers, timeout, name))
        self._by_names = self._axes_by_names()

    @classmethod
    def without_processes(cls, mesh: Mesh, rank: int = 0) -> Groups:
        """Return any rank's groups with their members, but without process groups to communicate in.

        They suffice to build layers and models on any device, such as torch's "meta". A forward needs process groups.
        """
        groups = cls.__new__(cls)
        groups.mesh, groups.rank, groups.coord, groups._num_chunks = mesh, rank, mesh.coord(rank), 1
        groups._axes = {frozenset[str](): Axis(1, 0, (rank,))}
        for key in map(groups._key, _needed_axes(mesh)):
            peers = mesh.peers(rank, *key)
            groups._axes[key] = Axis(len(peers), peers.index(rank), peers)
        groups._context = groups._context_axes(lambda peers, name: None)
        groups._by_names = groups._axes_by_names()
        return groups

    def with_chunks(self, num_chunks: int) -> Groups:
        """Return the same groups, whose `stage_name` names `num_chunks` stages per rank."""
        groups = copy(self)
        groups._num_chunks = num_chunks
        return groups

    def __deepcopy__(self, memo: object) -> Groups:
        """Return itself: a copy of a layer communicates with the same ranks."""
        return self

    @property
    def tensor(self) -> TensorMesh:
        """Sizes of the tensor axes, and the tensor mode."""
        return self.mesh.tensor

    @property
    def zero_axis(self) -> Axis:
        """The ranks that hold equal weights, over which ZeRO shards."""
        return self.axis(*self.mesh.zero_axes)

    @property
    def expert_data_axis(self) -> Axis:
        """The ranks that hold equal experts, over which ZeRO shards them."""
        return self.axis("expert_data") if self.tensor.e > 1 else self.zero_axis

    @property
    def weight_axis(self) -> Axis:
        """The ranks that together hold one copy of all weights."""
        return self.axis(*self.mesh.weight_axes)

    @property
    def stage_name(self) -> str:
        """This rank's coordinates, for reports: 'stage 1 (pipe 1, data 0, tensor 0)', or 'stages 1 and 5 (...)'."""
        pipe = self.coord["pipe"]
        held = Chunks(self.mesh.pipe, self._num_chunks).held_by(pipe)
        return place_name(held, pipe, self.coord["data"], self.axis("tensor").index)

    def axis(self, *names: str) -> Axis:
        """Return the group of ranks that differ from this rank only on the named axes.

        names: any of "d", "q", "y" and "z"; or one of "x", "tensor", "data", "pipe" and "model"; or ("data", "d"). In
            context parallelism, d also consists of two axes: "ulysses", groups of neighbours, and "ring", across these
            groups.
        """
        known = self._by_names.get(names)
        return self._axes[self._key(names)] if known is None else known

    def second(self, axis: str, description: str) -> Axis:
        """Return an axis of the same ranks over a new group, with its own NCCL communicators. All ranks together."""
        first = self.axis(axis)
        if first.group is None or first.size == 1:
            return first
        return replace(first, group=_new_group(first.peers, description=description))

    def subgroup(self, name: str, indices: Sequence[int]) -> dist.ProcessGroup | None:
        """Make a group of some ranks of this rank's axis, given their indices; return None on ranks outside it.

        All ranks must call it together.

        Raises:
            ValueError: the axis has no such index, or an index is repeated.
        """
        axis = self.axis(name)
        if len({*indices}) != len(indices) or not {*indices} <= {*range(axis.size)} or not indices:
            raise ValueError(f"{list(indices)} of axis {name!r}, which counts from 0 to {axis.size - 1}")
        if axis.index not in indices:
            return None
        if len(indices) == axis.size:
            return axis.group
        return _new_group([axis.peers[index] for index in sorted(indices)])

    def _axes_by_names(self) -> dict[tuple[str, ...], Axis]:
        """Return a table of all axes that layers request, with a key for each order of their names.

        It must not grow later, since torch.compile would then recompile the code that reads it.
        """
        orders = (names for length in range(1, len(TENSOR_AXES) + 1) for names in permutations(TENSOR_AXES, length))
        named = ((), ("tensor",), ("x",), ("data",), ("pipe",), ("model",), ("pipe", "data", "tensor"), ("expert",))
        return {names: self._axes[self._key(names)] for names in (*orders, *named)} | self._context

    def _context_axes(
        self, new_group: Callable[[Sequence[int], str], dist.ProcessGroup | None]
    ) -> dict[tuple[str, ...], Axis]:
        """Return the "ulysses" axis, which exchanges heads, and the "ring" axis; only `hybrid` splits d over both."""
        whole, alone = self._axes[self._key(("d",))], self._axes[frozenset()]
        ulysses, ring = self.tensor.ulysses, self.tensor.ring
        if 1 in (ulysses, ring):
            return {("ulysses",): whole if ring == 1 else alone, ("ring",): whole if ring > 1 else alone}
        place, turn = whole.index % ulysses, whole.index // ulysses
        found: dict[tuple[str, ...], Axis] = {}
        for name, index, peers in (
            ("ulysses", place, whole.peers[turn * ulysses : (turn + 1) * ulysses]),
            ("ring", turn, whole.peers[place::ulysses]),
        ):
            found[name,] = Axis(len(peers), index, peers, new_group(peers, name))
        return found

    def _key(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return the named axes of more than one rank: an axis of one rank adds no member to the group."""
        axes = expand(tuple(axis for name in names for axis in (_MODEL if name == "model" else (name,))))
        return frozenset(axis for axis in axes if self.mesh.size(axis) > 1)

    def _make_axis(self, names: tuple[str, ...], timeout: timedelta | None) -> Axis:
        key = self._key(names)
        if key in self._axes:
            return self._axes[key]
        peers = self.mesh.peers(self.rank, *key)
        # The group of all ranks exists already. Another one would open all connections again.
        is_world = len(peers) == self.mesh.world_size
        group = dist.group.WORLD if is_world else _new_group(peers, timeout, "_".join(names))
        return Axis(len(peers), peers.index(self.rank), peers, group)


def _new_group(
    peers: Sequence[int], timeout: timedelta | None = None, description: str | None = None
) -> dist.ProcessGroup:
    """Make a group; only its ranks must call it, together. torch's flight recorder and NCCL's logs show `description`.

    Ranks find each other by the group's name. torch derives it from the ranks and the number of groups that the process
    is in. That number may differ between ranks, such as by groups of tied weights, and they would wait for each other
    forever.
    """
    with patch.object(distributed_c10d, "_hash_ranks_to_str", _group_name, create=True):
        # Without use_local_synchronization, all ranks of the job would have to make every group.
        group: dist.ProcessGroup = dist.new_group(
            list(peers), timeout, use_local_synchronization=True, group_desc=description
        )
    return group


def _group_name(ranks: Sequence[int]) -> str:
    """Return a group's name, from its ranks and the number of existing groups of exactly these ranks."""
    before = sum(sorted(by_rank) == sorted(ranks) for by_rank in distributed_c10d._world.pg_group_ranks.values())
    return hashlib.sha1(f"dslpar {before} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()


def _needed_axes(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Yield the axis names of all groups that layers or the engine use.

    No mode has more than three tensor axes, so there are at most 7 subsets of them.
    """
    for length in range(1, len(TENSOR_AXES) + 1):
        yield from combinations([axis for axis in TENSOR_AXES if mesh.sizes[axis] > 1], length)
    yield from (("data",), ("pipe",), _MODEL, ("data", "d"), ("pipe", "data", "tensor"))
    if mesh.tensor.e > 1:
        yield from (("expert",), ("expert_data",), ("e",))


class Mpu:
    """DeepSpeed's `mpu` for an engine without a pipeline: its model, data and sequence parallel groups.

    As in DeepSpeed's own grid, "model parallel" means all ranks of one copy of the weights (pipe x tensor). Norms and
    overflow flags are reduced over them, so they must be all ranks that step together. "Sequence parallel" means ranks
    with equal weights and different tokens of the same samples, such as in context parallelism. DeepSpeed sums their
    gradients, and shards over them and data.
    """

    def __init__(self, groups: Groups) -> None:
        self._model, self._data, self._zero = groups.weight_axis, groups.axis("data"), groups.zero_axis
        self._sequence = groups.axis("d") if groups.tensor.zero_over_d else groups.axis()

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._model.group

    def get_model_parallel_rank(self) -> int:
        return self._model.index

    def get_model_parallel_world_size(self) -> int:
        return self._model.size

    # Without a pipeline these are the same ranks.
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._data.group

    def get_data_parallel_rank(self) -> int:
        return self._data.index

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._data.peers)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        return self._sequence.group

    def get_sequence_parallel_rank(self) -> int:
        return self._sequence.index

    def get_sequence_parallel_world_size(self) -> int:
        return self._sequence.size

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._zero.group

    def get_sequence_data_parallel_rank(self) -> int:
        return self._zero.index

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._zero.size
