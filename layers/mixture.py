"""Mixture of experts: a router chooses top_k of num_experts MLPs for each token, and weighs their outputs.

    Mixture(groups, 256, 512, num_experts=8, top_k=2)
    Mixture(groups, 256, 512, num_experts=64, top_k=6, activation="swiglu", shared_ffn_hidden_size=512)
    Mixture(groups, 256, 512, num_experts=64, top_k=6, router="sigmoid")

Letters: H residual features, F features of an expert, E experts, n this rank's tokens, m rows of its experts.

Experts are whole, and divided over the axis "expert": the tensor group, and with `parallel.expert` also neighbouring
replicas. Each rank routes its own tokens (`distinct_tokens`), sends them to their experts and gets the outputs back
(`token_exchange`). Nothing is dropped, unless `capacity_factor` bounds the tokens of an expert in training
(`expert_capacity`). With k ranks on the axis, a rank sends `4 top_k n H` elements in forward and
backward, less those of its own experts; the router's gradient is summed over the tensor group.

The router is a linear without bias, computed in float32. Its logits become scores: by softmax over all experts, as in
Mixtral (arXiv 2401.04088), or by the sigmoid of each, as in DeepSeek-V3 (arXiv 2412.19437). The `top_k` largest scores
are the weights. With `renormalize` they are divided by their sum. If two experts have equal scores, the one with the
smaller index is chosen. `with_bias` adds a bias to the scores when experts are chosen, and not to the weights;
`update_bias` moves it towards an even load. A shared expert is an MLP that every token visits, beside the others
(DeepSeekMoE, arXiv 2401.06066).

The products of a rank's experts are one grouped product where torch has a kernel for the device and the dtype, and a
loop over experts elsewhere. Both give the same numbers up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.balance_loss import LEAST, squares_of_logits, sums_of_choices
from dslpar.layers.block import ACTIVATIONS, MLP, Activation, Block
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.expert_capacity import ExpertCapacity
from dslpar.layers.expert_load import ExpertLoad
from dslpar.layers.named_options import one_of
from dslpar.layers.parameter import GPT2, Init, Layer, Shared, parameter
from dslpar.layers.placement import Placement
from dslpar.layers.stored_features import residual_features
from dslpar.layers.token_exchange import EXPERT_AXES, TokenExchange
from dslpar.layers.upcast import upcast

Router = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The choices of a router for n tokens."""

    experts: Tensor
    """The experts of each token, [n, k]."""
    weights: Tensor
    """Factors of these experts' outputs, [n, k]."""
    scores: Tensor
    """Scores of all experts, [n, E], in float32 or wider."""
    logits: Tensor
    """The router's output, [n, E], in float32 or wider."""

    def sums(self, of_squares: bool = False) -> Tensor:
        """Return what the load-balancing loss needs of these tokens, [2, E] (`dslpar.layers.balance_loss`).

        of_squares: return [3, E], with a row for the z-loss.
        """
        found = sums_of_choices(self.experts, self.scores)
        return torch.cat([found, squares_of_logits(self.logits)]) if of_squares else found


