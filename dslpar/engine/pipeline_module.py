"""Layers to DeepSpeed's PipelineModule: this rank's stage, cut where the Job says, built layer by layer.

    module = pipeline_module(model.layers(groups), counts=(3, 1), groups=groups, seed=1234, loss=model.loss(groups))
    for name, parameter in named_parameters(module): ...       # 'blocks.0.attention.qkv.weight', as without a pipeline

The first stage takes what stands before the blocks, the last what stands after. Explicit parts by overriding
`_partition_layers` is how DeepSpeed's DualPipeV has it; its default builds every layer on every rank to count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch import nn

from dslpar import models
from dslpar.core.mesh import STANDARD_ORDER, Mesh
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.models.layered import Loss
from dslpar.models.recompute import run_layers


def parts_of(layer_idx: Sequence[int | None], counts: Sequence[int]) -> list[int]:
    """Where each stage begins among all layers, and their number: what DeepSpeed calls parts.

    `layer_idx` is of each layer (see `LayerSpec`), `counts` are numbers of indices a stage.

        >>> parts_of([None, 0, 1, 2, None, -1], [2, 1])       # embedding, three blocks, norm, head
        [0, 3, 6]

    Raises:
        ValueError: the indices do not rise, or are not as many as `counts` adds up to.
    """
    known = [index % sum(counts) if index is not None and index >= -sum(counts) else index for index in layer_idx]
    placed = [index for index in known if index is not None]
    if placed != sorted(placed) or sorted(set(placed)) != list(range(sum(counts))):
        raise ValueError(f"layer_idx {list(layer_idx)} do not rise from 0 to {sum(counts) - 1}")
    begins = [known.index(before) for before in accumulate(counts[:-1])]
    return [0, *begins, len(known)]


def topology(mesh: Mesh) -> ProcessTopology:
    """DeepSpeed's picture of the mesh: one flat axis 'model' for the whole cuboid, since with more axes its norms
    would count every rank (FACTS 2.5).
    """
    if mesh.order == STANDARD_ORDER:
        return PipeModelDataParallelTopology(num_pp=mesh.pipe, num_mp=mesh.tensor.size, num_dp=mesh.data)
    return ProcessTopology(axes=["data", "pipe", "model"], dims=[mesh.data, mesh.pipe, mesh.tensor.size])


class Pipeline(PipelineModule):  # type: ignore[misc]
    """This rank's stage of a layered model; `interval` as in `models.LayeredModule`."""

    def __init__(
        self, specs: list[models.LayerSpec], parts: list[int], groups: Groups, seed: int, loss: Loss, interval: int = 0
    ) -> None:
        self._explicit_parts = parts
        self._specs, self._interval = specs, interval
        self.layer_names = [spec.name for spec in specs]
        tied = {spec.tied for spec in specs if spec.tied}
        layers = [(_Tied if spec.owner in tied else _Layer)(spec, groups, seed) for spec in specs]
        super().__init__(layers=layers, topology=topology(groups.mesh), loss_fn=loss)
        deepspeed_patches.own_nothing_of_tied_copies(self)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._explicit_parts
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stage's layers, one after the other; in DeepSpeed's place, which recomputes by ranges of all layers."""
        begin, end = self.parts[self.stage_id : self.stage_id + 2]
        return run_layers([self._specs[at].step(self._built(at)) for at in range(begin, end)], x, self._interval)

    def get_tied_weights_and_groups(self) -> list[tuple[Any, Any]]:
        """What DeepSpeed sums over the stages that hold a tied weight, and over which ranks."""
        return deepspeed_patches.tied_gradients(super().get_tied_weights_and_groups())

    def _built(self, at: int) -> nn.Module:
        """The module of layer `at`, which DeepSpeed has put under its index, or a tied one under its key."""
        own = hasattr(self, str(at))
        built: nn.Module = self.get_submodule(str(at)) if own else self.tied_modules[_key(self._specs[at])]
        return built


def pipeline_module(
    specs: list[models.LayerSpec], counts: Sequence[int], groups: Groups, seed: int, loss: Loss, interval: int = 0
) -> Pipeline:
    """This rank's stage. All ranks must call it together, with equal arguments."""
    parts = parts_of([spec.layer_idx for spec in specs], counts)
    with torch.no_grad():  # DeepSpeed broadcasts tied weights in place, which autograd warns of else
        return Pipeline(specs, parts, groups, seed, loss, interval)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, parameter), as the whole model in one module names them; tied copies under their owner's name."""
    for name, parameter in module.named_parameters():
        yield (global_name(name, module.layer_names) if isinstance(module, Pipeline) else name), parameter


def global_name(name: str, layer_names: Sequence[str]) -> str:
    """From a PipelineModule's name to ours.

    >>> global_name("1.mlp.up.weight", ["embedding", "blocks.0"])
    'blocks.0.mlp.up.weight'
    >>> global_name("tied_modules.embedding/tokens.weight", [])
    'embedding.tokens.weight'
    """
    head, _, rest = name.partition(".")
    if head == "tied_modules":
        key, _, rest = rest.partition(".")
        return f"{key.replace('/', '.')}.{rest}"
    return f"{layer_names[int(head)]}.{rest}"


class _Layer(LayerSpec):  # type: ignore[misc]
    """Builds a layer of ours, where DeepSpeed's spec would call a class with arguments."""

    def __init__(self, spec: models.LayerSpec, groups: Groups, seed: int) -> None:
        super().__init__(nn.Module)
        self.ours = (spec, groups, seed)

    def build(self, log: bool = False) -> nn.Module:
        return models.build_layer(*self.ours)


class _Tied(TiedLayerSpec):  # type: ignore[misc]
    """The same for a layer whose module stands on two stages; its key is `_key`."""

    def __init__(self, spec: models.LayerSpec, groups: Groups, seed: int) -> None:
        super().__init__(_key(spec), nn.Module, forward_fn=spec.forward, tied_weight_attr=["weight"])
        self.ours = (spec, groups, seed)

    def build(self, log: bool = False) -> Any:
        return models.build_layer(*self.ours)


def _key(spec: models.LayerSpec) -> str:
    """DeepSpeed's key of a tied module: its owner's name, in which no dot may stand."""
    return spec.owner.replace(".", "/")
