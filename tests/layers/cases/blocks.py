"""Attention, MLP, and the block of both."""

from __future__ import annotations

from functools import partial

from dslpar.groups import Groups
from dslpar.layers import MLP, Attention, Block
from tests.layers import dense
from tests.layers.proof import FFN, HEADS, HIDDEN, Found, compare, residual


def mlp(groups: Groups) -> Found:
    layer = MLP(groups, HIDDEN, FFN)
    yield from compare(groups, layer, dense.mlp, residual(groups), residual(groups))


def attention(groups: Groups) -> Found:
    layer = Attention(groups, HIDDEN, HEADS)
    reference = partial(dense.attention, num_heads=HEADS)
    yield from compare(groups, layer, reference, residual(groups), residual(groups))


def block(groups: Groups) -> Found:
    layer = Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN)
    reference = partial(dense.block, num_heads=HEADS)
    yield from compare(groups, layer, reference, residual(groups), residual(groups))


CASES = (
    mlp,
    attention,
    block,
)
