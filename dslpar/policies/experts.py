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
number of experts per token, and each rank stores the gathered tokens.

With `parallel.expert` (`TensorMesh.exchanges_tokens`), experts are divided over data ranks as well, and tokens are sent
to their experts instead::

    residual, as stored --split--> this rank's tokens [n, H] --router--> weights of experts for these tokens
    [n, H] --exchange--> rows of this rank's experts --> back, weighted sum [n, H] --> residual, as stored

(`layers.distinct_tokens`, `layers.token_exchange`). Routers then see each token on one rank only, and a shared expert's
weights are gathered for each use, since its features are sharded but each rank has other tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.expert_load import ExpertLoad
from dslpar.layers.lora import ExpertAdapter, KaimingUniform, placements_of_experts
from dslpar.layers.operand_shardings import Role
from dslpar.layers.parameter import ZEROS, Layer, parameter, placement_of
from dslpar.layers.placement import Placement
from dslpar.layers.token_exchange import TokenExchange
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.policies.lora import Adapters
from dslpar.policies.replacement_modules import Source, call_with


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


def _placed(
    groups: Groups, shape: tuple[int, ...], dim: int, sharing: placement.Letters, padded_rows: int | None = None
) -> Placement:
    """Return the placement of a weight whose `dim` is sharded over the axes `sharing`."""
    cuts = tuple(sharing if each == dim else () for each in range(len(shape)))
    partial = tuple(letter for letter in TENSOR_AXES if letter not in sharing)
    return Placement(groups.tensor, shape, cuts, partial=partial, padded_rows=padded_rows)


