"""Linear layers on a cuboid of ranks: every tensor mode is this one product (DESIGN, section 5).

Letters: M tokens (batch, sequence), H residual features, F inner features; x = d q.

=========  ===================  ==================  ====================  =====================  ======================
role       stored X             stored W            stored Y              X gathered over        Y reduced over
=========  ===================  ==================  ====================  =====================  ======================
inward     residual [M, H/z]    [F/yq, H/z]         inner [M/x, F/y]      y (as residual says)   z (as inner says)
outward    inner [M/x, F/y]     [H/zq, F/y]         residual [M, H/z]     z (as inner says)      y (as residual says)
=========  ===================  ==================  ====================  =====================  ======================

W is gathered over q. Backward is the same with gather and reduce exchanged, and dW summed over d::

    forward   Y  = reduce_Y(gather_X(X) @ gather_W(W).T) + b
    dgrad     dX = reduce_X(gather_Y(dY) @ gather_W(W))
    wgrad     dW = reduce_W(gather_Y(dY).T @ gather_X(X)), all-reduced over d

In 1d this is Megatron-LM's column- and row-parallel pair (arXiv 1909.08053), with its overlap of dgrad's reduction and
wgrad's product; with `sequence`, 2205.05198; which gathered panels live until the backward is `keep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.cuboid import Kept, features_of, inner_over_z, residual_over_y, weight_over_q
from dslpar.layers.options import one_of
from dslpar.layers.parameter import GPT2, ZEROS, Init, Layer, Shared, parameter

Role = Literal["inward", "outward"]
_ROLES = {"inward": "inward", "outward": "outward"}


@dataclass(frozen=True)
class Product:
    """How X, W and Y of one product are kept: all that `multiply` needs to know of the layout."""

    x: Kept
    w: Kept
    y: Kept
    depth: Axis
    """Ranks that hold equal weights for other tokens."""
    keeps_x: bool
    """Whether the gathered X lives until the backward; else it is gathered again."""
    keeps_w: bool

    @property
    def local(self) -> bool:
        """Whether no rank needs another."""
        return self.x.axis.size == self.w.axis.size == self.y.axis.size == self.depth.size == 1


def product(groups: Groups, role: Role, blocks: tuple[int, ...] = ()) -> Product:
    """The product of a linear in `role`; inward, its output may be `blocks` of features."""
    residual, inner = residual_over_y(groups), inner_over_z(groups, blocks)
    keep = groups.tensor.keep
    return Product(
        x=residual if role == "inward" else inner,
        w=weight_over_q(groups, blocks),
        y=inner if role == "inward" else residual,
        depth=groups.axis("d"),
        keeps_x=keep in ("x", "both"),
        keeps_w=keep in ("w", "both"),
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, how: Product) -> Tensor:
    """X W^T + b; `weight` is the Parameter itself, `bias` what the stored Y adds."""
    if how.local:
        return functional.linear(x, weight, bias)
    return cast("Tensor", _Multiply.apply(x, weight, bias, how))  # type: ignore[no-untyped-call]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Product) -> Tensor:
        x_panel, w_panel = how.x.gather(x), how.w.gather(weight)
        if how.y.axis.size == 1:
            y = functional.linear(x_panel, w_panel, bias)
        else:
            y = how.y.reduce(functional.linear(x_panel, w_panel))
            y = y if bias is None else y.add_(bias)
        # What is not gathered is saved itself, never a view: ZeRO-3 empties the Parameter and fills it again.
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            (x_panel if how.keeps_x else x) if needs_w else None,
            (w_panel if how.keeps_w else weight) if needs_x else None,
        )
        ctx.how = how
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        how: Product = ctx.how
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        x_grad, w_grad, b_grad = None, None, None
        if needs_x or needs_w:
            y_grad = how.y.gather(grads[0])
        if needs_x:
            w_panel = weight if how.keeps_w else how.w.gather(weight)
            x_grad = how.x.start_reduce(y_grad @ w_panel)  # on its way while the next product runs
        if needs_w:
            x_panel = x if how.keeps_x else how.x.gather(x)
            w_panel_grad = y_grad.flatten(0, -2).t() @ x_panel.flatten(0, -2)
            w_grad = collectives.start_all_reduce_(how.w.reduce(w_panel_grad), how.depth).wait()
        if needs_b:
            b_grad = grads[0].flatten(0, -2).sum(0)
        return x_grad and x_grad.wait(), w_grad, b_grad, None


class Linear(Layer):
    """A linear layer of the residual stream (`inward`: read it; `outward`: add to it).

    `forward(x)`: stored residual [batch, sequence, H] to stored inner activation [batch, sequence, F], or the other way
    round; all sizes as this rank stores them. `out_features` may be several lengths, of inward linears in one (q, k, v;
    gate, up): each is cut by itself, and the output has this rank's features of each one after the other. x may also be
    [tokens, features]: its first dim is then cut by all that cuts batch or sequence.

    With `gather_output` the output has all features on every rank, and all are to go on with it alike: backward takes
    this rank's features of the gradient. Tokens stay as they are stored.

    What is frozen (`requires_grad_(False)`; an input that needs no gradient) costs nothing in the backward.

    Raises:
        DslparError: another role, or a number of features that the ranks cannot share out.
    """

    def __init__(
        self,
        groups: Groups,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        role: Role,
        bias: bool = True,
        gather_output: bool = False,
        init: Init = GPT2,
    ) -> None:
        super().__init__(groups)
        one_of(_ROLES, role, "role")
        tensor = groups.tensor
        if role == "inward":
            at = placement.inward_weight(tensor, out_features, in_features)
            vector = placement.inner_vector(tensor, out_features)
        else:
            assert isinstance(out_features, int), "blocks are of inner features"
            at = placement.outward_weight(tensor, out_features, in_features)
            vector = placement.residual_vector(tensor, out_features)
        self.weight = parameter(at, init)
        self.bias = parameter(vector, ZEROS) if bias else None
        self.product = product(groups, role, at.blocks)
        self.joins = features_of(groups, vector.cuts[0], at.blocks) if gather_output else ()

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """See the class."""
        bias = self.stand_in(self.bias, self.share() if shared is None else shared)
        y = multiply(x, self.weight, bias, self.product)
        for kept in self.joins:
            y = kept.join(y)
        return y
