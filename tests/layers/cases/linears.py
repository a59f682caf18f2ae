"""Linear layers."""

from __future__ import annotations

from dslpar.groups import Groups
from dslpar.layers import Linear
from tests.layers import dense
from tests.layers.proof import FFN, HIDDEN, Found, compare, inner, residual


def inward(groups: Groups) -> Found:
    layer = Linear(groups, HIDDEN, FFN, role="inward")
    yield from compare(groups, layer, dense.linear, residual(groups), inner(groups, FFN))


def outward(groups: Groups) -> Found:
    layer = Linear(groups, FFN, HIDDEN, role="outward")
    yield from compare(groups, layer, dense.linear, inner(groups, FFN), residual(groups))


CASES = (
    inward,
    outward,
)
