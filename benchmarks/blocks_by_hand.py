"""Reference blocks for dslpar's: tensor-parallel transformer blocks over DTensor, and by hand.

`Block` is plain torch.nn, with one projection for q, k and v. `over_dtensor` gives it torch's own plan of column- and
row-wise linears, as torchtitan's parallelize.py does (`use_local_output`, and with `sequence` the norms between them on
pieces of the sequence). `ByHand` is Megatron-LM's pair of functions f and g (arXiv 1909.08053) around linears with this
rank's rows or columns.

The rows of `Block.qkv` are ordered (head, q k v, feature), the only order that a plan can shard. `by_head` converts
dslpar's order, (q k v, head, feature).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

WORLD = 2
Weights = Mapping[str, Tensor]
"""Weights of a block, under dslpar's names."""


class Attention(nn.Module):
    """Causal attention, with as many heads as the projection's output has."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        qkv = self.qkv(x)
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, self.head_dim).transpose(1, 2).unbind(3)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Apart(Attention):
    """Attention with separate projections for q, k and v."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        q, k, v = (y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Up projection, GELU, down projection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm block on one rank."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def apart(block: Block) -> Block:
    """Return the block with separate projections for q, k and v, as in torchtitan."""
    fused = block.attention
    hidden, heads = fused.qkv.in_features, fused.qkv.in_features // fused.head_dim
    block.attention = Apart(hidden, heads)
    block.attention.out = fused.out
    for i, one in enumerate((block.attention.q, block.attention.k, block.attention.v)):
        rows = {name: value.unflatten(0, (heads, 3, -1))[:, i] for name, value in fused.qkv.state_dict().items()}
        one.load_state_dict({name: value.flatten(0, 1) for name, value in rows.items()})
    return block


def load(block: Block, weights: Weights) -> Block:
    """Load the full weights of one of dslpar's blocks."""
    heads = block.attention.qkv.in_features // block.attention.head_dim
    by_name = {name: by_head(value, heads) if ".qkv." in name else value for name, value in weights.items()}
    block.load_state_dict(by_name)
    return block


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Reorder (q k v, head, feature) to (head, q k v, feature), along the first dim."""
    apart: Tensor = rows.unflatten(0, (3, heads, -1))
    return apart.transpose(0, 1).flatten(0, 2)


# DTensor --------------------------------------------------------------------------------------------------------


def over_dtensor(blocks: nn.Sequential, *, sequence: bool) -> nn.Sequential:
    """Parallelize every block by torch's plan."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in blocks:
        parallelize_module(block, mesh, sequence_plan() if sequence else plan())
    return blocks


def plan() -> dict[str, ParallelStyle]:
    """Keep the residual whole on every rank. The input of attention is marked once, so that its gradient is summed
    once.
    """
    whole: dict[str, Any] = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    return {
        "attention": PrepareModuleInput(**whole),
        "attention.[qkv]*": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Shard the residual and the norms along the sequence, gathered once before attention and MLP."""
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(**whole),
        "attention.[qkv]*": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(**whole),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


# By hand --------------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Megatron-LM's f: the input of a column-wise linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)  # noqa: TID251 - a reference owes nothing to dslpar.distributed.collectives
        return grad


class _Reduce(torch.autograd.Function):
    """Megatron-LM's g: the output of a row-wise linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)  # noqa: TID251 - a reference owes nothing to dslpar.distributed.collectives
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Column(nn.Linear):
    """This rank's rows of a linear."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., whole] to [..., piece]."""
        return functional.linear(_Copy.apply(x), self.weight, self.bias)


class Row(nn.Linear):
    """This rank's columns of a linear; the bias is not sharded."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., piece] to [..., whole]."""
        return _Reduce.apply(functional.linear(x, self.weight)) + self.bias  # type: ignore[no-any-return]


def by_hand(block: Block, rank: int) -> Block:
    """Return the block with this rank's rows and columns."""
    block.attention.qkv, block.mlp.up = _rows(block.attention.qkv, rank), _rows(block.mlp.up, rank)
    block.attention.out, block.mlp.down = _columns(block.attention.out, rank), _columns(block.mlp.down, rank)
    return block


def _rows(whole: nn.Linear, rank: int) -> Column:
    piece = Column(whole.in_features, whole.out_features // WORLD)
    piece.load_state_dict({name: value.chunk(WORLD)[rank] for name, value in whole.state_dict().items()})
    return piece


def _columns(whole: nn.Linear, rank: int) -> Row:
    piece = Row(whole.in_features // WORLD, whole.out_features)
    piece.load_state_dict({"weight": whole.weight.chunk(WORLD, 1)[rank], "bias": whole.bias})
    return piece
