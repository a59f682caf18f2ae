"""What the parts of a model cost a rank: the layers that a pipeline cuts, and what comes before and after them.

A family's `costs.model_costs` makes one value for a cuboid, a micro-batch and a sequence length; memory, traffic and
time of every stage are sums over it. Of a model that was traced (`dslpar.dry_run.trace`) layers may differ, and each
has its own costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Any

from dslpar.core.frozen import frozen
from dslpar.core.named_tuple import NamedTuple
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.ring import LayerTraffic, Number
from dslpar.costs.work import Work


class Costs(NamedTuple):
    """One layer, or several: what a rank computes, sends and holds for one micro-batch."""

    work: Work = Work()
    traffic: LayerTraffic = LayerTraffic()
    memory: LayerMemory = LayerMemory(weights=0, saved=Saved())

    def __add__(self, other: Costs) -> Costs:  # type: ignore[override]
        return Costs(
            work=self.work + other.work,
            traffic=self.traffic + other.traffic,
            memory=self.memory + other.memory,
        )


@frozen
class ModelCosts:
    """A model as a pipeline sees it."""

    first: Costs
    """Before the layers: tables, patches."""
    layer: Costs
    """One layer of the pipeline's cut; all are alike."""
    last: Costs
    """After them: the last norm, the head, the loss."""
    boundary: Number
    """Elements that a rank hands on from one layer to the next: the residual stream as it is stored."""
    tied: Number = 0
    """Elements of `last`'s weights that `first` has too: held once by a rank that has both."""
    tied_frozen: Number = 0
    """Of these, those that are not trained."""
    mlp_part: Costs = Costs()
    """Of `layer`, what `mlp_chunks` computes for a part of the tokens at a time: the last of its products."""
    weights_of_parts: LayerTraffic = LayerTraffic()
    """Of `mlp_part`, what is sent however many tokens there are: weights, and their gradients."""
    attention_working: Saved = Saved()
    """What the backward of a layer's attention needs besides what the layer saved."""
    logits: Number = 0
    """Elements of the model's output that a rank holds while the loss is computed."""
    units: tuple[Costs, ...] = ()
    """Of a model whose layers may differ, each one that a pipeline counts, in order; `layer` is all of them together,
    and `first` nothing."""
    recomputable: tuple[bool, ...] = ()
    """Of each of `units`, whether activation checkpointing may run it again."""
    flops: Flops | None = None
    """Of a token, where only a trace tells."""

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What was made of these costs, under keys of those who made it: candidates of a search share costs."""
        return {}

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Of what all `units` take a device, the share of each."""
        loads = [_load(each.work) for each in self.units]
        return tuple(load / sum(loads) for load in loads)

    @cached_property
    def weights(self) -> tuple[float, float, float, float]:
        """Elements of the weights of `first`, of a layer, and of `last`, and those that are tied."""
        parts = (self.first, self.layer, self.last)
        first, layer, last = (float(each.memory.weights) for each in parts)
        return first, layer, last, float(self.tied)

    @cached_property
    def frozen(self) -> tuple[float, float, float, float]:
        """Of `weights`, those that are not trained, likewise."""
        parts = (self.first, self.layer, self.last)
        first, layer, last = (float(each.memory.frozen) for each in parts)
        return first, layer, last, float(self.tied_frozen)


_OPERATIONS_AN_ELEMENT = 300
"""What a device computes in products while an element goes through its memory: 310 on an A100, 410 on an H100."""


def _load(work: Work) -> float:
    """Return about how long a layer takes, in operations of products; never nothing."""
    made = (*work.products, *work.frozen, *work.adapters)
    products = sum(2 * rows * depth * columns for rows, depth, columns in made)
    scores = sum(4 * each.queries * each.keys / (2 if each.causal else 1) for each in work.scores)
    return products + scores + _OPERATIONS_AN_ELEMENT * work.elementwise + 1.0
