"""Linear layers on a cuboid of ranks. One sharded product serves every mode (docs/architecture.md, "The cuboid").

Letters: M tokens (batch, sequence), H residual features, F inner features; x = d q.

=========  ===================  ==================  ====================  =====================  ======================
role       stored X             stored W            stored Y              X gathered over        Y reduced over
=========  ===================  ==================  ====================  =====================  ======================
inward     residual [M, H/z]    [F/yq, H/z]         inner [M/x, F/y]      y (as residual says)   z (as inner says)
outward    inner [M/x, F/y]     [H/zq, F/y]         residual [M, H/z]     z (as inner says)      y (as residual says)
=========  ===================  ==================  ====================  =====================  ======================

W is gathered over q. The backward exchanges gather and reduce, and sums dW over d, unless ZeRO does so::

    forward   Y  = reduce_Y(gather_X(X) @ gather_W(W).T) + b
    dgrad     dX = reduce_X(gather_Y(dY) @ gather_W(W))
    wgrad     dW = reduce_W(gather_Y(dY).T @ gather_X(X)), all-reduced over d

In 1d this is Megatron-LM's column- and row-parallel pair (arXiv 1909.08053), with its overlap of dgrad's reduction with
wgrad's product, and of X's second gather with dgrad's product. With `sequence` it is arXiv 2205.05198. `keep` selects
the gathered panels that live until the backward. With `comm_overlap` the collectives of activations are cut into parts
that run under their own product (overlap.py), and those of weights run under the product before or after theirs
(weight_prefetch.py). If a pipeline schedule splits the backward (weight_gradients.py), wgrad is deferred, and an older
wgrad product hides the reduction of dX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed.collectives import Pending
from dslpar.distributed.groups import Groups
from dslpar.layers import gradient_accumulation_fusion as fusion
from dslpar.layers import lora, memory_order, overlap, placement, weight_gradients
from dslpar.layers.dropout import shard_seed
from dslpar.layers.gather_reduce import features_over
from dslpar.layers.late_reduction import LateGradient, WeightReduction
from dslpar.layers.named_options import one_of
from dslpar.layers.operand_shardings import MatmulSharding, Role, matmul_sharding
from dslpar.layers.parameter import GPT2, ZEROS, Init, Layer, Shared, parameter
from dslpar.layers.weight_gradients import Leaf, Split
from dslpar.layers.weight_prefetch import WAITING, PrefetchedWeight, Run

_ROLES = {"inward": "inward", "outward": "outward"}


def sharded_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sharding: MatmulSharding,
    adapters: Sequence[lora.Applied] = (),
    matrices: Sequence[Tensor] = (),
) -> Tensor:
    """Return X W^T + b: [M/x, K/..] and [N/.., K/..] to [M/x, N/..], all stored as in the module's table.

    `weight` must be the Parameter itself. `bias` is this rank's piece, which is added to the stored Y. `matrices` are A
    and B of each adapter.
    """
    leaf = weight_gradients.leaf_of(weight)
    summed = weight if leaf is None and fusion.fuses_accumulation(weight) else None
    if sharding.is_local and not adapters and leaf is None:
        return functional.linear(x, weight, bias) if summed is None else fusion.linear(x, weight, bias)
    prefetched = None if torch.compiler.is_compiling() or not weight.is_leaf else sharding.prefetched
    stand_in = None if prefetched is None else prefetched.enter_forward(weight)
    late: LateGradient | None = None
    if leaf is not None:
        weight = leaf.stand_in()
    elif stand_in is not None:
        weight, late = stand_in.weight, stand_in.late
    use = _WeightUse(leaf, summed, late, prefetched)
    y = _ShardedMatmul.apply(x, weight, bias, sharding, use, adapters, *matrices)  # type: ignore[no-untyped-call]
    return cast("Tensor", y)


class _WeightUse(NamedTuple):
    """Sources of a product's weight, and destinations of its gradient."""

    leaf: Leaf | None
    """The weight, if its gradient is deferred (weight_gradients.py)."""
    summed: Tensor | None
    """The Parameter, if the product may add to its gradient sum (gradient_accumulation_fusion.py)."""
    late: LateGradient | None
    """Receiver of a gradient whose reduction is waited for later (late_gradient.py)."""
    prefetched: PrefetchedWeight | None

    @property
    def run(self) -> Run:
        """The forward or backward in progress."""
        return WAITING if self.prefetched is None else self.prefetched.run


