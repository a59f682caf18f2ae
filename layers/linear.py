"""Linear layers on a cuboid of ranks. One sharded product serves every mode (docs/architecture.md, "The cuboid").

Letters: M tokens (batch times sequence), H residual features, F inner features. d, q, y and z are the cuboid's axes,
and x = d q. M/x means that the dim M is cut into x pieces, one per rank along these axes. A panel is an operand as
gathered for the product.

=========  ===================  ==================  ====================  =====================  ======================
role       stored X             stored W            stored Y              X gathered over        Y reduced over
=========  ===================  ==================  ====================  =====================  ======================
inward     residual [M/x, H/z]  [F/yq, H/z]         inner [M/x, F/y]      y, if in pieces        z, to pieces or copies
outward    inner [M/x, F/y]     [H/zq, F/y]         residual [M/x, H/z]   z, if in pieces        y, to pieces or copies
=========  ===================  ==================  ====================  =====================  ======================

The tensor mode determines whether the residual over y, and the inner activation over z, is in pieces or in equal
copies. W is gathered over q. The backward exchanges gather and reduce. It sums dW over d, unless ZeRO does so::

    forward   Y  = reduce_Y(gather_X(X) @ gather_W(W).T) + b
    dgrad     dX = reduce_X(gather_Y(dY) @ gather_W(W))
    wgrad     dW = reduce_W(gather_Y(dY).T @ gather_X(X)), all-reduced over d

In 1d this is Megatron-LM's column- and row-parallel pair (arXiv 1909.08053). As there, the reduction of dX runs under
wgrad's product, and the second gather of X under dgrad's product. With `sequence` it is arXiv 2205.05198. `keep`
selects the panels that live until the backward. With `comm_overlap` the collectives of activations are cut into parts
that run under their own product (overlap.py). The collectives of weights then run under the product of the linear
before or after (weight_prefetch.py). If a pipeline schedule splits the backward (weight_gradients.py), wgrad is
deferred, and the reduction of dX runs under a wgrad product that was deferred before.
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
from dslpar.layers.stored_features import inner_features, residual_features
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
    """Return Y = X W^T + b for X [M/x, K/..] and W [N/.., K/..], all stored as in the table of this module.

    `weight` must be the Parameter itself. `bias` is this rank's piece, which is added to the stored Y. `matrices` are A
    and B of the first adapter, then those of the next one, and so on.
    """
    leaf = weight_gradients.leaf_of(weight)
    summed = weight if leaf is None and fusion.fuses_accumulation(weight) else None
    if sharding.is_local and not adapters and leaf is None:
        return functional.linear(x, weight, bias) if summed is None else fusion.linear(x, weight, bias)
    # If dW is deferred (`leaf`) or may arrive late (`late`), the product multiplies by a stand-in with the same data. A
    # gradient of the Parameter itself would reach autograd in this product's backward.
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
    """Handles by which one product gets the panel of its weight, and hands over the gradient of the weight."""

    leaf: Leaf | None
    """The weight, if its gradient is deferred (weight_gradients.py)."""
    summed: Tensor | None
    """The Parameter, if the product may add to its gradient sum (gradient_accumulation_fusion.py)."""
    late: LateGradient | None
    """Receives dW while it is still being reduced. Autograd takes it later from there (late_reduction.py)."""
    prefetched: PrefetchedWeight | None
    """Handle for prefetching the weight's panel (weight_prefetch.py); None: no prefetching."""

    @property
    def run(self) -> Run:
        """The pass in progress: a forward or a backward of the whole module (weight_prefetch.py)."""
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
        """Compute this rank's shard of Y in four phases.

        1. Gather W (with prefetching, an earlier product has started this). Start to gather the next linear's W.
        2. Compute Y: gather X, multiply, add the adapters, reduce Y, add the bias. With `comm_overlap`, in parts.
        3. In a recomputation, continue the reduction of an earlier dW. Start to gather the next W if phase 1 could not.
        4. Save X and W for the backward pass: the gathered panel where `keep` says so, else this rank's shard.
        """
        run = use.run  # the pass in progress (weight_prefetch.py)
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
        """Compute dX, dW and the other gradients. The order of the phases lets collectives run under products.

        1. Gather dY. With `comm_overlap`, dgrad gathers it instead (phase 6).
        2. Gather W, if dX is needed and `keep` has not kept the panel. Prefetching has started this in an earlier
           product. If this backward computes no dW, start to gather the next linear's W already here.
        3. Start to gather X again, unless `keep` has kept the panel. This runs under dgrad.
        4. In a split backward (weight_gradients.py), put dW into the queue of deferred products. With `comm_overlap`
           this comes in phase 9, when dY is complete.
        5. In a split backward that reduces dX, take an older product from the queue, and start to gather its X.
        6. dgrad: compute the panel of dX, and the adapters' gradients.
        7. Start to reduce dX. Free the panel of W.
        8. Wait for the sum over q of the dW that the linear before computed, and start its sum over d. Start to gather
           the next linear's W.
        9. wgrad: compute dW, and start to reduce it over q. With prefetching, autograd takes dW after the next linear's
           backward (late_reduction.py). Without, wait for it. A split backward has no wgrad here.
        10. Compute the older product of phase 5. The reduction of dX runs under this product, and else under wgrad.
        11. Compute the bias's gradient, and wait for dX.
        """
        sharding: MatmulSharding = ctx.sharding
        leaf, summed, late, prefetched = ctx.use
        contiguous = not sharding.keeps_memory_order
        x, weight, *matrices = ctx.saved_tensors
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        x_grad, w_grad, b_grad, x_panel_grad = None, None, None, None
        split = weight_gradients.split_backward(leaf)
        run = ctx.use.run  # the pass in progress (weight_prefetch.py)
        reduces_x = needs_x and sharding.x.axis.size > 1
        overlaps = needs_x and sharding.overlaps(ctx.adapters)
        # 1. Gather dY.
        if not overlaps and (needs_x or needs_w or ctx.adapters):
            y_grad = sharding.y.gather(grads[0], contiguous=contiguous)
        # 2. Gather W.
        if needs_x and sharding.keeps_w:
            w_panel = weight
        elif needs_x:
            w_panel = run.enter(prefetched).gather(weight, sharding.w)
        if not needs_w or leaf is not None:
            run.start_next()
        # 3. Gather X under dgrad's product, so that only the reduction of dX is left to run under wgrad's.
        if ctx.adapters or (needs_w and leaf is None):
            gathering = sharding.start_gather_x(x)
        # 4. Defer dW before dgrad: if the queue was empty, phase 5 takes this product, whose X is gathered under dgrad.
        aside = split if needs_w and leaf is not None else None
        if aside is not None and not overlaps:
            _put_aside(aside, leaf, x, y_grad, sharding)
        # 5. Start an older product.
        older = split.start_older() if split is not None and reduces_x else None
        # 6. dgrad.
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
        # 7. Reduce dX.
        if x_panel_grad is not None:
            x_panel_grad = x_panel_grad.contiguous() if contiguous else x_panel_grad
            x_grad = sharding.x.start_reduce(x_panel_grad)  # runs under wgrad's product
            del w_panel  # makes room for the next panel
        # 8. Continue the collectives of other weights.
        run.start_over_d()
        run.start_next()
        # 9. wgrad.
        if needs_w and leaf is None:
            reduction = _weight_gradient(y_grad, gathering.wait(), sharding, fusion.accumulator_of(summed))
            if reduction is not None and late is not None:
                w_grad = late.put(reduction)
                run.put(reduction)
            elif reduction is not None:
                w_grad = reduction.wait()
        elif aside is not None and overlaps:
            _put_aside(aside, leaf, x, y_grad, sharding)
        # 10. The older product; if there was none in phase 5, there may be one now.
        if older is None and split is not None and reduces_x:
            older = split.start_older()
        if older is not None:
            older()
        # 11. The bias's gradient.
        if needs_b:
            b_grad = memory_order.tokens(grads[0]).sum(0)
        return x_grad and x_grad.wait(), w_grad, b_grad, None, None, None, *adapter_grads


