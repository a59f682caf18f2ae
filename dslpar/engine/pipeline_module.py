"""DeepSpeed PipelineModule with this rank's stages of a layered model, partitioned by the Job, built layer by layer.

    module = pipeline_module(model.layers(groups), (3, 1), Chunks(pipe=2), groups, seed=1234, loss_fn=loss)
    for name, parameter in named_parameters(module): ...       # 'blocks.0.attention.qkv.weight', as without a pipeline

The first stage also has the layers before the blocks, and the last stage the layers after the blocks. DeepSpeed's
default partitioning builds every layer on every rank to count its parameters. Overriding `_partition_layers` with
explicit parts avoids that, as in DeepSpeed's DualPipeV.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch import nn

from dslpar import models
from dslpar.core.mesh import STANDARD_ORDER, Mesh
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.distributed.parameter_gather import ParameterGather
from dslpar.engine.stage_layers import TIED_WEIGHT, parts_of
from dslpar.layout.chunks import Chunks
from dslpar.models.layered import BuiltLayer, Loss, forward_steps
from dslpar.models.recompute import run_layers

TIED_MODULES = "tied_modules"
"""DeepSpeed's attribute for modules whose weight two stages share, on one rank or on two."""


def topology(mesh: Mesh) -> ProcessTopology:
    """Return the mesh as a DeepSpeed topology, with one flat axis "model" for the whole tensor cuboid.

    With more axes, DeepSpeed's norms would count replicated parameters on every rank.
    """
    if mesh.order == STANDARD_ORDER:
        return PipeModelDataParallelTopology(num_pp=mesh.pipe, num_mp=mesh.tensor.size, num_dp=mesh.data)
    return ProcessTopology(axes=["data", "pipe", "model"], dims=[mesh.data, mesh.pipe, mesh.tensor.size])


