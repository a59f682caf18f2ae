"""Blockwise attention without a kernel: plain products, and dropout masks from a seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dslpar.layers import fused_attention
from dslpar.layers.context_attention import AttentionDropout
from dslpar.layout.attention_blocks import Kind

SCALE = 0.3


def _all_kept(weights: Tensor) -> Tensor:
    """Return dropout factors that drop nothing; there is no kernel for dropout."""
    return torch.ones_like(weights)


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_plain_products_are_torch_s_attention(kind: Kind) -> None:
    """Queries have four heads, keys two. In float64, 1e-12 is a thousand roundings."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 5, 3, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    expected = scaled_dot_product_attention(q, k, v, is_causal=kind == "causal", scale=SCALE, enable_gqa=True)
    y_grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(expected, (q, k, v), y_grad)
    qkv = (q.detach(), k.detach(), v.detach())
    y, lse = fused_attention.forward(qkv, kind, SCALE, kept=_all_kept)
    assert (y - expected).abs().max() < 1e-12
    found = fused_attention.backward(qkv, y_grad, y, lse, kind, SCALE, kept=_all_kept)
    for one, other in zip(found, gradients, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_dropout_of_blocks() -> None:
    """A share p of 100,000 factors is 0, to 1 % (six standard deviations); the rest keep the mean."""
    dropout = AttentionDropout(p=0.25, seed=3)
    block = torch.empty(100, 1000)

    def factors(step: int, number: int) -> Tensor:
        made = dropout.of_block(step, number)
        assert made is not None
        return made(block)

    drawn = factors(1, 2)
    assert set(drawn.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (drawn == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(drawn, factors(1, 2)), "the backward's are the forward's"
    for other in (factors(0, 2), factors(1, 1), factors(2, 1)):
        assert not torch.equal(drawn, other)
    assert AttentionDropout().of_block(1, 2) is None
