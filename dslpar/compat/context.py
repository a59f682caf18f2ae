"""ColossalAI's global context: the launched run, this rank's groups by ParallelMode, and the config.

It exists for programs that expect global state, and is dslpar's only one.
"""

from __future__ import annotations

from enum import Enum

import torch.distributed as dist

from dslpar.api import Run
from dslpar.core.catalog import raise_finding
from dslpar.distributed.collectives import Axis
from dslpar.language.lazy import Settings, settings


class ParallelMode(Enum):
    """ColossalAI's names of process groups, each with the axes of dslpar's mesh that the group spans."""

    GLOBAL = ("pipe", "data", "tensor")
    DATA = ("data",)
    MODEL = ("model",)
    PIPELINE = ("pipe",)
    TENSOR = ("tensor",)


class GlobalContext:
    """ColossalAI's `global_context`: the run that `launch` has started, and this rank's place in it.

    Raises:
        DslparError: nothing was launched.
    """

    _run: Run | None = None

    def set_run(self, run: Run) -> None:
        """Set this process's run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run, for dslpar's own functions, which take it as an argument."""
        if self._run is None:
            message, hint = "no run was launched", "call colossalai.launch_from_torch(config=...) before"
            raise_finding("HST231", message, hint)
        return self._run

    @property
    def config(self) -> Settings:
        """The config's values, with attribute access: `gpc.config.NUM_EPOCHS`."""
        values: Settings = settings(self.run.config.root.plain())
        return values

    def is_initialized(self, mode: ParallelMode = ParallelMode.GLOBAL) -> bool:
        """Return whether a run was launched. Launching makes all process groups, so `mode` makes no difference."""
        return self._run is not None

    def get_global_rank(self) -> int:
        """Return this rank's global rank."""
        return self.run.groups.rank

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Return this rank's index in its group `mode`; with PIPELINE this is its stage."""
        return self._axis(mode).index

    def get_world_size(self, mode: ParallelMode) -> int:
        """Return the number of ranks in this rank's group `mode`."""
        return self._axis(mode).size

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """Return the global ranks in this rank's group `mode`."""
        return list(self._axis(mode).peers)

    def get_group(self, mode: ParallelMode) -> dist.ProcessGroup | None:
        """Return this rank's process group `mode`."""
        return self._axis(mode).group

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Return whether this rank is the first of its group `mode`."""
        return self._axis(mode).index == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Return whether this rank is the last of its group `mode`."""
        return self._axis(mode).index == self._axis(mode).size - 1

    def _axis(self, mode: ParallelMode) -> Axis:
        return self.run.groups.axis(*mode.value)


global_context = GlobalContext()
"""The context that `dslpar.compat.colossalai` uses."""
