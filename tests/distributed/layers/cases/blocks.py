"""Attention, MLP, and a block of both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Attention, Block, Form, Linear, Rotary
from tests.support import dense
from tests.support.compare_dense import (
    BATCH,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QUERY_HEADS,
    SEQUENCE,
    Found,
    compare,
    inner,
    residual,
)

THETA = 100.0
LLAMA = Form(norm="rmsnorm", activation="swiglu", num_kv_heads=KV_HEADS, rotary=Rotary(THETA), causal=False, bias=False)


def mlp(groups: Groups) -> Found:
    layer = MLP(groups, HIDDEN, FFN)
    yield from compare(groups, layer, dense.mlp, residual(groups), residual(groups))


def mlp_swiglu(groups: Groups) -> Found:
    layer = MLP(groups, HIDDEN, FFN, activation="swiglu")
    yield from compare(groups, layer, dense.mlp_swiglu, residual(groups), residual(groups))


def attention(groups: Groups) -> Found:
    yield from _attention(groups, {}, {})


def attention_not_causal(groups: Groups) -> Found:
    yield from _attention(groups, {"causal": False}, {"causal": False})


def attention_padded(groups: Groups) -> Found:
    """Causal: tokens before the first real one have no key."""
    yield from _attention(groups, {}, {}, mask=padding())


def attention_padded_grouped(groups: Groups) -> Found:
    """Not causal."""
    how = {"num_kv_heads": KV_HEADS, "causal": False}
    yield from _attention(groups, how, how, QUERY_HEADS, mask=padding())


def attention_documents(groups: Groups) -> Found:
    """Causal, each token within its own document."""
    ours = {"num_kv_heads": KV_HEADS, "rotary": Rotary(THETA)}
    theirs = {"num_kv_heads": KV_HEADS, "theta": THETA}
    yield from _attention(groups, ours, theirs, QUERY_HEADS, mask=documents())


def attention_documents_not_causal(groups: Groups) -> Found:
    yield from _attention(groups, {"causal": False}, {"causal": False}, mask=documents())


def attention_grouped(groups: Groups) -> Found:
    how = {"num_kv_heads": KV_HEADS}
    yield from _attention(groups, {"bias": False, **how}, how, QUERY_HEADS)


def attention_rotary(groups: Groups) -> Found:
    yield from _attention(groups, {"rotary": Rotary(THETA)}, {"theta": THETA})


def _attention(
    groups: Groups, ours: dict[str, Any], theirs: dict[str, Any], num_heads: int = HEADS, mask: Tensor | None = None
) -> Found:
    """Use half of the input: the full one gives scores of 30 and more, whose softmax loses a digit of float32."""
    layer = Attention(groups, HIDDEN, num_heads, **ours)
    forward = layer.forward
    layer.forward = lambda x: forward(x / 2, mask=mask)  # type: ignore[assignment, method-assign]

    def reference(p: dense.Parameters, x: Tensor) -> Tensor:
        return dense.attention(p, x / 2, num_heads, mask=mask, **theirs)

    yield from compare(groups, layer, reference, residual(groups), residual(groups))


def padding() -> Tensor:
    """Return a padding mask with each kind in turn: none, at the end, at the beginning, at both, with a hole, and all
    padding.
    """
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    mask[1::6, -5:] = mask[2::6, :7] = mask[3::6, :1] = mask[3::6, -7:] = mask[4::6, 3:8] = mask[5] = False
    return mask


def documents() -> Tensor:
    """Return document ids: one, two of many lengths, one per token, with padding at the end or the beginning; they need
    not rise.
    """
    at = torch.arange(SEQUENCE)
    kinds = [
        at * 0 + 1,
        1 + (at >= 5).int(),
        2 - (at >= 1).int(),
        at + 1,
        (1 + (at >= 4).int()) * (at < 9),
        (at >= 3) * (1 + at // 6),
    ]
    return torch.stack([kinds[sample % len(kinds)] for sample in range(BATCH)]).int()


def siblings(groups: Groups) -> Found:
    """Sum three linears from one input, as in models with separate q, k and v, like one fused linear."""
    layer = _Siblings(groups)
    yield from compare(groups, layer, _siblings, residual(groups), inner(groups, FFN))


class _Siblings(nn.Module):
    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.q, self.k, self.v = (Linear(groups, HIDDEN, FFN, role="inward") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


def _siblings(p: dense.Parameters, x: Tensor) -> Tensor:
    q, k, v = (dense.linear(dense.under(p, name), x) for name in "qkv")
    return q * k + v


def block(groups: Groups) -> Found:
    layer = Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN)
    reference = partial(dense.block, num_heads=HEADS)
    yield from compare(groups, layer, reference, residual(groups), residual(groups))


def block_llama(groups: Groups) -> Found:
    """An encoder's block, with padding."""
    layer = Block(groups, HIDDEN, QUERY_HEADS, ffn_hidden_size=FFN, form=LLAMA)
    layer.forward = partial(layer.forward, mask=padding())  # type: ignore[method-assign]
    how = {"num_kv_heads": KV_HEADS, "causal": False, "theta": THETA, "mask": padding()}
    reference = partial(dense.block, num_heads=QUERY_HEADS, **how)
    yield from compare(groups, layer, reference, residual(groups), residual(groups))


CASES = (
    mlp,
    mlp_swiglu,
    attention,
    attention_not_causal,
    attention_padded,
    attention_padded_grouped,
    attention_documents,
    attention_documents_not_causal,
    attention_grouped,
    attention_rotary,
    siblings,
    block,
    block_llama,
)
