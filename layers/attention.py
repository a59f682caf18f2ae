"""Causal self-attention over whole heads.

Letters: A heads of D features, A cut as inner features are. Every rank computes its own heads for its own samples, as
in Megatron-LM (arXiv 1909.08053); the product itself is torch's fused one. Where x splits the sequence, sequence.py
brings keys to queries.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dslpar.groups import Groups
from dslpar.layers import placement
from dslpar.layers.dropout import random_of_piece, seed_of_piece
from dslpar.layers.linear import Linear
from dslpar.layers.parameter import GPT2, Init, Layer, Shared
from dslpar.layers.sequence import Drop, ring, ulysses


class Attention(Layer):
    """Stored residual to stored residual. `init` is of the projections in, `init_out` of the one back."""

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        init: Init = GPT2,
        init_out: Init = GPT2,
    ) -> None:
        super().__init__(groups)
        assert hidden_size % num_heads == 0, f"{hidden_size} features in {num_heads} heads"
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        self.cuts = placement.inner_cuts(groups.tensor)
        self.axis = groups.axis(*self.cuts.sequence)
        self.qkv = Linear(groups, hidden_size, hidden_size, blocks=3, role="inward", init=init)
        self.out = Linear(groups, hidden_size, hidden_size, role="outward", init=init_out)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """See the class."""
        shared = self.share() if shared is None else shared
        qkv = self.qkv(x, shared)
        q, k, v = qkv.view(*qkv.shape[:2], 3, -1, self.head_dim).transpose(1, 3).unbind(2)
        y = self._attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2), shared)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[batch, heads, sequence, head_dim], as this rank stores them."""
        if self.axis.size == 1:
            return self._whole(q, k, v)
        if self.groups.tensor.impl == "ulysses":
            return ulysses(q, k, v, self.axis, self._whole)
        p = self.dropout if self.training else 0.0
        return ring(q, k, v, self.axis, Drop(p, seed_of_piece(self.groups, self.cuts) if p else 0))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Over whole sequences."""
        if not self.training or self.dropout == 0:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with random_of_piece(self.groups, self.cuts, q.device):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
