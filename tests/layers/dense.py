"""The layers once more, whole and plain: what the sharded ones are compared with. Nothing here is of dslpar.

Each takes its parameters in a dict of full tensors under the names that dslpar gives them, relative to the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


def under(p: Parameters, prefix: str) -> Parameters:
    """The parameters of a layer within a layer."""
    return {name.removeprefix(f"{prefix}."): value for name, value in p.items() if name.startswith(f"{prefix}.")}


def linear(p: Parameters, x: Tensor) -> Tensor:
    return x @ p["weight"].T + p.get("bias", 0)


def norm(p: Parameters, x: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * p["weight"] + p["bias"]


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def attention(p: Parameters, x: Tensor, num_heads: int) -> Tensor:
    batch, sequence, hidden = x.shape
    q, k, v = linear(under(p, "qkv"), x).view(batch, sequence, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(hidden // num_heads)
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return linear(under(p, "out"), y.transpose(1, 2).reshape(batch, sequence, hidden))


def mlp(p: Parameters, x: Tensor) -> Tensor:
    return linear(under(p, "down"), gelu(linear(under(p, "up"), x)))


def block(p: Parameters, x: Tensor, num_heads: int) -> Tensor:
    x = x + attention(under(p, "attention"), norm(under(p, "norm1"), x), num_heads)
    return x + mlp(under(p, "mlp"), norm(under(p, "norm2"), x))


def embedding(p: Parameters, ids: Tensor) -> Tensor:
    return p["weight"][ids]


def positions(p: Parameters, x: Tensor) -> Tensor:
    return x + p["weight"][: x.shape[1]]


def cross_entropy(logits: Tensor, labels: Tensor, denominator: float | None = None) -> Tensor:
    counted = labels != -100
    log_probabilities = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(log_probabilities * counted).sum() / (denominator or counted.sum())


def gpt(p: Parameters, ids: Tensor, num_layers: int, num_heads: int) -> Tensor:
    x = positions(under(p, "embedding.positions"), embedding(under(p, "embedding.tokens"), ids))
    for i in range(num_layers):
        x = block(under(p, f"blocks.{i}"), x, num_heads)
    head = p.get("head.weight", p["embedding.tokens.weight"])
    return norm(under(p, "norm"), x) @ head.T
