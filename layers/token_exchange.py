"""Exchange of tokens between the ranks that hold a mixture's experts: to the experts, and back.

    exchange = TokenExchange(groups, num_experts=8)
    y = exchange.run(x, index, weights, experts)     # [n, H], [n, k], [n, k] -> [n, H]

Each rank of the axis "expert" (e and the tensor axes, `TensorMesh.e`) has its own tokens, and `share` consecutive
experts. A token goes to the ranks of its k experts, and their outputs come back:

1. Sort the n k (token, choice) pairs by expert; ties keep the order of tokens.
2. Exchange how many rows each rank sends for each expert, then the rows (all-to-all of uneven sizes).
3. Bring the received rows in the order of experts, and call `experts` on them.
4. Send the outputs back by the same way; multiply them by their weights, and add the k outputs of each token.

The backward is the mirror, by autograd. No row is padded. A caller may drop choices (`dslpar.layers.expert_capacity`):
they are not sent, and add nothing. A rank computes as many rows as its experts were chosen for. With
`TensorMesh.expert_chunks` = c, a rank's tokens are exchanged in c parts, one after the other. Temporaries are then
those of 1 / c of the rows, however uneven the choices are; what autograd saves for the backward is not less, unless
layers are recomputed.

Each rank sends k n H elements forth and k n H back, but those of its own experts, and as many in the backward. Which
tokens share a product depends on the layout, but no row's result does, except for the order of sums within a kernel.

GShard (arXiv 2006.16668) has the exchange, with a capacity per expert; MegaBlocks (arXiv 2211.15841) drops nothing.
That weights are multiplied on the sender is transformers' way, and Megatron-LM's: a weight's gradient then needs no
exchange.

A host must know the sizes of an uneven all-to-all, so step 2 waits for the device once per mixture and direction of
the forward; the backward reuses the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups

RunExperts = Callable[[Tensor, Tensor], Tensor]
"""Maps rows [m, H], sorted by expert, and the number of rows of each expert of this rank [share] to [m, H].

It also runs with m = 0, and its result must then depend on the rows and on all weights, so that they get gradients.
"""
EXPERT_AXES = ("e", *TENSOR_AXES)
"""Axes over which experts are divided, from slow to fast."""


class Order(NamedTuple):
    """A permutation of rows, and its inverse."""

    forth: Tensor
    """For each row of the result, the row that it comes from."""
    back: Tensor
    """For each row, its place in the result."""

    @staticmethod
    def by(keys: Tensor) -> Order:
        """Return the order that sorts rows by integer keys; equal keys keep their order."""
        forth = keys.argsort(stable=True)
        return Order(forth, torch.empty_like(forth).scatter_(0, forth, torch.arange(len(forth), device=forth.device)))


class Route(NamedTuple):
    """The ranks that the rows of a part of a rank's tokens go to, and the order of the received rows."""

    sending: Order
    """The (token, choice) pairs by expert, which is the order in which rows are sent; dropped ones are last."""
    by_expert: Order
    """The received rows by expert."""
    counts: Tensor
    """Received rows of each expert of this rank."""
    sent: Sequence[int]
    received: Sequence[int]
    """Rows to each rank, and from each rank, without dropped ones."""


class TokenExchange:
    """Exchanges the tokens of one mixture. All ranks of the axis "expert" must call `run` together."""

    def __init__(self, groups: Groups, num_experts: int) -> None:
        self._axis, self._chunks = groups.axis("expert"), groups.tensor.expert_chunks
        self.share = -(-num_experts // self._axis.size)
        """Number of experts per rank. If it does not divide, the last ranks have places without an expert."""
        self.first = self._axis.index * self.share
        """First expert of this rank."""
        self.dropped = self._axis.size * self.share
        """Index of a choice that is not to be sent: the first after all places."""

    def run(self, x: Tensor, index: Tensor, weights: Tensor, experts: RunExperts) -> Tensor:
        """Return each token's weighted sum of its experts' outputs.

        x: this rank's tokens [n, H]. index: each token's k distinct experts, of all ranks, or `dropped`: [n, k].
        weights: [n, k].
        """
        # Each part has a length on every rank, which may be 0: all ranks exchange equally often.
        parts = [torch.tensor_split(each, self._chunks) for each in (x, index, weights)]
        return torch.cat([self._run_part(own, at, by, experts) for own, at, by in zip(*parts, strict=True)])

    def _run_part(self, x: Tensor, index: Tensor, weights: Tensor, experts: RunExperts) -> Tensor:
        route = self._route(index)
        rows: Tensor = _ToPairs.apply(x, route.sending, index.shape[1])  # type: ignore[no-untyped-call]
        dropped = len(rows) - sum(route.sent)  # the last ones
        rows = rows[: len(rows) - dropped] if dropped else rows
        rows = collectives.exchange_rows_autograd(rows, self._axis, route.sent, route.received)
        y = _put_back(experts(_reorder(rows, route.by_expert), route.counts), route.by_expert)
        y = collectives.exchange_rows_autograd(y, self._axis, route.received, route.sent)
        y = functional.pad(y, (0, 0, 0, dropped)) if dropped else y
        y = _put_back(y, route.sending).view(*index.shape, x.shape[-1])
        return (y * weights.unsqueeze(-1).to(y.dtype)).sum(1)

    def _route(self, index: Tensor) -> Route:
        """Exchange how many rows each rank sends for each expert, and return the ways of the rows."""
        ranks = self._axis.size
        counts = torch.bincount(index.flatten(), minlength=self.dropped)[: self.dropped].view(ranks, self.share)
        arriving = collectives.all_to_all(counts, self._axis, 0, 0).view(ranks, self.share)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        return Route(Order.by(index.flatten()), Order.by(_expert_of_rows(arriving)), arriving.sum(0), sent, received)


def _expert_of_rows(arriving: Tensor) -> Tensor:
    """Return the expert of each received row, given how many rows each rank sends for each expert [ranks, share]."""
    ranks, share = arriving.shape
    return torch.arange(share, device=arriving.device).repeat(ranks).repeat_interleave(arriving.flatten())


# ---- rows in another order ----

# torch's indexing would do, but index_copy keeps its values for the backward, which reads only their shape, and the
# backward of indexing adds row by row. A permutation's backward is the inverse permutation.


def _reorder(rows: Tensor, order: Order) -> Tensor:
    y: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call]
    return y


def _put_back(rows: Tensor, order: Order) -> Tensor:
    return _reorder(rows, Order(order.back, order.forth))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(order.back)
        return rows[order.forth]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return grads[0][back], None


class _ToPairs(torch.autograd.Function):
    """Repeat each token k times, once per choice, in the order in which rows are sent: [n, H] to [n k, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order, k: int) -> Tensor:
        ctx.save_for_backward(order.back)
        ctx.k = k
        return x[order.forth // k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        # Sizes are given in full: -1 is ambiguous for a rank without tokens.
        return grads[0][back].view(len(back) // ctx.k, ctx.k, grads[0].shape[1]).sum(1), None, None
