"""BatchNorm over all samples of all replicas, of features that a tensor group cuts.

Letters: M tokens, which here are samples, F features. Mean and variance are of the whole batch, over the ranks that cut
its tokens and over data replicas, so they do not depend on the layout; a feature is on one rank of those that cut
features, which send nothing. As in torch's SyncBatchNorm, gradients flow through the statistics to all ranks' samples.
Variance is the mean square of what is left after the mean is subtracted, never E[x^2] - E[x]^2, which cancels.
(Ioffe and Szegedy, arXiv 1502.03167.)

No running statistics are kept: this is for heads that are thrown away after training, as those of contrastive learning
are, and evaluation takes the batch's statistics, too.
"""

from __future__ import annotations

from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.matmul_sharding import Role
from dslpar.layers.parameter import ONES, ZEROS, Layer, Shared, parameter
from dslpar.layers.upcast import upcast


class BatchNorm(Layer):
    """Normalizes each feature over the batch of all replicas; `affine`: then a gain and a shift.

    `after` is the role of the linear that it follows, and so says how its features are stored: "inward" as inner
    activations, "outward" as the residual. All data replicas must have batches of one size.
    """

    def __init__(
        self,
        groups: Groups,
        num_features: int,
        *,
        after: Role,
        affine: bool = True,
        eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        inward = after == "inward"
        vector = (placement.inner_vector if inward else placement.residual_vector)(groups.tensor, num_features)
        self.weight = parameter(vector, ONES) if affine else None
        self.bias = parameter(vector, ZEROS) if affine else None
        self.eps, self.tokens, self.data = eps, groups.axis(*vector.partial), groups.axis("data")

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """[tokens/x, F/n] to the same, as the linear before it stores them."""
        shared = self.share() if shared is None else shared
        weight, bias = self.stand_in(self.weight, shared), self.stand_in(self.bias, shared)
        wide = upcast(x)
        centred = wide - self._mean(wide)
        normed = (centred * (self._mean(centred.square()) + self.eps).rsqrt()).to(x.dtype)
        return normed if weight is None or bias is None else normed * weight + bias

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean over all tokens of all replicas, [F/n]."""
        total = _sum_over(_sum_over(x.sum(0), self.tokens), self.data)
        return total / (len(x) * self.tokens.size * self.data.size)


def _sum_over(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks that go on with the sum each for samples of its own: so the backward sums, too."""
    return collectives.copy_to_group(collectives.reduce_from_group(x, axis), axis)
