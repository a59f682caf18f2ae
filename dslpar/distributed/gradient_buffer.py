"""ZeRO 1's gradients: one contiguous buffer a parameter group, reduced bucket by bucket under the last backward.

    buffer = GradientBuffer(zero, groups.zero_axis, is_last_backward, accumulates=True, order=order, late=late)
    buffer.accumulate(p)               # adds p.grad to p's place, and frees it
    buffer.on_gradient(p)              # a hook: the gradient of `p` is there
    buffer.reduce_rest()               # after the step's last backward
    buffer.finish()                    # before the norm

The place of a gradient is that of its weight in DeepSpeed's flat weights. So the part that a rank steps is a slice, a
bucket is another, and what of a bucket goes to a rank is summed up where it stands: nothing is copied, and a rank holds
its whole gradients once. Megatron-LM's and torch DDP's buckets are slices of such a buffer too. Buckets begin in one
order on all ranks, whatever the order in which a backward makes their gradients.

Micro-batches add up in the buffer itself, in fp32 also where weights are in half precision. Gradients of vectors, of
which a model has many, wait for each other, and one call adds them: one by one they cost the host more than the device;
a matrix' would need memory meanwhile. In a step of one micro-batch each bucket is a buffer of its own, made when its
first gradient is: all of them at once would stand beside the activations, which go as gradients come. This rank's part
is then copied together at the end.
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
from dslpar.distributed.collectives import Axis, Pending

_MOST_WAITING = 2**18
"""Elements of the vectors' gradients that wait to be added: few beside those of a matrix, many beside one vector's."""


@dataclass
class _Buffer:
    """Memory of a part of a group's gradients, or of all, from a step's first one to the optimizer's step."""

    group: int
    begin: int
    end: int
    memory: Tensor | None = None

    def between(self, first: int, end: int) -> Tensor:
        """Return the elements of the group between these two, as far as they are here; zeros at first."""
        assert self.memory is not None
        first, end = max(first, self.begin), min(end, self.end)
        return self.memory.narrow(0, first - self.begin, end - first)


@dataclass
class _Bucket:
    """Gradients that stand together, which are reduced together."""

    group: int
    begin: int
    end: int
    params: list[nn.Parameter]
    missing: int = 0
    """Of its gradients, those that this step's last backward has not made; late ones stay so until it is over."""
    has_begun: bool = False
    """Whether it is being reduced, or was, in this step."""


class _Begun(NamedTuple):
    """A part of a bucket on its way to the rank that steps it."""

    pending: Pending
    target: Tensor | None
    """Where that rank, if it is this one, has it: given where it travels in another type."""


