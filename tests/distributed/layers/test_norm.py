"""Sharded norms in float32 and bfloat16: they lose no more than torch's rounding, and send less if frozen.

tests/distributed/layers/cases/embedding_norm_loss.py compares float64 and all gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed.groups import Groups
from dslpar.layers import LayerNorm, RMSNorm, gather, initialize, placement
from tests.support.ranks import on_ranks
from tests.support.traffic_counter import counting

CUT = Cuboid(z=2, mode="cuboid")
"""Two ranks, each with half of the features."""


def normed(mean: float, dtype: torch.dtype) -> list[float]:
    """Return the errors of either norm and its input's gradient against torch in float64: features of this mean, spread
    1.
    """
    groups = Groups(Mesh(tensor=CUT))
    generator = torch.Generator().manual_seed(1)
    full = (torch.randn(4, 6, 64, generator=generator) + mean).to(dtype)
    grad = torch.randn(4, 6, 64, generator=generator).to(dtype)
    wide = full.double().requires_grad_()
    errors = []
    for layer, reference in (
        (LayerNorm(groups, 64), functional.layer_norm(wide, (64,), eps=1e-5)),
        (RMSNorm(groups, 64), functional.rms_norm(wide, (64,), eps=1e-5)),
    ):
        initialize(layer, groups, seed=1)
        errors += _errors(groups, layer.to(dtype), full, grad, reference, wide)
    return errors


def _errors(groups: Groups, layer: Any, full: Tensor, grad: Tensor, reference: Tensor, wide: Tensor) -> list[float]:
    at = placement.residual(groups.tensor, *full.shape)
    x = at.cut(full, groups.coord).requires_grad_()
    y = layer(x)
    assert y.dtype == full.dtype
    y.backward(at.cut(grad, groups.coord))
    (x_grad,) = torch.autograd.grad(reference, wide, grad.double())
    pairs = ((y.detach(), reference.detach()), (x.grad, x_grad))
    return [((gather(a.double(), at, groups) - b).abs().max() / b.abs().max()).item() for a, b in pairs]


def test_statistics_of_bfloat16_are_not_in_bfloat16() -> None:
    """The result is rounded once, to a relative 2^-8. With bfloat16 statistics, the mean alone would be off by the
    spread of the features.
    """
    for errors in on_ranks(2, normed, 8.0, torch.bfloat16):
        assert max(errors) <= 2**-8


def test_a_large_mean_cancels_nothing() -> None:
    """With float32, mean 1000 and spread 1, E[x^2] - E[x]^2 would lose 6e-8 * 1e6, a sixteenth, of the variance.

    x - mean is exact to 1000 * 6e-8. RMSNorm subtracts nothing, and is as exact as float32.
    """
    for errors in on_ranks(2, normed, 1000.0, torch.float32):
        assert max(errors[:2]) < 2e-4  # LayerNorm
        assert max(errors[2:]) < 1e-6  # RMSNorm


def sent() -> list[dict[Any, int]]:
    """Return calls in either norm's backward, for an input that needs a gradient, and one that does not."""
    groups = Groups(Mesh(tensor=CUT))
    counts = []
    for needed in (True, False):
        for layer in (LayerNorm(groups, 64), RMSNorm(groups, 64)):
            initialize(layer, groups, seed=1)
            y = layer(torch.randn(4, 6, 32, requires_grad=needed))
            with counting(groups) as found:
                y.sum().backward()
            counts.append(dict(found.calls))
    return counts


def test_an_input_without_a_gradient_costs_no_collective() -> None:
    once: dict[Any, int] = {("all_reduce", "z"): 1}
    assert on_ranks(2, sent)[0] == [once, once, {}, {}]


def test_rms_norm_without_sharding_is_torchs() -> None:
    groups = Groups(Mesh())
    layer, theirs = RMSNorm(groups, 8, eps=1e-3), torch.nn.RMSNorm(8, eps=1e-3)
    initialize(layer, groups, seed=1)
    x = torch.randn(2, 3, 8)
    assert torch.equal(layer(x), theirs(x))
