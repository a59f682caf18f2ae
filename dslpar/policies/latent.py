"""Latent attention's linears (DeepSeek-V2, arXiv 2405.04434): residual to a short latent, latent to heads.

A latent is of all heads: each rank has it whole, and goes on from it with heads of its own. So its gradient, on each
rank, is that of these heads alone: what the entrance has gathered, its backward sums. A norm of the latent computes the
same on every rank, and its gain's gradient is summed likewise: `modules.PerHead`. (transformers' plan has each rank
compute the whole latent, "mla_kv_a_proj"; here it is computed once, and gathered.)
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
    """Inward linears of a region whose features every rank needs whole."""

    def fill(self, x: Tensor, slots: Sequence[Slot]) -> Tensor:
        """Compute all from the stored residual [batch/x, sequence, H/z], whole, and fill the slots."""
        letters = placement.inner_cuts(self.groups.tensor).features
        parts = []
        for part, slot in zip(torch.split(self(x), self.local, dim=-1), slots, strict=True):
            for letter in reversed(letters):
                part = collectives.all_gather_autograd(part, self.groups.axis(letter), -1)
            slot.ready[:] = (part,)
            parts.append(part)
        return parts[0]


class FromLatent(Layer):
    """A linear of a region from a latent to this rank's heads: [.., L] to [.., F/y]."""

    def __init__(self, groups: Groups, in_features: int, out_features: int, *, bias: bool, sources: Sources) -> None:
        super().__init__(groups)
        cuts, tensor = placement.inner_cuts(groups.tensor), groups.tensor
        at = Placement(tensor, (out_features, in_features), (cuts.features, ()), partial=cuts.tokens)
        self.weight = parameter(at, ZEROS)
        self.bias = parameter(placement.inner_vector(tensor, out_features), ZEROS) if bias else None
        self.sources = sources

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """[.., L] to [.., F/y]; the gradient of `x` is of these features alone."""
        shared = self.share() if shared is None else shared
        weight = self.stand_in(self.weight, shared)
        assert weight is not None
        return functional.linear(x, weight, self.stand_in(self.bias, shared))
