"""Fused kernels on the meta device: attention, RMSNorm and dropout that save what a GPU's kernels save.

    with fused_kernels():
        module(x).backward(...)

For meta tensors torch would run these operations as several smaller ones. Autograd would then save all scores of a
head, each step of a norm in float32, and a dropout mask in the model's dtype. With this module it saves as much as on a
GPU. The shapes of inputs and outputs are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Replace torch's attention, RMSNorm and dropout in the body by versions that save as much as a GPU's kernels."""
    attention = patch.object(functional, "scaled_dot_product_attention", _attention)
    with attention, patch.object(functional, "rms_norm", _rms_norm), patch.object(functional, "dropout", _dropout):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: object,
) -> Tensor:
    """Run flash attention in half precision without a mask, otherwise memory-efficient attention.

    Flash attention needs as many features of values as of keys, which latent attention does not have. Arguments have
    torch's names, because transformers passes some of them by name.
    """
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]:
        made = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)
        return cast("Tensor", made[0])
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    wants_sums = query.requires_grad
    made = aten._scaled_dot_product_efficient_attention(query, key, value, None, wants_sums, dropout_p, is_causal)
    return cast("Tensor", made[0])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run dropout that saves a mask of one byte per element."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None:
        weight = input.new_empty(tuple(normalized_shape))
    return cast("Tensor", _RMSNorm.apply(input, weight))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input, the weight, and one float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x * weight)  # raises if the shapes do not fit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
