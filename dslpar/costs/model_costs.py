"""Costs of a model's parts on a rank: the layers that a pipeline partitions, and the parts before and after them.

`function_of` computes them from a model's layers (`dslpar.costs.layers`). Memory, traffic and time of every stage are
sums over these parts. Layers of a traced model (`dslpar.dry_run.trace`) may differ, so each of its layers has its own
costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

from dslpar.core.mesh import TensorMesh
from dslpar.costs import memory, traffic, work
from dslpar.costs.collective_traffic import LayerTraffic, Number
from dslpar.costs.flops import Flops
from dslpar.costs.layers import AttentionCore, Layers, ModelLayers, within
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.work import Work


class Costs(NamedTuple):
    """Costs of one layer or several on a rank, for one micro-batch: compute, traffic and memory."""

    work: Work = Work()
    traffic: LayerTraffic = LayerTraffic()
    memory: LayerMemory = LayerMemory()

    def __add__(self, other: Costs) -> Costs:  # type: ignore[override]
        return Costs(
            work=self.work + other.work,
            traffic=self.traffic + other.traffic,
            memory=self.memory + other.memory,
        )


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Costs of a model's parts on one rank, for one micro-batch."""

    first: Costs
    """Parts before the layers: embedding tables, the projection of image patches."""
    layer: Costs
    """One layer of the pipeline's partition. All layers have the same costs; otherwise, see `units`."""
    last: Costs
    """Parts after the layers: the last norm, the head, the loss."""
    boundary: Number
    """Elements of the activation between two layers that a rank stores: its shard of the residual stream."""
    tied: Number = 0
    """Elements of weights that `first` and `last` share (tied embeddings). A rank with both parts holds them once."""
    tied_frozen: Number = 0
    """Elements of `tied` that are not trained."""
    mlp_part: Costs = Costs()
    """Norm and MLP of `layer`, which the setting `mlp_chunks` computes for one chunk of tokens at a time."""
    weights_of_parts: LayerTraffic = LayerTraffic()
    """Traffic of `mlp_part` that does not depend on the number of tokens: weights and their gradients."""
    attention_working: Saved = Saved()
    """Temporaries of attention's backward, in addition to saved tensors (`dslpar.costs.memory.attention_working`)."""
    logits: Number = 0
    """Elements of the model's output that a rank holds while the loss is computed."""
    units: tuple[Costs, ...] = ()
    """Costs of each layer, in order, of a traced model and of a model whose layers differ. If `units` is not empty,
    `layer` is the sum of all layers, and `first` is empty because the first layer includes the embeddings."""
    recomputable: tuple[bool, ...] = ()
    """For each of `units`: True if activation checkpointing may recompute it."""
    flops: Flops | None = None
    """FLOPs per token of a traced model; None for models whose FLOPs have a closed form (`dslpar.costs.any_model`)."""

    @property
    def is_traced(self) -> bool:
        """Return whether the costs were found by a trace, and not in closed form."""
        return self.flops is not None

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """Cache of results that are derived from these costs.

        Each module that derives results chooses its own keys. Layouts with the same costs share the cache.
        """
        return {}

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Each unit's share of the compute of all `units`."""
        loads = [_load(each.work) for each in self.units]
        return tuple(load / sum(loads) for load in loads)

    @cached_property
    def weights(self) -> tuple[float, float, float, float]:
        """Elements of the weights of `first`, `layer`, `last` and of the tied weights."""
        parts = (self.first, self.layer, self.last)
        first, layer, last = (float(each.memory.weights) for each in parts)
        return first, layer, last, float(self.tied)

    @cached_property
    def frozen(self) -> tuple[float, float, float, float]:
        """Elements of `weights` that are not trained, in the same order."""
        parts = (self.first, self.layer, self.last)
        first, layer, last = (float(each.memory.frozen) for each in parts)
        return first, layer, last, float(self.tied_frozen)


CostsFunction: TypeAlias = Callable[[TensorMesh, Number], ModelCosts]
"""Function from a tensor group and the tokens of a micro-batch to the costs of a model's parts on one of its ranks."""


def function_of(layers: ModelLayers) -> CostsFunction:
    """Return the function that computes the costs of a model with these layers.

    It computes once for each tensor group what does not depend on tokens, because a search calls it hundreds of times.
    """

    @cache
    def traffic_of_weights(tensor: TensorMesh) -> LayerTraffic:
        return traffic.total(layers.mlp_part, tensor, 0)

    core = next((each for each in within(layers.layer) if isinstance(each, AttentionCore)), None)

    def model_costs(tensor: TensorMesh, tokens: Number) -> ModelCosts:
        first = costs_of(layers.first, tensor, tokens)
        block, mlp_part = (costs_of(part, tensor, tokens) for part in (layers.block, layers.mlp_part))
        tied = LayerMemory() if layers.tied is None else memory.total([layers.tied], tensor, tokens)
        of_kind = {kind: costs_of(kind, tensor, tokens) for kind in set(layers.unequal)}
        units = tuple([(Costs() if place else first) + of_kind[kind] for place, kind in enumerate(layers.unequal)])
        return ModelCosts(
            first=Costs() if units else first,
            layer=sum(units, Costs()) if units else block + mlp_part,
            last=costs_of(layers.last, tensor, tokens),
            boundary=memory.residual(tensor, tokens, layers.boundary),
            mlp_part=mlp_part,
            weights_of_parts=traffic_of_weights(tensor),
            attention_working=Saved() if core is None else memory.attention_working(core, tensor, tokens),
            tied=tied.weights,
            tied_frozen=tied.frozen,
            logits=memory.logits(layers.last, tensor, tokens),
            units=units,
            recomputable=(True,) * len(units),
        )

    return model_costs


def costs_of(layers: Layers, tensor: TensorMesh, tokens: Number) -> Costs:
    """Return the costs of layers on one rank of a tensor group, for a micro-batch of `tokens`."""
    return Costs(
        work=work.total(layers, tensor, tokens),
        traffic=traffic.total(layers, tensor, tokens),
        memory=memory.total(layers, tensor, tokens),
    )


_OPERATIONS_AN_ELEMENT = 300
"""Operations that a device computes in the time of one element's memory access: 310 on an A100, 410 on an H100."""


def _load(work: Work) -> float:
    """Return a rough measure of a layer's time, in operations of matrix products; at least 1."""
    made = (*work.products, *work.frozen, *work.adapters, *work.kernels)
    products = sum(2 * rows * depth * columns for rows, depth, columns in made)
    products += sum(2 * each.elements * (each.rows + 3 * each.r) for each in work.sums)
    scores = sum(4 * each.queries * each.keys / (2 if each.causal else 1) for each in work.scores)
    return products + scores + _OPERATIONS_AN_ELEMENT * work.elementwise + 1.0
