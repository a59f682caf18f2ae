"""Lint rules of a ResidualMLP's keys."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from tests.support.mlp_family.layout import conditions
from tests.support.mlp_family.section import ResidualMLP


@rule("TEN290", "width-does-not-divide")
def width_does_not_divide(cx: Context) -> Iterator[Problem]:
    """The width does not divide over the ranks that cut it."""
    for condition in conditions(cx.model.of(ResidualMLP), cx.tensor.cuboid, 0):
        if not condition.holds:
            message = f"width {condition.value} is not divisible by {condition.why}"
            yield cx.problem("model.width", message, f"choose a multiple of {condition.by}")


RULES = (width_does_not_divide,)