class Mixture(Layer):
    """Router and experts in place of an MLP.

    `up` [E, F or 2 F, H] and `down` [E, H, F] hold this rank's experts; `router` [E, H] is whole on each rank. With
    "swiglu", the rows of the gate come first in `up`. Experts have no bias.

    Raises:
        DslparError: an unknown activation or router, `top_k` is not between 1 and `num_experts`, `capacity_factor` is
            not above 0, or ZeRO shards over axis d, so that ranks of a tensor group must hold equal experts.
    """

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        num_experts: int,
        top_k: int = 2,
        router: Router = "softmax",
        renormalize: bool = True,
        with_bias: bool = False,
        with_squares: bool = False,
        capacity_factor: float | None = None,
        activation: Activation = "gelu",
        shared_ffn_hidden_size: int | None = None,
        init: Init = GPT2,
        init_out: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        _check(groups, num_experts, top_k, capacity_factor)
        blocks, self.activation = one_of(ACTIVATIONS, activation, "activation")
        self._score = one_of(_SCORES, router, "router")
        self.with_squares = with_squares
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32) if with_bias else None)
        self._load_of_step = ExpertLoad(num_experts)
        self.top_k, self.renormalize = top_k, renormalize
        self.expert_load = ExpertLoad(num_experts, drops=capacity_factor is not None)
        self.capacity: ExpertCapacity | None = None
        if capacity_factor is not None:
            self.capacity = ExpertCapacity(groups, num_experts, capacity_factor)
        self._split, self._exchange = DistinctTokens(groups), TokenExchange(groups, num_experts)
        tensor, places = groups.tensor, self._exchange.share * groups.axis("expert").size
        at_router = Placement(tensor, (num_experts, hidden_size), ((), ()), partial=TENSOR_AXES)
        self.router = parameter(at_router, init)
        self.features = residual_features(groups, hidden_size)
        for name, shape, drawn in (
            ("up", (num_experts, blocks * ffn_hidden_size, hidden_size), init),
            ("down", (num_experts, hidden_size, ffn_hidden_size), init_out),
        ):
            padded = places if places != num_experts else None
            at = Placement(tensor, shape, (EXPERT_AXES, (), ()), padded_rows=padded)
            self.register_parameter(name, parameter(at, drawn))
        self.shared_expert: MLP | None = None
        if shared_ffn_hidden_size is not None:
            self.shared_expert = MLP(
                groups,
                hidden_size,
                shared_ffn_hidden_size,
                activation=activation,
                bias=False,
                init=init,
                init_out=init_out,
            )

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the stored residual, [batch/x, sequence, H/z] or [tokens/x, H/z], to the same shape."""
        return self.run(x, shared)[0]

    def run(self, x: Tensor, shared: Shared | None = None) -> tuple[Tensor, Routing]:
        """Map the stored residual to the same shape, and return the routing of this rank's own tokens too."""
        self.features.check(x, "Mixture")
        shared = self.share() if shared is None else shared
        tokens = self._split.take(x)
        routing = self.route(tokens, cast("Tensor", self.stand_in(self.router, shared)))
        index = routing.experts
        if self.training:
            kept = None if self.capacity is None else self.capacity.kept(index, routing.weights, x.shape)
            self.expert_load.add(index, kept)
            if self.bias is not None:
                self._load_of_step.add(index)
            index = index if kept is None else index.masked_fill(~kept, self._exchange.dropped)
        y = self._exchange.run(tokens, index, routing.weights, self._experts)
        y = self._split.give_back(y, x.shape)
        return (y if self.shared_expert is None else y + self.shared_expert(x, shared)), routing

    def route(self, tokens: Tensor, router: Tensor) -> Routing:
        """Choose the experts of tokens [n, H], given the router's weight [E, H]."""
        logits = functional.linear(upcast(tokens), upcast(router))
        scores = self._score(logits)
        by = scores if self.bias is None else scores.detach() + self.bias
        # A stable sort, unlike torch.topk, chooses the same one of equal experts on every device.
        experts = by.argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]
        weights = scores.gather(-1, experts)  # not a view of all scores, which autograd would keep
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=LEAST)
        return Routing(experts, weights, scores, logits)

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Move the bias by `rate` towards an even load, by the load since the last call; all ranks together.

        Experts with less tokens than the mean get more, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
        """
        assert self.bias is not None, "a mixture with a bias"
        load = self._load_of_step.take()[: len(self.bias)].to(self.bias.device)
        for axis in ("tensor", "data"):  # these ranks have other tokens, and other stages other mixtures
            load = collectives.all_reduce(load, self.groups.axis(axis))
        self.bias += rate * (load.double().mean() - load).sign()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the bias in float32, of which half precision would lose its small steps."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype in (torch.float16, torch.bfloat16):
            self.bias = bias.to(self.bias.device)
        return self

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = cast("Tensor", self.up), cast("Tensor", self.down)
        return grouped_linear(self.activation(grouped_linear(rows, up, counts)), down, counts)


class MixtureBlock(Block):
    """Pre-norm transformer block with a mixture in place of the MLP.

    Its forward returns two values: the residual, and what the routers' losses need of this rank's own tokens, [2, E],
    or [3, E] for a mixture `with_squares` (`dslpar.layers.balance_loss`).
    """

    def __init__(self, groups: Groups, hidden_size: int, num_heads: int, *, mixture: Mixture, **block: Any) -> None:
        super().__init__(groups, hidden_size, num_heads, mlp=mixture, **block)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map the stored residual [batch/x, sequence, H/z] to the same shape; `mask` as in `Attention.forward`."""
        shared = self.share()
        x = self.add_attention(x, shared, mask)
        if self.mlp_chunks == 1 or not torch.is_grad_enabled():
            return self._add_mixture(x, shared)
        if cast("Mixture", self.mlp).capacity is not None:
            message = (
                "with mlp_chunks a mixture sees parts of a sequence, but capacity_factor selects among all its tokens"
            )
            hint = "leave mlp_chunks out; or leave model.experts.capacity_factor out"
            raise_finding("TEN224", message, hint, key="activation_checkpoint.mlp_chunks")
        parts = [part for part in x.tensor_split(self.mlp_chunks, 1) if part.shape[1]]
        found = [checkpoint(self._add_mixture, part, shared, use_reentrant=False) for part in parts]
        return torch.cat([y for y, _ in found], 1), torch.stack([sums for _, sums in found]).sum(0)

    def _add_mixture(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        mixture = cast("Mixture", self.mlp)
        y, routing = mixture.run(self.norm2(x, shared), shared)
        return x + self.dropout(y), routing.sums(mixture.with_squares)


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}
"""For each router, the function from its logits [n, E] to scores."""


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows [m, in], sorted by expert, by their experts' weights [E, out, in]: [m, out].

    counts: rows of each expert [E], on the same device.
    """
    if _has_grouped_product(rows):
        ends = counts.cumsum(0).to(torch.int32)
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = zip(torch.split(rows, counts.tolist()), weights, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])


def _has_grouped_product(rows: Tensor) -> bool:
    """Return whether torch has a fast grouped product: on CUDA, in bf16, with rows aligned to 16 bytes."""
    if not (rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows)):
        return False
    return hasattr(functional, "grouped_mm") and rows.shape[1] % 8 == 0


def _check(groups: Groups, num_experts: int, top_k: int, capacity_factor: float | None) -> None:
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        message = f"capacity_factor is {capacity_factor}"
        raise_finding("TEN224", message, "choose a number above 0, or leave it out", key="model.capacity_factor")
    if not 1 <= top_k <= num_experts:
        message = f"top_k is {top_k}, of {num_experts} experts"
        raise_finding("TEN224", message, f"choose a number from 1 to {num_experts}", key="model.top_k")
    if groups.tensor.zero_over_d:
        message = f"ZeRO shards over the {groups.tensor.d} ranks of axis d, which must then hold equal experts"
        raise_finding("TEN224", message, f"parallel.expert={groups.tensor.size}", key="parallel.expert")
