"""A linear product in parts, so that its collectives run under its own products: `tensor=dict(comm_overlap=True)`.

What is cut along tokens goes around a ring. Gathered, each rank multiplies the piece that it has while the next one
comes; reduced, it adds its part of a piece to what comes, and sends that on while it computes its part of the next. So
of n - 1 messages each runs under a product (Megatron-LM's user buffers and torch's async tensor parallelism have it so;
Wang et al., ASPLOS 2023, first decomposed them). Other collectives, all-reduces and those along features, are made of a
few chunks of tokens, each under the product of the next.

=====================  ================================  =========================================
collective             parts                             exposed
=====================  ================================  =========================================
along tokens           n pieces, around the ring         none; with both X and Y so, X's gathering
all others             NUM_CHUNKS of the tokens          the first gathering, the last reduction
=====================  ================================  =========================================

Bytes are those of the collectives. A ring adds up in its own order: sums differ from a collective's in their last bits,
and are the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers import memory_order
from dslpar.layers.gather_reduce import Sharding

NUM_CHUNKS = 4
"""As many parts as a ring of 4 ranks has; more hide little more, and each is a launch and a smaller product."""

NOT_REDUCED = Sharding(Axis(), None)
"""Of a product that is whole on each rank."""


def linear(x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding = NOT_REDUCED) -> tuple[Tensor, Tensor]:
    """Return reduce(gather(X) W^T), and gather(X); both perhaps by sequence first in memory.

    X is [batch, sequence, K] or [tokens, K] as `gathered` stores it, W [N, K] a panel, Y stored as `reduced` says.
    """
    if not _communicates(gathered) and not _communicates(reduced):
        return memory_order.linear(x, weight), x
    if _along_tokens(reduced, x):
        panel = gathered.gather(x, contiguous=False)
        return _reduced_around(panel, weight, reduced), panel
    if _along_tokens(gathered, x) and not _communicates(reduced):
        return _gathered_around(x, weight, gathered)
    return _by_chunks(x, weight, gathered, reduced)


def _communicates(sharding: Sharding) -> bool:
    return sharding.axis.size > 1


def _along_tokens(sharding: Sharding, x: Tensor) -> bool:
    return _communicates(sharding) and sharding.dim is not None and sharding.dim % x.dim() < x.dim() - 1


def _gathered_around(x: Tensor, weight: Tensor, gathered: Sharding) -> tuple[Tensor, Tensor]:
    """Multiply each rank's piece when it is here; panels stand in memory as a gathering's that is not contiguous."""
    axis, dim = gathered.axis, gathered.dim
    assert dim is not None
    piece = x.movedim(dim, 0)
    pieces = piece.new_empty((axis.size, *piece.shape))
    parts = piece.new_empty((axis.size, *piece.shape[:-1], weight.shape[0]))
    pieces[axis.index] = piece
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        following = Pending(piece)
        if step + 1 < axis.size:
            following = collectives.start_ring_shift(pieces[source], axis, pieces[source - 1])
        torch.mm(pieces[source].flatten(0, -2), weight.t(), out=parts[source].flatten(0, -2))
        following.wait()
    return parts.flatten(0, 1).movedim(0, dim), pieces.flatten(0, 1).movedim(0, dim)


def _reduced_around(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    """Compute this rank's part of each piece in turn, its own one last, adding what comes from the ranks before."""
    axis, dim = reduced.axis, reduced.dim
    assert dim is not None
    pieces = panel.movedim(dim, 0).chunk(axis.size)
    pending: Pending | None = None
    for step in range(axis.size):
        part = memory_order.linear(pieces[axis.index - step - 1], weight)
        if pending is not None:
            part += pending.wait()
        if step + 1 < axis.size:
            pending = collectives.start_ring_shift(part.contiguous(), axis)
    return part.movedim(0, dim)


def _by_chunks(x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding) -> tuple[Tensor, Tensor]:
    """Gather each chunk of tokens under the product before it, and reduce it under the product after it."""
    dim = _dim_of_chunks(x, gathered, reduced)
    chunks = [x] if dim is None else x.chunk(NUM_CHUNKS, dim)
    panels: list[Tensor] = []
    reductions: list[Pending] = []
    gathering = gathered.start_gather(chunks[0])
    for index in range(len(chunks)):
        panels.append(gathering.wait())
        if index + 1 < len(chunks):
            gathering = gathered.start_gather(chunks[index + 1])
        reductions.append(reduced.start_reduce(memory_order.linear(panels[-1], weight)))
    results = [each.wait() for each in reductions]
    if dim is None or len(chunks) == 1:
        return results[0], panels[0]
    return torch.cat(results, dim), torch.cat(panels, dim) if _communicates(gathered) else x


def _dim_of_chunks(x: Tensor, *shardings: Sharding) -> int | None:
    """Return the longest dim of tokens that no collective cuts: its chunks are chunks of the results as well."""
    cut = {each.dim % x.dim() for each in shardings if _communicates(each) and each.dim is not None}
    free = [dim for dim in range(x.dim() - 1) if dim not in cut]
    return max(free, key=lambda dim: x.shape[dim], default=None)
