"""ZeRO 2's gradient reduction, bucket by bucket, overlapped with the backward.

    reduction = GradientReduction(zero, axes)
    reduction.on_gradient(p, group)    # a hook: the gradient of `p` is there
    reduction.finish()                 # before the norm

DeepSpeed shards the optimizer state into equal, contiguous parts of each parameter group, so a bucket's gradients
belong to one or a few ranks. One reduction per such rank sums the rank's part of the bucket on that rank. DeepSpeed's
buckets, hooks and shards are used unchanged. Only the time of a reduction differs: it begins when a bucket is full, and
the backward goes on. Megatron-LM and torch's DDP overlap their reductions in the same way. At most `IN_FLIGHT` buckets
are in flight, since the purpose of ZeRO 2 is to keep no whole gradients. ZeRO 1 keeps whole gradients, and has a buffer
for them (gradient_buffer.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.group_axes import GroupAxes

IN_FLIGHT = 2
"""Number of buckets in flight: one is sent while the next one fills, as in DeepSpeed."""


class _Piece(NamedTuple):
    """The part of one parameter's gradient that one rank owns: its optimizer updates these elements."""

    gradient: Tensor
    """This rank's part of the bucket, before the sum over ranks."""
    target: Tensor | None
    """Tensor to which the sum over ranks is added; None on all ranks but the piece's owner."""


class _Reduction(NamedTuple):
    """One reduction in flight: the pieces of a bucket that belong to one rank."""

    pending: Pending
    pieces: list[_Piece]


class GradientReduction:
    """Reduces the gradients of a DeepSpeedZeroOptimizer; all data ranks must make gradients in the same order."""

    def __init__(self, zero: Any, axes: GroupAxes) -> None:
        self._zero, self._axes = zero, axes
        self._in_flight: deque[list[_Reduction]] = deque()
        """For each bucket in flight, one reduction per target rank."""

    # ---- replacements of DeepSpeed's methods ----

    def on_gradient(self, p: nn.Parameter, group: int) -> None:
        """Put a gradient that a backward has made into a bucket."""
        zero = self._zero
        if zero._coalesce_grad_reduction:
            return
        zero.setup_buckets()
        zero.reduce_independent_p_g_buckets_and_remove_grads(p, group)

    def reduce_bucket(self, comm_dtype: torch.dtype | None = None) -> None:
        """Begin reducing the full bucket of a dtype; None: all buckets, at the end of a backward."""
        zero = self._zero
        for dtype in zero.ipg_buckets if comm_dtype is None else (comm_dtype,):
            bucket = zero.ipg_buckets[dtype]
            if not bucket.params:
                continue
            large = zero.extra_large_param_to_reduce.pop(dtype, None)  # larger than a bucket: reduced where it is
            if large is None:
                gradients = bucket.buffer[bucket.index].narrow(0, 0, bucket.elements)
            else:
                gradients = zero.get_gradient_for_reduction(large).view(-1)
            self._in_flight.append(self._start(gradients, bucket.params, dtype))
            for group, index, param_id in bucket.params:
                zero.params_already_reduced[param_id] = True
                zero.clear_grad_attribute(zero.bit16_groups[group][index])  # the bucket has it
            bucket.clear()
            if large is None and comm_dtype is not None:
                bucket.buffer[bucket.index] = self._buffer()
        while len(self._in_flight) > IN_FLIGHT:
            self._finish_first()

    def finish(self) -> None:
        """Wait for all reductions, and add this rank's parts to the gradients of its step."""
        while self._in_flight:
            self._finish_first()

    # ---- one bucket ----

    def _start(self, gradients: Tensor, params: list[tuple[int, int, int]], dtype: torch.dtype) -> list[_Reduction]:
        """Begin averaging a bucket, each part on the rank that owns it.

        gradients: a flat tensor with the gradients of `params`, in order.
        params: (group, index in the group, id) of each parameter.
        """
        zero = self._zero
        if zero.gradient_average and (replicas := self._axes.data.size // zero.sequence_parallel_size) > 1:
            gradients.div_(replicas)
        pieces: dict[tuple[int, bool], list[_Piece]] = {}
        axes: dict[bool, Axis] = {}
        begin = 0
        for group, index, param_id in params:
            length = zero.bit16_groups[group][index].numel()
            for rank, start, numel in self._shards(group, param_id, length):
                target = zero._get_compact_grad_partition_slice(group, rank, param_id, numel)
                is_expert = self._axes.is_expert(group)
                axes[is_expert] = self._axes[group]
                pieces.setdefault((rank, is_expert), []).append(
                    _Piece(gradients.narrow(0, begin + start, numel), target)
                )
            begin += length
        return [
            _Reduction(collectives.start_reduce_(_joined(gradients, of_rank).to(dtype), axes[is_expert], rank), of_rank)
            for (rank, is_expert), of_rank in pieces.items()
        ]

    def _shards(self, group: int, param_id: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, begin, number of elements) of each part of a parameter, in order."""
        zero = self._zero
        ranks = zero.param_to_partition_ids[group][param_id]
        starts = sorted((int(zero.grad_start_offset[group][rank][param_id]), rank) for rank in ranks)
        for (start, rank), (end, _) in zip(starts, [*starts[1:], (length, -1)], strict=True):
            yield rank, start, end - start

    def _finish_first(self) -> None:
        """Wait for the oldest bucket, also on ranks that only send: until then the sent buffer must not be reused."""
        for pending, pieces in self._in_flight.popleft():
            summed = pending.wait()
            begin = 0
            for piece in pieces:
                if piece.target is not None:
                    piece.target.add_(summed.narrow(0, begin, piece.gradient.numel()))
                begin += piece.gradient.numel()

    def _buffer(self) -> Tensor:
        """Return a new bucket buffer, since the previous one is in flight."""
        zero = self._zero
        dtype, device = zero._gradient_reduction_buffer_dtype(), zero.bit16_groups_flat[0].device
        return torch.empty(int(zero.reduce_bucket_size), dtype=dtype, device=device)


def _joined(gradients: Tensor, pieces: list[_Piece]) -> Tensor:
    """Return the pieces as one vector: a slice of `gradients` if they are adjacent, else a copy."""
    begin, last = pieces[0].gradient.storage_offset(), pieces[-1].gradient
    length = sum(piece.gradient.numel() for piece in pieces)
    if last.storage_offset() + last.numel() - begin == length:
        return gradients.narrow(0, begin - gradients.storage_offset(), length)
    return torch.cat([piece.gradient for piece in pieces])
