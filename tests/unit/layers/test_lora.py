"""LoRA's product and its hand-written backward, against autograd."""

from __future__ import annotations

import pytest
import torch

from dslpar.layers.lora import Adapter, Applied


@pytest.mark.parametrize("seed", [0, 5])
def test_gradients_are_those_of_autograd(seed: int) -> None:
    """With dropout (a seed) and without; 1e-12 is a thousand roundings of float64."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, a, b, y_grad = drawn(2, 3, 8), drawn(4, 8), drawn(5, 4), drawn(2, 3, 7)
    adapter = Adapter("", 1, 6, scale=1.7, dropout=0.5)
    applied = Applied(adapter, seed)

    leaves = [each.clone().requires_grad_() for each in (x, a, b)]
    kept = torch.ones_like(x)
    if seed:
        kept = (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= 0.5) / 0.5
    y = torch.zeros(2, 3, 7, dtype=torch.float64)
    applied.add_to(y, x, a, b)
    own = torch.nn.functional.pad(1.7 * ((leaves[0] * kept) @ leaves[1].t()) @ leaves[2].t(), (1, 1))
    assert (y - own).abs().max() < 1e-12
    expected = torch.autograd.grad(own, leaves, y_grad)
    x_grad = torch.zeros_like(x)
    a_grad, b_grad = applied.backward(y_grad, x, a, b, x_grad)
    for one, other in zip((x_grad, a_grad, b_grad), expected, strict=True):
        assert (one - other).abs().max() < 1e-12