def _put_aside(split: Split, leaf: Leaf, x: Tensor, y_grad: Tensor, sharding: MatmulSharding) -> None:
    """Defer a product's dW: append it to the queue of the split backward."""
    # Detached: the queue must not keep the graph that X comes from.
    split.put(leaf.weight, partial(_start_weight_gradient, x.detach(), y_grad, sharding))


def _start_weight_gradient(x: Tensor, y_grad: Tensor, sharding: MatmulSharding) -> Callable[[], Tensor]:
    """Start to gather X, unless its panel was kept; return a function that computes and reduces dW."""
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
    """Linear layer: `inward` maps the residual stream to inner features, `outward` maps them back to the residual.

    `out_features` may be a list of lengths. The layer then fuses several inward linears (q, k, v; gate, up), and each
    length is a block of its output features. Each block is cut over all ranks. A rank's output has its features of the
    first block, then its features of the second one, and so on.

    With `gather_output` every rank gets all output features. All ranks must compute the same values from them, since
    the backward takes only this rank's features of the gradient. Tokens stay sharded.

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
        stored = residual_features if role == "inward" else inner_features
        self.features = stored(groups, in_features)
        self.sharding = matmul_sharding(groups, role, at.blocks)
        self.adapters: list[lora.Adapter] = []
        self.output_gathers = features_over(groups, vector.cuts[0], at.blocks) if gather_output else ()

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the residual [batch/x, sequence, H/z] to inner features [batch/x, sequence, F/y], or outward back.

        Inputs may also be [tokens/x, features]. Their first dim is cut over all axes that cut batch or sequence. If the
        mode also cuts the stored residual over y, or the inner activation over z (docs/architecture.md, "The cuboid"),
        the shapes have these cuts too.

        Raises:
            DslparError: `x` has another number of features than a rank stores.
        """
        self.features.check(x, "Linear")
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
        """Accept and return activations that are sequence first in memory (memory_order.py).

        The surrounding code must then neither `view` nor flatten them.
        """
        self.sharding = replace(self.sharding, keeps_memory_order=True)

    def add_adapter(
        self, r: int, *, scale: float, dropout: float = 0.0, name: str = "", blocks: slice = slice(None)
    ) -> lora.Adapter:
        """Add a LoRA adapter s B A of rank `r`, with parameters `<name>lora_A` (r, in) and `<name>lora_B` (out, r).

        `blocks` selects the blocks of the linear's output features to which the adapter adds. The caller must freeze
        the linear's own weight.
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
        return shard_seed(self.groups, placement.ActivationSharding(("d", "q"), (), features))
