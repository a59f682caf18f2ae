"""Pipeline part: this rank's layers of a pipeline, built before the engine exists, as in ColossalAI's builders.

    part = PipelinePart(dslpar.build_pipeline_model_from_cfg(config), run)
    optimizer = torch.optim.Adam(part.parameters())
    engine, *_ = dslpar.initialize(run, model=part.model, optimizer=optimizer)

The layers are built in the same way as by the engine, with the same initial weights in every layout. The engine then
uses these modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from dslpar import api
from dslpar.api import Run
from dslpar.distributed.groups import Groups
from dslpar.engine.initial_weights import check_equal_weights
from dslpar.engine.model import CustomModel
from dslpar.engine.partition import partition_layers
from dslpar.engine.stage_layers import stage_parts
from dslpar.models import LayeredModel, LayerSpec
from dslpar.models.layered import Loss, build_layer


class PipelinePart(nn.ModuleList):
    """This rank's layers of a pipeline, as built modules. A program makes its optimizer from their parameters.

    Layers with a parameter that they share with another layer are left out; the engine builds them later. Pass the
    attribute `model` to `dslpar.initialize`.
    """

    def __init__(self, model: CustomModel, run: Run) -> None:
        # Check now: later each rank reads only the weights of its own stages.
        check_equal_weights(model, run.groups, run.job.path)
        job, layers = partition_layers(api.with_program_model(run.job, model), model, run.groups)
        held = list(range(len(layers)))
        if job.stages.counts is not None and job.mesh.pipe > 1:
            parts = stage_parts([layer.layer_idx for layer in layers], job.stages.counts)
            held = [i for stage in job.chunks.held_by(run.stage) for i in range(parts[stage], parts[stage + 1])]
        # The engine builds these layers: two stages may hold a copy each.
        shared = {layer.owner for layer in layers if layer.tied}
        built = {
            index: build_layer(layer, run.groups, job.spec.train.seed)
            for index in held
            if (layer := layers[index]).owner not in shared
        }
        super().__init__(built.values())
        self.owners = [layers[index].owner for index in built]
        self.model = CustomModel(_PartlyBuilt(model, built), method=model.method, num_chunks=model.num_chunks)

    def whole_name(self, name: str) -> str:
        """Return a weight's name in the whole model: "0.weight" of this part may be "blocks.4.weight" there."""
        index, _, rest = name.partition(".")
        return f"{self.owners[int(index)]}.{rest}"


@dataclasses.dataclass(frozen=True)
class _PartlyBuilt(LayeredModel):
    """A model of which some layers are already built."""

    model: LayeredModel
    modules: Mapping[int, nn.Module]
    """The built layers by layer index."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        specs = self.model.layers(groups)
        for index, module in self.modules.items():
            specs[index] = dataclasses.replace(specs[index], build=partial(_itself, module))
        return specs

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        specs = self.model.layers(groups)
        return {specs[index].owner: module for index, module in self.modules.items()}

    def loss(self, groups: Groups) -> Loss:
        return self.model.loss(groups)

    def whole_output(self, groups: Groups, output: Any) -> Any:
        return self.model.whole_output(groups, output)


def _itself(module: nn.Module) -> nn.Module:
    return module
