"""`Run`: a started job before its model exists, with this rank's place and helpers for a program's own tensors."""

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
    """A started job whose model is not built yet; `start` returns it, and `initialize` takes it."""

    config: Config
    """The config as written."""
    job: Job
    """The resolved job; without layers if the program passes the model."""
    groups: Groups
    """This rank's process groups."""
    monitor: RankMonitor | None = dataclasses.field(default=None, repr=False, compare=False)
    """This rank's monitor, which reports hangs and failures; None: the program set up torch.distributed itself, or
    handles errors itself.
    """

    @property
    def stage(self) -> int:
        """This rank's index on the "pipe" axis; with one stage per rank, its stage."""
        return self.groups.coord["pipe"]

    @property
    def num_stages(self) -> int:
        """Size of the "pipe" axis; with one stage per rank, the number of stages."""
        return self.groups.mesh.pipe

    @property
    def stages(self) -> range:
        """The stages that this rank holds, in forward order; several with schedule.num_model_chunks.

        In a pipeline over 2 ranks with 2 chunks each, the first rank holds stages 0 and 2, the second one 1 and 3.
        """
        return self.job.chunks.held_by(self.stage)

    @property
    def stage_manager(self) -> PipelineStageManager:
        """This rank's place in the pipeline, under ColossalAI's names."""
        return PipelineStageManager(self.groups)

    def get_layer_stage_id(self, layer_idx: int) -> int:
        """Return the index on the "pipe" axis of the ranks that hold a layer; -1 is the last layer (LiBai's name).

        Raises:
            DslparError: there is no such layer, or the partition of layers is not known yet.
        """
        pipeline = pipeline_of(self.job.spec)
        ids: tuple[int, ...] | dict[int, int] | None = self.job.stages.actual_ids
        if not ids and pipeline is not None:
            ids = pipeline.stage_ids or ids_of(pipeline.counts or (), self.job.chunks)
        if self.job.mesh.pipe == 1:
            counts = self.job.stages.counts
            ids = (0,) * counts[0] if counts and counts[0] else {layer_idx: 0}
        if not ids:
            message = "the partition of the layers is unknown before there is a model"
            hint = "write parallel.pipeline.stage_ids (LiBai's custom_pipeline_stage_id), or counts"
            raise_finding("PIP208", message, hint, self.job.path)
        try:
            return ids[layer_idx]
        except (IndexError, KeyError):
            message = f"there is no layer {layer_idx}: the model has {len(ids)}"
            raise_finding("PIP208", message, f"from 0 to {len(ids) - 1}, or -1 for the last", self.job.path)

    # Helpers for a program's own tensors. They import dslpar.layers.dtensor lazily: importing DTensor takes half as
    # long as importing torch.

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Return a torch DeviceMesh with one dim per axis: "pipe", "data", "tensor", "x", "d", "q", "y", "z".

        Raises:
            DslparError: an axis does not exist, or two axes overlap.
        """
        from dslpar.layers import dtensor

        return dtensor.device_mesh(self.groups, *names)

    def get_layer_placement(self, layer_idx: int) -> DeviceMesh:
        """Return the ranks that hold a layer, as a mesh of (data, tensor) (LiBai's name).

        Every rank may call it. A rank that does not hold the layer is not in the mesh (`get_coordinate()` is None), and
        holds no part of tensors that are distributed over the mesh.

        Raises:
            DslparError: there is no such layer, or the partition of layers is not known yet.
        """
        from dslpar.layers import dtensor

        return dtensor.stage_mesh(self.groups, self.get_layer_stage_id(layer_idx))

    def get_nd_sbp(self, placements: Sequence[Placement]) -> tuple[Placement, Placement]:
        """Check and return a tensor's placements over data and over tensor (LiBai's name).

        Placements are split(dim), broadcast and partial_sum.

        Raises:
            DslparError: there are not two placements.
        """
        from dslpar.layers import dtensor

        return dtensor.nd_sbp(placements)

    def distribute(
        self, tensor: Tensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None, source: int | None = 0
    ) -> DTensor:
        """Distribute a whole tensor over a mesh, by default this pipeline rank's mesh of (data, tensor).

        See `dslpar.layers.dtensor.distribute`.

        Raises:
            DslparError: the placements do not fit the mesh or the tensor.
        """
        from dslpar.layers import dtensor

        mesh = dtensor.stage_mesh(self.groups, self.stage) if mesh is None else mesh
        return dtensor.distribute(tensor, placements, mesh, source)
