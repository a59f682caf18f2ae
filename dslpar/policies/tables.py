"""Sharded replacements of transformers' embedding tables, tables of biases per head, and output heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers import Embedding, Head, placement
from dslpar.layers.parameter import ZEROS, Layer, parameter
from dslpar.layers.placement import Placement
from dslpar.models.pretrained import Sources
from dslpar.policies.replacement_modules import call_with


class Table(Embedding):
    """A token table, which can also be the tied head. Looked-up rows are scaled by `factor` (Gemma)."""

    def __init__(self, groups: Groups, table: nn.Embedding, factor: float, sources: Sources) -> None:
        super().__init__(groups, table.num_embeddings, table.embedding_dim, padding_idx=table.padding_idx)
        self.factor, self.sources = factor, sources

    def forward(self, x: Tensor) -> Tensor:
        """Look up ids [batch, sequence], or compute logits from a float `x`: the stored residual, if it is the head."""
        y = super().forward(x)
        return y if x.is_floating_point() or self.factor == 1 else y * self.factor


class OutputHead(Head):
    """An untied output head with weight (V, H)."""

    def __init__(self, groups: Groups, head: nn.Linear, sources: Sources) -> None:
        super().__init__(groups, head.in_features, head.out_features, bias=head.bias is not None)
        self.sources = sources


class LogitBias(Layer):
    """A bias (V,) of the logits, for a head whose weight is the tied token table."""

    def __init__(self, groups: Groups, vocab_size: int, sources: Sources) -> None:
        super().__init__(groups)
        self.bias = parameter(placement.logit_vector(groups.tensor, vocab_size), ZEROS)
        self.sources = sources

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias to the logits as ranks store them; the shape does not change."""
        bias = self.stand_in(self.bias, self.share())
        assert bias is not None
        return x + bias


class HeadTable(Layer):
    """A module with a table (rows, heads) of biases that heads add to attention scores, sharded over heads.

    T5's table is looked up by ids. Swin's module stores the indices of its windows itself. SwinV2's table is the last
    linear (heads, features) of an MLP over positions.
    """

    def __init__(self, groups: Groups, module: nn.Module, sources: Sources) -> None:
        super().__init__(groups)
        cuts = placement.inner_cuts(groups.tensor)
        ((self.own, table),) = module.named_parameters()
        dims = (cuts.features, ()) if isinstance(module, nn.Linear) else ((), cuts.features)
        of_heads = Placement(groups.tensor, tuple(table.shape), dims, partial=cuts.tokens)
        self.register_parameter(self.own, parameter(of_heads, ZEROS))
        self.sources = sources
        delattr(module, self.own)
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        """Call the module on its arguments; return the biases of this rank's heads, [..., heads/y]."""
        table = self.stand_in(self.get_parameter(self.own), self.share())
        assert table is not None
        y: Tensor = call_with(self.module, {self.own: table}, *args)
        return y


class Rows(Layer):
    """A small table of positions or token types, whose rows transformers' code looks up and adds to the residual."""

    def __init__(self, groups: Groups, table: nn.Embedding, sources: Sources) -> None:
        super().__init__(groups)
        self.weight = parameter(placement.position_table(groups.tensor, *table.weight.shape), ZEROS)
        self.table = [table]  # in a list, so that its weight is not registered here
        self.sources = sources

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look up ids [batch or 1, sequence], full on every rank; return rows sharded like the stored residual."""
        weight = self.stand_in(self.weight, self.share())
        assert weight is not None
        rows: Tensor = call_with(self.table[0], {"weight": weight}, *args, **kwargs)
        cuts = placement.residual_cuts(self.groups.tensor)
        tensor, coord = self.groups.tensor, self.groups.coord
        rows = placement.take(rows, 0, tensor, coord, cuts.batch if rows.shape[0] > 1 else ())
        return placement.take_tokens(rows, 1, tensor, coord, cuts.sequence)
