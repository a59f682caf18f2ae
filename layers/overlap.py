"""A linear product in parts, so that its collectives run under its own products: `tensor=dict(comm_overlap=True)`.

Everything that is in pieces goes around a ring. Gathered, each rank multiplies the piece that it has while the next one
comes; reduced, it adds its part of a piece to what comes, and sends that on while it computes its part of the next. So
of n - 1 messages each runs under a product (Megatron-LM's user buffers and torch's async tensor parallelism have it so;
Wang et al., ASPLOS 2023, first decomposed them). Pieces are of tokens or of features. Features are what a product sums
over where they are gathered: as in torch's fused gathering along the last dim, each piece's product with its columns of
W is added to Y.

=======================  =========================================================  =================================
of a product             parts                                                      exposed
=======================  =========================================================  =================================
X is gathered            n pieces, around a ring                                    none
Y is reduced to pieces   n pieces, around a ring                                    none
both                     two halves of each sequence: X of the first, and Y of      none
                         the second around their rings; the second's X comes, and
                         the first's Y goes, under products of the other half
Y is summed to copies    NUM_CHUNKS of the tokens, each under the next one's        the last
=======================  =========================================================  =================================

Bytes are those of the collectives. A ring adds up in its own order: sums differ from a collective's in their last bits,
and are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers import memory_order
from dslpar.layers.gather_reduce import Sharding

NUM_CHUNKS = 4
"""As many parts as a ring of 4 ranks has; more hide little more, and each is a launch and a smaller product."""

NOT_REDUCED = Sharding(Axis(), None)
"""Of a product that is whole on each rank."""


def linear(x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding = NOT_REDUCED) -> tuple[Tensor, Pending]:
    """Return reduce(gather(X) W^T), and gather(X), which `wait` joins; both perhaps by sequence first in memory.

    X is [batch, sequence, K] or [tokens, K] as `gathered` stores it, W [N, K] a panel, Y stored as `reduced` says.
    """
    if not _in_pieces(gathered):
        return _reduced(x, weight, reduced), Pending(x)
    if reduced.axis.size == 1:
        return _gathered_around(x, weight, gathered)
    if _has_halves(x, gathered, reduced):
        return _in_halves(x, weight, gathered, reduced)
    panel = gathered.gather(x, contiguous=False)
    return _reduced(panel, weight, reduced), Pending(panel)


def _in_pieces(sharding: Sharding) -> bool:
    return sharding.axis.size > 1 and sharding.dim is not None


def _along_tokens(sharding: Sharding, x: Tensor) -> bool:
    return sharding.dim is not None and sharding.dim % x.dim() < x.dim() - 1


def _gathered_around(
    x: Tensor, weight: Tensor, gathered: Sharding, at_the_last: Callable[[], None] = lambda: None
) -> tuple[Tensor, Pending]:
    """Multiply each rank's piece when it is here, and call `at_the_last` before the last product."""
    axis, dim, along_tokens = gathered.axis, gathered.dim, _along_tokens(gathered, x)
    assert dim is not None
    piece = x.movedim(dim, 0) if along_tokens else memory_order.as_stored(x)
    pieces = piece.new_empty((axis.size, *piece.shape))
    parts = piece.new_empty((axis.size if along_tokens else 1, *piece.shape[:-1], weight.shape[0]))
    pieces[axis.index] = piece
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        following = Pending(piece)
        if step + 1 < axis.size:
            following = collectives.start_ring_shift(pieces[source], axis, pieces[source - 1])
        else:
            at_the_last()
        tokens, y = pieces[source].flatten(0, -2), parts[source if along_tokens else 0].flatten(0, -2)
        if along_tokens:
            torch.mm(tokens, weight.t(), out=y)
        else:  # the first does not read what stands in y
            torch.addmm(y, tokens, gathered.features_of(source, weight, 1).t(), beta=min(step, 1), out=y)
        following.wait()
    if along_tokens:
        return parts.flatten(0, 1).movedim(0, dim), Pending(pieces.flatten(0, 1).movedim(0, dim))
    return _as(x, parts[0]), Pending(pieces, finish=lambda pieces: _as(x, gathered.joined(pieces)))


