"""Costs of a model's parts on a rank: the layers that a pipeline partitions, and what comes before and after them.

A family's `costs.model_costs` returns them for a cuboid, a micro-batch and a sequence length. Memory, traffic and time
of every stage are sums over these parts. Layers of a traced model (`dslpar.dry_run.trace`) may differ, so each has its
own costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.ring import LayerTraffic, Number
from dslpar.costs.work import Work


class Costs(NamedTuple):
    """Costs of one layer or several on a rank, for one micro-batch: compute, traffic and memory."""

    work: Work = Work()
    traffic: LayerTraffic = LayerTraffic()
    memory: LayerMemory = LayerMemory(weights=0, saved=Saved())

    def __add__(self, other: Costs) -> Costs:  # type: ignore[override]
        return Costs(
            work=self.work + other.work,
            traffic=self.traffic + other.traffic,
            memory=self.memory + other.memory,
        )


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model as a pipeline sees it."""

    first: Costs
    """Before the layers: tables, patches."""
    layer: Costs
    """One layer of the pipeline's partition; all layers are alike."""
    last: Costs
    """After the layers: the last norm, the head, the loss."""
    boundary: Number
    """Elements that a rank passes from one layer to the next: the residual stream as stored."""
    tied: Number = 0
    """Elements of `last`'s weights shared with `first`: a rank that has both holds them once."""
    tied_frozen: Number = 0
    """Elements of `tied` that are not trained."""
    mlp_part: Costs = Costs()
    """Part of `layer` that `mlp_chunks` computes for one chunk of tokens at a time: its last products."""
    weights_of_parts: LayerTraffic = LayerTraffic()
    """Part of `mlp_part`'s traffic that does not depend on the tokens: weights, and their gradients."""
    attention_working: Saved = Saved()
    """Elements that the backward of a layer's attention needs besides what the layer saved."""
    logits: Number = 0
    """Elements of the model's output that a rank holds while the loss is computed."""
    units: tuple[Costs, ...] = ()
    """For a model whose layers may differ, each layer that a pipeline counts, in order. Then `layer` is all of them
    together, and `first` is empty."""
    recomputable: tuple[bool, ...] = ()
    """True if activation checkpointing may recompute each of `units`."""
    flops: Flops | None = None
    """FLOPs per token, if only a trace knows them."""

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """Cache of results derived from these costs, by the deriving module's keys; candidates share it."""
        return {}

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of the compute of all `units` that each takes."""
        loads = [_load(each.work) for each in self.units]
        return tuple(load / sum(loads) for load in loads)

    @cached_property
    def weights(self) -> tuple[float, float, float, float]:
        """Elements of the weights of `first`, of a layer and of `last`, and of tied weights."""
        parts = (self.first, self.layer, self.last)
        first, layer, last = (float(each.memory.weights) for each in parts)
        return first, layer, last, float(self.tied)

    @cached_property
    def frozen(self) -> tuple[float, float, float, float]:
        """Elements of `weights` that are not trained, in the same order."""
        parts = (self.first, self.layer, self.last)
        first, layer, last = (float(each.memory.frozen) for each in parts)
        return first, layer, last, float(self.tied_frozen)


_OPERATIONS_AN_ELEMENT = 300
"""Operations of products that a device computes while an element passes its memory: 310 on an A100, 410 on an H100."""


def _load(work: Work) -> float:
    """Return roughly how long a layer takes, in operations of products; at least 1."""
    made = (*work.products, *work.frozen, *work.adapters)
    products = sum(2 * rows * depth * columns for rows, depth, columns in made)
    scores = sum(4 * each.queries * each.keys / (2 if each.causal else 1) for each in work.scores)
    return products + scores + _OPERATIONS_AN_ELEMENT * work.elementwise + 1.0
