"""Gather of updated weights in ZeRO 1 and 2, bucket by bucket, overlapped with the next forward.

    gather = ParameterGather(zero, axes, layers, bucket_size)
    gather.start()                # the last act of a step: nobody waits
    gather.wait_for(layer)        # each time before a layer runs
    gather.finish()               # before anything else reads weights, or writes them

DeepSpeed flattens each parameter group and divides it into equal, contiguous parts. Each rank of ZeRO's axis updates
one part. A bucket consists of adjacent whole parameters, so its content belongs to one or a few ranks. Each of these
ranks broadcasts its piece, in the order in which the forward needs the buckets. An all-gather would bring a slice of
every rank's part, from all over the model: with N ranks, the layer at 1/N of the depth would wait for the last
all-gather. The number of bytes is the same, since a ring passes each piece on N - 1 times either way. A group that fits
one bucket, such as biases and gains, is gathered by one call, in place.

Readers of weights, and where they wait:

===========================================================  =======================================================
a layer, wherever it runs: training, evaluation,             `LayerSpec.step`, for the buckets of all parameters that
recomputation, compiled code, pipelines, policies            its module holds, at any depth; a call of the module too
`Engine.module`, `named_parameters`: saving, counting,       `finish_gathers`
hooks, `LayeredModel.after_step`
`checkpoint.full_state`, `load_full_state`                   `finish_gathers`
`state_dict()` of the module, or of a submodule              a hook before it
the next step, DeepSpeed's own loading, moving of states     `deepspeed_patches.overlap_param_gather`
norms, clipping, loss scaling, sums of tied gradients        nowhere: they read gradients and fp32 masters alone
a parameter, or a part of a layer, that a program has kept   nowhere: call `Engine.wait_for_weights` before
===========================================================  =======================================================

The idea and the name come from Megatron-LM's `overlap_param_gather`: gathers begin after the step, in forward order,
and a hook on each module that owns weights waits for them. Before it evaluates or saves, Megatron-LM waits for all
gathers and removes the hooks. Here each layer waits for all weights that it holds: a Block reads the vectors of the
layers within it, a tied head reads the embedding's table, and torch.compile would trace hooks. A model that is a single
layer, such as MoCo, waits for all weights. torch's FSDP2 gathers a layer while the previous one runs, in each forward,
whereas ZeRO 1 and 2 keep all weights. DeepSpeed determines the memory layout: buckets, parts and padding are read from
its optimizer, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Pending
from dslpar.distributed.group_axes import GroupAxes


class _Bucket(NamedTuple):
    """Adjacent whole parameters in a parameter group's flat tensor, with the padding behind them."""

    group: int
    """Index of the parameter group."""
    begin: int
    """First element, as an offset in the group's flat tensor."""
    end: int
    params: Sequence[nn.Parameter]


class ParameterGather:
    """Gathers the weights of a DeepSpeedZeroOptimizer over the ranks of `axes`, which must call `start` together.

    layers: modules in forward order; the order must be the same on all ranks.
    bucket_size: number of elements; the parameter that reaches it closes a bucket.
    """

    def __init__(self, zero: Any, axes: GroupAxes, layers: Sequence[nn.Module], bucket_size: int) -> None:
        self._zero, self._axes = zero, axes
        first_user: dict[nn.Parameter, int] = {}
        for number, layer in enumerate(layers):
            for p in layer.parameters():
                first_user.setdefault(p, number)
        buckets = [bucket for group in range(len(zero.bit16_groups)) for bucket in _cut(zero, group, bucket_size)]
        # The order is the same on all ranks. Parameters of no layer come last.
        buckets.sort(key=lambda bucket: min(first_user.get(p, len(layers)) for p in bucket.params))
        self._buckets = buckets
        bucket_of = {p: number for number, bucket in enumerate(buckets) for p in bucket.params}
        self._needed = {
            layer: sorted({bucket_of[p] for p in layer.parameters() if p in bucket_of})  # frozen ones never change
            for layer in layers
        }
        self._pending: dict[int, list[Pending]] = {}
        """For each bucket in flight, by number, one collective per rank that owns a piece."""

    def __deepcopy__(self, memo: object) -> ParameterGather:
        """Return itself: a copy of a module has its own parameters, which are not gathered."""
        return self

    def start(self, **_: object) -> None:
        """Begin gathering all buckets; replaces DeepSpeed's `all_gather_dp_groups` and takes its arguments."""
        assert not self._pending, "a step begins with finish()"
        self._pending = {number: self._start(bucket) for number, bucket in enumerate(self._buckets)}

    def wait_for(self, layer: nn.Module) -> None:
        """Wait for a layer's weights, or for all weights if the layer is not in `layers`."""
        if self._pending:
            for number in self._needed.get(layer, list(self._pending)):
                self._wait(number)

    def finish(self) -> None:
        """Wait for all weights."""
        for number in list(self._pending):
            self._wait(number)

    def _start(self, bucket: _Bucket) -> list[Pending]:
        flat, axis = self._zero.bit16_groups_flat[bucket.group], self._axes[bucket.group]
        if bucket.end - bucket.begin == flat.numel():
            return [collectives.start_all_gather_(flat, axis)]
        owners = _owners(bucket, flat.numel() // axis.size)
        return [collectives.start_broadcast_(flat[begin:end], axis, rank) for rank, begin, end in owners]

    def _wait(self, number: int) -> None:
        for pending in self._pending.pop(number, ()):
            pending.wait()


def finish_gathers(module: nn.Module) -> None:
    """Wait for all weights of an engine's module that are in flight."""
    gather = getattr(module, "parameter_gather", None)
    if gather is not None:
        gather.finish()


def _cut(zero: Any, group: int, bucket_size: int) -> Iterator[_Bucket]:
    """Yield the buckets of a parameter group."""
    # In memory order, which `round_robin_gradients` changes.
    params, offsets = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
    end = zero.bit16_groups_flat[group].numel()
    first = 0
    for number, after in enumerate([*offsets[1:], end], 1):  # aligned parameters have padding behind them
        if after - offsets[first] >= bucket_size or number == len(params):
            yield _Bucket(group, offsets[first], after, params[first:number])
            first = number


def _owners(bucket: _Bucket, part: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, begin, end) for each piece of a bucket; each rank owns `part` elements of the group."""
    for rank in range(bucket.begin // part, (bucket.end - 1) // part + 1):
        yield rank, max(bucket.begin, rank * part), min(bucket.end, (rank + 1) * part)
