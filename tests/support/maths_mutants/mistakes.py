"""Wrong computations that the mutants' changed source calls, such as `mistakes.rolled(...)`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers.gather_reduce import Sharding
from dslpar.layers.operand_shardings import MatmulSharding


def rolled(x: Tensor, pieces: int, dim: int = 0) -> Tensor:
    """Shift each rank's piece of a tensor, gathered along `dim`, to its neighbour's place."""
    return x if pieces == 1 else x.roll(x.shape[dim] // pieces, dim).contiguous()


def rolled_pieces(pending: Pending, pieces: int, dim: int = 0) -> Pending:
    """Do the same once a collective has finished."""
    return Pending(rolled(pending.wait(), pieces, dim))


def panel_rolled(panel: Tensor, sharding: Sharding) -> Tensor:
    """Put the pieces of a panel in another order."""
    if sharding.axis.size == 1 or sharding.dim is None:
        return panel
    return rolled(panel, sharding.axis.size, sharding.dim)


def not_reduced(partial: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's piece of its own partial sum, without the other ranks' sums."""
    if sharding.axis.size == 1 or sharding.dim is None:
        return partial
    return sharding.features_of(sharding.axis.index, partial, sharding.dim % partial.dim()).contiguous()


def not_gathered(stored: Tensor, sharding: Sharding) -> Tensor:
    """Return the panel with zeros in place of other ranks' pieces."""
    if sharding.axis.size == 1 or sharding.dim is None:
        return stored
    pieces = stored.new_zeros((sharding.axis.size, *stored.shape))
    pieces[sharding.axis.index] = stored
    return sharding.join_pieces(pieces)


def own_alone(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return a gather along `dim` with zeros in place of other ranks' pieces."""
    if axis.size == 1:
        return x
    zeros = torch.zeros_like(x)
    return torch.cat([x if rank == axis.index else zeros for rank in range(axis.size)], dim)


def own_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's piece of its own tensor along `dim`: a reduce-scatter without the sum."""
    return x if axis.size == 1 else x.chunk(axis.size, dim)[axis.index].contiguous()


def neighbours_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the piece along `dim` that belongs to the previous rank."""
    return x.chunk(axis.size, dim)[axis.index - 1].contiguous()


def cut_off(x: Tensor) -> Tensor:
    """Return the same numbers without a gradient to their inputs."""
    return x.detach() + 0 * x.sum() if x.is_floating_point() else x


def without_depth(sharding: MatmulSharding) -> MatmulSharding:
    """Return a product's sharding without the sum of the weight's gradient over the depth."""
    return replace(sharding, depth=Axis())


def draws(module: nn.Module) -> bool:
    """Return whether a module has dropout; otherwise no mask depends on a seed."""
    return any(
        isinstance(value, float) and value > 0
        for part in module.modules()
        for value in (getattr(part, name, None) for name in ("p", "dropout", "attention_dropout", "drop_prob"))
    )
