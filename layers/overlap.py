"""Split a linear product into parts that hide its own collectives: `tensor=dict(comm_overlap=True)`.

Pieces travel around a ring. To gather X, each rank multiplies the piece that it has while the next piece arrives. To
reduce Y, each rank adds its part of a piece to the sum that arrives, and sends it on while it computes its part of the
next piece. So each of the n - 1 messages runs under a product. Megatron-LM's user buffers and torch's async tensor
parallelism work so too; Wang et al. (ASPLOS 2023) published the decomposition first. Pieces are of tokens or of
features. If features are gathered, the product sums over them: each piece's product with its columns of W is added to
Y, as in torch's fused gather along the last dim.

=======================  =========================================================  ===============================
collectives              parts                                                      exposed communication
=======================  =========================================================  ===============================
X is gathered            n pieces, around a ring                                    none
Y is reduced to pieces   n pieces, around a ring                                    none
X is gathered, and Y is  two halves of each sequence: the pieces of both halves     none; X, if a piece of a
reduced to pieces        of X arrive under the first half's products; the first     sequence is one token, or both
                         Y's reduction and the second Y's ring run under the        cut dim 0 of [tokens, features]
                         second half's products
Y is summed to copies    NUM_CHUNKS of the tokens, each under the next one's        the last chunk
=======================  =========================================================  ===============================

With symmetric memory (symmetric_memory.py) torch's fused products replace rings of tokens if only X is gathered or only
Y is reduced.

The parts send as many bytes as the collectives. A ring sums in an order of its own, the same in every run. It rounds to
the dtype of Y after each piece. In half precision, Y is rounded after each piece also if features are gathered, while a
single product would round it once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers import memory_order, symmetric_memory
from dslpar.layers.gather_reduce import Sharding

NUM_CHUNKS = 4
"""As many parts as a ring of 4 ranks has. More hide little more, and each adds a launch and shrinks the products."""

NOT_REDUCED = Sharding(Axis(), None)
"""Sharding of a Y that needs no reduction."""


def linear(
    x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding = NOT_REDUCED, *, symmetric: bool = False
) -> tuple[Tensor, Pending]:
    """Return Y = reduce(gather(X) W^T), and the gathered X as a `Pending`, whose `wait` joins its pieces.

    X is [batch, sequence, K] or [tokens, K], sharded as `gathered`. W [N, K] is a gathered panel. Y is sharded as
    `reduced`. Both results may be sequence first in memory (memory_order.py). With `symmetric`, pieces of tokens travel
    through symmetric memory if only X is gathered or only Y is reduced.
    """
    if symmetric and symmetric_memory.is_reached(x) and _fuses(gathered, reduced):
        return _fused(x, weight, gathered, reduced)
    if not _in_pieces(gathered):
        return _reduced(x, weight, reduced), Pending(x)
    if reduced.axis.size == 1:
        ring = _Ring(x, gathered)
        return _gathered_around(ring, weight), ring.join()
    if _has_halves(x, gathered, reduced):
        return _in_halves(x, weight, gathered, reduced)
    panel = gathered.gather(x, contiguous=False)
    return _reduced(panel, weight, reduced), Pending(panel)


def _fuses(gathered: Sharding, reduced: Sharding) -> bool:
    """Return whether torch's fused products apply: only one collective is needed, and it is over pieces of tokens."""
    one, other = (gathered, reduced) if gathered.axis.size > 1 else (reduced, gathered)
    return one.axis.size > 1 and other.axis.size == 1 and one.dim in (0, -2)


def _fused(x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding) -> tuple[Tensor, Pending]:
    if gathered.axis.size > 1:
        assert gathered.dim is not None
        y, panel = symmetric_memory.gathered(x, weight, gathered.axis, gathered.dim)
        return y, Pending(panel)
    assert reduced.dim is not None
    return symmetric_memory.reduced(x, weight, reduced.axis, reduced.dim), Pending(x)


def _in_pieces(sharding: Sharding) -> bool:
    return sharding.axis.size > 1 and sharding.dim is not None


def _along_tokens(sharding: Sharding, x: Tensor) -> bool:
    return sharding.dim is not None and sharding.dim % x.dim() < x.dim() - 1


# ---- X is gathered ----


class _Ring:
    """Pieces of X that travel around a ring; one more arrives at each step."""

    def __init__(self, x: Tensor, gathered: Sharding) -> None:
        assert gathered.dim is not None
        self.gathered, self._dim = gathered, gathered.dim
        self.is_along_tokens = _along_tokens(gathered, x)
        self._is_sequence_first = memory_order.is_sequence_first(x)
        piece = x.movedim(self._dim, 0) if self.is_along_tokens else memory_order.as_stored(x)
        self.pieces = piece.new_empty((gathered.axis.size, *piece.shape))
        self.pieces[gathered.axis.index] = piece

    def source(self, step: int) -> int:
        """Return the rank whose piece is available at this step."""
        return (self.gathered.axis.index - step) % self.gathered.axis.size

    def start(self, step: int) -> Pending:
        """Start to receive the next step's piece, if there is one, and to send on this step's piece."""
        axis, source = self.gathered.axis, self.source(step)
        if step + 1 == axis.size:
            return Pending(self.pieces)
        return collectives.start_ring_shift(self.pieces[source], axis, self.pieces[source - 1])

    def join(self) -> Pending:
        """Return a `Pending` of the panel, whose memory order is that of a gather without `contiguous`."""
        return Pending(self.pieces, finish=self._joined)

    def _joined(self, pieces: Tensor) -> Tensor:
        if self.is_along_tokens:
            return pieces.flatten(0, 1).movedim(0, self._dim)
        return self.as_x(self.gathered.join_pieces(pieces))

    def as_x(self, stored: Tensor) -> Tensor:
        """Return `stored`, whose dims are in the order of X's memory layout, as a view with its dims in X's order."""
        return stored.transpose(0, 1) if self._is_sequence_first else stored

    def of_pieces(self, parts: Tensor) -> Tensor:
        """Return Y from its parts: one part per piece of tokens, or one sum over pieces of features."""
        return parts.flatten(0, 1).movedim(0, self._dim) if self.is_along_tokens else self.as_x(parts[0])


