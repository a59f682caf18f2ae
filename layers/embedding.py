"""Token and position tables; the head, which is the token table the other way round.

Letters: V vocabulary, H residual features; x = d q. The token table [V/yq, H/z] is, as an embedding, an outward linear
of a one-hot: gather it over q, look up the ids that fall into V/y, reduce over y (Megatron-LM's vocabulary-parallel
embedding, arXiv 1909.08053). As a head it is an inward linear, from the same pieces, so tying converts nothing. V is
padded with zero rows; the loss never counts them, so they stay zero.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar import comm
from dslpar.groups import Groups
from dslpar.layers import placement
from dslpar.layers.linear import Product, multiply, product
from dslpar.layers.parameter import GPT2, Init, Layer, Shared, parameter


class Embedding(nn.Module):
    """The token table (V, H); nothing else inside, so that it can be tied.

    `forward(ids)`: ids [batch, sequence] of the whole micro-batch, equal on all ranks of a tensor group, to the stored
    residual. `forward(residual)`, of a floating dtype: the table as head, to stored logits [batch, sequence, V], never
    gathered. One forward for both uses, since ZeRO-3 fetches weights at a module's forward.
    """

    def __init__(self, groups: Groups, vocab_size: int, hidden_size: int, *, init: Init = GPT2) -> None:
        super().__init__()
        self.groups = groups
        self.weight = parameter(placement.table(groups.tensor, vocab_size, hidden_size), init)
        self.look_up = product(groups, "outward")
        self.project = product(groups, "inward")

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if x.is_floating_point():
            return multiply(x, self.weight, None, self.project)
        ids = _own_rows(x, self.groups)
        if self.look_up.local:
            return functional.embedding(ids, self.weight)
        rows = self.weight.shape[0] * self.look_up.w.axis.size
        first = self.groups.axis("y").index * rows
        return cast("Tensor", _LookUp.apply(ids - first, self.weight, self.look_up))  # type: ignore[no-untyped-call]


class Head(nn.Module):
    """An untied head (V, H): stored residual to stored logits."""

    def __init__(self, groups: Groups, hidden_size: int, vocab_size: int, *, init: Init = GPT2) -> None:
        super().__init__()
        self.weight = parameter(placement.table(groups.tensor, vocab_size, hidden_size), init)
        self.project = product(groups, "inward")

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return multiply(x, self.weight, None, self.project)


class PositionEmbedding(Layer):
    """A learned table (S, H) of positions: `forward(residual)` adds to each stored token the row of its position."""

    def __init__(self, groups: Groups, num_positions: int, hidden_size: int, *, init: Init = GPT2) -> None:
        super().__init__(groups)
        self.weight = parameter(placement.position_table(groups.tensor, num_positions, hidden_size), init)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """See the class."""
        table = cast("Tensor", self.stand_in(self.weight, self.share() if shared is None else shared))
        tensor, coord = self.groups.tensor, self.groups.coord
        index, count = placement.piece(tensor, coord, placement.residual_cuts(tensor).sequence)
        length = x.shape[1]
        assert length * count <= table.shape[0], f"a sequence of {length * count} in {table.shape[0]} positions"
        return x + table.narrow(0, index * length, length)


def _own_rows(ids: Tensor, groups: Groups) -> Tensor:
    """The tokens of this rank's panel: cut over x alone."""
    cuts = placement.residual_cuts(groups.tensor)
    for dim, letters in enumerate((cuts.batch, cuts.sequence)):
        over_x = tuple(letter for letter in letters if letter in ("d", "q"))
        ids = placement.take(ids, dim, groups.tensor, groups.coord, over_x)
    return ids


class _LookUp(torch.autograd.Function):
    """Rows of a table that is in pieces; ids count from the first row of this rank's panel, and may lie outside."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, how: Product) -> Tensor:
        panel = how.w.gather(weight)
        outside = (ids < 0) | (ids >= panel.shape[0])
        ids = ids.masked_fill(outside, 0)
        rows = functional.embedding(ids, panel).masked_fill_(outside.unsqueeze(-1), 0)
        ctx.save_for_backward(ids, outside)
        ctx.how, ctx.num_rows = how, panel.shape[0]
        return how.y.reduce(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        how: Product = ctx.how
        ids, outside = ctx.saved_tensors
        y_grad = how.y.gather(grads[0]).masked_fill(outside.unsqueeze(-1), 0)
        panel_grad = torch.ops.aten.embedding_dense_backward(y_grad, ids, ctx.num_rows, -1, False)
        w_grad = comm.start_all_reduce_(how.w.reduce(panel_grad), how.depth).wait()
        return None, w_grad, None
