"""Redistribution of the residual stream so that each rank of a tensor group has its own tokens, with all features.

    split = DistinctTokens(groups)
    mine = split.take(x)                  # [B, S, H] as stored -> this rank's tokens [n, H]
    y = split.give_back(mine, x.shape)    # the inverse

Routers need whole tokens, and no two ranks need to route the same one. What a rank lacks for that depends on how the
residual is stored (`residual_cuts`), axis by axis:

==========================================  =============================================  ========================
the residual along an axis                  `take`                                         its backward
==========================================  =============================================  ========================
is split by tokens (d, q, y by sequence)    -                                              -
is replicated (y)                           keep this rank's part of the tokens            all-gather
is split by features (z, y by hidden)       all-to-all: tokens are split, features joined  all-to-all
==========================================  =============================================  ========================

`give_back` is the inverse, and its backward is `take`. A rank sends f(n) of its stored elements along an axis of n
ranks by features, with f(n) = (n - 1) / n, and `give_back` receives all tokens along a replicated one. Megatron-LM's
expert parallelism likewise starts from tokens split over the tensor group (it requires sequence parallelism).

Tokens need not be divisible by the number of ranks. They are padded for the collectives only: the last ranks have fewer
tokens or none, and no router sees padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement


class DistinctTokens:
    """Moves the residual to whole, distinct tokens per rank, and back."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        cuts = placement.residual_cuts(groups.tensor)
        sizes = {letter: getattr(groups.tensor, letter) for letter in (*cuts.tokens, *cuts.features, "y")}
        copies = [letter for letter in ("y",) if letter not in (*cuts.tokens, *cuts.features)]
        # Features are joined from the fastest cut to the slowest, which keeps their order.
        self._exchanged = [letter for letter in reversed(cuts.features) if sizes[letter] > 1]
        self._sliced = [letter for letter in copies if sizes[letter] > 1]
        split = [*self._sliced, *self._exchanged]
        self._index, self._count = placement.piece(groups.tensor, groups.coord, tuple(split))

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [n, H] of the stored residual [..., H / features]."""
        x = x.reshape(-1, x.shape[-1])
        tokens = len(x)
        x = self._padded(x, self.most(tokens) * self._count)
        for letter in self._sliced:
            x = collectives.scatter_to_group(x, self._groups.axis(letter), 0)
        for letter in self._exchanged:
            x = collectives.all_to_all_autograd(x, self._groups.axis(letter), 0, 1)
        return x[: self._own(tokens)]

    def give_back(self, y: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the stored residual of `shape`, given this rank's tokens [n, H]."""
        tokens = math.prod(shape[:-1])
        y = self._padded(y, self.most(tokens))
        for letter in reversed(self._exchanged):
            y = collectives.all_to_all_autograd(y, self._groups.axis(letter), 1, 0)
        for letter in reversed(self._sliced):
            y = collectives.gather_from_group(y, self._groups.axis(letter), 0)
        return y[:tokens].reshape(shape)

    def part(self, rows: Tensor) -> Tensor:
        """Return the rows [n, ...] of the tokens that `take` gives this rank.

        rows: one row per token of the stored residual, equal on all ranks that store these tokens.
        """
        most = self.most(len(rows))
        return rows[self._index * most :][: self._own(len(rows))]

    def most(self, tokens: int) -> int:
        """Return how many of `tokens` stored ones a rank gets at most."""
        return -(-tokens // self._count)

    def _own(self, tokens: int) -> int:
        """Return how many of the stored residual's tokens are this rank's."""
        most = self.most(tokens)
        return min(max(tokens - self._index * most, 0), most)

    def _padded(self, x: Tensor, rows: int) -> Tensor:
        return x if len(x) == rows else functional.pad(x, (0, 0, 0, rows - len(x)))
