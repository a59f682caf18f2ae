"""Model states of a rank in bytes, in closed form: weights, gradients, optimizer states and DeepSpeed's buckets.

    >>> from dslpar.forecast.workload import Buckets
    >>> made = Owner(elements=1e9, layer=(1e7, 1e7), num_layers=50, ends=(0.0, 0.0), replicas=8)
    >>> held = zero_1(made, Buckets(), moments=2)
    >>> (held.weights, held.masters, held.optimizer, held.gradients) == (2e9, 0.5e9, 1e9, 4e9)
    True

Letters: W elements of a rank's trained weights, c bytes per element; N ranks that hold the same weights
(`Mesh.zero_axes`); S = W/N the size of a ZeRO shard, or with X elements of experts that tokens are sent to, which only
M ranks ("expert_data") hold, S = (W - X)/N + X/M; k moments of the optimizer (2 for Adam). *Masters* are the fp32
copies of weights that the optimizer updates. A *bucket* is a buffer in which DeepSpeed collects gradients before it
reduces them. The table gives bytes for DeepSpeed 0.19.8 with dslpar's settings and patches, from its source and from
measurements of running engines (tests/distributed/engine/test_state_memory.py):

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

"From the start" marks gradients that are allocated when the run starts; the others exist from a step's first backward.
With ZeRO, masters exist also in fp32, in addition to the weights. With an offloaded optimizer the host holds masters,
optimizer moments, and the gradients of ZeRO 2 and 3.

Memory may peak at three times in a step: during a backward, in the reduction of gradients after the last backward
(`States.reduced`), and in the optimizer's step (`States.stepped`). `without_zero` to `zero_3` document their sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from dslpar.forecast.workload import Buckets, Workload

IN_FLIGHT = 2
"""Buckets of ZeRO 2 that are being sent while others fill, as in `dslpar.distributed.gradient_reduction`."""
SEEN = 4
"""Buckets that a backward fills until its memory repeats itself."""
ALL_REDUCED = 500_000_000
"""Elements of gradients that DeepSpeed copies into one buffer for an all-reduce without ZeRO."""


class Owner(NamedTuple):
    """The weights that one rank holds, trained and frozen, and how their gradients are sent.

    Capital letters are those of the module's docstring.
    """

    elements: float
    """W: elements of trained weights."""
    layer: tuple[float, ...]
    """Elements of each trained matrix of a layer, in the order in which a backward makes their gradients."""
    num_layers: int
    """Layers with such matrices on this rank."""
    ends: tuple[float, float]
    """Trained elements after the layers (norm, head), and before them (tables). A tied table counts as before them."""
    replicas: int
    """N: ranks that hold the same weights."""
    bytes: int = 2
    """c: bytes per element of a weight."""
    sent: int = 4
    """Bytes per element of a gradient in a collective."""
    accumulates: bool = True
    """True if a step has several micro-batches."""
    tied: float = 0.0
    """Elements of the tied table. Its gradient lives from the head's backward to the embedding's backward."""
    frozen: float = 0.0
    """Elements of weights that are not trained."""
    frozen_layer: tuple[float, ...] = ()
    """Elements of each frozen matrix of a layer."""
    frozen_ends: tuple[float, float] = (0.0, 0.0)
    """Like `ends`, for frozen elements."""
    experts: float = 0.0
    """X: elements of experts that tokens are sent to."""
    expert_replicas: int = 1
    """M: ranks that hold the same experts."""

    @property
    def shard(self) -> float:
        """S: elements of a ZeRO shard of the trained weights."""
        return (self.elements - self.experts) / self.replicas + self.experts / self.expert_replicas

    @property
    def largest(self) -> float:
        """Elements of the largest trained matrix."""
        return max(*self.layer, *self.ends)

    @property
    def is_half(self) -> bool:
        """Return whether weights are in bf16 or fp16."""
        return self.bytes == 2


class States(NamedTuple):
    """Model states and buffers of a rank in bytes; none of them depends on activations."""

    weights: float
    masters: float
    """Copies of the weights in fp32, which the optimizer updates."""
    optimizer: float
    """Moments of the optimizer."""
    allocated: float = 0.0
    """Gradients that are allocated when the run starts."""
    gradients: float = 0.0
    """Gradients that a step's first backward allocates; they accumulate until the step's last backward ends."""
    at_once: bool = False
    """True if the first gradient allocates all of `gradients`."""
    buffers: float = 0.0
    """The most that buckets and gathered weights take while a micro-batch's backward runs."""
    filled: tuple[float, tuple[tuple[float, float], ...]] | None = None
    """Buffers over time: the bytes at the start of a backward, and pairs (share of this rank's layers whose backward is
    done, bytes). None means that all of `buffers` exist during the whole backward.
    """
    constant: float = 0.0
    """Buffers that exist from the start of the run to its end."""
    reduced: float = 0.0
    """Gradients and buffers in the reduction after a step's last backward, without `allocated` and `constant`."""
    stepped: float = 0.0
    """Gradients and buffers in the optimizer's step, without `allocated` and `constant`."""

    @property
    def left(self) -> float:
        """Bytes of buffers at the start of a backward, left over from the backward before it."""
        return self.buffers if self.filled is None else self.filled[0]

    @property
    def rises(self) -> tuple[tuple[float, float], ...]:
        """Bytes of buffers during a backward: pairs (share of this rank's layers whose backward is done, bytes)."""
        return ((0.0, self.buffers), (1.0, self.buffers)) if self.filled is None else self.filled[1]

    @property
    def resting(self) -> float:
        """Bytes held between steps."""
        return self.weights + self.masters + self.optimizer + self.allocated + self.constant


