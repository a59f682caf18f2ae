"""ColossalAI's global context: the launched run, this rank's groups by ParallelMode, and the config.

It exists for programs that expect global state, and is dslpar's only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, EnumMeta
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dslpar import api
from dslpar.api import Run
from dslpar.compat.program_config import ProgramConfig, read
from dslpar.core.catalog import raise_finding
from dslpar.distributed.collectives import Axis
from dslpar.language.lazy import Settings
from dslpar.language.load import Config as LoadedConfig
from dslpar.linter.check import Source


class _Modes(EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        if name in cls.__members__:
            return cls.__members__[name]
        known = ", ".join(cls.__members__)
        raise AttributeError(f"there is no ParallelMode.{name} here; write gpc.run.groups.axis(...), or one of {known}")


class ParallelMode(Enum, metaclass=_Modes):
    """ColossalAI's names of process groups, each with the axes of dslpar's mesh that the group spans.

    The groups of a tensor mode are named by what they cut. In 2d and 2.5d, COL cuts samples and ROW cuts features. In
    2.5d, DEP cuts samples too. In 3d, WEIGHT and then INPUT cut samples, and OUTPUT cuts features.
    """

    GLOBAL = ("global", "pipe", "data", "tensor")
    DATA = ("data", "data")
    MODEL = ("model", "model")
    PIPELINE = ("pipeline", "pipe")
    TENSOR = ("tensor", "tensor")
    SEQUENCE = ("sequence", "tensor")
    SEQUENCE_DP = ("sequence_dp", "data", "d")
    PARALLEL_1D = ("1d", "tensor")
    PARALLEL_2D_COL = ("2d_col", "q")
    PARALLEL_2D_ROW = ("2d_row", "y")
    PARALLEL_2P5D_DEP = ("2.5d_dep", "d")
    PARALLEL_2P5D_COL = ("2.5d_col", "q")
    PARALLEL_2P5D_ROW = ("2.5d_row", "y")
    PARALLEL_3D_WEIGHT = ("3d_weight", "q")
    PARALLEL_3D_INPUT = ("3d_input", "y")
    PARALLEL_3D_OUTPUT = ("3d_output", "z")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the group spans."""
        _, *axes = self.value
        return tuple(axes)

    @property
    def tensor_mode(self) -> str | None:
        """The tensor mode that has this group; None: it exists in every mode."""
        mode = self.value[0].partition("_")[0]
        return mode if mode in ("1d", "2d", "2.5d", "3d", "sequence") else None


_ALWAYS = (ParallelMode.GLOBAL, ParallelMode.DATA)
"""Groups that ColossalAI makes even of one rank."""


class GlobalContext:
    """ColossalAI's `global_context`: the run that `launch` has started, and this rank's place in it.

    Raises:
        DslparError: nothing was launched.
    """

    _run: Run | None = None
    _values: Settings | None = None
    _source: LoadedConfig | Source = MappingProxyType({})
    _overrides: tuple[str, ...] = ()

    def set_run(self, run: Run, config: ProgramConfig, overrides: Sequence[str]) -> None:
        """Set this process's run, with its config and the `key=value` overrides of it."""
        self._run, self._values = run, config.values
        self._source, self._overrides = config.source, tuple(overrides)

    def with_overrides(self, overrides: Sequence[str]) -> Run:
        """Return the run with other values of its config; see `dslpar.api.with_overrides`."""
        words = [*self._overrides, *overrides]
        if isinstance(self._source, LoadedConfig):
            return api.with_overrides(self.run, self._source.root.plain(), words)
        return api.with_overrides(self.run, self._source, words)

    @property
    def run(self) -> Run:
        """The run, for dslpar's own functions, which take it as an argument."""
        if self._run is None:
            _refuse_not_launched()
        return self._run

    @property
    def config(self) -> Settings:
        """The config's values, with attribute access: `gpc.config.NUM_EPOCHS`. The program may change them."""
        if self._values is None:
            _refuse_not_launched()
        return self._values

    def load_config(self, config: LoadedConfig | Source) -> None:
        """Read a config before the launch; the launch reads its own again."""
        self._values = read(config).values

    def is_initialized(self, mode: ParallelMode = ParallelMode.GLOBAL) -> bool:
        """Return whether the launched run has groups of this kind: several ranks, in the run's tensor mode."""
        if self._run is None:
            return False
        if mode.tensor_mode not in (None, self._run.groups.tensor.mode):
            return False
        return mode in _ALWAYS or self._axis(mode).size > 1

    def destroy(self) -> None:
        """Forget the run, at the end of a program. dslpar ends the process groups when the process ends."""
        self._run = self._values = None

    # ---- sizes ----

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline stages."""
        return self.get_world_size(ParallelMode.PIPELINE)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks of a tensor group."""
        return self.get_world_size(ParallelMode.TENSOR)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return self.get_world_size(ParallelMode.DATA)

    # ---- this rank's place ----

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

    def get_next_global_rank(self, mode: ParallelMode) -> int:
        """Return the next rank of the group; after the last comes the first."""
        axis = self._axis(mode)
        return axis.peers[(axis.index + 1) % axis.size]

    def get_prev_global_rank(self, mode: ParallelMode) -> int:
        """Return the previous rank of the group; before the first comes the last."""
        axis = self._axis(mode)
        return axis.peers[axis.index - 1]

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Return whether this rank is the first of its group `mode`."""
        return self._axis(mode).index == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Return whether this rank is the last of its group `mode`."""
        return self._axis(mode).index == self._axis(mode).size - 1

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Return whether this rank holds the first stage."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Return whether this rank holds the last stage."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    def set_seed(self, seed: int) -> None:
        """Seed torch on this rank. Layers and dropout draw by the config's train.seed."""
        torch.manual_seed(seed)

    def set_device(self, device_ordinal: int | None = None) -> None:
        """Do nothing: the launch has set this rank's device."""

    def _axis(self, mode: ParallelMode) -> Axis:
        return self.run.groups.axis(*mode.axes)


def _refuse_not_launched() -> NoReturn:
    raise_finding("HST231", "no run was launched", "call colossalai.launch_from_torch(config=...) before")


class Config(Settings):
    """A dict with attribute access, under ColossalAI's name."""

    @staticmethod
    def from_file(filename: str) -> Settings:
        """Read a config file."""
        return read(filename).values


global_context = GlobalContext()
"""The context that `dslpar.compat.colossalai` uses."""
