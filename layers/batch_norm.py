"""BatchNorm over the samples of all replicas, with features sharded over a tensor group.

Letters: M tokens, which here are samples, F features. Mean and variance are taken over the whole batch: over the ranks
that cut its tokens and over data replicas. So they do not depend on the layout. Each feature is whole on one of the
ranks that cut features, so these ranks exchange nothing. As in torch's SyncBatchNorm, gradients flow through the
statistics to all ranks' samples. The variance is the mean square of the centred values, never E[x^2] - E[x]^2, which
loses precision by cancellation. (Ioffe and Szegedy, arXiv 1502.03167.)

The layer keeps no running statistics, and evaluation uses the batch's statistics too. It is for heads that are dropped
after training, as in contrastive learning.
"""

from __future__ import annotations

from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.operand_shardings import Role
from dslpar.layers.parameter import ONES, ZEROS, Layer, Shared, parameter
from dslpar.layers.upcast import upcast


class BatchNorm(Layer):
    """Normalize each feature over the batch of all replicas and, with `affine`, apply a gain and a shift.

    `after` is the role of the preceding linear. It determines how the features are stored: "inward" as inner
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
        """Map [tokens/x, F/n], stored as the preceding linear's output, to the same shape."""
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
    """Sum over ranks. Each rank uses the sum for its own samples, so the backward sums too."""
    return collectives.copy_to_group(collectives.reduce_from_group(x, axis), axis)