def surround(mixture: nn.Module, groups: Groups) -> None:
    """Register hooks on a mixture: its forward gets full tokens, and its output becomes the stored residual."""
    if groups.tensor.exchanges_tokens:
        _surround_with_split(mixture, groups)
        return

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_tokens(groups, args[0]), *args[1:]

    def reduce(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _with_first(output, lambda y: reduce_tokens(groups, y))

    mixture.register_forward_pre_hook(gather)
    mixture.register_forward_hook(reduce)


def _surround_with_split(mixture: nn.Module, groups: Groups) -> None:
    split = DistinctTokens(groups)
    shapes: list[torch.Size] = []

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Not a stack: a recomputation may stop before the end of a forward.
        shapes[:] = [args[0].shape]
        return split.take(args[0]).unsqueeze(0), *args[1:]

    def give_back(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _with_first(output, lambda y: split.give_back(y.squeeze(0), shapes[0]))

    mixture.register_forward_pre_hook(take)
    mixture.register_forward_hook(give_back)


def _with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a mixture's output with its first tensor changed.

    Other outputs (GPT-OSS's router scores) are of other tokens than the rank's residual, so code that reads them must
    fail.
    """
    if not isinstance(output, tuple):
        return change(output)
    first, *others = output
    return (change(first), *[None] * len(others))


class Experts(Layer):
    """This rank's share of a mixture's experts, in transformers' parameters, whose first dim is the expert.

    Raises:
        DslparError: the module does not run through transformers' interface, or has parameters of another kind.
    """

    def __init__(self, groups: Groups, module: nn.Module, name: str) -> None:
        super().__init__(groups)
        own: Any = module
        _refuse_unless_of_the_interface(own, name)
        shapes = {each: tuple(p.shape) for each, p in module.named_parameters()}
        axes = sharing_axes(groups)
        self.exchange: TokenExchange | None = None
        num_experts = own.num_experts
        self.expert_load = ExpertLoad(num_experts)
        if groups.tensor.exchanges_tokens:
            axes = ("e", *axes)
            self.exchange = TokenExchange(groups, num_experts)
        index, count = placement.piece(groups.tensor, groups.coord, axes)
        self.share_of_experts = -(-num_experts // count)
        self.first = index * self.share_of_experts
        padded = self.share_of_experts * count
        for each, shape in shapes.items():
            rows = padded if padded != num_experts else None
            self.register_parameter(each, parameter(_placed(groups, shape, 0, axes, rows), ZEROS))
        own.num_experts, own._is_expert_parallel = self.share_of_experts, count > 1 and self.exchange is None
        self.module = [own]  # in a list, so that its parameters are not registered here
        self.sources = {each: (Source(f"{name}.{each}"),) for each in shapes}
        self.adapters: list[ExpertAdapter] = []
        self.adapted: dict[ExpertAdapter, str] = {}
        """Adapter -> the module in peft's names."""

    def adapt(self, adapters: Adapters, module: str) -> None:
        """Add adapters to the weights that are among the target parameters; `module` is transformers' name."""
        names = adapters.parameters.get(module, [])
        for depth, name in enumerate(reversed(names)):
            adapter = self.add_adapter(name, adapters.lora.r, adapters.lora.scale)
            # peft wraps a module once per parameter, in the module's order: the last is the outermost.
            self.adapted[adapter] = module + ".base_layer" * depth

    def add_adapter(self, name: str, r: int, scale: float) -> ExpertAdapter:
        """Add adapters of rank `r` to the experts' weights in the parameter `name`."""
        adapter = ExpertAdapter(name, scale, getattr(self.module[0], "is_transposed", False))
        at = placement_of(self.get_parameter(name))
        assert at is not None
        made = placements_of_experts(at, r, transposed=adapter.transposed)
        a, b = adapter.matrices
        self.register_parameter(a, parameter(made[0], KaimingUniform()))
        self.register_parameter(b, parameter(made[1], ZEROS))
        self.adapters.append(adapter)
        return adapter

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map x [tokens, H], with [tokens, k] choices of all experts, to [tokens, H].

        The result is the sum over this rank's experts; with an exchange, over all experts.
        """
        if self.training:
            self.expert_load.add(top_k_index)
        own = self._weights()  # once, however many parts tokens are exchanged in
        if self.exchange is not None:
            return self.exchange.run(x, top_k_index, top_k_weights, partial(self._run_rows, own))
        here = (top_k_index >= self.first) & (top_k_index < self.first + self.share_of_experts)
        if not bool(here.any()):
            return x.new_zeros(x.shape) + self._zero_of(x, top_k_weights)
        index = top_k_index - self.first
        if self._config(x)._experts_implementation == "eager":
            token, choice = here.nonzero(as_tuple=True)
            rows = self._run(own, x[token], index[token, choice, None], top_k_weights[token, choice, None])
            return x.new_zeros(x.shape).index_add(0, token, rows)
        return self._run(own, x, index.masked_fill(~here, self.share_of_experts), top_k_weights.masked_fill(~here, 0))

    def _run_rows(self, own: Mapping[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [m, H], sorted by expert of this rank, to their outputs [m, H]."""
        if not len(rows):
            return rows + self._zero_of(rows)
        index = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        return self._run(own, rows, index.unsqueeze(1), rows.new_ones(len(rows), 1))

    def _zero_of(self, *inputs: Tensor) -> Tensor:
        """Return 0, computed from all inputs and weights, so that a rank without tokens has zero gradients for them."""
        return torch.stack([each[:0].sum() for each in (*inputs, *self.parameters())]).sum()

    def _config(self, x: Tensor) -> Any:
        """Return the config for inputs of x's dtype: transformers' fused products do not support float64."""
        own = self.module[0]
        if x.dtype is torch.float64 and own.config._experts_implementation != "eager":
            own.config = copy.copy(own.config)
            own.config._experts_implementation = "eager"
        return own.config

    def _run(self, own: Mapping[str, Tensor], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run transformers' experts with this rank's parameters."""
        self._config(x)
        y: Tensor = call_with(self.module[0], dict(own), x, index, weights)
        return y

    def _weights(self) -> dict[str, Tensor]:
        """Return transformers' parameters of this rank's experts, with adapters added."""
        weights: dict[str, Tensor] = {name: self.get_parameter(name) for name in self.sources}
        for adapter in self.adapters:
            a, b = (self.get_parameter(each) for each in adapter.matrices)
            weights[adapter.name] = adapter.added(weights[adapter.name], a, b)
        return weights


def _refuse_unless_of_the_interface(module: Any, name: str) -> None:
    """Raise DslparError for experts that may compute another function than transformers' interface of experts does.

    Its functions multiply an expert's output by the token's weight, so the sender of a token can do it as well.
    """
    of = f"{name} of {type(module).__name__}"
    shapes = {each: tuple(p.shape) for each, p in module.named_parameters()}
    message = ""
    if not hasattr(module, "_is_expert_parallel"):
        message = f"{of} does not run its experts through transformers' interface (`use_experts_implementation`)"
    elif others := {each: shape for each, shape in shapes.items() if shape[:1] != (module.num_experts,)}:
        message = f"{of}: the first dim of {others} is not the number of experts, {module.num_experts}"
    if message:
        raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")


class SharedExpertLinear(Layer):
    """A linear of a shared expert, which all tokens visit. Its F features are sharded over the `sharing_axes`.

    On full tokens it needs no communication of its own. On this rank's tokens alone, it gathers its weight.

    Raises:
        DslparError: F is not divisible by the number of ranks, or the linear has a bias.
    """

    def __init__(self, groups: Groups, linear: nn.Linear, name: str, role: Role) -> None:
        super().__init__(groups)
        if getattr(linear, "bias", None) is not None:
            message = f"{name}.bias: linears of a shared expert are supported only without a bias"
            raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
        self._dim = 0 if role == "inward" else 1
        at = _placed(groups, tuple(linear.weight.shape), self._dim, sharing_axes(groups))
        self.weight = parameter(at, ZEROS)
        self.sources = {"weight": (Source(f"{name}.weight"),)}

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, H] to [tokens, F/T], or an outward linear back to this rank's terms of the sum [tokens, H].

        With an exchange of tokens, map [n, H] to [n, F], and back to the whole sum.
        """
        weight: Tensor = self.weight
        if self.groups.tensor.exchanges_tokens:
            axis = self.groups.axis(*sharing_axes(self.groups))
            weight = collectives.all_gather_autograd(weight, axis, self._dim)
        return functional.linear(x, weight)
