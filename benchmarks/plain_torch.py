"""GPT and Llama in plain torch.nn, and a training loop without an engine, as references.

`LlamaBlock` has the parameters of dslpar's Llama block, under the same names. `StockGPT` uses torch's own
nn.TransformerEncoderLayer. `training_step` is the loop: weights in float32, bf16 by autocast, fused AdamW, clipping by
torch.

    step = training_step(StockGPT(sizes))
    step(batches)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.by_hand import MicroBatch, Sizes, loss

GROUPS_HEADS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""Whether torch's attention accepts fewer key heads than query heads."""
TrainingStep = Callable[[Sequence[MicroBatch]], Tensor]
"""Maps the micro-batches of a step to the last one's loss, which stays on the device."""


class LlamaBlock(nn.Module):
    """A pre-norm block: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases (arXiv 2302.13971)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = LlamaAttention(hidden, heads, kv_heads)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGLU(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class LlamaAttention(nn.Module):
    """Causal attention with one projection; `kv_heads` key and value heads serve all query heads."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = [heads, kv_heads, kv_heads]
        self.head_dim = hidden // heads
        self.qkv = nn.Linear(hidden, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.angles: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        if self.angles is None or self.angles.shape[1] != x.shape[1]:
            self.angles = rotary_angles(x.shape[1], self.head_dim, x)
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = (part.transpose(1, 2) for part in heads.split(self.heads, 2))
        q, k = rotate(q, self.angles), rotate(k, self.angles)
        if not GROUPS_HEADS:
            k, v = (part.repeat_interleave(self.heads[0] // self.heads[1], 1) for part in (k, v))
        grouped: dict[str, Any] = {"enable_gqa": True} if GROUPS_HEADS else {}
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotary_angles(length: int, head_dim: int, like: Tensor) -> Tensor:
    """Cosines and sines of the positions, [2, sequence, D/2], in float32 or wider, on a tensor's device."""
    wide = torch.promote_types(like.dtype, torch.float32)
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()]).to(like.device, wide)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of [batch, heads, sequence, D] by their position's angles (arXiv 2104.09864)."""
    cos, sin = angles
    a, b = x.to(angles.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class SwiGLU(nn.Module):
    """silu(gate) * up, both of one projection (arXiv 2002.05202), and down."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        gate, up = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Token table, blocks, a norm, and an untied head."""

    def __init__(self, sizes: Sizes, kv_heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.Sequential(*(LlamaBlock(sizes.hidden, sizes.heads, kv_heads) for _ in range(sizes.layers)))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] to logits."""
        return self.head(self.norm(self.blocks(self.tokens(ids))))  # type: ignore[no-any-return]


class StockGPT(nn.Module):
    """A GPT from torch's own layers, as in its documentation, with a head tied to the token table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(_stock_layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] to logits."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        # A causal layer never reads the mask, but torch requires one.
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(x), self.tokens.weight)


def _stock_layer(sizes: Sizes) -> nn.Module:
    return nn.TransformerEncoderLayer(
        sizes.hidden,
        sizes.heads,
        4 * sizes.hidden,
        dropout=0.0,
        activation=functional.gelu,
        batch_first=True,
        norm_first=True,
    )


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingStep:
    """Return the step of a model from ids to logits."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(batches: Sequence[MicroBatch]) -> Tensor:
        for ids, labels in batches:
            with torch.autocast(ids.device.type, torch.bfloat16):
                mean = loss(model(ids), labels)
            (mean / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean.detach()

    return step
