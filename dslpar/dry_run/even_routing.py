"""Even routing: each expert gets as many tokens, for tensors without values.

    with even_routing():
        module(x)

A dry run of a model with mixtures of experts runs in it. A router's choices are numbers, which the meta device does not
have. In the body, mixtures on the meta device send as many rows to each rank. transformers' mixtures run their grouped
products, and dslpar's own compute as many rows with each expert. An overloaded rank would receive more
(`dslpar.forecast.stage_memory.uneven_load`). A mixture that gathers its tokens runs its experts on all of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from dslpar.distributed import collectives
from dslpar.layers import mixture
from dslpar.layers.token_exchange import Order, Route, TokenExchange

_READ, _EQUAL = torch.ops.aten._local_scalar_dense, torch.ops.aten.equal


@contextmanager
def even_routing() -> Iterator[None]:
    """Let routers choose each expert equally often in the body, for tensors on the meta device."""
    with ExitStack() as within:
        within.enter_context(patch.object(TokenExchange, "_route", _even_route))
        within.enter_context(patch.object(mixture, "grouped_linear", _grouped_evenly))
        if _MOE in sys.modules:  # imported with a transformers model
            within.enter_context(_with_grouped_products())
        yield


def _grouped_evenly(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows by the weights of experts that have as many rows each, up to one."""
    parts = zip(rows.tensor_split(len(weights)), weights, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])


_MOE = "transformers.integrations.moe"


@contextmanager
def _with_grouped_products() -> Iterator[None]:
    """Let mixtures of transformers run their grouped products in the body, and all their experts."""
    from dslpar.policies.experts import Experts

    moe = sys.modules[_MOE]
    run = Experts._run

    def with_grouped_products(
        self: Experts, own_weights: Mapping[str, Tensor], x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        own = self.module[0]
        if own.config._experts_implementation != "grouped_mm":
            own.config = copy.copy(own.config)
            own.config._experts_implementation = "grouped_mm"
        return run(self, own_weights, x, index, weights)

    def in_half_precision(x: Tensor, weight: Tensor, offsets: Tensor) -> bool:
        return weight.dtype is torch.bfloat16  # torch's kernel on the meta device has no other

    with (
        patch.object(Experts, "_run", with_grouped_products),
        patch.object(moe, "_can_use_grouped_mm", in_half_precision),
        _YesToAll(),  # type: ignore[no-untyped-call]
    ):
        yield


class _YesToAll(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers True where code asks whether two tensors are equal, or a mixture whether any token chose its experts."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is _EQUAL and args[0].is_meta:
            return True
        if func.overloadpacket is _READ and args[0].is_meta and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def _even_route(self: TokenExchange, index: Tensor) -> Route:
    """Return a route on which each rank gets as many rows, up to one."""
    ranks, pairs = self._axis.size, index.numel()
    counts = index.new_empty(ranks, self.share)
    arriving = collectives.all_to_all(counts, self._axis, 0, 0).view(ranks, self.share)
    sent = [pairs * (rank + 1) // ranks - pairs * rank // ranks for rank in range(ranks)]
    received = [sent[self._axis.index]] * ranks
    by_expert = index.new_empty(sum(received))
    return Route(Order.by(index.flatten()), Order.by(by_expert), arriving.sum(0), sent, received)
