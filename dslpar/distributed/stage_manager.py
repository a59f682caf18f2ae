"""A rank's place in the pipeline, with ColossalAI's names: a view of the mesh.

    manager = PipelineStageManager(groups)           # or run.stage_manager, engine.stage_manager
    if manager.is_last_stage(): ...
    begin, end = manager.get_stage_index(manager.distribute_layers(num_layers=24))
    ends = manager.init_process_group_by_stages([0, manager.num_stages - 1])

The names come from ColossalAI's PipelineStageManager, and so does the wrap-around from the last stage to the first.
The class is for a program's own code, and does not change how dslpar partitions a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist

from dslpar.distributed.groups import Groups
from dslpar.layout.stages import distribute_layers


class PipelineStageManager:
    """The stages of this rank's pipeline: the ranks that differ from it only on the axis "pipe".

    As in ColossalAI, a rank that holds several chunks of the model is one stage here.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._axis = groups.axis("pipe")

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self._axis.index

    @property
    def num_stages(self) -> int:
        """The number of stages; 1 without a pipeline."""
        return self._axis.size

    def is_first_stage(self) -> bool:
        """Return whether this stage takes the model's inputs."""
        return self.stage == 0

    def is_last_stage(self) -> bool:
        """Return whether this stage computes the model's output."""
        return self.stage == self.num_stages - 1

    def get_rank(self) -> int:
        """Return this rank's global rank."""
        return self.groups.rank

    def get_prev_rank(self) -> int:
        """Return the previous stage's rank; for the first stage, the last stage's rank."""
        return self._axis.peers[self.stage - 1]

    def get_next_rank(self) -> int:
        """Return the next stage's rank; for the last stage, the first stage's rank."""
        return self._axis.peers[(self.stage + 1) % self.num_stages]

    def get_p2p_process_group(self) -> dist.ProcessGroup | None:
        """Return the group of all stages of this pipeline."""
        return self._axis.group

    def init_process_group_by_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """Make a group of this pipeline's ranks on some stages; None on other ranks. All ranks must call it together.

        Raises:
            ValueError: there is no such stage, or a stage is repeated.
        """
        return self.groups.subgroup("pipe", stages)

    def distribute_layers(self, num_layers: int, num_stages: int | None = None) -> list[int]:
        """Return the number of layers per stage as in ColossalAI's policies; default `num_stages`: this pipeline's."""
        return distribute_layers(num_layers, self.num_stages if num_stages is None else num_stages)

    def get_stage_index(self, layers_per_stage: Sequence[int], stage: int | None = None) -> tuple[int, int]:
        """Return the begin and end index of a stage's layers, by default this rank's stage."""
        ends = (0, *accumulate(layers_per_stage))
        stage = self.stage if stage is None else stage
        return ends[stage], ends[stage + 1]
