"""Self-attention over whole heads: causal or not, with a padding mask, grouped queries and rotary positions.

Letters: A heads of queries, G of keys and values, each of D features, both cut as inner features are. Every rank
computes its own heads for its own samples, as in Megatron-LM (arXiv 1909.08053); the product itself is torch's fused
one. Where x splits the sequence, sequence.py brings keys to queries.

With G < A (grouped queries, arXiv 2305.13245) each head of keys serves A/G neighbouring heads of queries; groups are
never cut, so G divides by all that A divides by.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.boundary import wrong_shape
from dslpar.layers.dropout import random_of_piece, seed_of_piece
from dslpar.layers.heads import heads_of_rank, own_samples
from dslpar.layers.linear import Linear
from dslpar.layers.parameter import GPT2, Init, Layer, Shared
from dslpar.layers.rotary import Rotary
from dslpar.layers.sequence import Drop, Ring, ring, ulysses

_GROUPED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""Whether torch's fused attention takes grouped queries by itself."""


class Attention(Layer):
    """Stored residual [batch, sequence, hidden] to stored residual.

    `forward(x, mask=mask)`: `mask` is bool [batch, sequence] of the whole micro-batch, equal on all ranks of a tensor
    group; True: a token, False: padding, which no query attends to. A query whose keys are all padding gives zeros.
    `rotary` turns queries and keys by their positions, counted from the sequence's beginning. `init` is of the
    projections in, `init_out` of the one back.

    Raises:
        DslparError: heads do not divide over the ranks; a mask is of another shape or type.
    """

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        rotary: Rotary | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        init: Init = GPT2,
        init_out: Init = GPT2,
    ) -> None:
        super().__init__(groups)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.heads = heads_of_rank(groups, hidden_size, num_heads, num_kv_heads, rotary=rotary is not None)
        self.head_dim = hidden_size // num_heads
        self.causal, self.rotary, self.dropout = causal, rotary, dropout
        self.cuts = placement.inner_cuts(groups.tensor)
        self.axis = groups.axis(*self.cuts.sequence)
        blocks = [count * self.head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        self.qkv = Linear(groups, hidden_size, blocks, role="inward", bias=bias, init=init)
        self.out = Linear(groups, hidden_size, hidden_size, role="outward", bias=bias, init=init_out)

    def forward(self, x: Tensor, shared: Shared | None = None, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        if x.dim() != 3:
            raise wrong_shape(f"an activation of shape {tuple(x.shape)}", "[batch, sequence, hidden], as it is stored")
        shared = self.share() if shared is None else shared
        mask = mask if mask is None else own_samples(self.groups, mask, x)
        q, k, v = self._heads(self.qkv(x, shared))
        y = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.out(y.transpose(1, 2).flatten(2), shared)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [batch, sequence, heads, head_dim]; split so that the backward copies once."""
        heads = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        if self.rotary is not None:
            heads = self.rotary(heads, first=self.axis.index * qkv.shape[1], num_heads=sum(self.heads[:2]))
        return torch.split(heads, self.heads, dim=2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, heads, sequence, head_dim], as this rank stores them; `mask` of its samples' whole sequences."""
        if self.axis.size == 1:
            return self._whole(q, k, v, mask)
        if self.groups.tensor.impl == "ulysses":
            return ulysses(q, k, v, self.axis, partial(self._whole, mask=mask))
        p = self.dropout if self.training else 0.0
        drop = Drop(p, seed_of_piece(self.groups, self.cuts) if p else 0)
        return ring(q, k, v, Ring(self.axis, self.causal, mask, drop))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Over whole sequences."""
        if not self.training or self.dropout == 0:
            return attend(q, k, v, causal=self.causal, mask=mask)
        with random_of_piece(self.groups, self.cuts, q.device):
            return attend(q, k, v, causal=self.causal, mask=mask, dropout=self.dropout)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Torch's fused attention over whole sequences; `mask` [batch, sequence] of keys.

    A query without any key is given all of them and its result struck out: what torch makes of such a row depends on
    its version and kernel, and where that is NaN, the backward has it too.
    """
    if mask is None:
        return _fused(q, k, v, None, causal, dropout)
    allowed = mask[:, None, None, :]
    if causal:
        allowed = allowed & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    nothing = ~allowed.any(-1, keepdim=True)
    return _fused(q, k, v, allowed | nothing, False, dropout).masked_fill(nothing, 0)


def _fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """Grouped keys are repeated only where torch would not group them, or, with a mask, not by a fused kernel."""
    how = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if how and (allowed is not None or not _GROUPED):
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        how = {}
    return functional.scaled_dot_product_attention(q, k, v, allowed, dropout, causal, **how)
