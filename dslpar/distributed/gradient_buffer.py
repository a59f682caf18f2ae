"""ZeRO 1's gradients: one contiguous buffer per parameter group, reduced by buckets during the last backward.

    buffer = GradientBuffer(zero, axes, is_last_backward, accumulates=True, order=order, late=late)
    buffer.accumulate(p)               # adds p.grad to p's place, and frees it
    buffer.on_gradient(p)              # a hook: the gradient of `p` is there
    buffer.reduce_rest()               # after the step's last backward
    buffer.finish()                    # before the norm

A gradient has the same offset as its weight in DeepSpeed's flat weights. A rank's *partition*, the part that its
optimizer updates, is therefore a slice of the buffer, and so is a bucket. A bucket is reduced in place, each part to
the rank that updates it: nothing is copied, and a rank holds its whole gradients once. Megatron-LM's and torch DDP's
buckets are slices of such a buffer, too. Reductions of buckets start in the same order on all ranks, regardless of the
order in which a backward makes their gradients.

Micro-batches accumulate in the buffer itself, in fp32 even if weights are in half precision. A model has many vectors,
and adding their gradients one by one costs the host more time than the device. So vectors' gradients wait and are added
by one call. A matrix's gradient is added at once, since keeping it would need memory. In a step of one micro-batch each
bucket is a separate buffer, allocated with its first gradient. Allocating all buckets at once would add to the
activations, which are freed while gradients are made. `finish` then copies this rank's partition into one tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Pending
from dslpar.distributed.group_axes import GroupAxes

_MOST_WAITING = 2**18
"""Most elements that wait to be added: few compared to a matrix, many compared to one vector."""


@dataclass
class _Buffer:
    """Memory of some or all of a parameter group's gradients, from a step's first gradient to the optimizer step."""

    group: int
    """Index of the parameter group."""
    begin: int
    """First element, as an offset in the group's flat weights."""
    end: int
    memory: Tensor | None = None
    """None until it is allocated, and after the step."""

    def between(self, first: int, end: int) -> Tensor:
        """Return a view of the elements from `first` to `end`, offsets in the group, that this buffer holds."""
        assert self.memory is not None
        first, end = max(first, self.begin), min(end, self.end)
        return self.memory.narrow(0, first - self.begin, end - first)


@dataclass
class _Bucket:
    """Adjacent gradients that are reduced together."""

    group: int
    """Index of the parameter group."""
    begin: int
    """First element, as an offset in the group's flat weights."""
    end: int
    params: list[nn.Parameter]
    missing: int = 0
    """Number of gradients that this step's last backward has not made yet. Late parameters count until it is over."""
    has_begun: bool = False
    """True if this bucket's reduction has begun in this step."""


class _Begun(NamedTuple):
    """A part of a bucket in flight to the rank that updates it."""

    pending: Pending
    target: Tensor | None
    """Where to copy the sum; set only if this rank updates the part and the sum is in another dtype than the buffer."""