class Pipeline(PipelineModule):  # type: ignore[misc]
    """This rank's stages of a layered model; `interval` is as in `models.LayeredModule`."""

    stage: int
    """The stage that a forward runs; the executor sets it if the rank holds several."""
    stages: range
    """All stages of this rank."""

    parameter_gather: ParameterGather | None = None
    """As in `models.LayeredModule`."""
    micro_batch_seed: int | None = None
    """As in `models.LayeredModule`."""
    offloads_inputs: bool = False
    """As in `models.LayeredModule`."""

    def __init__(
        self,
        specs: list[models.LayerSpec],
        parts: list[int],
        chunks: Chunks,
        groups: Groups,
        seed: int,
        loss_fn: Loss,
        interval: int = 0,
    ) -> None:
        # Set before super().__init__, which uses them to partition and build the layers.
        self._explicit_parts, self.chunks = parts, chunks
        self.stages = chunks.held_by(groups.coord["pipe"])
        self.stage = self.stages[0]
        self.specs, self._interval = specs, interval
        self.layer_names = [spec.name for spec in specs]
        tied = {spec.tied for spec in specs if spec.tied}
        layers = [(_TiedLayer if spec.owner in tied else _UntiedLayer)(spec, groups, seed) for spec in specs]
        super().__init__(layers=layers, topology=topology(groups.mesh), loss_fn=loss_fn)
        # Called after DeepSpeed's constructor, which finds the tied copies, and before deepspeed.initialize reads who
        # owns each parameter.
        deepspeed_patches.disown_tied_copies(self)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._explicit_parts
        self._set_bounds(*self._bounds(self.stages[0]))

    def _build(self) -> None:
        for stage in self.stages:
            self._set_bounds(*self._bounds(stage))
            super()._build()
        self._set_bounds(*self._bounds(self.stages[0]))

    def _bounds(self, stage: int) -> tuple[int, int]:
        return self.parts[stage], self.parts[stage + 1]

    def stage_of(self, position: int) -> int:
        """Return the stage of a layer, by its position in the model."""
        return bisect(self.parts, position) - 1

    def stage_owner(self, layer_idx: int) -> int:
        """Return the "pipe" rank that holds a layer; DeepSpeed makes its groups of tied weights from it."""
        return self.chunks.rank_of(self.stage_of(layer_idx))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers of `stage`; x is the model's inputs, or the stored residual [micro, sequence, hidden].

        It replaces DeepSpeed's forward, whose recomputation counts all layers, not only blocks.
        """
        seed = self.micro_batch_seed if self.training else None
        steps = forward_steps(self._layers_of(self.stage), self.parameter_gather, seed)
        y: torch.Tensor = run_layers(steps, x, self._interval, self.offloads_inputs)
        return y

    def built_layers(self) -> list[tuple[models.LayerSpec, nn.Module]]:
        """Return the layers of this rank's stages in order, each with its module."""
        return [(spec, layer) for stage in self.stages for _, spec, layer in self._layers_of(stage)]

    def stage_parameters(self, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of one of this rank's stages."""
        for module in dict.fromkeys(module for _, _, module in self._layers_of(stage)):
            yield from module.parameters()

    def _layers_of(self, stage: int) -> Iterator[BuiltLayer]:
        """Yield (position in the model, spec, module) for each layer of one of this rank's stages."""
        begin, end = self._bounds(stage)
        for index, spec in enumerate(self.specs[begin:end], begin):
            # DeepSpeed stores a layer's module under its index, or under its key if the layer is tied.
            own = hasattr(self, str(index))
            yield index, spec, self.get_submodule(str(index)) if own else self.tied_modules[_key(spec)]

    def get_tied_weights_and_groups(self) -> list[tuple[Any, Any]]:
        """Return the tied weights whose gradients DeepSpeed sums over stages, each with its group of ranks."""
        return deepspeed_patches.tied_gradients(super().get_tied_weights_and_groups())


def pipeline_module(
    specs: list[models.LayerSpec],
    counts: Sequence[int],
    chunks: Chunks,
    groups: Groups,
    seed: int,
    loss_fn: Loss,
    interval: int = 0,
) -> Pipeline:
    """Build this rank's stages. All ranks must call it together, with equal arguments."""
    parts = parts_of(specs, counts)
    with torch.no_grad():  # DeepSpeed broadcasts tied weights in place, which makes autograd warn
        return Pipeline(specs, parts, chunks, groups, seed, loss_fn, interval)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (global name, parameter). A global name is the name in the unpartitioned model.

    A tied copy has the name of the layer that owns the weight.
    """
    for name, parameter in module.named_parameters():
        yield (global_name(name, module.layer_names) if isinstance(module, Pipeline) else name), parameter


def global_name(name: str, layer_names: Sequence[str]) -> str:
    """Return the global name of a parameter or module from its name in a PipelineModule.

    >>> global_name("1.mlp.up.weight", ["embedding", "blocks.0"])
    'blocks.0.mlp.up.weight'
    >>> global_name("tied_modules.embedding/tokens.weight", [])
    'embedding.tokens.weight'
    """
    head, _, rest = name.partition(".")
    if head == TIED_MODULES:
        key, _, rest = rest.partition(".")
        return f"{key.replace('/', '.')}.{rest}"
    return f"{layer_names[int(head)]}.{rest}".rstrip(".")


class _UntiedLayer(LayerSpec):  # type: ignore[misc]
    """DeepSpeed LayerSpec whose layer `models.build_layer` builds."""

    def __init__(self, spec: models.LayerSpec, groups: Groups, seed: int) -> None:
        super().__init__(nn.Module)
        self.ours = (spec, groups, seed)

    def build(self, log: bool = False) -> nn.Module:
        return models.build_layer(*self.ours)


class _TiedLayer(TiedLayerSpec):  # type: ignore[misc]
    """DeepSpeed TiedLayerSpec for a layer whose weight two stages share; `_key` identifies the weight."""

    def __init__(self, spec: models.LayerSpec, groups: Groups, seed: int) -> None:
        super().__init__(_key(spec), nn.Module, forward_fn=spec.forward, tied_weight_attr=[TIED_WEIGHT])
        self.ours = (spec, groups, seed)

    def build(self, log: bool = False) -> nn.Module:
        return models.build_layer(*self.ours)


def _key(spec: models.LayerSpec) -> str:
    """Return DeepSpeed's key for a tied module: its owner's name without dots, which module names cannot contain."""
    return spec.owner.replace(".", "/")
