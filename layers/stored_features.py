"""Features of an activation that a rank stores, and the error for an activation with another number.

    self.features = residual_features(groups, 64)      # of the residual's 64 features, those that this rank stores
    self.features.check(x, "LayerNorm")                # [..., 64/n]

Without the check, an activation that was not split ends in an error of torch's about two matrices, deep in a product.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement


class StoredFeatures(NamedTuple):
    """The number of an activation's features, and how many of them this rank stores."""

    total: int
    stored: int
    convert: str
    """The function of dslpar.layers that takes this rank's piece of a whole activation."""

    def check(self, x: Tensor, layer: str) -> None:
        """Raise DslparError if the last dim of `x` is not the stored features."""
        if x.shape[-1] == self.stored:
            return
        hint = f"an activation whose last dim is {self.stored}"
        if x.shape[-1] == self.total:
            hint = f"dslpar.layers.{self.convert}(groups, x), this rank's piece of it; groups is run.groups"
        of = "" if self.stored == self.total else f" of {self.total}"
        message = f"{layer} got an activation of shape {tuple(x.shape)}, but takes {self.stored}{of} features"
        raise_finding("TEN226", message, hint, key="model")


def residual_features(groups: Groups, total: int) -> StoredFeatures:
    """Return which share of the residual's features this rank stores."""
    return _share(groups, total, placement.residual_cuts(groups.tensor), "to_residual")


def inner_features(groups: Groups, total: int) -> StoredFeatures:
    """Return which share of inner features this rank stores."""
    return _share(groups, total, placement.inner_cuts(groups.tensor), "to_inner")


def _share(groups: Groups, total: int, cuts: placement.ActivationSharding, convert: str) -> StoredFeatures:
    _, count = placement.piece(groups.tensor, groups.coord, cuts.features)
    return StoredFeatures(total, total // count, convert)
