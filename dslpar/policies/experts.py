"""Mixtures of experts on sharded models: gather tokens, run this rank's experts, sum the results over ranks.

Letters: B samples, S sequence, H residual features, E experts, F features of an expert; T ranks of the tensor group.

::

    residual, as stored --gather--> [B, S, H] --router--> weights of experts, equal on all ranks
    [B, S, H] --experts of this rank--> this rank's terms of the sum [B, S, H] --reduce--> residual, as stored

A *mixture* is the module with the router and the experts. Its forward is transformers' own, on full tokens. The experts
run in transformers' loops and kernels (`ExpertsInterface`). For experts of other ranks, a rank passes the expert index
that transformers' own expert parallelism skips. Every rank computes the same router output, but the router's gradient
on a rank comes only from this rank's terms, so it is summed over the ranks. The gather's backward sums the gradients of
the tokens.

Whole experts are divided over the tensor group, `ceil(E / T)` per rank, in every mode (`sharing_axes` has the
exception). E need not be divisible by T: remaining places are experts of zeros, as in a padded vocabulary, and get no
tokens. Sharding the F features of each expert instead (Megatron-LM's expert tensor parallelism, and transformers' own
tensor plan) would balance the ranks exactly. But with F of some hundred the matrix products become thin. Files also
store experts one by one, so a rank with whole experts reads whole tensors.

Each mixture sends `2 f(T) B S H` elements in the forward and as many in the backward, with f(n) = (n - 1) / n, for any
number of experts per token. Each rank stores the gathered tokens. An all-to-all (GShard, arXiv 2006.16668) sends fewer
elements if a token's experts are on few of many ranks, but their number changes in each step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.operand_shardings import Role
from dslpar.layers.parameter import ZEROS, Layer, parameter
from dslpar.layers.placement import Placement
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.policies.replacement_modules import Source, call_with

_PROJECTIONS = ("gate_up_proj", "down_proj")


def gather_tokens(groups: Groups, x: Tensor) -> Tensor:
    """Gather the stored residual to [B, S, H] on every rank; backward: sum all ranks' gradients.

    The gather is over `sharing_axes` only; ranks along other axes process their own tokens.
    """
    cuts, sharing = placement.residual_cuts(groups.tensor), sharing_axes(groups)
    for dim, letters in enumerate(cuts):
        for letter in reversed([each for each in letters if each in sharing]):  # fastest axis first: keeps order
            x = collectives.all_gather_autograd(x, groups.axis(letter), dim)
    return collectives.copy_to_group(x, groups.axis(*_copies(cuts, sharing))).contiguous()


def reduce_tokens(groups: Groups, y: Tensor) -> Tensor:
    """Sum all ranks' terms [B, S, H] to the stored residual; backward: gather."""
    cuts, sharing = placement.residual_cuts(groups.tensor), sharing_axes(groups)
    for dim, letters in enumerate(cuts):
        for letter in (each for each in letters if each in sharing):
            y = collectives.reduce_scatter_autograd(y, groups.axis(letter), dim)
    return collectives.reduce_from_group(y, groups.axis(*_copies(cuts, sharing)))


def _copies(cuts: placement.ActivationSharding, sharing: placement.Letters) -> placement.Letters:
    """Return the sharing axes along which ranks hold equal copies of the residual."""
    return tuple(letter for letter in sharing if not any(letter in letters for letters in cuts))


def sharing_axes(groups: Groups) -> placement.Letters:
    """Return the axes over which experts are divided: all tensor axes, except d if ZeRO shards weights over d.

    If the config declares experts, ZeRO does not use d (`layout.resolve.with_zero`). Other models may have experts too.
    """
    return groups.tensor.summed_by_layers(TENSOR_AXES)


