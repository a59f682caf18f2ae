"""The ranks and the hosts of the job as rules read them, `cx.world`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dslpar.linter.problem import UnknownValueError

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster


class World:
    """The ranks and the hosts of the job."""

    def __init__(self, requested_size: int | None, cluster: Cluster | None) -> None:
        self._requested_size = requested_size
        self._cluster = cluster

    @property
    def requested_size(self) -> int | None:
        """The world size that the caller passed, even if the hosts have another number of slots; None if none."""
        return self._requested_size

    @property
    def cluster(self) -> Cluster | None:
        """The hosts, or None if none were given."""
        return self._cluster

    @property
    def size_if_given(self) -> int | None:
        """The number of ranks: the requested one, else the slots of the hosts, else None."""
        cluster = self.cluster
        if self.requested_size is None and cluster is not None and not cluster.invalid and cluster.world_size:
            return cluster.world_size
        return self.requested_size

    @property
    def size(self) -> int:
        """The number of ranks. Raises UnknownValueError if it was not given."""
        if self.size_if_given is None:
            raise UnknownValueError("world size")
        return self.size_if_given

    @property
    def hosts(self) -> Cluster:
        """The hosts. Raises UnknownValueError if none were given."""
        if self.cluster is None:
            raise UnknownValueError("hostfile")
        return self.cluster


class AnyWorld(World):
    """A world of which nothing is known: reading any member raises UnknownValueError."""

    def __init__(self) -> None:
        super().__init__(None, None)

    @property
    def requested_size(self) -> int | None:
        raise UnknownValueError("world")

    @property
    def cluster(self) -> Cluster | None:
        raise UnknownValueError("world")