def states(workload: Workload, pipe_rank: int) -> States:
    """Return the model states of a pipeline rank."""
    owner, framework = owner_of(workload, pipe_rank), workload.framework
    buckets = framework.buckets
    if buckets is None:
        return _plain(owner, workload)
    if workload.zero == 0 and workload.dtype == "bf16" and workload.mesh.pipe > 1:
        found = without_zero_bf16_pipeline(owner, buckets, framework.moments)
    else:
        found = _BY_STAGE[workload.zero](owner, buckets, framework.moments)
    if owner.frozen and workload.zero < 3:
        found = found._replace(weights=found.weights + owner.bytes * owner.frozen)
    return _offloaded(found, owner, workload.zero, buckets) if framework.offloads_optimizer and workload.zero else found


def owner_of(workload: Workload, pipe_rank: int) -> Owner:
    """Return the weights that a pipeline rank holds."""
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
    if costs.units:  # tables, which no product multiplies
        after, before = 0.0, max(0.0, elements - sum(depth * columns for _, depth, columns in products) / q)
        frozen_ends = 0.0, max(0.0, frozen - sum(frozen_layer))
    trained = tuple(float(depth * columns) / q for _, depth, columns in reversed(products))
    grouped = tuple(each.num * each.depth * each.columns for layer in layers for each in reversed(layer.work.grouped))
    adapters = tuple(depth * columns for layer in layers for _, depth, columns in reversed(layer.work.adapters))
    return Owner(
        elements=elements,
        layer=grouped + trained + adapters,
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
        experts=workload.experts(pipe_rank),
        expert_replicas=workload.mesh.size("expert_data"),
    )


def _sent_bytes(workload: Workload) -> int:
    """Return the bytes per element of a gradient in a collective.

    If ZeRO below stage 3 also sums over d, and DeepSpeed does the reduction, gradients are sent in fp32.
    """
    buckets = workload.framework.buckets
    if buckets is not None and workload.mesh.tensor.zero_over_d and workload.zero < 3 and not buckets.overlapped:
        return 4
    return (buckets.communicated_bytes if buckets else None) or (2 if workload.dtype == "fp16" else 4)


# Without ZeRO ------------------------------------------------------------------------------------------------------