def _placed(groups: Groups, shape: tuple[int, ...], dim: int, padded_rows: int | None = None) -> Placement:
    """Return the placement of a weight whose `dim` is sharded over the axes that divide the experts."""
    sharing = sharing_axes(groups)
    cuts = tuple(sharing if each == dim else () for each in range(len(shape)))
    partial = tuple(letter for letter in TENSOR_AXES if letter not in sharing)
    return Placement(groups.tensor, shape, cuts, partial=partial, padded_rows=padded_rows)


def surround(mixture: nn.Module, groups: Groups) -> None:
    """Register hooks on a mixture: its forward gets full tokens, and its output is reduced to the stored residual."""

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_tokens(groups, args[0]), *args[1:]

    def reduce(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        return reduce_tokens(groups, y)

    mixture.register_forward_pre_hook(gather)
    mixture.register_forward_hook(reduce)


class Experts(Layer):
    """This rank's share of a mixture's experts, in transformers' three-dimensional parameters.

    Raises:
        DslparError: the parameters are not those of gated experts, [E, 2 F, H] and [E, H, F].
    """

    def __init__(self, groups: Groups, module: nn.Module, name: str) -> None:
        super().__init__(groups)
        own: Any = module
        shapes = {each: tuple(p.shape) for each, p in module.named_parameters()}
        if set(shapes) != set(_PROJECTIONS) or not all(len(shape) == 3 for shape in shapes.values()):
            message = f"{name} of {type(module).__name__} holds {shapes}, not the weights of gated experts"
            raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
        index, count = placement.piece(groups.tensor, groups.coord, sharing_axes(groups))
        num_experts = own.num_experts
        self.share_of_experts = -(-num_experts // count)
        self.first = index * self.share_of_experts
        padded = self.share_of_experts * count
        for each, shape in shapes.items():
            rows = padded if padded != num_experts else None
            self.register_parameter(each, parameter(_placed(groups, shape, 0, rows), ZEROS))
        own.num_experts, own._is_expert_parallel = self.share_of_experts, count > 1
        self.module = [own]  # in a list, so that its parameters are not registered here
        self.sources = {each: (Source(f"{name}.{each}"),) for each in shapes}

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map x [tokens, H], with [tokens, k] choices of all experts, to this rank's terms of the sum [tokens, H]."""
        here = (top_k_index >= self.first) & (top_k_index < self.first + self.share_of_experts)
        if not bool(here.any()):
            # No token chose an expert of this rank. Its backward must still return zero gradients for all inputs and
            # weights, so the output is computed from empty slices of them.
            empty = (x[:0], top_k_weights[:0], *(p[:0] for p in self.parameters()))
            return x.new_zeros(x.shape) + torch.stack([each.sum() for each in empty]).sum()
        own = self.module[0]
        if x.dtype is torch.float64 and own.config._experts_implementation != "eager":
            own.config = copy.copy(own.config)
            own.config._experts_implementation = "eager"  # the fused products do not support float64
        index = (top_k_index - self.first).masked_fill(~here, self.share_of_experts)
        args = (x, index, top_k_weights.masked_fill(~here, 0))
        y: Tensor = call_with(own, dict(self.named_parameters()), *args)
        return y


class SharedExpertLinear(Layer):
    """A linear of a shared expert, which all tokens visit. Its F features are sharded over the `sharing_axes`.

    It needs no communication of its own.

    Raises:
        DslparError: F is not divisible by the number of ranks, or the linear has a bias.
    """

    def __init__(self, groups: Groups, linear: nn.Linear, name: str, role: Role) -> None:
        super().__init__(groups)
        if getattr(linear, "bias", None) is not None:
            message = f"{name}.bias: linears of a shared expert are supported only without a bias"
            raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
        at = _placed(groups, tuple(linear.weight.shape), 0 if role == "inward" else 1)
        self.weight = parameter(at, ZEROS)
        self.sources = {"weight": (Source(f"{name}.weight"),)}

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, H] to [tokens, F/T], or an outward linear back to this rank's terms of the sum [tokens, H]."""
        return functional.linear(x, self.weight)
