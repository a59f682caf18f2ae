"""Affine layer: scale and shift each feature of the residual stream. ResMLP uses it in place of norms.

Touvron et al. showed that networks train well with it (ResMLP, arXiv 2105.03404). Their LayerScale, a scale per branch
that starts near zero (CaiT, 2103.17239), is `Affine(groups, 384, bias=False, init=Init(1e-4))`.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import ONES, ZEROS, Init, Layer, Shared, parameter
from dslpar.layers.stored_features import residual_features


class Affine(Layer):
    """Multiply each feature of the residual by a gain and, with `bias`, add a shift."""

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        *,
        bias: bool = True,
        init: Init = ONES,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        vector = placement.residual_vector(groups.tensor, hidden_size)
        self.weight = parameter(vector, init)
        self.bias = parameter(vector, ZEROS) if bias else None
        self.features = residual_features(groups, hidden_size)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the stored residual [..., H/n] to the same shape."""
        self.features.check(x, "Affine")
        shared = self.share() if shared is None else shared
        weight, bias = cast("Tensor", self.stand_in(self.weight, shared)), self.stand_in(self.bias, shared)
        return x * weight if bias is None else x * weight + bias
