"""The ranks over which ZeRO 1 and 2 shard each parameter group: all data ranks, or those that hold the same experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dslpar.distributed.collectives import Axis


class GroupAxes:
    """`axes[group]` is the axis over which a DeepSpeedZeroOptimizer shards a parameter group.

    `data` is the axis of all data ranks, by whose size every gradient is divided.
    """

    def __init__(self, zero: Any, data: Axis, expert_data: Axis) -> None:
        self._groups = zero.optimizer.param_groups
        self.data = replace(data, group=zero.dp_process_group)
        self._expert_data = expert_data

    def is_expert(self, group: int) -> bool:
        """Return whether data ranks hold different pieces of a group's parameters."""
        return bool(self._groups[group].get("moe"))

    def __getitem__(self, group: int) -> Axis:
        return self._expert_data if self.is_expert(group) else self.data
