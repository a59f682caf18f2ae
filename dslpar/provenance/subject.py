"""Config whose values are explained, with and without overrides, and its Job if the world size is known."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dslpar.core.errors import COMMAND_LINE
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.origins import Ways, ways_of
from dslpar.schema.sections_reader import Reading, read

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster


class Subject:
    """Config, world size and findings. The linter's context `cx` raises UnknownValueError for unknown values."""

    def __init__(self, config: Config, world_size: int | None = None, cluster: Cluster | None = None) -> None:
        self.config = config
        self.checked = check.check(config, world_size, cluster)
        self.cx = self.checked.context
        self.findings = self.checked.findings

    @property
    def world_size(self) -> int | None:
        """Number of ranks, given directly or by the hostfile."""
        return self.cx.world.size_if_given

    @property
    def reading(self) -> Reading:
        """The spec, and the location of each written key."""
        return self.cx.reading

    @property
    def sound(self) -> bool:
        """Return whether lint finds no error."""
        return not self.checked.has_errors

    @cached_property
    def ways(self) -> Ways:
        """The imports between each file and the config."""
        return ways_of(self.config)

    @cached_property
    def before(self) -> tuple[Config, Reading] | None:
        """The config without its overrides; None if there are no overrides."""
        if COMMAND_LINE not in self.config.sources:
            return None
        config = check.load_text(self.config.sources[self.config.path], self.config.path)
        return config, read(config)

    @property
    def job(self) -> Job:
        """The Job of this world size.

        Raises:
            UnknownValueError: there is no world size, or lint finds an error.
        """
        if not self.sound:
            raise UnknownValueError("a config with errors")
        return self._job(self.cx.world.size)

    @property
    def job_of_some_world(self) -> Job:
        """The Job of this world size, or of the smallest one if it is not given, for values that do not depend on it.

        Raises:
            UnknownValueError: lint finds an error.
        """
        if not self.sound:
            raise UnknownValueError("a config with errors")
        replicas = self.reading.spec.parallel.data.size or 1
        return self._job(self.world_size or self.cx.pipeline.stages * self.cx.tensor.cuboid.size * replicas)

    def _job(self, world_size: int) -> Job:
        if world_size not in self._jobs:
            self._jobs[world_size] = self.checked.job_of(world_size)
        return self._jobs[world_size]

    @cached_property
    def _jobs(self) -> dict[int, Job]:
        return {}
