"""Weights, gradients, optimizer states and DeepSpeed's buffers that a rank holds, in bytes, as closed forms.

    >>> from dslpar.forecast.workload import Buckets
    >>> made = Owner(elements=1e9, layer=(1e7, 1e7), num_layers=50, ends=(0.0, 0.0), replicas=8)
    >>> held = zero_1(made, Buckets(), moments=2)
    >>> (held.weights, held.masters, held.optimizer, held.gradients) == (2e9, 0.5e9, 1e9, 4e9)
    True

Letters: W elements of this rank's weights, of c bytes; N ranks that hold the same (`Mesh.zero_axes`), S = W/N; k
moments of the optimizer; B a bucket. As DeepSpeed 0.19.8 holds them with dslpar's settings and mends, read in its
source and counted on running engines (tests/distributed/engine/test_state_memory.py):

======================  =======  ==========  =======  =========================  ===================================
ZeRO, precision         weights  masters     moments  gradients until the step   optimizer class
======================  =======  ==========  =======  =========================  ===================================
0, fp32                 4W       -           4kW      4W                         torch's own
0, bf16 and fp16        2W       4W          4kW      2W                         FP16_UnfusedOptimizer
0, bf16, a pipeline     2W       4S          4kS      2W, and 2W from the start  BF16_Optimizer
1                       cW       4S          4kS      4W                         DeepSpeedZeroOptimizer
2                       cW       4S          4kS      4S                         DeepSpeedZeroOptimizer
3                       cS       4S          4kS      4S, from the start         DeepSpeedZeroOptimizer_Stage3
======================  =======  ==========  =======  =========================  ===================================

In fp32, ZeRO has masters too, beside the weights. With the optimizer offloaded, masters, moments, and ZeRO 2 and 3's
gradients are the host's. Two more moments of a step can be its fullest: when the last backward is over and gradients
are reduced, and the optimizer's step. What is summed is said at each function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil

from dslpar.core.named_tuple import NamedTuple
from dslpar.forecast.workload import Buckets, Workload

IN_FLIGHT = 2
"""Buckets of ZeRO 2 on their way while others fill: that of `dslpar.distributed.gradient_reduction`."""
SEEN = 4
"""Buckets that fill until those on their way are as many as there will be."""
ALL_REDUCED = 500_000_000
"""Elements of gradients that DeepSpeed copies together, and all-reduces, without ZeRO."""


class Owner(NamedTuple):
    """The weights that one rank holds: those that are trained, and what else there is."""

    elements: float
    """W."""
    layer: tuple[float, ...]
    """Elements of each matrix of a layer, in the order in which a backward makes their gradients."""
    num_layers: int
    ends: tuple[float, float]
    """Elements of what comes after the layers, and of what comes before them; a tied table is of the latter."""
    replicas: int
    """N."""
    bytes: int = 2
    """c."""
    sent: int = 4
    """Bytes of a gradient on its way."""
    accumulates: bool = True
    """Whether a step has several micro-batches."""
    tied: float = 0.0
    """Elements of the table whose gradient the head begins: it is there until the tables' backward has added to it."""
    frozen: float = 0.0
    """Elements of weights that are not trained."""
    frozen_layer: tuple[float, ...] = ()
    """Of each such matrix of a layer."""
    frozen_ends: tuple[float, float] = (0.0, 0.0)

    @property
    def shard(self) -> float:
        """S."""
        return self.elements / self.replicas

    @property
    def largest(self) -> float:
        """Elements of the largest matrix."""
        return max(*self.layer, *self.ends)

    @property
    def is_half(self) -> bool:
        """Whether weights are in bf16 or fp16."""
        return self.bytes == 2


class States(NamedTuple):
    """What is held whatever the activations are, in bytes."""

    weights: float
    masters: float
    """Weights in fp32, which the optimizer steps."""
    optimizer: float
    """Its moments."""
    allocated: float = 0.0
    """Gradients that have their place from the start of the run."""
    gradients: float = 0.0
    """Those that a step's first backward makes, and that add up until its last one is over."""
    at_once: bool = False
    """Whether all of these have their place as soon as there is one."""
    buffers: float = 0.0
    """Buckets and gathered weights, while a micro-batch's backward runs: the most of them."""
    filled: tuple[float, tuple[tuple[float, float], ...]] | None = None
    """Buffers as a backward begins, and as it goes on: (share of this rank's layers that are done, bytes). None: all of
    them all along.
    """
    constant: float = 0.0
    """Buffers that are there from the start of the run to its end."""
    reduced: float = 0.0
    """When the last backward is over: gradients and buffers, of which `allocated` and `constant` are no part."""
    stepped: float = 0.0
    """When the optimizer steps: likewise."""

    @property
    def left(self) -> float:
        """Of the buffers, what is there as a backward begins: what the one before it has left."""
        return self.buffers if self.filled is None else self.filled[0]

    @property
    def rises(self) -> tuple[tuple[float, float], ...]:
        """Buffers as a backward goes on: (share of this rank's layers that are done, bytes)."""
        return ((0.0, self.buffers), (1.0, self.buffers)) if self.filled is None else self.filled[1]

    @property
    def resting(self) -> float:
        """Between steps."""
        return self.weights + self.masters + self.optimizer + self.allocated + self.constant