class GradientBuffer:
    """Holds and reduces the gradients of a DeepSpeedZeroOptimizer at stage 1.

    A step has these phases:

    1. Each backward calls `on_gradient`, which adds a gradient to its sum, at once or with others.
    2. In the last backward, a bucket's reduction begins when its gradients and all buckets before it are complete.
    3. `reduce_rest` begins the remaining reductions, such as those of late parameters.
    4. `finish` waits for all reductions and hands this rank's partition to the optimizer.

    is_last_backward: returns whether the running backward completes a step's gradients. DeepSpeed's engine provides it.
        DeepSpeed's optimizer learns this from a hook on the model's output, too late for a head that runs in the loss.
    accumulates: whether a step has several micro-batches.
    order: position by parameter id, in registration order, which is about the order of the forward.
    late: ids of parameters whose gradients are not complete after the last backward, such as weights that pipeline
        stages share.
    """

    def __init__(
        self,
        zero: Any,
        axes: GroupAxes,
        is_last_backward: Callable[[], bool],
        *,
        accumulates: bool,
        order: Mapping[int, int],
        late: Collection[int],
    ) -> None:
        self._zero, self._axes, self._is_last_backward, self._late = zero, axes, is_last_backward, frozenset(late)
        self._offsets = {
            id(p): int(offset)
            for params, offsets in zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
            for p, offset in zip(params, offsets, strict=True)
        }
        """Offset of each parameter in its group's flat weights, in elements, by id."""
        self._buckets = self._cut()
        # Sorted in the order in which a backward completes buckets: from the model's end, late parameters last.
        self._buckets.sort(
            key=lambda each: (any(map(self._is_late, each.params)), -min(order[id(p)] for p in each.params))
        )
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.params}
        self._whole: list[_Buffer] = []
        if accumulates:
            self._whole = [_Buffer(group, 0, len(flat)) for group, flat in enumerate(zero.bit16_groups_flat)]
            self._buffers = {id(p): self._whole[bucket.group] for bucket in self._buckets for p in bucket.params}
        else:
            parts = [_Buffer(bucket.group, bucket.begin, bucket.end) for bucket in self._buckets]
            pairs = zip(self._buckets, parts, strict=True)
            self._buffers = {id(p): part for bucket, part in pairs for p in bucket.params}
        own = [self._cut_own(group) for group in range(len(zero.bit16_groups))]
        self._sizes, self._shapes = [sizes for sizes, _ in own], [shapes for _, shapes in own]
        self._places: dict[int, Tensor] = {}
        """Views of the allocated buffers, by parameter id."""
        self._waiting: list[Any] = []
        """Vectors whose gradients wait to be added to their sums."""
        self._num_waiting = 0
        """Number of elements of these gradients."""
        self._backward: int | None = None
        """torch's id of the running backward; None until it has made a gradient."""
        self._completes = False
        """True if the running backward is the step's last."""
        self._in_flight: deque[_Begun] = deque()
        self._num_begun = 0
        self._expect_all()

    # ---- replacements of DeepSpeed's methods ----

    def accumulate(self, p: Any) -> None:
        """Add a micro-batch's gradient to the sum of earlier ones in the buffer."""
        if p.grad is None:
            return
        if self._zero.use_grad_accum_attribute and p.grad_accum is not None:
            p.grad_accum.add_(p.grad)
            p.grad = None
        else:
            self._add([p])

    def on_gradient(self, p: Any) -> None:
        """Take a gradient that a backward has made; begin reducing the buckets that it completes.

        A parameter that the last backward does not use delays its bucket, and the buckets after it, until the backward
        is over.

        Raises:
            RuntimeError: the reduction of the parameter's bucket has begun, and the gradient would be lost.
        """
        bucket = self._bucket_of[id(p)]
        if bucket.has_begun:
            raise RuntimeError("a gradient of a step whose reduction has begun, in which it would be missing")
        if torch._C._current_graph_task_id() != self._backward:
            self._enter_backward()
        # p.grad is None if a matrix product added to the sum directly (layers.gradient_accumulation_fusion).
        if p.grad is not None:
            if p.dim() > 1:
                self.accumulate(p)
            else:
                self._wait(p)
        if not self._completes or self._is_late(p):
            return
        bucket.missing -= 1
        while self._num_begun < len(self._buckets) and self._buckets[self._num_begun].missing == 0:
            self._add_waiting()
            self._begin_next()

    def reduce_rest(self, pipeline_parallel: bool = False) -> None:
        """Begin all remaining reductions, after the last backward."""
        while self._num_begun < len(self._buckets):
            for p in self._buckets[self._num_begun].params:
                self.accumulate(p)  # a gradient may be new, such as an unused vector's zeros
            self._begin_next()
        self._zero._epilogue_ran_this_backward = True

    def finish(self) -> None:
        """Wait for all reductions, and hand this rank's averaged gradients to DeepSpeed's step.

        Raises:
            RuntimeError: gradients were not reduced, because no engine backward was the step's last.
        """
        if self._num_begun < len(self._buckets):
            raise RuntimeError("a step whose gradients were not reduced: engine.backward() must be its last call")
        while self._in_flight:
            begun = self._in_flight.popleft()
            summed = begun.pending.wait()
            if begun.target is not None:
                begun.target.copy_(summed)
            del begun, summed  # frees `summed`, which may be a copy of a large embedding's gradient
        self._num_begun = 0
        self._places.clear()
        self._expect_all()
        group_of = import_module("deepspeed.runtime.zero.stage_1_and_2").GradPartitionBufferGroup
        for group in range(len(self._sizes)):
            own = self._own_part(group)
            pairs = zip(torch.split(own, self._sizes[group]), self._shapes[group], strict=True)
            parts = [part.view(shape) for part, shape in pairs if shape is not None]
            self._zero.averaged_gradients[group] = group_of(parts, own)

    # ---- gradients that wait to be added ----

    def _enter_backward(self) -> None:
        """Note which backward makes gradients, and have waiting gradients added at its end.

        A backward can run within another one, such as with recomputed activations. Each backward's waiting gradients
        are added before another backward makes a gradient. Otherwise autograd would add two gradients of a parameter in
        half precision. One case remains: the inner backward's first gradient, if it is of a parameter whose gradient
        waits.
        """
        self._add_waiting()
        self._backward = torch._C._current_graph_task_id()
        self._completes = self._is_last_backward()
        for buffer in self._whole:
            if buffer.memory is None:
                self._begin_sums(buffer)
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _begin_sums(self, buffer: _Buffer) -> None:
        """Allocate the sums to which matrix products add directly, from the step's first micro-batch on.

        See layers.gradient_accumulation_fusion.
        """
        self._with_memory(buffer)
        for p in self._zero.round_robin_bit16_groups[buffer.group]:
            if getattr(p, "fuses_accumulation", False) and p.grad_accum is None:
                p.grad_accum = self.place(p)

    def _leave_backward(self) -> None:
        self._add_waiting()
        self._backward = None

    def _wait(self, p: Any) -> None:
        self._waiting.append(p)
        self._num_waiting += p.numel()
        if self._num_waiting > _MOST_WAITING:
            self._add_waiting()

    def _add_waiting(self) -> None:
        # p.grad is None if a backward failed and its gradients were dropped.
        params = [p for p in self._waiting if p.grad is not None]
        self._waiting, self._num_waiting = [], 0
        if params:
            self._add(params)

    def _add(self, params: Sequence[Any]) -> None:
        """Add the parameters' gradients to their sums in the buffers.

        In half precision DeepSpeed keeps the sums in `p.grad_accum`. bf16 and fp16 gradients are added to an fp32 sum
        without a copy in fp32, so only 10 bytes per parameter are moved. If gradients have the sum's dtype, `p.grad`
        becomes a view of the buffer, and autograd itself adds later gradients to it.
        """
        if not self._zero.use_grad_accum_attribute:
            elsewhere = [p for p in params if p.grad.data_ptr() != self.place(p).data_ptr()]
            _copy([self.place(p) for p in elsewhere], [p.grad for p in elsewhere])
            for p in elsewhere:
                p.grad = self.place(p)
            return
        first, more = [p for p in params if p.grad_accum is None], [p for p in params if p.grad_accum is not None]
        for p in first:
            p.grad_accum = self.place(p)
        _copy([p.grad_accum for p in first], [p.grad for p in first])
        if more:
            torch._foreach_add_([p.grad_accum for p in more], [p.grad for p in more])
        for p in params:
            p.grad = None

    # ---- the buffers ----

    def place(self, p: nn.Parameter) -> Tensor:
        """Return the buffer's view for a parameter's gradient, in its shape; zeros until a gradient is written."""
        place = self._places.get(id(p))
        if place is None:
            offset = self._offsets[id(p)]
            place = self._with_memory(self._buffers[id(p)]).between(offset, offset + p.numel())
            if p.dim() != 1:
                place = place.view(p.shape)
            self._places[id(p)] = place
        return place

    def _with_memory(self, buffer: _Buffer) -> _Buffer:
        if buffer.memory is None:
            # Zeros, because padding and parameters that a step does not use get no gradient.
            buffer.memory = self._zeros(buffer.group, buffer.end - buffer.begin)
        return buffer

    def _zeros(self, group: int, length: int) -> Tensor:
        dtype = self._zero._gradient_reduction_buffer_dtype()
        return torch.zeros(length, dtype=dtype, device=self._zero.bit16_groups_flat[group].device)

    def _own_part(self, group: int) -> Tensor:
        """Return this rank's partition of a group, and free the rest."""
        size = int(self._zero.partition_size[group])
        index = self._axes[group].index
        begin, end = index * size, (index + 1) * size
        buffers = list({id(each): each for each in self._buffers.values() if each.group == group}.values())
        if len(buffers) == 1 and buffers[0].begin <= begin and end <= buffers[0].end:
            own = self._with_memory(buffers[0]).between(begin, end)
            buffers[0].memory = None
            return own
        own = self._zeros(group, size)
        for buffer in (each for each in buffers if each.memory is not None):
            if begin < buffer.end and buffer.begin < end:
                part = buffer.between(begin, end)
                own.narrow(0, max(buffer.begin - begin, 0), len(part)).copy_(part)
            buffer.memory = None
        return own

    def _cut_own(self, group: int) -> tuple[list[int], list[Sequence[int] | None]]:
        """Return the sizes and shapes of the parts of this rank's partition; the shape of padding is None."""
        size = int(self._zero.partition_size[group])
        begin, at = self._axes[group].index * size, 0
        sizes: list[int] = []
        shapes: list[Sequence[int] | None] = []
        for p in self._zero.params_in_partition[group]:
            offset = self._offsets[id(p)]
            first, end = max(offset - begin, 0), min(offset - begin + p.numel(), size)
            if first > at:
                sizes.append(first - at)
                shapes.append(None)
            sizes.append(end - first)
            shapes.append(p.shape if end - first == p.numel() else (end - first,))
            at = end
        return [*sizes, size - at], [*shapes, None]

    # ---- buckets ----

    def _is_late(self, p: nn.Parameter) -> bool:
        return id(p) in self._late

    def _cut(self) -> list[_Bucket]:
        """Return each group's buckets of at most `reduce_bucket_size`; a larger parameter is its own bucket."""
        buckets: list[_Bucket] = []
        for group, params in enumerate(self._zero.round_robin_bit16_groups):
            bucket: _Bucket | None = None
            for p in params:
                offset = self._offsets[id(p)]
                end = offset + p.numel()
                if bucket is None or end - bucket.begin > self._zero.reduce_bucket_size:
                    bucket = _Bucket(group, offset, end, [])
                    buckets.append(bucket)
                bucket.end = end
                bucket.params.append(p)
        return buckets

    def _expect_all(self) -> None:
        for bucket in self._buckets:
            bucket.missing, bucket.has_begun = len(bucket.params), False

    def _begin_next(self) -> None:
        """Begin averaging the next bucket, each part on the rank that updates it."""
        bucket = self._buckets[self._num_begun]
        self._num_begun += 1
        bucket.has_begun = True
        zero, axis = self._zero, self._axes[bucket.group]
        for p in bucket.params:
            if zero.get_gradient_for_reduction(p) is None:
                self.place(p).zero_()  # not used in this step, or dropped, as by `zero_grad`
            zero.clear_grad_attribute(p)  # no gradient until the step is over
        buffer, size = self._with_memory(self._buffers[id(bucket.params[0])]), int(zero.partition_size[bucket.group])
        if zero.gradient_average and (replicas := self._axes.data.size // zero.sequence_parallel_size) > 1:
            buffer.between(bucket.begin, bucket.end).div_(replicas)
        dtype = zero.get_param_comm_dtype(bucket.params[0])
        for rank in range(bucket.begin // size, (bucket.end - 1) // size + 1):
            part = buffer.between(max(bucket.begin, rank * size), min(bucket.end, (rank + 1) * size))
            pending = collectives.start_reduce_(part.to(dtype), axis, rank)
            self._in_flight.append(_Begun(pending, part if dtype != part.dtype and rank == axis.index else None))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