def _gathered_around(ring: _Ring, weight: Tensor, *others: _Ring) -> Tensor:
    """Multiply each rank's piece while the next one arrives; the rings `others` advance in the same steps."""
    pieces, size = ring.pieces, ring.gathered.axis.size
    parts = pieces.new_empty((size if ring.is_along_tokens else 1, *pieces.shape[1:-1], weight.shape[0]))
    for step in range(size):
        source = ring.source(step)
        coming = [each.start(step) for each in (ring, *others)]
        tokens, y = pieces[source].flatten(0, -2), parts[source if ring.is_along_tokens else 0].flatten(0, -2)
        if ring.is_along_tokens:
            torch.mm(tokens, weight.t(), out=y)
        else:  # beta 0 in the first step, since y is uninitialized
            torch.addmm(y, tokens, ring.gathered.features_of(source, weight, 1).t(), beta=min(step, 1), out=y)
        for each in coming:
            each.wait()
    return ring.of_pieces(parts)


# ---- Y is reduced ----


def _reduced(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    if reduced.axis.size == 1:
        return memory_order.linear(panel, weight)
    return _reduced_around(panel, weight, reduced) if _in_pieces(reduced) else _summed_by_chunks(panel, weight, reduced)


def _reduced_around(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    """Compute this rank's part of the sum for each rank's piece of Y in turn, for its own piece last.

    Each part is added to the sum that the rank before has sent for the same piece, and sent on.
    """
    axis, dim, along_tokens = reduced.axis, reduced.dim, _along_tokens(reduced, panel)
    assert dim is not None
    stored = panel.movedim(dim, 0) if along_tokens else memory_order.as_stored(panel)
    pieces = stored.chunk(axis.size) if along_tokens else ()
    pending: Pending | None = None
    for step in range(axis.size):
        rank = (axis.index - step - 1) % axis.size
        if along_tokens:
            part = _product(pieces[rank], weight)
        else:
            part = _product(stored, reduced.features_of(rank, weight, 0))
        if pending is not None:
            part += pending.wait()
        if step + 1 < axis.size:
            pending = collectives.start_ring_shift(part, axis)
    if along_tokens:
        return part.movedim(0, dim)
    return memory_order.from_stored(part, panel)


def _summed_by_chunks(panel: Tensor, weight: Tensor, reduced: Sharding) -> Tensor:
    """Sum each chunk of the tokens under the next one's product."""
    stored = memory_order.as_stored(panel)
    chunks = stored.flatten(0, -2).chunk(NUM_CHUNKS)
    sums = [reduced.start_reduce(functional.linear(chunk, weight)) for chunk in chunks]
    y = torch.cat([each.wait() for each in sums]).view(*stored.shape[:-1], -1)
    return memory_order.from_stored(y, panel)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return X W^T, contiguous, as one product; torch would split a strided X [.., .., K] into many small ones."""
    return functional.linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


# ---- X is gathered and Y is reduced ----


def _has_halves(x: Tensor, gathered: Sharding, reduced: Sharding) -> bool:
    """Return whether sequences can be halved: at most one collective cuts them, into pieces of two tokens or more."""
    num_gathered, num_reduced = _pieces_of_sequence(x, gathered), _pieces_of_sequence(x, reduced)
    return min(num_gathered, num_reduced) == 1 and x.shape[-2] // num_reduced > 1


def _pieces_of_sequence(x: Tensor, sharding: Sharding) -> int:
    return sharding.axis.size if sharding.dim is not None and sharding.dim % x.dim() == x.dim() - 2 else 1


def _in_halves(x: Tensor, weight: Tensor, gathered: Sharding, reduced: Sharding) -> tuple[Tensor, Pending]:
    num_gathered, num_reduced = _pieces_of_sequence(x, gathered), _pieces_of_sequence(x, reduced)
    first, second = (_Ring(half, gathered) for half in _halves(x, num_reduced))
    first_y = reduced.start_reduce(_gathered_around(first, weight, second))
    second_panel = second.join().wait()
    del second  # frees the pieces, which have been copied to the joined panel
    second_y = _reduced(second_panel, weight, reduced)
    y = _whole(first_y.wait(), second_y, num_gathered)

    def join(pieces: Tensor) -> Tensor:
        return _whole(first.join().wait(), second_panel, num_gathered * num_reduced)

    return y, Pending(x, finish=join)


def _halves(x: Tensor, num_pieces: int) -> tuple[Tensor, Tensor]:
    """Halve each of `num_pieces` pieces of the sequence."""
    first, second = torch.unflatten(x, -2, (num_pieces, -1)).chunk(2, -2)
    return first.flatten(-3, -2), second.flatten(-3, -2)


def _whole(first: Tensor, second: Tensor, num_pieces: int) -> Tensor:
    """Undo `_halves`."""
    return torch.cat([torch.unflatten(half, -2, (num_pieces, -1)) for half in (first, second)], -2).flatten(-3, -2)
