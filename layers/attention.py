"""Self-attention: causal or not, with padding masks, grouped queries and rotary positions.

Letters: A query heads, G key and value heads, D features per head. Heads are distributed as inner features
are, and are never split. Every rank computes its own heads for its own samples with torch's fused attention, as in
Megatron-LM (arXiv 1909.08053). If x splits the sequence, context_attention.py brings keys to queries.

With G < A (grouped-query attention, arXiv 2305.13245) each key head serves A/G neighbouring query heads. These query
heads stay on one rank, so G must divide by the same numbers as A.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.context_attention import AttentionDropout, RingOptions, hybrid, ring, ulysses
from dslpar.layers.dropout import shard_rng, shard_seed
from dslpar.layers.heads import local_heads, local_samples
from dslpar.layers.kv_cache import cache_in_use, first_position
from dslpar.layers.linear import Linear
from dslpar.layers.memory_order import as_stored, is_sequence_first
from dslpar.layers.parameter import GPT2, Init, Layer, Shared
from dslpar.layers.rotary import Rotary
from dslpar.layout.attention_blocks import TILE

_TORCH_HAS_GQA = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""Whether torch's fused attention supports grouped queries (`enable_gqa`)."""
_ALONE = Axis(1, 0, (0,))


class Attention(Layer):
    """Multi-head or grouped-query self-attention of the residual stream.

    `rotary` rotates queries and keys by their positions, counted from the sequence's beginning. With a `window`, tokens
    attend only to tokens less than `window` positions away (as in Mistral, arXiv 2310.06825). `init` draws the input
    projections (q, k, v), `init_out` the output projection.

    Raises:
        DslparError: the heads do not divide over the ranks; a mask has the wrong shape or type.
    """

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rotary: Rotary | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        init: Init = GPT2,
        init_out: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        self.heads = local_heads(groups, hidden_size, num_heads, num_kv_heads, rotary=rotary is not None)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.causal, self.window, self.rotary, self.dropout = causal, window, rotary, dropout
        self.cuts = placement.inner_cuts(groups.tensor)
        self.axis = groups.axis(*self.cuts.sequence)
        blocks = [count * self.head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        self.qkv = Linear(groups, hidden_size, blocks, role="inward", bias=bias, init=init)
        self.qkv.keep_memory_order()
        self.out = Linear(groups, hidden_size, hidden_size, role="outward", bias=bias, init=init_out)

    def forward(self, x: Tensor, shared: Shared | None = None, mask: Tensor | None = None) -> Tensor:
        """Map the stored residual [batch/x, sequence, H/z] to the same shape (sequence/x if x splits the sequence).

        `mask` is [batch, sequence] of the whole micro-batch, equal on all ranks of a tensor group. A bool mask is True
        for tokens and False for padding, to which no query attends. An int32 mask numbers each token's document from 1,
        and 0 is padding. Tokens attend only within their document. A query whose keys are all padding gives zeros.
        """
        if x.dim() != 3:
            message = f"an activation of shape {tuple(x.shape)}"
            raise_finding("TEN226", message, "[batch, sequence, hidden], as it is stored", key="model")
        shared = self.share() if shared is None else shared
        mask = mask if mask is None else local_samples(self.groups, mask, x)
        qkv = self.qkv(x, shared)
        sequence_dim = 0 if is_sequence_first(qkv) else 1
        q, k, v = self._split_heads(as_stored(qkv), sequence_dim)
        del qkv  # with rotary positions q, k and v are copies, and this frees the original
        y = self._attend(q, k, v, mask)
        if sequence_dim == 1:
            return self.out(y.transpose(1, 2).flatten(2), shared)
        return self.out(y.permute(2, 0, 1, 3).flatten(2).transpose(0, 1), shared)

    def _split_heads(self, qkv: Tensor, sequence_dim: int) -> tuple[Tensor, ...]:
        """Split [batch, sequence, (A + 2 G)/y D] or [sequence, batch, ...] to q, k, v [batch, heads, sequence, D].

        It splits one tensor once, so the backward joins the three gradients in a single copy.
        """
        heads = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        if self.rotary is not None:
            length = qkv.shape[sequence_dim] * self.axis.size
            tokens = placement.stored_runs(self.groups.tensor, self.groups.coord, self.cuts.sequence, length)
            heads = self.rotary(heads, first_position(), sum(self.heads[:2]), sequence_dim, tokens)
        to_heads = (0, 2, 1, 3) if sequence_dim == 1 else (1, 2, 0, 3)
        return tuple(part.permute(to_heads) for part in torch.split(heads, self.heads, dim=2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with this rank's q, k, v [batch, heads, sequence, D]; `mask` is [batch, whole sequence]."""
        cache = cache_in_use()
        if self.axis.size == 1:
            if cache is not None:
                k, v = cache.extended(self, k, v)
            return self._attend_whole_sequences(q, k, v, mask)
        assert cache is None, "pieces of sequences are attended to without a cache"
        if self.groups.tensor.ring == 1:
            return ulysses(q, k, v, self.axis, partial(self._attend_whole_sequences, mask=mask))
        p = self.dropout if self.training else 0.0
        dropout = AttentionDropout(p, shard_seed(self.groups, self.cuts) if p else 0)
        zigzag = self.groups.tensor.zigzag
        options = RingOptions(self.groups.axis("ring"), self.causal, mask, dropout, self.window, zigzag=zigzag)
        return hybrid(q, k, v, self.groups.axis("ulysses"), options)

    def _attend_whole_sequences(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not self.training or self.dropout == 0:
            return attend(q, k, v, causal=self.causal, mask=mask, window=self.window)
        with shard_rng(self.groups, self.cuts, q.device):
            return attend(q, k, v, causal=self.causal, mask=mask, window=self.window, dropout=self.dropout)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Run torch's fused attention over whole sequences: q [B, A, S, D], k and v [B, G, S, D] to [B, A, S, D].

    If there are fewer queries than keys, the queries are those of the last tokens. `mask` [B, S] masks keys or numbers
    documents, as in `Attention.forward`. A query attends to no key at distance `window` or more. Masks of long
    sequences are made tile by tile. A query without any key attends to all keys, and its result is set to zero. torch's
    own result for such a row depends on its version and kernel, and a NaN there would spread into the backward.
    """
    num_before = k.shape[2] - q.shape[2]
    if not num_before and (window is not None or (mask is not None and q.shape[2] > TILE)):
        options = RingOptions(_ALONE, causal, mask, AttentionDropout(dropout, _drawn_seed(q) if dropout else 0), window)
        return ring(q, k, v, options)
    near = None if window is None else _window_mask(q, k, window)
    if mask is None and near is None:
        seen = causal_mask(q, k) if causal and num_before and q.shape[2] > 1 else None
        return _fused(q, k, v, seen, causal and not num_before, dropout)
    if mask is None:
        assert near is not None
        return _fused(q, k, v, near & causal_mask(q, k) if causal else near, False, dropout)
    allowed = mask.bool()[:, None, None, :]
    if mask.dtype != torch.bool:
        allowed = allowed & (mask[:, None, :, None] == mask[:, None, None, :])
    if causal:
        allowed = allowed & causal_mask(q, k)
    if near is not None:
        allowed = allowed & near
    no_keys = ~allowed.any(-1, keepdim=True)
    return _fused(q, k, v, allowed | no_keys, False, dropout).masked_fill(no_keys, 0)


def _drawn_seed(q: Tensor) -> int:
    """Draw a seed from the device's generator, which `shard_rng` has seeded for this rank's piece."""
    return int(torch.randint(2**62, (), device="cpu" if q.device.type == "meta" else q.device))


def _window_mask(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Return the mask [queries, keys] of keys less than `window` away; queries are the last tokens."""
    queries = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
    return (queries[:, None] - torch.arange(k.shape[2], device=q.device)).abs() < window


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Return the mask [queries, keys] of keys at or before each query; queries are the last tokens."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])


def _fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """Call torch's attention; repeat grouped keys if torch cannot group them or, with a mask, has no fused kernel."""
    gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if gqa and (allowed is not None or not _TORCH_HAS_GQA):
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        gqa = {}
    return functional.scaled_dot_product_attention(q, k, v, allowed, dropout, causal, **gqa)