def _as(x: Tensor, stored: Tensor) -> Tensor:
    """Return a tensor that stands in memory as X does, by its dims."""
    return stored.transpose(0, 1) if memory_order.is_sequence_first(x) else stored


def _reduced(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    if reduced.axis.size == 1:
        return memory_order.linear(panel, weight)
    return _reduced_around(panel, weight, reduced) if _in_pieces(reduced) else _summed_by_chunks(panel, weight, reduced)


def _reduced_around(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    """Compute this rank's part of each piece in turn, its own one last, adding what comes from the ranks before."""
    axis, dim, along_tokens = reduced.axis, reduced.dim, _along_tokens(reduced, panel)
    assert dim is not None
    pieces = panel.movedim(dim, 0).chunk(axis.size) if along_tokens else ()
    pending: Pending | None = None
    for step in range(axis.size):
        rank = (axis.index - step - 1) % axis.size
        if along_tokens:
            part = memory_order.linear(pieces[rank], weight)
        else:
            part = functional.linear(memory_order.as_stored(panel), reduced.features_of(rank, weight, 0))
        if pending is not None:
            part += pending.wait()
        if step + 1 < axis.size:
            pending = collectives.start_ring_shift(part.contiguous(), axis)
    return part.movedim(0, dim) if along_tokens else _as(panel, part)


def _summed_by_chunks(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    """Sum each chunk of the tokens under the next one's product."""
    dim = panel.dim() - 2
    sums = [reduced.start_reduce(memory_order.linear(chunk, weight)) for chunk in panel.chunk(NUM_CHUNKS, dim)]
    return torch.cat([each.wait() for each in sums], dim)


# ---- X is gathered and Y reduced ----


def _has_halves(x: Tensor, gathered: Sharding, reduced: Sharding) -> bool:
    """Whether sequences can be halved: their pieces are not too short, and not both collectives cut them."""
    num_gathered, num_reduced = _pieces_of_sequence(x, gathered), _pieces_of_sequence(x, reduced)
    return min(num_gathered, num_reduced) == 1 and x.shape[-2] // num_reduced > 1


def _pieces_of_sequence(x: Tensor, sharding: Sharding) -> int:
    return sharding.axis.size if sharding.dim is not None and sharding.dim % x.dim() == x.dim() - 2 else 1


def _in_halves(x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding) -> tuple[Tensor, Pending]:
    num_gathered, num_reduced = _pieces_of_sequence(x, gathered), _pieces_of_sequence(x, reduced)
    first, second = _halves(x, num_reduced)
    coming: list[Pending] = []

    def start_second() -> None:  # not before: it would stand before the first one's pieces in their communicator
        coming.append(gathered.start_gather(second, contiguous=False))

    partial, first_panel = _gathered_around(first, weight, gathered, start_second)
    first_y = reduced.start_reduce(partial)
    second_panel = coming[0].wait()
    second_y = _reduced(second_panel, weight, reduced)
    y = _whole(first_y.wait(), second_y, num_gathered)

    def join(first_panel: Tensor) -> Tensor:
        return _whole(first_panel, second_panel, num_gathered * num_reduced)

    return y, Pending(x, finish=lambda _: join(first_panel.wait()))


def _halves(x: Tensor, num_pieces: int) -> tuple[Tensor, Tensor]:
    """Halve each of so many pieces of the sequence."""
    first, second = torch.unflatten(x, -2, (num_pieces, -1)).chunk(2, -2)
    return first.flatten(-3, -2), second.flatten(-3, -2)


def _whole(first: Tensor, second: Tensor, num_pieces: int) -> Tensor:
    """Undo `_halves`."""
    return torch.cat([torch.unflatten(half, -2, (num_pieces, -1)) for half in (first, second)], -2).flatten(-3, -2)
