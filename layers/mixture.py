"""Mixture of experts: a router chooses top_k of num_experts MLPs for each token, and weighs their outputs.

    Mixture(groups, 256, 512, num_experts=8, top_k=2)
    Mixture(groups, 256, 512, num_experts=64, top_k=6, activation="swiglu", shared_ffn_hidden_size=512)

Letters: H residual features, F features of an expert, E experts, n this rank's tokens, m rows of its experts.

Experts are whole, and divided over the axis "expert": the tensor group, and with `parallel.expert` also neighbouring
replicas. Each rank routes its own tokens (`distinct_tokens`), sends them to their experts and gets the outputs back
(`token_exchange`). Nothing is dropped. With k ranks on the axis, a rank sends `4 top_k n H` elements in forward and
backward, less those of its own experts; the router's gradient is summed over the tensor group.

The router is a linear without bias, computed in float32, as in Mixtral (arXiv 2401.04088): softmax over all experts, of
which the `top_k` largest probabilities are the weights. With `renormalize` they are divided by their sum. If two
experts have equal probabilities, the one with the smaller index is chosen. A shared expert is an MLP that every token
visits, beside the others (DeepSeekMoE, arXiv 2401.06066).

The products of a rank's experts are one grouped product where torch has a kernel for the device and the dtype, and a
loop over experts elsewhere. Both give the same numbers up to rounding.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed.groups import Groups
from dslpar.layers.block import ACTIVATIONS, MLP, Activation
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.expert_load import ExpertLoad
from dslpar.layers.named_options import one_of
from dslpar.layers.parameter import GPT2, Init, Layer, Shared, parameter
from dslpar.layers.placement import Placement
from dslpar.layers.stored_features import residual_features
from dslpar.layers.token_exchange import EXPERT_AXES, TokenExchange
from dslpar.layers.upcast import upcast


class Mixture(Layer):
    """Router and experts in place of an MLP.

    `up` [E, F or 2 F, H] and `down` [E, H, F] hold this rank's experts; `router` [E, H] is whole on each rank. With
    "swiglu", the rows of the gate come first in `up`. Experts have no bias.

    Raises:
        DslparError: an unknown activation, `top_k` is not between 1 and `num_experts`, or ZeRO shards over axis d, so
            that ranks of a tensor group must hold equal experts.
    """

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        num_experts: int,
        top_k: int = 2,
        renormalize: bool = True,
        activation: Activation = "gelu",
        shared_ffn_hidden_size: int | None = None,
        init: Init = GPT2,
        init_out: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        _check(groups, num_experts, top_k)
        blocks, self.activation = one_of(ACTIVATIONS, activation, "activation")
        self.top_k, self.renormalize = top_k, renormalize
        self.expert_load = ExpertLoad(num_experts)
        self._split, self._exchange = DistinctTokens(groups), TokenExchange(groups, num_experts)
        tensor, places = groups.tensor, self._exchange.share * groups.axis("expert").size
        router = Placement(tensor, (num_experts, hidden_size), ((), ()), partial=TENSOR_AXES)
        self.router = parameter(router, init)
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
        self.features.check(x, "Mixture")
        shared = self.share() if shared is None else shared
        tokens = self._split.take(x)
        index, weights = self.route(tokens, cast("Tensor", self.stand_in(self.router, shared)))
        if self.training:
            self.expert_load.add(index)
        y = self._split.give_back(self._exchange.run(tokens, index, weights, self._experts), x.shape)
        return y if self.shared_expert is None else y + self.shared_expert(x, shared)

    def route(self, tokens: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [n, top_k] of tokens [n, H], and their weights [n, top_k]."""
        probabilities = torch.softmax(functional.linear(upcast(tokens), upcast(router)), -1)
        # A stable sort, unlike torch.topk, chooses the same one of equal experts on every device.
        ordered, experts = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights = ordered[:, : self.top_k]
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts[:, : self.top_k], weights

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = cast("Tensor", self.up), cast("Tensor", self.down)
        return grouped_linear(self.activation(grouped_linear(rows, up, counts)), down, counts)


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


def _check(groups: Groups, num_experts: int, top_k: int) -> None:
    if not 1 <= top_k <= num_experts:
        message = f"top_k is {top_k}, of {num_experts} experts"
        raise_finding("TEN224", message, f"choose a number from 1 to {num_experts}", key="model.top_k")
    if groups.tensor.zero_over_d:
        message = f"ZeRO shards over the {groups.tensor.d} ranks of axis d, which must then hold equal experts"
        raise_finding("TEN224", message, f"parallel.expert={groups.tensor.size}", key="parallel.expert")
