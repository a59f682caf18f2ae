"""Linears of latent attention (DeepSeek-V2, arXiv 2405.04434): residual to a short latent, latent to heads.

A latent serves all heads: each rank has it whole, and computes its own heads from it. So its gradient on each rank is
that of these heads alone. The backward of the entrance's gather sums these gradients. A norm of the latent computes the
same on every rank, and the gradient of its gain is summed likewise (`modules.per_head`). (In transformers' plan each
rank computes the whole latent, "mla_kv_a_proj". Here it is computed once and gathered.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import ZEROS, Layer, Shared, parameter
from dslpar.layers.placement import Placement
from dslpar.policies.modules import Entrance, Slot, Sources


class LatentEntrance(Entrance):
    """Inward linears of a region whose output every rank needs whole."""

    def fill(self, x: Tensor, slots: Sequence[Slot]) -> Tensor:
        """Compute all outputs from the stored residual [batch/x, sequence, H/z], gather them, and fill the slots."""
        letters = placement.inner_cuts(self.groups.tensor).features
        parts = []
        for part, slot in zip(torch.split(self(x), self.local, dim=-1), slots, strict=True):
            for letter in reversed(letters):
                part = collectives.all_gather_autograd(part, self.groups.axis(letter), -1)
            slot.ready[:] = (part,)
            parts.append(part)
        return parts[0]


class FromLatent(Layer):
    """A region's linear from a latent to this rank's heads: [.., L] to [.., F/y]."""

    def __init__(self, groups: Groups, in_features: int, out_features: int, *, bias: bool, sources: Sources) -> None:
        super().__init__(groups)
        cuts, tensor = placement.inner_cuts(groups.tensor), groups.tensor
        at = Placement(tensor, (out_features, in_features), (cuts.features, ()), partial=cuts.tokens)
        self.weight = parameter(at, ZEROS)
        self.bias = parameter(placement.inner_vector(tensor, out_features), ZEROS) if bias else None
        self.sources = sources

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [.., L] to [.., F/y]; the gradient of `x` is of these features alone."""
        shared = self.share() if shared is None else shared
        weight = self.stand_in(self.weight, shared)
        assert weight is not None
        return functional.linear(x, weight, self.stand_in(self.bias, shared))