def states(workload: Workload, pipe_rank: int) -> States:
    """Return what a rank of the pipeline holds."""
    owner, habits = owner_of(workload, pipe_rank), workload.habits
    buckets = habits.buckets
    if buckets is None:
        return _plain(owner, workload)
    if workload.zero == 0 and workload.dtype == "bf16" and workload.mesh.pipe > 1:
        found = without_zero_bf16_pipeline(owner, buckets, habits.moments)
    else:
        found = _BY_STAGE[workload.zero](owner, buckets, habits.moments)
    if owner.frozen and workload.zero < 3:
        found = found._replace(weights=found.weights + owner.bytes * owner.frozen)
    return _offloaded(found, owner, workload.zero, buckets) if habits.offloads_optimizer and workload.zero else found


def owner_of(workload: Workload, pipe_rank: int) -> Owner:
    """Return the weights that a rank of the pipeline holds."""
    costs, q = workload.costs, workload.mesh.tensor.q
    has_first, has_last = pipe_rank == 0, pipe_rank == workload.mesh.pipe - 1
    is_tied = has_first and has_last and bool(costs.tied)

    def ends_of(parts: tuple[float, float, float, float]) -> tuple[float, float]:
        first, _, last, tied = parts
        return (last - (tied if is_tied else 0.0) if has_last else 0.0, first if has_first else 0.0)

    held = workload.chunks.held_by(pipe_rank)
    layers, num_layers = [costs.layer], sum(workload.counts[stage] for stage in held)
    if costs.units:
        layers, num_layers = [layer for stage in held for layer, _ in workload.layers_of(stage)], 1
    products = [product for layer in layers for product in layer.work.products]
    elements = workload.trained(pipe_rank)
    frozen = workload.weights(pipe_rank) - elements
    frozen_layer = tuple(depth * columns / q for layer in layers for _, depth, columns in layer.work.frozen)
    frozen_ends = ends_of(costs.frozen)
    after, before = (every - frozen for every, frozen in zip(ends_of(costs.weights), frozen_ends, strict=True))
    if costs.units:  # tables, which are no product's
        after, before = 0.0, max(0.0, elements - sum(depth * columns for _, depth, columns in products) / q)
        frozen_ends = 0.0, max(0.0, frozen - sum(frozen_layer))
    trained = tuple(float(depth * columns) / q for _, depth, columns in reversed(products))
    adapters = tuple(depth * columns for layer in layers for _, depth, columns in reversed(layer.work.adapters))
    return Owner(
        elements=elements,
        layer=trained + adapters,
        num_layers=num_layers,
        ends=(after, before),
        frozen=frozen,
        frozen_layer=frozen_layer,
        frozen_ends=frozen_ends,
        replicas=workload.mesh.size(*workload.mesh.zero_axes),
        bytes=workload.element_bytes,
        accumulates=workload.micro_batches > 1,
        sent=_sent_bytes(workload),
        tied=float(costs.tied) if is_tied and not costs.units and not costs.frozen[3] else 0.0,
    )


def _sent_bytes(workload: Workload) -> int:
    """Return the bytes of a gradient on its way; what DeepSpeed reduces over ranks of d, ZeRO 3's apart, is in fp32."""
    buckets = workload.habits.buckets
    if buckets is not None and workload.mesh.tensor.zero_over_d and workload.zero < 3 and not buckets.overlapped:
        return 4
    return (buckets.communicated_bytes if buckets else None) or (2 if workload.dtype == "fp16" else 4)


# Without ZeRO ------------------------------------------------------------------------------------------------------


