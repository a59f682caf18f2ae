"""Linear layers: blocks of features, [tokens, features], gathered output, and frozen weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers import Linear, Placement, placement
from tests.support import dense
from tests.support.compare_dense import (
    BATCH,
    FFN,
    HIDDEN,
    SEQUENCE,
    Found,
    compare,
    error,
    inner,
    numbers,
    piece,
    randomized,
    residual,
    whole,
)


def inward(groups: Groups) -> Found:
    layer = Linear(groups, HIDDEN, FFN, role="inward")
    yield from compare(groups, layer, dense.linear, residual(groups), inner(groups, FFN))


def outward(groups: Groups) -> Found:
    layer = Linear(groups, FFN, HIDDEN, role="outward")
    yield from compare(groups, layer, dense.linear, inner(groups, FFN), residual(groups))


def without_bias(groups: Groups) -> Found:
    """Both linears, one after the other."""
    layer = nn.Sequential(
        Linear(groups, HIDDEN, FFN, role="inward", bias=False),
        Linear(groups, FFN, HIDDEN, role="outward", bias=False),
    )
    yield from compare(groups, layer, _pair, residual(groups), residual(groups))


def _pair(p: dense.Parameters, x: Tensor) -> Tensor:
    return dense.linear(dense.under(p, "1"), dense.linear(dense.under(p, "0"), x))


# Blocks ---------------------------------------------------------------------------------------------------------

GROUPED = (2 * HIDDEN, HIDDEN, HIDDEN)
"""q, k and v with two features of q per feature of k and v: blocks of unequal length."""


class Grouped(nn.Module):
    """A fused linear whose query block meets the shared key and value blocks."""

    def __init__(self, groups: Groups, **options: Any) -> None:
        super().__init__()
        self.linear = Linear(groups, HIDDEN, GROUPED, role="inward", **options)

    def forward(self, x: Tensor) -> Tensor:
        return _meet(self.linear(x))


def _meet(fused: Tensor) -> Tensor:
    unit = fused.shape[-1] // 4
    q, k, v = torch.split(fused, [2 * unit, unit, unit], -1)
    return (q.unflatten(-1, (-1, 2)) * k.unsqueeze(-1) + v.unsqueeze(-1)).flatten(-2)


def _grouped(p: dense.Parameters, x: Tensor) -> Tensor:
    return _meet(dense.linear(dense.under(p, "linear"), x))


def blocks(groups: Groups) -> Found:
    yield from compare(groups, Grouped(groups), _grouped, residual(groups), inner(groups, GROUPED[0]))


# [tokens, features] ---------------------------------------------------------------------------------------------


def flat_inward(groups: Groups) -> Found:
    layer = Linear(groups, HIDDEN, FFN, role="inward")
    yield from compare(groups, layer, dense.linear, _flat(groups, HIDDEN), _flat_inner(groups, FFN))


def flat_outward(groups: Groups) -> Found:
    layer = Linear(groups, FFN, HIDDEN, role="outward")
    yield from compare(groups, layer, dense.linear, _flat_inner(groups, FFN), _flat(groups, HIDDEN))


def flat_blocks(groups: Groups) -> Found:
    layer = Grouped(groups)
    yield from compare(groups, layer, _grouped, _flat(groups, HIDDEN), _flat_inner(groups, GROUPED[0]))


def _flat(groups: Groups, features: int) -> Placement:
    return placement.residual(groups.tensor, BATCH * SEQUENCE, features)


def _flat_inner(groups: Groups, features: int) -> Placement:
    return placement.inner(groups.tensor, BATCH * SEQUENCE, features)


# Gathered output ------------------------------------------------------------------------------------------------


def gathered_inward(groups: Groups) -> Found:
    layer = Linear(groups, HIDDEN, FFN, role="inward", gather_output=True)
    yield from compare(groups, layer, dense.linear, residual(groups), _whole_features(inner(groups, FFN)))


def gathered_outward(groups: Groups) -> Found:
    layer = Linear(groups, FFN, HIDDEN, role="outward", gather_output=True)
    yield from compare(groups, layer, dense.linear, inner(groups, FFN), _whole_features(residual(groups)))


def gathered_blocks(groups: Groups) -> Found:
    """All features of q, then all of k, then all of v."""
    layer = Linear(groups, HIDDEN, GROUPED, role="inward", gather_output=True)
    yield from compare(groups, layer, dense.linear, residual(groups), _whole_features(inner(groups, sum(GROUPED))))


def gathered_flat(groups: Groups) -> Found:
    layer = Linear(groups, HIDDEN, FFN, role="inward", gather_output=True)
    at = _whole_features(_flat_inner(groups, FFN))
    yield from compare(groups, layer, dense.linear, _flat(groups, HIDDEN), at)


def _whole_features(at: Placement) -> Placement:
    return replace(at, cuts=(*at.cuts[:-1], ()))


# Frozen parameters ------------------------------------------------------------------------------------------------


def frozen(groups: Groups) -> Found:
    """Try every choice of what needs a gradient, for both roles: exactly those gradients come, and are right."""
    for needs in product((False, True), repeat=3):
        if any(needs):
            yield from _frozen(Linear(groups, HIDDEN, FFN, role="inward"), needs, residual(groups), inner(groups, FFN))
            yield from _frozen(Linear(groups, FFN, HIDDEN, role="outward"), needs, inner(groups, FFN), residual(groups))


def _frozen(layer: Linear, needs: tuple[bool, bool, bool], x_at: Placement, y_at: Placement) -> Found:
    groups, name = layer.groups, f"gradients of x, weight, bias = {needs}"
    full = whole(randomized(layer, groups), groups)
    x_full, y_grad = numbers(x_at.shape, 1), numbers(y_at.shape, 2)
    x = piece(x_full, x_at, groups)
    assert layer.bias is not None
    ours, theirs = (x, layer.weight, layer.bias), (x_full, full["weight"], full["bias"])
    for tensor, need in zip((*ours, *theirs), needs * 2, strict=True):
        tensor.requires_grad_(need)
    layer(x).backward(piece(y_grad, y_at, groups))
    dense.linear(full, x_full).backward(y_grad)
    places = (x_at, layer.weight.placement, layer.bias.placement)
    for mine, at, reference in zip(ours, places, theirs, strict=True):
        if reference.requires_grad:
            yield f"{name}: {tuple(at.shape)}", error(mine.grad, at, reference.grad, groups)
        else:
            assert mine.grad is None, f"{name}: a gradient of what is frozen"


CASES = (
    inward,
    outward,
    without_bias,
    blocks,
    flat_inward,
    flat_outward,
    flat_blocks,
    gathered_inward,
    gathered_outward,
    gathered_blocks,
    gathered_flat,
    frozen,
)
