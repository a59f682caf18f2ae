"""Cached sharding of activations: the functions of `dslpar.layout.sharding`, each result computed once.

A search for layouts requests the same few `ActivationSharding` values thousands of times. The functions of
`dslpar.layout.sharding` have no cache, because layers call them too, and torch.compile would trace through the cache
and warn.
"""

from __future__ import annotations

from functools import cache

from dslpar.core.mesh import Inner, Residual, Split, TensorMesh
from dslpar.layout import sharding
from dslpar.layout.sharding import ActivationSharding


def residual_cuts(tensor: TensorMesh) -> ActivationSharding:
    """Return the axes that shard the residual stream."""
    return _residual_cuts(tensor.residual, tensor.split)


def inner_cuts(tensor: TensorMesh) -> ActivationSharding:
    """Return the axes that shard inner activations: qkv, the MLP's hidden layer and the logits."""
    return _inner_cuts(tensor.inner, tensor.split)


@cache
def _residual_cuts(residual: Residual, split: Split) -> ActivationSharding:
    return sharding.residual_cuts(TensorMesh(residual=residual, split=split))


@cache
def _inner_cuts(inner: Inner, split: Split) -> ActivationSharding:
    return sharding.inner_cuts(TensorMesh(inner=inner, split=split))
