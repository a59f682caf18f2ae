"""Cached cuts of `dslpar.layout.sharding`: a search requests the same few cuts thousands of times.

The functions there have no cache, because torch.compile would trace through it and warn.
"""

from __future__ import annotations

from functools import cache

from dslpar.core.mesh import Inner, Residual, Split, Tensor
from dslpar.layout import sharding
from dslpar.layout.sharding import Cuts


def residual_cuts(tensor: Tensor) -> Cuts:
    """Return how the residual stream is stored."""
    return _residual_cuts(tensor.residual, tensor.split)


def inner_cuts(tensor: Tensor) -> Cuts:
    """Return how qkv, the MLP's hidden layer and the logits are stored."""
    return _inner_cuts(tensor.inner, tensor.split)


@cache
def _residual_cuts(residual: Residual, split: Split) -> Cuts:
    return sharding.residual_cuts(Tensor(residual=residual, split=split))


@cache
def _inner_cuts(inner: Inner, split: Split) -> Cuts:
    return sharding.inner_cuts(Tensor(inner=inner, split=split))
