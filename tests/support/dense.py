"""Dense reference layers in plain torch, without dslpar, which the sharded ones are compared with.

Each takes a dict of full parameters under dslpar's names, relative to the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


def under(p: Parameters, prefix: str) -> Parameters:
    """Return the parameters of a sublayer."""
    return {name.removeprefix(f"{prefix}."): value for name, value in p.items() if name.startswith(f"{prefix}.")}


def linear(p: Parameters, x: Tensor) -> Tensor:
    return x @ p["weight"].T + p.get("bias", 0)


def norm(p: Parameters, x: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * p["weight"] + p.get("bias", 0)


def rms_norm(p: Parameters, x: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p["weight"]


def token_linear(p: Parameters, x: Tensor) -> Tensor:
    """[batch, tokens, H]: a linear over tokens, for each feature alone."""
    return torch.einsum("tu,buh->bth", p["weight"], x) + p.get("bias", torch.zeros(1)).unsqueeze(-1)


def patches(p: Parameters, images: Tensor, patch_size: int) -> Tensor:
    """Convolve with kernels that do not overlap."""
    kernel = p["projection.weight"].unflatten(1, (images.shape[1], patch_size, patch_size))
    found = torch.nn.functional.conv2d(images, kernel, p.get("projection.bias"), stride=patch_size)
    return found.flatten(2).transpose(1, 2)


def batch_norm(p: Parameters, x: Tensor, eps: float = 1e-5) -> Tensor:
    """Call torch's BatchNorm over the first dim."""
    return torch.nn.functional.batch_norm(x, None, None, p.get("weight"), p.get("bias"), training=True, eps=eps)


def resmlp(p: Parameters, images: Tensor, num_layers: int, patch_size: int) -> Tensor:
    """ResMLP as in its paper's appendix."""

    def affine(p: Parameters, x: Tensor) -> Tensor:
        return x * p["weight"] + p.get("bias", 0)

    x = patches(under(p, "patches"), images, patch_size)
    for index in range(num_layers):
        block = under(p, f"blocks.{index}")
        x = x + affine(under(block, "scale1"), token_linear(under(block, "tokens"), affine(under(block, "norm1"), x)))
        hidden = gelu(linear(under(block, "mlp.up"), affine(under(block, "norm2"), x)))
        x = x + affine(under(block, "scale2"), linear(under(block, "mlp.down"), hidden))
    return linear(under(p, "head"), affine(under(p, "norm"), x).mean(1))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def attention(
    p: Parameters,
    x: Tensor,
    num_heads: int,
    num_kv_heads: int | None = None,
    causal: bool = True,
    theta: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention per key head with an explicit softmax. A query without keys gives zeros."""
    (_, sequence, hidden), groups = x.shape, num_kv_heads or num_heads
    size = hidden // num_heads
    inner = linear(under(p, "qkv"), x).unflatten(-1, (-1, size))
    q, k, v = inner[:, :, :num_heads], inner[:, :, num_heads : num_heads + groups], inner[:, :, num_heads + groups :]
    if theta:
        q, k = rotated(q, theta), rotated(k, theta)
    allowed = torch.ones(sequence, sequence, dtype=torch.bool).tril() if causal else torch.ones(1, 1, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & (mask[:, None, :] > 0)
        if mask.dtype != torch.bool:  # ids of documents
            allowed = allowed & (mask[:, :, None] - mask[:, None, :] == 0)
    heads = []
    for head in range(num_heads):
        key = head // (num_heads // groups)
        weights = torch.exp(q[:, :, head] @ k[:, :, key].transpose(1, 2) / math.sqrt(size)) * allowed
        total = weights.sum(-1, keepdim=True)
        heads.append(weights / (total + (total == 0)) @ v[:, :, key])
    return linear(under(p, "out"), torch.cat(heads, -1))


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotate x [batch, sequence, heads, features]: features i and i + half a head form one complex number."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(x.shape[1])[:, None, None] * speeds
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def mlp(p: Parameters, x: Tensor) -> Tensor:
    return linear(under(p, "down"), gelu(linear(under(p, "up"), x)))


def mlp_swiglu(p: Parameters, x: Tensor) -> Tensor:
    gate, up = linear(under(p, "up"), x).chunk(2, -1)
    return linear(under(p, "down"), silu(gate) * up)


def block(p: Parameters, x: Tensor, num_heads: int, **of_attention: Any) -> Tensor:
    """GPT-2's block, or Llama's if the norms have no bias."""
    normed, fed = (norm, mlp) if "norm1.bias" in p else (rms_norm, mlp_swiglu)
    x = x + attention(under(p, "attention"), normed(under(p, "norm1"), x), num_heads, **of_attention)
    return x + fed(under(p, "mlp"), normed(under(p, "norm2"), x))


def embedding(p: Parameters, ids: Tensor, padding_idx: int | None = None) -> Tensor:
    rows = p["weight"][ids]
    return rows if padding_idx is None else torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)


def positions(p: Parameters, x: Tensor) -> Tensor:
    return x + p["weight"][: x.shape[1]]


def token_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the loss per token, 0 if the label is -100."""
    log_probabilities = logits.log_softmax(-1)
    of_label = log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    smoothed = (1 - smoothing) * of_label + smoothing * log_probabilities.mean(-1)
    return -smoothed * (labels != -100)


def cross_entropy(logits: Tensor, labels: Tensor, denominator: float | None = None) -> Tensor:
    return token_losses(logits, labels).sum() / (denominator or (labels != -100).sum())


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Count token by token in Python; ties go to the first of the largest."""
    rows = zip(logits.flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True)
    counted = [(row, label) for row, label in rows if label != -100]
    return sum(row.index(max(row)) == label for row, label in counted) / len(counted)


def gpt(p: Parameters, ids: Tensor, num_layers: int, num_heads: int, **of_attention: Any) -> Tensor:
    """GPT-2, or Llama if the norms have no bias."""
    x = embedding(under(p, "embedding.tokens"), ids)
    if "embedding.positions.weight" in p:
        x = positions(under(p, "embedding.positions"), x)
    for i in range(num_layers):
        x = block(under(p, f"blocks.{i}"), x, num_heads, **of_attention)
    head = p.get("head.weight", p["embedding.tokens.weight"])
    return (norm if "norm.bias" in p else rms_norm)(under(p, "norm"), x) @ head.T
