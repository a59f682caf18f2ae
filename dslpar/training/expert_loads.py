"""Measure the load of all mixtures' experts over all ranks, and warn of a router that collapses.

    loads = ExpertLoads(engine)         # all ranks together
    found = loads.measure()             # all ranks together, between steps: since the last measurement

Mixtures count on their own ranks (`dslpar.layers.expert_load`). A measurement sums the counts with one all-reduce over
all ranks, and every rank gets all layers' shares. Ranks of a tensor group that route the same tokens count them once
each. This does not change the shares of a layer, since they all count equally often.

A router *collapses* when it sends most tokens to few experts: the others get no gradient, and are never chosen again
(Shazeer et al., arXiv 1701.06538, section 4). The measure is `LayerLoad.effective`, the exponential of the entropy,
because the load of the fullest expert alone does not tell whether the others are in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.layers.expert_load import ExpertLoad, loads_of
from dslpar.reporting.expert_loads import LayerLoad
from dslpar.reporting.logging import log
from dslpar.schema.sections import Model, OtherModel

COLLAPSED = 0.25
"""A router has collapsed if its effective number of experts is below this share of the way from top_k to all."""
_MEASUREMENTS = 2
"""Consecutive measurements in which a router must have collapsed before it is reported."""


class ExpertLoads:
    """Loads of the mixtures of a run. All ranks must construct it together."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._everyone = engine, engine.groups.axis("pipe", "data", "tensor")
        self._own = dict(_named_loads(engine))
        found: dict[str, tuple[int, bool]] = {}
        own = {name: (load.num_experts, load.drops) for name, load in self._own.items()}
        for of_rank in collectives.gather_objects(own, self._everyone):
            found |= of_rank
        self._sizes = {name: found[name][0] for name in sorted(found, key=_natural)}
        """The number of experts of each mixture of the whole model, in the order of layers."""
        self._drops = {name for name, (_, drops) in found.items() if drops}
        """Mixtures that may drop choices."""
        self._times_collapsed = dict.fromkeys(self._sizes, 0)

    def __bool__(self) -> bool:
        """Return whether the model has mixtures."""
        return bool(self._sizes)

    def measure(self) -> list[LayerLoad]:
        """Return the load of each layer since the last measurement, without layers that have seen no token."""
        columns = max(self._sizes.values()) + 2
        counts = torch.zeros(len(self._sizes), columns, dtype=torch.int64)
        for row, (name, size) in enumerate(self._sizes.items()):
            if (own := self._own.get(name)) is not None:
                counts[row, : size + 2] = own.take().cpu()
        counts = collectives.all_reduce(counts.to(self._engine.deepspeed.device), self._everyone).cpu()
        loads = []
        for (name, size), row_of_layer in zip(self._sizes.items(), counts.tolist(), strict=True):
            *chosen, dropped, tokens = row_of_layer[: size + 2]
            if tokens:
                total = sum(chosen)
                share = dropped / total if name in self._drops else None
                loads.append(LayerLoad(name, round(total / tokens), tuple(count / total for count in chosen), share))
        return loads

    def warn_of_collapse(self, loads: Sequence[LayerLoad]) -> None:
        """Log a warning once for each router that has collapsed, with the key that helps; ranks need not call it."""
        found = []
        for load in loads:
            low = load.effective - load.top_k < COLLAPSED * (len(load.shares) - load.top_k)
            self._times_collapsed[load.layer] = self._times_collapsed[load.layer] + 1 if low else 0
            if self._times_collapsed[load.layer] == _MEASUREMENTS:
                found.append(load)
        if found:
            log.warning("%s", _message(found, _hint(self._engine.job.spec.model)))


def _named_loads(engine: Engine) -> Iterator[tuple[str, ExpertLoad]]:
    """Yield the loads of this rank's mixtures, by the name of their layer, or by their own if a layer has several."""
    module: Any = engine.module
    for spec, layer in module.built_layers():
        found = loads_of(layer)
        for path, load in found.items():
            yield (spec.name if len(found) == 1 and spec.layer_idx is not None else f"{spec.name}.{path}"), load


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "blocks.10" after "blocks.9"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _message(loads: Sequence[LayerLoad], hint: str) -> str:
    first = min(loads, key=lambda each: each.effective / len(each.shares))
    others = f" and {len(loads) - 1} more have" if len(loads) > 1 else " has"
    return (
        f"the router of {first.layer}{others} collapsed: {len(first.shares)} experts get the tokens of"
        f" {first.effective:.1f} even ones, and one gets {first.max_over_mean:.1f} times the mean\nhelp: {hint}"
    )


def _hint(model: Model | OtherModel) -> str:
    """Return what makes a model's routers even."""
    if isinstance(model, Model):
        balance = getattr(getattr(model, "experts", None), "balance", 0.0)
        return f"a larger model.experts.balance, now {balance:g}; or a lower optimizer.lr"
    config = model.transformers
    values: Mapping[str, Any] = {} if config is None else config.values
    if values.get("output_router_logits"):
        return f"a larger model.config.router_aux_loss_coef, now {values.get('router_aux_loss_coef')}; or a lower lr"
    if "router_aux_loss_coef" in values:
        return "model.config.output_router_logits=True, which trains the load-balancing loss"
    return "a lower optimizer.lr or more lr_scheduler.warmup_steps; this model has no load-balancing loss"
