"""Mixtures of experts on cut models: gather tokens, run this rank's share of the experts, sum the results.

Letters: B samples, S sequence, H residual features, E experts, F features of an expert; T ranks of the tensor group.

::

    residual, as stored --gather--> [B, S, H] --router--> weights of experts, equal on all ranks
    [B, S, H] --experts of this rank--> this rank's terms of the sum [B, S, H] --reduce--> residual, as stored

The forward around router and experts is transformers' own, on whole tokens, and so are the experts' loops and kernels
(its `ExpertsInterface`). An expert of another rank gets the index that transformers' own expert parallelism skips. The
router is computed alike on every rank, so its gradient comes in parts, one for each rank's terms. The gather's backward
sums the gradients of the tokens.

Experts are divided by number over the whole group, `ceil(E / T)` per rank, in every mode (but see `sharing_axes`). E
need not be divisible by T: leftover places are rows of zeros, like those of a padded vocabulary, and get no tokens.
Cutting each expert's F features instead (Megatron-LM's expert tensor parallelism, and transformers' own tensor plan)
would balance ranks to the token. But it makes thin products of small experts, with F of some hundred. Files also store
experts one by one, so a rank reads whole tensors.

Each mixture sends `2 f(T) B S H` elements in forward and as many in backward, f(n) = (n - 1) / n, for any number of
experts per token. Each rank keeps the gathered tokens. An all-to-all (GShard, arXiv 2006.16668) sends fewer if a token
visits few of many ranks, but in counts that change each step.
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
from dslpar.policies.modules import Source, call_with

_PROJECTIONS = ("gate_up_proj", "down_proj")


def gather_tokens(groups: Groups, x: Tensor) -> Tensor:
    """Gather the stored residual to [B, S, H] on every rank; backward: the sum of all ranks' gradients.

    It gathers only over the axes of `sharing_axes`; ranks along other axes process their own tokens.
    """
    cuts, sharing = placement.residual_cuts(groups.tensor), sharing_axes(groups)
    for dim, letters in enumerate(cuts):
        for letter in reversed([each for each in letters if each in sharing]):  # the fastest cut first: neighbours
            x = collectives.all_gather_autograd(x, groups.axis(letter), dim)
    return collectives.copy_to_group(x, groups.axis(*_copies(cuts, sharing))).contiguous()


def reduce_tokens(groups: Groups, y: Tensor) -> Tensor:
    """Sum all ranks' terms [B, S, H] to the stored residual; backward: gather."""
    cuts, sharing = placement.residual_cuts(groups.tensor), sharing_axes(groups)
    for dim, letters in enumerate(cuts):
        for letter in (each for each in letters if each in sharing):
            y = collectives.reduce_scatter_autograd(y, groups.axis(letter), dim)
    return collectives.reduce_from_group(y, groups.axis(*_copies(cuts, sharing)))


def _copies(cuts: placement.Cuts, sharing: placement.Letters) -> placement.Letters:
    """Return the axes along which the residual is stored as equal copies."""
    return tuple(letter for letter in sharing if not any(letter in letters for letters in cuts))


def sharing_axes(groups: Groups) -> placement.Letters:
    """Return the axes that divide the experts: all tensor axes, except d if ZeRO shards equal weights over it.

    A config that declares experts has no such d (`layout.resolve.with_zero`), but other models may have experts too.
    """
    return groups.tensor.summed_by_layers(TENSOR_AXES)


def _placed(groups: Groups, shape: tuple[int, ...], dim: int, padded_rows: int | None = None) -> Placement:
    """Place a weight whose `dim` is cut over the axes that divide the experts."""
    sharing = sharing_axes(groups)
    cuts = tuple(sharing if each == dim else () for each in range(len(shape)))
    partial = tuple(letter for letter in TENSOR_AXES if letter not in sharing)
    return Placement(groups.tensor, shape, cuts, partial=partial, padded_rows=padded_rows)


def surround(mixture: nn.Module, groups: Groups) -> None:
    """Have a mixture's forward run on whole tokens, and return this rank's piece of the sum over all ranks."""

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
            message = f"{name} of {type(module).__name__} holds {shapes}, and not the weights of gated experts"
            raise_finding("TEN234", message, "report the model: it needs a rule of its own", key="model.type")
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
            # No expert is called, but each rank's backward must return all gradients: zeros, from empty slices.
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
    """A linear of an expert that all tokens visit: its F features are cut over the whole group, without communication.

    Raises:
        DslparError: F does not divide, or the linear has a bias.
    """

    def __init__(self, groups: Groups, linear: nn.Linear, name: str, role: Role) -> None:
        super().__init__(groups)
        if getattr(linear, "bias", None) is not None:
            message = f"{name}.bias: of linears of a shared expert, only those without a bias are known"
            raise_finding("TEN234", message, "report the model: it needs a rule of its own", key="model.type")
        at = _placed(groups, tuple(linear.weight.shape), 0 if role == "inward" else 1)
        self.weight = parameter(at, ZEROS)
        self.sources = {"weight": (Source(f"{name}.weight"),)}

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, H] to [tokens, F/T], or an outward linear back to this rank's terms of the sum [tokens, H]."""
        return functional.linear(x, self.weight)
