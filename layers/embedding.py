"""Token and position embeddings, and the head, which is the transposed token table.

Letters: V vocabulary, H residual features; x = d q. As an embedding, the token table [V/yq, H/z] is an outward linear
of a one-hot vector: gather the table over q, look up the ids in this rank's V/y rows, reduce over y (Megatron-LM's
vocabulary-parallel embedding, arXiv 1909.08053). As a head it is an inward linear with the same pieces, so a tied head
needs no conversion. V is padded with zero rows. The loss never counts them, so they stay zero. The rows are cut in
every layout with y or q above 1: there is no separate embedding with whole rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.kv_cache import first_position
from dslpar.layers.linear import sharded_matmul
from dslpar.layers.operand_shardings import MatmulSharding, matmul_sharding
from dslpar.layers.parameter import GPT2, ZEROS, Init, Layer, PlacedModule, Shared, parameter
from dslpar.layers.placement import ActivationSharding
from dslpar.layers.stored_features import residual_features
from dslpar.layers.token_ids import check_range, check_shape, local_tokens, row_index


class Embedding(PlacedModule):
    """Token embedding (V, H), which also serves as a tied head. The table is its only parameter: pipelines can tie it.

    `padding_idx` works as in torch: its row starts as zeros, and a lookup gives it no gradient (a tied head does). A
    negative index counts from the end.

    Raises:
        DslparError: an id is outside the vocabulary; every rank of the tensor group checks all ids (on an accelerator,
            a device-side assertion fails instead). Or `padding_idx` is out of range.
    """

    def __init__(
        self,
        groups: Groups,
        vocab_size: int,
        hidden_size: int,
        *,
        padding_idx: int | None = None,
        init: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups)
        self.vocab_size, self.layer_idx = vocab_size, layer_idx
        self.padding_idx = None if padding_idx is None else row_index(padding_idx, vocab_size)
        at = placement.table(groups.tensor, vocab_size, hidden_size)
        self.weight = parameter(at, init._replace(zero_row=self.padding_idx))
        self.lookup_sharding = matmul_sharding(groups, "outward")
        self.head_sharding = matmul_sharding(groups, "inward")
        self.features = residual_features(groups, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Look up ids; or, given a residual (any floating dtype), multiply by the table as a head.

        Ids are [batch, sequence] or [tokens] of the whole micro-batch, equal on all ranks of a tensor group. The result
        is the residual [batch/x, sequence, H/z]. A residual [batch/x, sequence, H/z] becomes logits [batch/x, sequence,
        V/y], which are never gathered. Both uses share one forward, as ZeRO 3 fetches weights at a module's forward.
        """
        if x.is_floating_point():
            self.features.check(x, "Embedding, as a head,")
            return sharded_matmul(x, self.weight, None, self.head_sharding)
        check_shape(self.groups, x, placement.residual_cuts(self.groups.tensor))
        x = x.long()  # torch refuses 8-bit ids, and the subtraction below would wrap around
        check_range(x, self.vocab_size, "ids")
        if self.groups.tensor.size == 1:
            return functional.embedding(x, self.weight, self.padding_idx)
        rows = self.weight.shape[0] * self.lookup_sharding.w.axis.size
        first = self.groups.axis("y").index * rows
        # The panel's tokens are cut over x alone. The reduction over y cuts them further.
        cuts = placement.residual_cuts(self.groups.tensor)
        batch, sequence = (tuple(letter for letter in letters if letter in "dq") for letters in cuts[:2])
        ids = local_tokens(self.groups, x, ActivationSharding(batch, sequence, ())) - first
        padding = -1 if self.padding_idx is None else self.padding_idx - first
        padding = padding if 0 <= padding < rows else -1  # -1 in torch: no padding row in this panel
        return cast("Tensor", _Lookup.apply(ids, self.weight, padding, self.lookup_sharding))  # type: ignore[no-untyped-call]


