"""Linears of latent attention (DeepSeek-V2, arXiv 2405.04434): residual to a short latent, latent to heads.

All heads read the same latent: each rank holds the full latent, and computes its own heads from it. So the latent's
gradient on a rank comes from this rank's heads only. The backward of the entrance's gather sums these gradients. A norm
of the latent computes the same on every rank, and the gradient of its gain is summed likewise (`modules.per_head`). (In
transformers' plan each rank computes the full latent, "mla_kv_a_proj". Here each rank computes a shard, and the shards
are gathered.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import ZEROS, Layer, Shared, parameter
from dslpar.layers.placement import Placement
from dslpar.policies.replacement_modules import Entrance, Slot, Sources


class LatentEntrance(Entrance):
    """Inward linears that compute latents: the full output is gathered on every rank."""

    def fill(self, x: Tensor, slots: Sequence[Slot]) -> Tensor:
        """Compute all outputs from the stored residual [batch/x, sequence, H/z], gather them, and fill the slots."""
        letters = placement.inner_cuts(self.groups.tensor).features
        parts = []
        for part, slot in zip(self(x).unsafe_split_with_sizes(self.local, -1), slots, strict=True):
            for letter in reversed(letters):
                part = collectives.all_gather_autograd(part, self.groups.axis(letter), -1)
            slot.ready[:] = (part,)
            parts.append(part)
        return parts[0]


class FromLatent(Layer):
    """Linear within a region from a latent (L features) to this rank's heads: [.., L] to [.., F/y]."""

    def __init__(self, groups: Groups, in_features: int, out_features: int, *, bias: bool, sources: Sources) -> None:
        super().__init__(groups)
        cuts, tensor = placement.inner_cuts(groups.tensor), groups.tensor
        at = Placement(tensor, (out_features, in_features), (cuts.features, ()), partial=cuts.tokens)
        self.weight = parameter(at, ZEROS)
        self.bias = parameter(placement.inner_vector(tensor, out_features), ZEROS) if bias else None
        self.sources = sources

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [.., L] to [.., F/y]; the gradient of `x` on a rank comes from this rank's features only."""
        shared = self.share() if shared is None else shared
        weight = self.stand_in(self.weight, shared)
        assert weight is not None
        return functional.linear(x, weight, self.stand_in(self.bias, shared))
