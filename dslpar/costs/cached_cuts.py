"""Sharding of activations (`Cuts`: the axes that shard each dim), computed by `dslpar.layout.sharding` and cached.

A search for layouts requests the same few `Cuts` thousands of times. The functions of `dslpar.layout.sharding` have no
cache, because layers call them too, and torch.compile would trace through the cache and warn.
"""

from __future__ import annotations

from functools import cache

from dslpar.core.mesh import Inner, Residual, Split, Tensor
from dslpar.layout import sharding
from dslpar.layout.sharding import Cuts


def residual_cuts(tensor: Tensor) -> Cuts:
    """Return the axes that shard the residual stream."""
    return _residual_cuts(tensor.residual, tensor.split)


def inner_cuts(tensor: Tensor) -> Cuts:
    """Return the axes that shard inner activations: qkv, the MLP's hidden layer and the logits."""
    return _inner_cuts(tensor.inner, tensor.split)


@cache
def _residual_cuts(residual: Residual, split: Split) -> Cuts:
    return sharding.residual_cuts(Tensor(residual=residual, split=split))


@cache
def _inner_cuts(inner: Inner, split: Split) -> Cuts:
    return sharding.inner_cuts(Tensor(inner=inner, split=split))