class _ShardedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sharding: MatmulSharding,
        use: _WeightUse,
        adapters: Sequence[lora.Applied],
        *matrices: Tensor,
    ) -> Tensor:
        run = use.run
        w_panel = run.gather(weight, sharding.w)
        run.start_next()
        if sharding.overlaps(adapters):
            y, gathered_x = overlap.linear(x, w_panel, sharding.x, sharding.y, symmetric=sharding.symmetric_memory)
            y = y if sharding.keeps_memory_order else y.contiguous()
            y = y if bias is None else y.add_(bias)
        else:
            x_panel = sharding.x.gather(x, contiguous=not sharding.keeps_memory_order)
            y = memory_order.linear(x_panel, w_panel, bias if sharding.y.axis.size == 1 else None)
            for adapter, a, b in zip(adapters, matrices[::2], matrices[1::2], strict=True):
                adapter.add_to(y, x_panel, a, b)
            if sharding.y.axis.size > 1:
                y = sharding.y.reduce(y)
                y = y if bias is None else y.add_(bias)  # after the sum, else every rank's partial product would add it
            gathered_x = Pending(x_panel)
        # In a recomputation the panel of a weight's gradient may occupy the place of the next weight's panel.
        run.start_over_d()
        run.start_next()
        # A weight that is not gathered is saved itself, never as a view: ZeRO 3 empties the Parameter and fills it
        # again. (No weight has a stand-in at ZeRO 3.)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            (gathered_x.wait() if sharding.keeps_x else x) if needs_w or adapters else None,
            (w_panel if sharding.keeps_w else weight) if needs_x else None,
            *matrices,
        )
        ctx.sharding, ctx.use, ctx.adapters = sharding, use, adapters
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sharding: MatmulSharding = ctx.sharding
        leaf, summed, late, prefetched = ctx.use
        contiguous = not sharding.keeps_memory_order
        x, weight, *matrices = ctx.saved_tensors
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        x_grad, w_grad, b_grad, x_panel_grad = None, None, None, None
        split = weight_gradients.split_backward(leaf)
        run = ctx.use.run
        reduces_x = needs_x and sharding.x.axis.size > 1
        overlaps = needs_x and sharding.overlaps(ctx.adapters)
        if not overlaps and (needs_x or needs_w or ctx.adapters):
            y_grad = sharding.y.gather(grads[0], contiguous=contiguous)
        if needs_x and sharding.keeps_w:
            w_panel = weight
        elif needs_x:
            w_panel = run.enter(prefetched).gather(weight, sharding.w)
        if not needs_w or leaf is not None:
            run.start_next()
        # X is gathered under dgrad's product, so that only the reduction of dX is left to run under wgrad's.
        if ctx.adapters or (needs_w and leaf is None):
            gathering = sharding.start_gather_x(x)
        aside = split if needs_w and leaf is not None else None
        if aside is not None and not overlaps:  # before dgrad, so that the gather of this X may run under it
            _put_aside(aside, leaf, x, y_grad, sharding)
        older = split.start_older() if split is not None and reduces_x else None
        if overlaps:
            x_panel_grad, gathered_grad = overlap.linear(
                grads[0], w_panel.t(), sharding.y, symmetric=sharding.symmetric_memory
            )
            y_grad = gathered_grad.wait() if needs_w else grads[0]  # only wgrad reads the gathered dY
            del gathered_grad  # frees the pieces, which have been copied to the joined panel
        elif needs_x:
            x_panel_grad = memory_order.linear(y_grad, w_panel.t())
        adapter_grads: list[Tensor] = []
        if ctx.adapters:
            x_panel = gathering.wait()
            gathering = Pending(x_panel)
            for adapter, a, b in zip(ctx.adapters, matrices[::2], matrices[1::2], strict=True):
                adapter_grads += adapter.backward(y_grad, x_panel, a, b, x_panel_grad)
        if x_panel_grad is not None:
            x_panel_grad = x_panel_grad.contiguous() if contiguous else x_panel_grad
            x_grad = sharding.x.start_reduce(x_panel_grad)  # runs under wgrad's product
            del w_panel  # makes room for the next panel
        run.start_over_d()
        run.start_next()
        if needs_w and leaf is None:
            reduction = _weight_gradient(y_grad, gathering.wait(), sharding, fusion.sum_of(summed))
            if reduction is not None and late is not None:
                w_grad = late.put(reduction)
                run.put(reduction)
            elif reduction is not None:
                w_grad = reduction.wait()
        elif aside is not None and overlaps:
            _put_aside(aside, leaf, x, y_grad, sharding)
        if older is None and split is not None and reduces_x:
            older = split.start_older()
        if older is not None:
            older()
        if needs_b:
            b_grad = memory_order.tokens(grads[0]).sum(0)
        return x_grad and x_grad.wait(), w_grad, b_grad, None, None, None, *adapter_grads