def without_zero(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 0: gradients in the model's dtype, copied into a buffer for the all-reduce.

    In half precision the optimizer's step also makes copies of the gradients in fp32.
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
    """Count ZeRO 0 of a pipeline in bf16: DeepSpeed still shards the optimizer, and holds the bf16 gradients twice."""
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
    """Count ZeRO 1: all gradients in fp32, in one buffer whose parts are reduced in place.

    In fp16 gradients are sent as fp16, so the gradients in transit are copies. With one micro-batch per step, buckets
    are allocated one by one, and at the end this rank's shard is copied from them. A matrix's gradient is made in the
    model's dtype before it is added to the buffer.

    If DeepSpeed reduces gradients instead of dslpar (`Buckets.overlapped` False), it uses separate buckets.
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
    """Count ZeRO 2: buckets for the gradients of each backward, and a shard of accumulated gradients.

    Buckets have the model's dtype. Up to `IN_FLIGHT` buckets are being sent, in the dtype of the collective.
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
"""Share of a model's elements that are biases and vectors of norms: an upper limit, and a typical value."""


def zero_3(owner: Owner, buckets: Buckets, moments: float) -> States:
    """Count ZeRO 3: shards of weights, gradients and optimizer states, a permanent bucket, and gathered weights.

    The reduce-scatter copies the bucket. Weights below `stage3_param_persistence_threshold` stay gathered after their
    first use. Others are gathered and freed under two settings: up to `stage3_max_live_parameters` elements are
    gathered ahead, and weights that are used again within `stage3_max_reuse_distance` elements stay gathered. The
    distance counts the forward and the backward, hence half of it.
    """
    shard, size, summed = owner.shard, owner.bytes, buckets.summed_bytes
    bucket, sent = buckets.reduce_elements(3), owner.sent
    # Frozen weights are sharded and gathered like the others.
    every, layer, ends = owner.elements + owner.frozen, owner.layer + owner.frozen_layer, owner.ends + owner.frozen_ends
    large = owner.num_layers * sum(matrix for matrix in layer if matrix >= buckets.persistent)
    large = min(large + sum(ends), every)
    persistent = every - large
    if persistent > MOST_VECTORS * every:  # too many for vectors: experts without tokens in `layer`, which are sharded
        persistent = FEW_VECTORS * every
    largest = max(*layer, *ends)
    live = min(large, max(buckets.reused / 2, buckets.live, 2 * largest) + buckets.prefetched)
    if owner.replicas == 1:  # the gathered weight is the shard itself
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
    """Return the states that stay on the device with an offloaded optimizer.

    Then DeepSpeed reduces the gradients, with its own bucket and a copy of the largest matrix's gradient.
    """
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
    """Count a framework without DeepSpeed.

    Optimizer states are sharded over replicas from ZeRO 1 on, gradients from ZeRO 2 on, and weights at ZeRO 3. The
    accumulated gradients are allocated when the run starts.
    """
    whole, shard, framework = owner.elements, owner.shard, workload.framework
    of_states = shard if workload.zero else whole
    return States(
        weights=owner.bytes * (shard if workload.zero == 3 else whole),
        masters=4 * of_states if owner.is_half else 0.0,
        optimizer=4 * framework.moments * of_states,
        allocated=framework.gradient_bytes * (shard if workload.zero >= 2 else whole),
        buffers=owner.bytes * owner.largest * (2 if workload.zero == 3 else 0),
    )


# Buckets -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _in_flight(owner: Owner, bucket: float) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return the memory of ZeRO 2's buckets over a backward, in the form of `States.filled`.

    The function simulates a backward gradient by gradient, as `dslpar.distributed.gradient_reduction` runs. It counts
    the bucket that is being filled, the buckets that are being sent with their copies, and the newest gradient. Vectors
    are small, so their elements are spread evenly over the matrices. A matrix larger than a bucket is sent in place.
    """
    size, copied = owner.bytes, _copied(owner, bucket)
    of_layer = sum(owner.layer)
    # Once `SEEN` buckets have been filled, memory repeats itself. A few layers therefore stand for many.
    num_layers = min(owner.num_layers, ceil(SEEN * bucket / of_layer) + SEEN) if of_layer else 0
    matrices = [(owner.ends[0], 0.0)]
    matrices += [(each, layer / owner.num_layers) for layer in range(num_layers) for each in owner.layer]
    matrices += [(owner.ends[1], 1.0)]
    vectors = owner.elements - sum(owner.ends) - of_layer * owner.num_layers
    vectors = max(vectors, 0.0) / (len(owner.layer) * owner.num_layers + 2)
    sent: deque[float] = deque()
    left, most = 0.0, {0.0: 0.0}

    def begin(elements: float) -> None:
        """Send the bucket's content; a matrix larger than the bucket is contiguous and sent without a copy."""
        is_large = elements > bucket
        sent.append((0.0 if is_large and owner.sent == size else copied) * elements + size * max(bucket, elements))

    for _ in range(2 if owner.accumulates else 1):  # the second backward starts with the buckets of the first
        left, most, elements = sum(sent), {}, 0.0
        for matrix, done in matrices:
            made = size * (bucket + matrix + owner.tied)  # the buffer being filled, and gradients
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
    """Return the bytes of copies per element of a gradient in transit: the whole element if its dtype changes."""
    return owner.sent if owner.sent != owner.bytes else owner.sent * _scattered(owner, bucket)


def _scattered(owner: Owner, bucket: float) -> float:
    """Return the share of gradients that are copied because one rank's parts of a bucket are not contiguous.

    Matrices and vectors are sharded separately. The token table or the head moves a layer's matrices to other ranks
    than its vectors, which lie between the matrices in a bucket. The share of moved matrices falls along the model. A
    bucket at the border between the shards of two ranks belongs to both ranks, and is copied too.
    """
    if owner.replicas == 1 or not owner.elements:
        return 0.0
    shift = owner.replicas * max(owner.ends) / owner.elements
    moved = shift / 2 if shift <= 1 else 1 - 1 / (2 * shift)
    borders = (owner.replicas - 1) * bucket / owner.elements
    return min(1.0, moved + borders)
