"""LayerNorm of a residual stream whose hidden dim may be in pieces.

Letters: M tokens, H residual features in n pieces. Where H is whole this is torch's own. Where it is cut, each rank has
(mean, variance) of its H/n features; they are gathered and merged (Chan, Golub, LeVeque 1979; never E[x^2] - E[x]^2,
which cancels), and the backward sums two numbers a token over the ranks. Traffic in elements: forward 2 M (n-1),
backward 4 M (n-1)/n.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar import comm
from dslpar.comm import Axis
from dslpar.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import ONES, ZEROS, Layer, Shared, parameter


class LayerNorm(Layer):
    """`forward(residual)`: the stored residual [batch, sequence, H/n], normalised over all H, in float32 or wider."""

    def __init__(self, groups: Groups, hidden_size: int, *, eps: float = 1e-5) -> None:
        super().__init__(groups)
        tensor = groups.tensor
        self.eps = eps
        self.weight = parameter(placement.residual_vector(tensor, hidden_size), ONES)
        self.bias = parameter(placement.residual_vector(tensor, hidden_size), ZEROS)
        self.axis = groups.axis(*placement.residual_cuts(tensor).features)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """See the class."""
        shared = self.share() if shared is None else shared
        weight, bias = self.stand_in(self.weight, shared), self.stand_in(self.bias, shared)
        if self.axis.size == 1:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        return cast("Tensor", _CutNorm.apply(x, weight, bias, self.axis, self.eps))  # type: ignore[no-untyped-call]


class _CutNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, axis: Axis, eps: float) -> Tensor:
        wide = _wide(x)
        mean, rstd = _statistics(wide, axis, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.axis = axis
        return torch.addcmul(bias, (wide - mean) * rstd, weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, mean, rstd, weight = ctx.saved_tensors
        y_grad = _wide(grads[0])
        normed = (_wide(x) - mean) * rstd
        normed_grad = y_grad * weight
        features = x.shape[-1] * ctx.axis.size
        sums = torch.stack([normed_grad.sum(-1), (normed_grad * normed).sum(-1)])
        means = comm.start_all_reduce_(sums, ctx.axis).wait().div_(features).unsqueeze(-1)
        x_grad = (normed_grad - means[0] - normed * means[1]) * rstd
        weight_grad = (y_grad * normed).flatten(0, -2).sum(0)
        bias_grad = y_grad.flatten(0, -2).sum(0)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), bias_grad.to(weight.dtype), None, None


def _statistics(x: Tensor, axis: Axis, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation [batch, sequence, 1] of features in pieces of one length."""
    variance, mean = torch.var_mean(x, -1, correction=0)
    means, variances = comm.all_gather(torch.stack([mean, variance]).unsqueeze(0), axis).unbind(1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    return mean.unsqueeze(-1), (variance + eps).rsqrt().unsqueeze(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
