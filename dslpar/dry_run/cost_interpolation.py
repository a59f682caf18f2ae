"""Interpolate a model's costs for any micro-batch size from its traced costs for two sizes.

    one, two = trace.run(taken(1), 1), trace.run(taken(2), 2)
    interpolate(one, two, at=3.0)      # of four samples

`taken(n)` stands for the forms of inputs and labels for n samples. Operations, bytes and saved activations are affine
in the number of samples, so two sizes determine all others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dslpar.costs.collective_traffic import LayerTraffic, Traffic
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.costs.work import Work


def interpolate(one: ModelCosts, two: ModelCosts, at: float) -> ModelCosts:
    """Return the costs at position `at` on the line through `one` at 0 and `two` at 1.

    Raises:
        ValueError: `one` and `two` do not have the same numbers of layers and operations.
    """
    units = tuple(_costs(*pair, at) for pair in zip(one.units, two.units, strict=True))
    return replace(
        one,
        layer=sum(units, Costs()),
        last=_costs(one.last, two.last, at),
        boundary=_value(one.boundary, two.boundary, at),
        logits=_value(one.logits, two.logits, at),
        units=units,
    )


def _value(one: Any, two: Any, at: float) -> float:
    return float(one) + at * (float(two) - float(one))


def _costs(one: Costs, two: Costs, at: float) -> Costs:
    products, frozen = (
        tuple(
            a._replace(rows=_value(a.rows, b.rows, at), depth=_value(a.depth, b.depth, at))
            for a, b in zip(getattr(one.work, kind), getattr(two.work, kind), strict=True)
        )
        for kind in ("products", "frozen")
    )
    grouped = [
        a._replace(rows=_value(a.rows, b.rows, at)) for a, b in zip(one.work.grouped, two.work.grouped, strict=True)
    ]
    scores = [
        a._replace(queries=_value(a.queries, b.queries, at))
        for a, b in zip(one.work.scores, two.work.scores, strict=True)
    ]
    return Costs(
        work=Work(
            products=products,
            frozen=frozen,
            grouped=tuple(grouped),
            scores=tuple(scores),
            elementwise=_value(one.work.elementwise, two.work.elementwise, at),
            losses=_value(one.work.losses, two.work.losses, at),
        ),
        traffic=LayerTraffic(
            forward=_traffic(one.traffic.forward, two.traffic.forward, at),
            backward=_traffic(one.traffic.backward, two.traffic.backward, at),
        ),
        memory=LayerMemory(
            weights=one.memory.weights,
            frozen=one.memory.frozen,
            experts=one.memory.experts,
            saved=Saved(
                elements=_value(one.memory.saved.elements, two.memory.saved.elements, at),
                wide=_value(one.memory.saved.wide, two.memory.saved.wide, at),
            ),
        ),
    )


def _traffic(one: Traffic, two: Traffic, at: float) -> Traffic:
    return Traffic({key: _value(one[key], two.get(key, 0), at) for key in one}, dict(one.calls))
