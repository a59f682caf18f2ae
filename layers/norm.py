"""LayerNorm and RMSNorm of a residual stream whose hidden dim may be sharded.

Letters: M tokens, H residual features in n pieces. If H is whole, torch's own functions are used. If H is cut, one
autograd function serves both norms. It merges the statistics of the pieces to those of all features, and its backward
sums the gradients through the statistics over the ranks. Statistics are in float32 or wider.

==========  ==============================================  ========================  ===========  ================
norm        forward sends                                   backward sums             forward      backward
==========  ==============================================  ========================  ===========  ================
LayerNorm   (mean, variance) of each piece, all-gathered    two numbers per token     2 M (n-1)    4 M (n-1)/n
RMSNorm     the sum of squares, all-reduced                 one number per token      2 M (n-1)/n  2 M (n-1)/n
==========  ==============================================  ========================  ===========  ================

The last two columns are elements sent per rank. LayerNorm merges the pieces' statistics after Chan, Golub and LeVeque
(1979), never by E[x^2] - E[x]^2, which loses precision by cancellation. RMSNorm (Zhang and Sennrich, arXiv 1910.07467)
subtracts nothing, so a plain sum of squares is precise enough.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import ONES, ZEROS, Layer, Shared, parameter
from dslpar.layers.stored_features import residual_features
from dslpar.layers.upcast import upcast


class _Norm(Layer):
    """Divide each token by its spread over all H features, then apply a gain and perhaps a bias."""

    centred: ClassVar[bool]
    """Whether the mean is subtracted."""

    def __init__(self, groups: Groups, hidden_size: int, *, eps: float, bias: bool, layer_idx: int | None) -> None:
        super().__init__(groups, layer_idx)
        vector = placement.residual_vector(groups.tensor, hidden_size)
        self.eps = eps
        self.weight = parameter(vector, ONES)
        self.bias = parameter(vector, ZEROS) if bias else None
        self.axis = groups.axis(*placement.residual_cuts(groups.tensor).features)
        self.features = residual_features(groups, hidden_size)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the stored residual [..., H/n] to the same shape."""
        self.features.check(x, type(self).__name__)
        shared = self.share() if shared is None else shared
        weight = cast("Tensor", self.stand_in(self.weight, shared))
        bias = self.stand_in(self.bias, shared)
        return normalize(x, weight, bias, axis=self.axis, eps=self.eps, centred=self.centred)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, *, axis: Axis, eps: float, centred: bool) -> Tensor:
    """Normalize [..., H/n] over all H features, which `axis` cuts; `weight` and `bias` are [H/n]."""
    if axis.size > 1:
        y = _ShardedNorm.apply(x, weight, bias, axis, eps, centred)  # type: ignore[no-untyped-call]
        return cast("Tensor", y)
    if centred:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


class LayerNorm(_Norm):
    """Torch's LayerNorm over the residual's features, with or without `bias`."""

    centred = True

    def __init__(
        self, groups: Groups, hidden_size: int, *, eps: float = 1e-5, bias: bool = True, layer_idx: int | None = None
    ) -> None:
        super().__init__(groups, hidden_size, eps=eps, bias=bias, layer_idx=layer_idx)


class RMSNorm(_Norm):
    """Torch's RMSNorm over the residual's features: x / sqrt(mean(x^2) + eps), times a gain."""

    centred = False

    def __init__(self, groups: Groups, hidden_size: int, *, eps: float = 1e-5, layer_idx: int | None = None) -> None:
        super().__init__(groups, hidden_size, eps=eps, bias=False, layer_idx=layer_idx)


class _ShardedNorm(torch.autograd.Function):
    """Both norms for features in equal pieces [..., H/n]; `mean` is None if the norm is not centred.

    The backward normalizes the saved input again. Saving the normalized input would keep a second tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, eps: float, centred: bool
    ) -> Tensor:
        wide = upcast(x)
        mean, rstd = _statistics(wide, axis, eps, centred)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.axis = axis
        normed = _normalize(wide, mean, rstd)
        y = normed * weight if bias is None else torch.addcmul(bias, normed, weight)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, mean, rstd, weight = ctx.saved_tensors
        y_grad, normed = upcast(grads[0]), _normalize(upcast(x), mean, rstd)
        x_grad, weight_grad, bias_grad = None, None, None
        if ctx.needs_input_grad[0]:
            normed_grad = y_grad * weight
            x_grad = _statistics_backward(normed_grad, normed, ctx.axis, centred=mean is not None)
            x_grad = x_grad.mul_(rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = (y_grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = y_grad.flatten(0, -2).sum(0).to(weight.dtype)
        return x_grad, weight_grad, bias_grad, None, None, None


def _normalize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return x * rstd if mean is None else (x - mean) * rstd


def _statistics_backward(normed_grad: Tensor, normed: Tensor, axis: Axis, *, centred: bool) -> Tensor:
    """Subtract from the gradient the parts that flow through the spread and, if `centred`, through the mean."""
    sums = [(normed_grad * normed).sum(-1), *([normed_grad.sum(-1)] if centred else [])]
    means = (
        collectives.start_all_reduce_(torch.stack(sums), axis).wait().div_(normed.shape[-1] * axis.size).unsqueeze(-1)
    )
    x_grad = normed_grad - normed * means[0]
    return x_grad.sub_(means[1]) if centred else x_grad


def _statistics(x: Tensor, axis: Axis, eps: float, centred: bool) -> tuple[Tensor | None, Tensor]:
    """Return the mean (None unless `centred`) and 1 / the spread over all H, each [..., 1], of x [..., H/n]."""
    if not centred:
        squares = collectives.start_all_reduce_(x.square().sum(-1, keepdim=True), axis).wait()
        return None, (squares / (x.shape[-1] * axis.size) + eps).rsqrt()
    # For equal pieces, the total variance is the mean of their variances plus the variance of their means.
    variance, mean = torch.var_mean(x, -1, correction=0)
    means, variances = collectives.all_gather(torch.stack([mean, variance]).unsqueeze(0), axis).unbind(1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    return mean.unsqueeze(-1), (variance + eps).rsqrt().unsqueeze(-1)