class Head(Layer):
    """Untied head (V, H), with or without bias; also a classifier with any number of classes."""

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        init: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        self.weight = parameter(placement.table(groups.tensor, vocab_size, hidden_size), init)
        self.bias = parameter(placement.logit_vector(groups.tensor, vocab_size), ZEROS) if bias else None
        self.sharding = matmul_sharding(groups, "inward")
        self.features = residual_features(groups, hidden_size)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the residual [batch/x, sequence, H/z] to logits [batch/x, sequence, V/y], which are never gathered."""
        self.features.check(x, "Head")
        bias = self.stand_in(self.bias, self.share() if shared is None else shared)
        return sharded_matmul(x, self.weight, bias, self.sharding)


class PositionEmbedding(Layer):
    """Learned position embedding (S, H), added to the residual.

    Raises:
        DslparError: the residual is not [batch, sequence, features], or its sequences are longer than the table.
    """

    def __init__(
        self, groups: Groups, num_positions: int, hidden_size: int, *, init: Init = GPT2, layer_idx: int | None = None
    ) -> None:
        super().__init__(groups, layer_idx)
        self.weight = parameter(placement.position_table(groups.tensor, num_positions, hidden_size), init)
        self.features = residual_features(groups, hidden_size)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Add to each token of the residual [batch/x, sequence, H/z] the row of its position.

        A residual [tokens, H/z] is an error, since flattened tokens have lost their positions.
        """
        self.features.check(x, "PositionEmbedding")
        table = cast("Tensor", self.stand_in(self.weight, self.share() if shared is None else shared))
        tensor, coord = self.groups.tensor, self.groups.coord
        letters = placement.residual_cuts(tensor).sequence
        _, count = placement.piece(tensor, coord, letters)
        first = first_position()
        _check_positions(x, count, first, table.shape[0])
        rows = table.narrow(0, first, x.shape[1] * count)
        return x + placement.take_tokens(rows, 0, tensor, coord, letters)


def _check_positions(x: Tensor, pieces: int, first: int, num_positions: int) -> None:
    """Raise DslparError: the residual has no sequence dim, or the sequence is longer than the table."""
    if x.dim() != 3:
        message = f"positions cannot be added to a residual of shape {tuple(x.shape)}"
        raise_finding("TEN226", message, "[batch, sequence, features]", key="model")
    length = first + x.shape[1] * pieces
    if length > num_positions:
        message = f"a sequence has {length} tokens, but the table has {num_positions} positions"
        raise_finding("TEN226", message, f"num_positions={length}, or shorter sequences", key="model")


class _Lookup(torch.autograd.Function):
    """Lookup in a sharded table: ids [tokens/x] and the table [V/yq, H/z] to the stored residual.

    Ids count from the first row of this rank's panel. An id outside the panel gives zeros here, and its row on the rank
    of y that holds it. The reduction over y sums these to the looked-up row.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, sharding: MatmulSharding) -> Tensor:
        panel = sharding.w.gather(weight)
        outside = (ids < 0) | (ids >= panel.shape[0])
        # Every index must name a row, so row 0 stands in for ids of other ranks, and its result is masked.
        ids = ids.masked_fill(outside, 0)
        rows = functional.embedding(ids, panel).masked_fill_(outside.unsqueeze(-1), 0)
        ctx.save_for_backward(ids, outside)
        ctx.sharding, ctx.num_rows, ctx.padding = sharding, panel.shape[0], padding
        return sharding.y.reduce(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        sharding: MatmulSharding = ctx.sharding
        ids, outside = ctx.saved_tensors
        y_grad = sharding.y.gather(grads[0]).masked_fill(outside.unsqueeze(-1), 0)
        panel_grad = torch.ops.aten.embedding_dense_backward(y_grad, ids, ctx.num_rows, ctx.padding, False)
        w_grad = collectives.start_all_reduce_(sharding.w.reduce(panel_grad), sharding.depth).wait()
        return None, w_grad, None, None
