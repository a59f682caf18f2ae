"""A GPT and training loop in the style of small scripts such as nanoGPT, written for this table.

The formulas are GPT-2's. As in such scripts, it has one projection for q, k and v, and a head tied to the token table.
Weights have std 0.02, divided by sqrt(2 layers) if they add to the residual. Vectors do not decay, AdamW's betas are
0.9 and 0.95, bf16 is by autocast, AdamW is fused, and torch clips.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.by_hand import Sizes
from benchmarks.plain_torch import TrainingStep, training_step


class NanoGPT(nn.Module):
    """Token and position tables, blocks, a norm; logits by the token table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes.hidden, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                adds_to_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * sizes.layers) if adds_to_residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] to logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(x.shape[-1], -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def nano_step(sizes: Sizes, device: torch.device) -> TrainingStep:
    """Return the step of such a script."""
    with device:
        model = NanoGPT(sizes)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return training_step(model, torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True))