def without_zero(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 0: gradients in the model's type, which are copied to be all-reduced; in half precision the step
    makes them in fp32 too.
    """
    whole, size = owner.elements, owner.bytes
    return States(
        weights=size * whole,
        masters=4 * whole if owner.is_half else 0.0,
        optimizer=4 * moments * whole,
        gradients=size * whole,
        reduced=size * (whole + min(whole, ALL_REDUCED)),
        stepped=(size + 4) * whole if owner.is_half else size * whole,
    )


def without_zero_bf16_pipeline(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 0 of a pipeline in bf16, whose optimizer is sharded all the same: gradients twice, in bf16."""
    whole, shard = owner.elements, owner.shard
    return States(
        weights=2 * whole,
        masters=4 * shard,
        optimizer=4 * moments * shard,
        allocated=2 * whole,
        gradients=2 * whole,
        reduced=2 * (whole + min(whole, ALL_REDUCED)),
        stepped=2 * whole + 4 * shard,
    )


# ZeRO --------------------------------------------------------------------------------------------------------------


def zero_1(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 1: whole gradients in fp32, in one buffer, whose parts are reduced where they stand.

    In fp16, which is sent as such, those on their way are copies. Of one micro-batch a step, buckets come one by one,
    and the part that this rank steps is copied from them in the end. A matrix's gradient is made in the model's type
    before it is added.
    """
    whole, shard, summed = owner.elements, owner.shard, buckets.summed_bytes
    if not buckets.overlapped:
        bucket = buckets.reduce_elements(1)
        staged = summed * bucket * buckets.num_staged
        return States(
            weights=owner.bytes * whole,
            masters=4 * shard,
            optimizer=4 * moments * shard,
            gradients=summed * whole,
            buffers=staged,
            reduced=summed * whole + staged + owner.sent * bucket + summed * shard,
            stepped=4 * shard,
        )
    besides = owner.bytes * owner.largest + (owner.sent * whole if owner.sent != summed else 0.0)
    return States(
        weights=owner.bytes * whole,
        masters=4 * shard,
        optimizer=4 * moments * shard,
        gradients=summed * whole,
        at_once=owner.accumulates,
        reduced=summed * whole + (besides if owner.accumulates else max(besides, summed * shard)),
        stepped=summed * (whole if owner.accumulates else shard),
    )


def zero_2(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 2: each backward's gradients in buckets of the model's type, a few in flight, in the type that is
    sent; their sums in a shard.
    """
    whole, shard, size, bucket = owner.elements, owner.shard, owner.bytes, buckets.reduce_elements(2)
    filled = _in_flight(owner, bucket) if buckets.overlapped else None
    staged = filled[1][-1][1] if filled else bucket * (size * buckets.num_staged + _copied(owner, bucket))
    return States(
        weights=size * whole,
        masters=4 * shard,
        optimizer=4 * moments * shard,
        gradients=buckets.summed_bytes * shard,
        at_once=owner.is_half,
        buffers=staged,
        filled=filled,
        reduced=buckets.summed_bytes * shard + staged,
        stepped=buckets.summed_bytes * shard,
    )


MOST_VECTORS, FEW_VECTORS = 0.1, 0.01
"""Of a model's elements, what biases and norms are at most; and about what they are."""


def zero_3(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 3: shards of all; a bucket that is always there, copied to be scattered; weights that are gathered.

    Small weights stay gathered once they were used. Others do as far as `max_live_parameters` lets the next ones be
    gathered ahead, and those that will be used again within `max_reuse_distance` elements, there and back.
    """
    shard, size, summed = owner.shard, owner.bytes, buckets.summed_bytes
    bucket, sent = buckets.reduce_elements(3), owner.sent
    # What is frozen is sharded and gathered like all else.
    every, layer, ends = owner.elements + owner.frozen, owner.layer + owner.frozen_layer, owner.ends + owner.frozen_ends
    large = owner.num_layers * sum(matrix for matrix in layer if matrix >= buckets.persistent)
    large = min(large + sum(ends), every)
    persistent = every - large
    if persistent > MOST_VECTORS * every:  # experts that this rank's tokens do not take: sharded as well
        persistent = FEW_VECTORS * every
    largest = max(*layer, *ends)
    live = min(large, max(buckets.reused / 2, buckets.live, 2 * largest) + buckets.prefetched)
    if owner.replicas == 1:  # what is gathered is the shard itself
        persistent = live = 0.0
    scattered = sent * min(bucket, owner.elements) * (1 + 1 / owner.replicas)
    return States(
        weights=size * (every / owner.replicas + persistent),
        masters=4 * shard,
        optimizer=4 * moments * shard,
        allocated=summed * shard,
        buffers=size * live + (scattered if owner.elements > bucket else 0.0),
        constant=sent * bucket,
        reduced=size * min(live, largest + buckets.prefetched) + scattered,
        stepped=4 * min(shard, buckets.step_elements),
    )


_BY_STAGE: Mapping[int, Callable[[Owner, Buckets, float], States]] = {0: without_zero, 1: zero_1, 2: zero_2, 3: zero_3}


def _offloaded(held: States, owner: Owner, zero: int, buckets: Buckets) -> States:
    """Return what stays on the device where the optimizer is the host's: DeepSpeed's own reduction, and a matrix."""
    gradients = held.gradients if zero == 1 else 0.0
    bucket = 0.0 if zero == 3 else buckets.reduce_elements(zero) * (buckets.summed_bytes if zero == 1 else owner.bytes)
    staged = held.buffers if zero == 3 else bucket + owner.bytes * owner.largest
    return States(
        weights=0.0 if buckets.offloads_weights else held.weights,
        masters=0.0,
        optimizer=0.0,
        gradients=gradients,
        buffers=staged,
        constant=held.constant,
        reduced=gradients + staged + (0.0 if zero == 3 else owner.sent * owner.largest),
        stepped=0.0,
    )


def _plain(owner: Owner, workload: Workload) -> States:
    """Count a framework without DeepSpeed's buckets: states over replicas from ZeRO 1 on, gradients from 2, weights
    from 3; gradients that add up have their place from the start.
    """
    whole, shard, habits = owner.elements, owner.shard, workload.habits
    of_states = shard if workload.zero else whole
    return States(
        weights=owner.bytes * (shard if workload.zero == 3 else whole),
        masters=4 * of_states if owner.is_half else 0.0,
        optimizer=4 * habits.moments * of_states,
        allocated=habits.gradient_bytes * (shard if workload.zero >= 2 else whole),
        buffers=owner.bytes * owner.largest * (2 if workload.zero == 3 else 0),
    )


# Buckets -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _in_flight(owner: Owner, bucket: float) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return ZeRO 2's buckets, as `States.filled` has them.

    A backward is gone through gradient by gradient, as `dslpar.distributed.gradient_reduction` takes them: the buffer
    that is being filled, those on their way with what is copied of them, and the gradient that was just made. Vectors,
    which are small, are spread over the matrices; matrices larger than a bucket are sent where they are.
    """
    size, copied = owner.bytes, _copied(owner, bucket)
    of_layer = sum(owner.layer)
    # The middle of a backward repeats itself as soon as enough buckets are on their way.
    num_layers = min(owner.num_layers, ceil(SEEN * bucket / of_layer) + SEEN) if of_layer else 0
    matrices = [(owner.ends[0], 0.0)]
    matrices += [(each, layer / owner.num_layers) for layer in range(num_layers) for each in owner.layer]
    matrices += [(owner.ends[1], 1.0)]
    vectors = owner.elements - sum(owner.ends) - of_layer * owner.num_layers
    vectors = max(vectors, 0.0) / (len(owner.layer) * owner.num_layers + 2)
    sent: deque[float] = deque()
    left, most = 0.0, {0.0: 0.0}

    def begin(elements: float) -> None:
        """Send what is in the bucket; or is larger than it, and stands together."""
        is_large = elements > bucket
        sent.append((0.0 if is_large and owner.sent == size else copied) * elements + size * max(bucket, elements))

    for _ in range(2 if owner.accumulates else 1):  # the second finds what the first left
        left, most, elements = sum(sent), {}, 0.0
        for matrix, done in matrices:
            made = size * (bucket + matrix + owner.tied)  # the buffer that is being filled, and gradients
            most[done] = max(most.get(done, 0.0), made + sum(sent))
            if elements and elements + matrix > bucket:
                begin(elements)
                joined = size * elements if owner.replicas > 1 else 0.0  # pieces of several ranks, one at a time
                most[done] = max(most[done], made + joined + sum(sent))
                while len(sent) > IN_FLIGHT:
                    sent.popleft()
                elements = 0.0
            elements += matrix + (vectors if matrix <= bucket else 0.0)
        begin(elements)
        most[1.0] = max(most[1.0], sum(sent))
        while len(sent) > IN_FLIGHT:
            sent.popleft()
    rises: list[tuple[float, float]] = []
    for done, held in most.items():
        if not rises or held > rises[-1][1]:
            rises.append((done, held))
    return left, tuple(rises)


def _copied(owner: Owner, bucket: float) -> float:
    """Return the bytes of what is copied of a gradient that is on its way: all of it into another type, or some."""
    return owner.sent if owner.sent != owner.bytes else owner.sent * _scattered(owner, bucket)


def _scattered(owner: Owner, bucket: float) -> float:
    """Return the share of gradients that are copied, since what goes to one rank does not stand together in a bucket of
    several matrices.

    Matrices and vectors are sharded each by themselves: the token table, or the head, moves the matrices of a layer to
    other ranks than its vectors, which stand between them, by a share that falls along the model; and at each border of
    two ranks a bucket is theirs both.
    """
    if owner.replicas == 1 or not owner.elements:
        return 0.0
    shift = owner.replicas * max(owner.ends) / owner.elements
    moved = shift / 2 if shift <= 1 else 1 - 1 / (2 * shift)
    borders = (owner.replicas - 1) * bucket / owner.elements
    return min(1.0, moved + borders)
