"""An affine map of each feature of the residual stream, and a scale alone: what ResMLP has in place of norms.

That features without a norm train well is Touvron et al.'s (ResMLP, arXiv 2105.03404); LayerScale, a branch's scale
that begins near zero, is theirs too (CaiT, 2103.17239): `Affine(groups, 384, bias=False, init=Init(1e-4))`.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import ONES, ZEROS, Init, Layer, Shared, parameter


class Affine(Layer):
    """A gain for each feature of the residual and, with `bias`, a shift."""

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

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """[..., H/n] to the same: the residual as it is stored."""
        shared = self.share() if shared is None else shared
        weight, bias = cast("Tensor", self.stand_in(self.weight, shared)), self.stand_in(self.bias, shared)
        return x * weight if bias is None else x * weight + bias
