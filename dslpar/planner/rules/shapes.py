"""PERF114: sizes that do not fill the tiles of the GPU's matrix products. Reported only if the device is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dslpar.layout.divisors import divisors
from dslpar.layout.family_interface import conditions
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.planner.rules.fit import has_device
from dslpar.schema.sections import Model

TILE = 64
"""Features per tile: heads, and a rank's share of hidden_size, should have a multiple of this number."""


@rule("PERF114", "off-the-tiles", "warning")
def off_the_tiles(cx: Context) -> Iterator[Problem]:
    """Head size, or a rank's share of hidden_size, is not a multiple of 64 in half precision."""
    model = cx.model.of(Model)
    heads, hidden = getattr(model, "num_heads", None), getattr(model, "hidden_size", None)
    if cx.spec.precision.dtype == "fp32" or heads is None or hidden is None or hidden < 1024 or not has_device(cx):
        return
    size, part = hidden // heads, hidden // cx.tensor.cuboid.y
    if hidden % heads == 0 and size % TILE and size > TILE and not cx.model.has_weights:
        better = _heads(cx, hidden, heads)
        message = f"head size {size}: attention takes multiples of {TILE}, and pads it or falls back to a slower kernel"
        hint = f"model.num_heads={better}: head size {hidden // better}" if better else _CHOOSE
        yield cx.problem("model.num_heads", message, hint)
    if hidden % cx.tensor.cuboid.y == 0 and part % TILE:
        better = None if cx.model.has_weights else _hidden(cx, hidden, heads)
        message = f"hidden_size {hidden} over {cx.tensor.cuboid.y} ranks: products of {part} features do not fill tiles"
        hint = f"model.hidden_size={better}" if better else _FEWER if cx.model.has_weights else _CHOOSE
        yield cx.problem("model.hidden_size", message, hint)


_FEWER = f"choose a tensor size of which each rank has a multiple of {TILE} features"
_CHOOSE = f"choose sizes such that heads have {TILE} or {2 * TILE} features"


def _heads(cx: Context, hidden: int, heads: int) -> int | None:
    """Return the nearest legal number of heads that fills tiles, or None."""
    legal = [
        each for each in divisors(hidden) if hidden // each in (TILE, 2 * TILE, 4 * TILE) and _holds(cx, num_heads=each)
    ]
    return min(legal, key=lambda each: abs(each - heads), default=None)


def _hidden(cx: Context, hidden: int, heads: int) -> int | None:
    """Return the nearest hidden size that fills tiles and is legal with these heads, or None."""
    step = TILE * cx.tensor.cuboid.y
    near = sorted(range(step, 2 * hidden, step), key=lambda each: abs(each - hidden))
    return next((each for each in near[:64] if each % heads == 0 and _holds(cx, hidden_size=each)), None)


def _holds(cx: Context, **sizes: int) -> bool:
    """Return whether all divisibility conditions of the layout hold for the model with these sizes."""
    model = cx.reading.spec.model
    assert isinstance(model, Model), "off_the_tiles has found one"
    model = replace(model, **sizes)
    return all(each.holds for each in conditions(model, cx.tensor.cuboid))


RULES = (off_the_tiles,)
