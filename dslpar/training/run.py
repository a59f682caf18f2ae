"""A job on its ranks, before there is a model: what a program asks for its place, and for tensors of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.distributed.stage_manager import PipelineStageManager
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.layout.stages import ids_of
from dslpar.schema.parallel_forms import pipeline_of
from dslpar.watchdog.rank_monitor import RankMonitor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclasses.dataclass(frozen=True)
class Run:
    """A job on its ranks, before there is a model; `start` returns it, and `initialize` takes it."""

    config: Config
    """What the author wrote."""
    job: Job
    """What will run; without layers where the program passes the model."""
    groups: Groups
    """This rank's process groups."""
    monitor: RankMonitor | None = dataclasses.field(default=None, repr=False, compare=False)
    """What watches this rank; None: the program has set up torch.distributed, or handles errors, in its own way."""

    @property
    def stage(self) -> int:
        """This rank's place in the pipeline: its stage, where each rank has one."""
        return self.groups.coord["pipe"]

    @property
    def num_stages(self) -> int:
        """The number of these places; it is the number of stages, where each rank has one."""
        return self.groups.mesh.pipe

    @property
    def stages(self) -> range:
        """The stages that this rank holds, in the order of the forward: with schedule.num_model_chunks several.

        Of a pipeline over 2 ranks with 2 chunks each, the first rank holds stages 0 and 2, the second one 1 and 3.
        """
        return self.job.chunks.held_by(self.stage)

    @property
    def stage_manager(self) -> PipelineStageManager:
        """This rank's place in the pipeline, under ColossalAI's names."""
        return PipelineStageManager(self.groups)

    def get_layer_stage_id(self, layer_idx: int) -> int:
        """Return the place in the pipeline (`stage`) of a layer by its index; -1 is the last one (LiBai's name).

        Raises:
            DslparError: there is no such layer, or it is not known yet how layers are partitioned.
        """
        pipeline = pipeline_of(self.job.spec)
        ids: tuple[int, ...] | dict[int, int] | None = self.job.stages.actual_ids
        if not ids and pipeline is not None:
            ids = pipeline.stage_ids or ids_of(pipeline.counts or (), self.job.chunks)
        if self.job.mesh.pipe == 1:
            counts = self.job.stages.counts
            ids = (0,) * counts[0] if counts and counts[0] else {layer_idx: 0}
        if not ids:
            message = "how the layers are partitioned is not known before there is a model"
            hint = "write parallel.pipeline.stage_ids (LiBai's custom_pipeline_stage_id), or counts"
            raise_finding("PIP208", message, hint, self.job.path)
        try:
            return ids[layer_idx]
        except (IndexError, KeyError):
            message = f"there is no layer {layer_idx}: the model has {len(ids)}"
            raise_finding("PIP208", message, f"from 0 to {len(ids) - 1}, or -1 for the last", self.job.path)

    # For tensors of one's own. dslpar.layers.dtensor is imported here: DTensor takes half as long to import as torch.

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Return torch's DeviceMesh over our axes, a dim each: "pipe", "data", "tensor", "x", "d", "q", "y", "z".

        Raises:
            DslparError: an axis that does not exist, or two that overlap.
        """
        from dslpar.layers import dtensor

        return dtensor.device_mesh(self.groups, *names)

    def get_layer_placement(self, layer_idx: int) -> DeviceMesh:
        """Return the ranks that hold the layer, as a mesh of (data, tensor) (LiBai's name).

        Every rank may call it. A rank elsewhere in the pipeline is not in the mesh (`get_coordinate()` is None), and
        holds nothing of what is distributed over it.

        Raises:
            DslparError: there is no such layer, or it is not known yet how layers are partitioned.
        """
        from dslpar.layers import dtensor

        return dtensor.stage_mesh(self.groups, self.get_layer_stage_id(layer_idx))

    def get_nd_sbp(self, placements: Sequence[Placement]) -> tuple[Placement, Placement]:
        """Return a tensor's placements over data and over tensor: split(dim), broadcast, partial_sum (LiBai's name).

        Raises:
            DslparError: not two placements.
        """
        from dslpar.layers import dtensor

        return dtensor.nd_sbp(placements)

    def distribute(
        self, tensor: Tensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None, source: int | None = 0
    ) -> DTensor:
        """Distribute a whole tensor over a mesh, by default (data, tensor) at this rank's place in the pipeline.

        See `dslpar.layers.dtensor.distribute`.

        Raises:
            DslparError: the placements do not fit the mesh or the tensor.
        """
        from dslpar.layers import dtensor

        mesh = dtensor.stage_mesh(self.groups, self.stage) if mesh is None else mesh
        return dtensor.distribute(tensor, placements, mesh, source)