def _put_aside(split: Split, leaf: Leaf, x: Tensor, y_grad: Tensor, sharding: MatmulSharding) -> None:
    # Detached: the queue must not keep the graph that X comes from.
    split.put(leaf.weight, partial(_start_weight_gradient, x.detach(), y_grad, sharding))


def _start_weight_gradient(x: Tensor, y_grad: Tensor, sharding: MatmulSharding) -> Callable[[], Tensor]:
    """Start to gather X, unless it was kept; return a function that computes dW."""
    gathering = sharding.start_gather_x(x)
    return lambda: cast("WeightReduction", _weight_gradient(y_grad, gathering.wait(), sharding, None)).wait()


def _weight_gradient(
    y_grad: Tensor, x: Tensor, sharding: MatmulSharding, total: Tensor | None
) -> WeightReduction | None:
    """Compute dW of panels [M/.., N/..] and [M/.., K/..], and start to reduce it over q and d to the stored pieces.

    If dW needs no reduction, its product adds it to `total`, and the result is None.
    """
    a, b = memory_order.weight_factors(y_grad, x)
    if total is not None and sharding.w.axis.size == sharding.depth.size == 1:
        fusion.add_product_(total, a, b)
        return None
    return WeightReduction(a @ b, sharding.w, sharding.depth)


class Linear(Layer):
    """Linear layer of the residual stream (`inward`: reads it; `outward`: adds to it).

    `out_features` may be several lengths, which fuse inward linears into one (q, k, v; gate, up). Each block is cut
    over all ranks, and the output has this rank's features of the blocks one after the other.

    With `gather_output` the output has all features on every rank, and all ranks must compute the same with it: the
    backward takes this rank's features of the gradient. Tokens stay sharded.

    Frozen weights (`requires_grad_(False)`) and inputs that need no gradient cost nothing in the backward.

    Raises:
        DslparError: the role is unknown, or a number of features does not divide over the ranks.
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
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
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
        self.sharding = matmul_sharding(groups, role, at.blocks)
        self.adapters: list[lora.Adapter] = []
        self.output_gathers = features_over(groups, vector.cuts[0], at.blocks) if gather_output else ()

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the residual [batch/x, sequence, H/z] to inner features [batch/x, sequence, F/y], or outward back.

        Inputs may also be [tokens/x, features]. Their first dim is cut over all axes that cut batch or sequence. If
        `residual` or `inner` cuts tokens or features once more, over y or z, inputs and outputs are cut so too.
        """
        shared = self.share() if shared is None else shared
        bias = self.stand_in(self.bias, shared)
        if self.adapters:
            adapters = [lora.Applied(each, self._dropout_seed(each)) for each in self.adapters]
            matrices = [self.stand_in(getattr(self, name), shared) for each in self.adapters for name in each.matrices]
            y = sharded_matmul(x, self.weight, bias, self.sharding, adapters, cast("list[Tensor]", matrices))
        else:
            y = sharded_matmul(x, self.weight, bias, self.sharding)
        for features in self.output_gathers:
            y = features.join(y)
        return y

    def keep_memory_order(self) -> None:
        """Take and return tokens in any memory order. The surrounding code must then neither view nor flatten them."""
        self.sharding = replace(self.sharding, keeps_memory_order=True)

    def add_adapter(
        self, r: int, *, scale: float, dropout: float = 0.0, name: str = "", blocks: slice = slice(None)
    ) -> lora.Adapter:
        """Add a LoRA adapter s B A of rank `r`, with parameters `<name>lora_A` (r, in) and `<name>lora_B` (out, r).

        `blocks` selects the linear's blocks of output features that it adapts. It freezes nothing: the caller does.
        """
        at = self.weight.placement  # type: ignore[attr-defined]
        lengths = at.blocks or at.shape[:1]
        before, own = sum(lengths[: blocks.start or 0]), lengths[blocks]
        count = self.groups.axis(at.cuts[0][0]).size
        adapter = lora.Adapter(name, before // count, (before + sum(own)) // count, scale, dropout)
        (a_name, b_name), (a_place, b_place) = adapter.matrices, lora.placements(at, r, own)
        self.register_parameter(a_name, parameter(a_place, lora.KaimingUniform()))
        self.register_parameter(b_name, parameter(b_place, ZEROS))
        self.adapters.append(adapter)
        return adapter

    def _dropout_seed(self, adapter: lora.Adapter) -> int:
        """Draw the seed of an adapter's dropout mask over this rank's panel of the input; 0: no dropout."""
        if not self.training or adapter.dropout == 0:
            return 0
        features = self.weight.placement.cuts[1]  # type: ignore[attr-defined]
        return shard_seed(self.groups, placement.Cuts(("d", "q"), (), features))