class GradientBuffer:
    """Holds and reduces the gradients of a DeepSpeedZeroOptimizer at stage 1.

    is_last_backward: whether the backward that runs completes the gradients of a step. DeepSpeed's engine knows; its
        optimizer is told by a hook of the model's output, which comes too late for a head that the loss runs.
    accumulates: whether a step has several micro-batches.
    order: of parameters by id, that in which they were registered: a forward uses them in about the same.
    late: ids of parameters whose gradients are not complete when the last backward is over, such as weights that a
        pipeline's stages share.
    """

    def __init__(
        self,
        zero: Any,
        axis: Axis,
        is_last_backward: Callable[[], bool],
        *,
        accumulates: bool,
        order: Mapping[int, int],
        late: Collection[int],
    ) -> None:
        self._zero, self._axis, self._is_last_backward, self._late = zero, axis, is_last_backward, frozenset(late)
        self._offsets = {
            id(p): int(offset)
            for params, offsets in zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
            for p, offset in zip(params, offsets, strict=True)
        }
        """Of each parameter in its group's flat weights, in elements."""
        self._buckets = self._cut()
        # As a backward completes them: from the model's end, and what comes late last.
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
        """By a parameter's id, views of the buffers that stand."""
        self._waiting: list[Any] = []
        self._num_waiting = 0
        """Elements of them."""
        self._backward: int | None = None
        """torch's number of the backward that runs, as far as one has brought a gradient."""
        self._completes = False
        """Whether that is a step's last."""
        self._in_flight: deque[_Begun] = deque()
        self._num_begun = 0
        self._expect_all()

    # ---- what takes the place of DeepSpeed's methods ----

    def accumulate(self, p: Any) -> None:
        """Add a micro-batch's gradient to those before, in its place."""
        if p.grad is None:
            return
        if self._zero.use_grad_accum_attribute and p.grad_accum is not None:
            p.grad_accum.add_(p.grad)
            p.grad = None
        else:
            self._add([p])

    def on_gradient(self, p: Any) -> None:
        """Take a gradient that a backward has made; begin the buckets that it completes.

        A parameter that the last backward does not use keeps its bucket, and those after it, until that is over.

        Raises:
            RuntimeError: its bucket has begun, and the gradient would be lost.
        """
        bucket = self._bucket_of[id(p)]
        if bucket.has_begun:
            raise RuntimeError("a gradient of a step whose reduction has begun, in which it would be missing")
        if torch._C._current_graph_task_id() != self._backward:
            self._enter_backward()
        # Where a product has added to the sum itself (layers.gradient_accumulation_fusion) there is no gradient.
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
        """Begin all reductions that are left, after the last backward."""
        while self._num_begun < len(self._buckets):
            for p in self._buckets[self._num_begun].params:
                self.accumulate(p)  # where one was made since: zeros of a vector that was not used, and is summed
            self._begin_next()
        self._zero._epilogue_ran_this_backward = True

    def finish(self) -> None:
        """Wait for all reductions, and give the step what it takes.

        Raises:
            RuntimeError: gradients were not reduced: no backward of the engine was the step's last.
        """
        if self._num_begun < len(self._buckets):
            raise RuntimeError("a step whose gradients were not reduced: engine.backward() must be its last call")
        while self._in_flight:
            begun = self._in_flight.popleft()
            summed = begun.pending.wait()
            if begun.target is not None:
                begun.target.copy_(summed)
            del begun, summed  # the last one may be a copy of a large table's
        self._num_begun = 0
        self._places.clear()
        self._expect_all()
        group_of = import_module("deepspeed.runtime.zero.stage_1_and_2").GradPartitionBufferGroup
        for group in range(len(self._sizes)):
            own = self._own_part(group)
            pairs = zip(torch.split(own, self._sizes[group]), self._shapes[group], strict=True)
            parts = [part.view(shape) for part, shape in pairs if shape is not None]
            self._zero.averaged_gradients[group] = group_of(parts, own)

    # ---- what waits ----

    def _enter_backward(self) -> None:
        """Note which backward brings gradients, and have what waits at its end added.

        A backward can run within another one, as where activations are recomputed. Each adds what it has made before
        another brings a gradient: else autograd would add up two gradients of a parameter in half precision, as it does
        with the inner one's first where that is of a parameter whose gradient waits.
        """
        self._add_waiting()
        self._backward = torch._C._current_graph_task_id()
        self._completes = self._is_last_backward()
        for buffer in self._whole:
            if buffer.memory is None:
                self._begin_sums(buffer)
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _begin_sums(self, buffer: _Buffer) -> None:
        """Have sums stand that products may add to (layers.gradient_accumulation_fusion): also a step's first ones."""
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
        # Without a gradient: where a backward failed, and its gradients were dropped.
        params = [p for p in self._waiting if p.grad is not None]
        self._waiting, self._num_waiting = [], 0
        if params:
            self._add(params)

    def _add(self, params: Sequence[Any]) -> None:
        """Add the gradients of parameters to those before, in their places.

        In half precision DeepSpeed has the sums in `p.grad_accum`: one in fp32 takes a bf16 or fp16 number without
        rounding, so 10 bytes move for a parameter. In the sum's own type autograd adds to `p.grad`, once that is the
        place.
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
        """Return where the gradient of a parameter stands, in its shape; zeros until one was written there."""
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
            # Zeros: of parameters that no sample of a step has used, and between them.
            buffer.memory = self._zeros(buffer.group, buffer.end - buffer.begin)
        return buffer

    def _zeros(self, group: int, length: int) -> Tensor:
        dtype = self._zero._gradient_reduction_buffer_dtype()
        return torch.zeros(length, dtype=dtype, device=self._zero.bit16_groups_flat[group].device)

    def _own_part(self, group: int) -> Tensor:
        """Return what this rank steps of a group, and give all else free."""
        size = int(self._zero.partition_size[group])
        begin, end = self._axis.index * size, (self._axis.index + 1) * size
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
        """Return sizes of the parts that this rank's slice consists of; and a part's shape, None where nothing is."""
        size = int(self._zero.partition_size[group])
        begin, at = self._axis.index * size, 0
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
        """Cut each group in slices of at most `reduce_bucket_size`."""
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
        """Begin to average the next bucket, each part on the rank that steps it."""
        bucket = self._buckets[self._num_begun]
        self._num_begun += 1
        bucket.has_begun = True
        zero, axis = self._zero, self._axis
        for p in bucket.params:
            if zero.get_gradient_for_reduction(p) is None:
                self.place(p).zero_()  # not used in this step; or what stood there was dropped, as `zero_grad` does
            zero.clear_grad_attribute(p)  # until the step is over, nobody's
        buffer, size = self._with_memory(self._buffers[id(bucket.params[0])]), int(zero.partition_size[bucket.group])
        if zero.gradient_average and (replicas := axis.size // zero.sequence_parallel_size) > 1:
            buffer.between(bucket.begin, bucket.end).div_(replicas)
        dtype = zero.get_param_comm_dtype(bucket.params[0])
        for rank in range(bucket.begin // size, (bucket.end - 1) // size + 1):
            part = buffer.between(max(bucket.begin, rank * size), min(bucket.end, (rank + 1) * size))
            pending = collectives.start_reduce_(part.to(dtype), axis, rank)
            self._in_flight.append(_Begun(pending, part if dtype != part.dtype and rank == axis.index else None))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
