"""Time of a model's parts for one micro-batch on one rank: a layer forward and backward, the tables, and the head.

    part_times(part_terms(workload, device, nodes), constants).layer.seconds

The module applies fitted constants (`dslpar.forecast.constants`) to the terms of `dslpar.forecast.part_terms`. A
layer's device time is the sum of its kernels (`dslpar.forecast.kernels`) and collectives (`dslpar.forecast.links`). Its
host time is the time to launch them. The layer takes the longer of the two, and a little more if they are close. The
messages of ring attention overlap with the computation of attention's blocks. With `comm_overlap` a product's
collectives overlap with the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, sqrt
from typing import NamedTuple

from dslpar.forecast.constants import Constants
from dslpar.forecast.kernels import attention_s, products_s
from dslpar.forecast.part_terms import PartTerms

BACKWARD_FUSED, BACKWARD_PLAIN = 2.5, 2.0
"""Time of attention's backward over its forward, with and without a fused kernel. The fused one recomputes scores."""
BACKWARD_ELEMENTWISE = 1.7
"""Time of elementwise operations in the backward over their time in the forward."""
RECOMPUTED_ELEMENTWISE = 0.3
"""Share of the elementwise operations that selective recomputation repeats."""
OVERLAP = 0.5
"""With `comm_overlap`, the share of the products' time that hides collectives; measured on few devices so far."""
LEAST_EXPOSED = 0.3
"""With `comm_overlap`, the share of collectives that is never hidden: norms' statistics, and collectives longer than
their products."""


class LayerTime(NamedTuple):
    """Time of one layer, forward and backward."""

    seconds: float
    """Elapsed time."""
    kernels_s: float
    """Device time of kernels, including recomputation."""
    collectives_s: float
    """Device time of exposed collectives, including recomputation."""
    backward_share: float
    """Share of `seconds` in the backward, including recomputation."""
    idle: float
    """Idle time of a pipeline with this schedule, relative to a schedule that does not split the backward."""


class PartTimes(NamedTuple):
    """Times of a model's parts, forward and backward."""

    layer: LayerTime
    head_s: float
    """The head and the loss, without their collectives."""
    first_sent_s: float
    last_sent_s: float
    """Collectives of the tables, and of the head and the loss."""


def part_times(terms: PartTerms, constants: Constants, *, splits_backward: bool = False) -> PartTimes:
    """Return the times of the parts; `splits_backward` is True if the schedule computes weight gradients separately.

    The latest result is cached in `terms`, because a search needs the same times for many pipelines and ZeRO stages.
    """
    kept: dict[bool, tuple[Constants, PartTimes]] = vars(terms).setdefault("_last_times", {})
    last = kept.get(splits_backward)
    if last is None or last[0] is not constants:
        last = kept[splits_backward] = constants, _part_times(terms, constants, splits_backward)
    return last[1]


def _part_times(terms: PartTerms, constants: Constants, splits_backward: bool) -> PartTimes:
    wide, head = terms.wide_tiles, terms.head
    head_s = products_s(head.forward, constants, wide) + products_s(head.backward, constants, wide)
    if terms.repeats_head:
        head_s += products_s(head.forward, constants, wide)
    head_s += head.logits_s * constants.logit_bytes
    ends_s = [sum([each.seconds(constants) for each in sent]) for sent in (terms.first_sent, terms.last_sent)]
    return PartTimes(_layer_time(terms, constants, splits_backward), head_s, *ends_s)


def _layer_time(terms: PartTerms, constants: Constants, splits_backward: bool) -> LayerTime:
    kernels, wide = terms.layer, terms.wide_tiles
    scores_s = attention_s(kernels, constants, wide)
    between_s = constants.elementwise_passes * kernels.elementwise_s
    products = products_s(kernels.forward, constants, wide), products_s(kernels.backward, constants, wide)
    forward_s = products[0] + scores_s + between_s
    backward_s = products[1] + BACKWARD_ELEMENTWISE * between_s
    backward_s += scores_s * (BACKWARD_FUSED if kernels.fused_s else BACKWARD_PLAIN)
    kernels_s = forward_s + backward_s
    sent_s = [sum([each.seconds(constants) for each in way]) for way in (terms.forward, terms.backward)]
    if terms.overlapped:
        sent_s = [max(LEAST_EXPOSED * s, s - OVERLAP * under) for s, under in zip(sent_s, products, strict=True)]
    if terms.ring_size > 1:
        blocks_s = scores_s, scores_s * (BACKWARD_FUSED if kernels.fused_s else BACKWARD_PLAIN)
        messages_s = [each.seconds(constants) for each in terms.ring]
        num_blocks = terms.ring_size * terms.launched
        exposed = exposed_by_ring(messages_s, [each / num_blocks for each in blocks_s], terms.ring_size)
        sent_s = [s + terms.launched * more for s, more in zip(sent_s, exposed, strict=True)]
    host_s = _launches_s(terms, constants)
    again_s = sent_again_s = host_again_s = 0.0
    if terms.recomputes:
        again_s, sent_again_s, host_again_s = forward_s, sent_s[0], host_s[0]
    elif terms.recomputes_scores:
        again_s = scores_s + RECOMPUTED_ELEMENTWISE * between_s
    if terms.recomputed_part is not None:
        part = terms.recomputed_part
        again_s += products_s(part.forward, constants, wide) + constants.elementwise_passes * part.elementwise_s
        sent_again_s += sum([each.seconds(constants) for each in terms.part_sent])
        host_again_s += constants.collective_launch_s * sum([each.calls for each in terms.part_sent])
    forward = forward_s + sent_s[0], host_s[0]
    own = backward_s + sent_s[1], host_s[1]
    repeated = again_s + sent_again_s, host_again_s
    if terms.blocking:
        # Between a forward and a backward the host waits for a message, so it has no kernels queued ahead afterwards.
        (in_forward,), (in_backward, in_repeats) = _elapsed(forward), _elapsed(own, repeated)
    else:
        in_forward, in_backward, in_repeats = _elapsed(forward, own, repeated)
    repeats = in_repeats + terms.offload_s
    seconds = in_forward + in_backward + repeats
    idle = 1.0
    if splits_backward:
        # As in `Schedule.bubble`: B (gradients of inputs) and W (of weights) are halves of the backward without
        # recomputation, and B also recomputes.
        weights = in_backward / 2
        inputs = weights + repeats
        idle = max(inputs, in_forward + inputs - weights) / seconds
    return LayerTime(seconds, kernels_s + again_s, sum(sent_s) + sent_again_s, (in_backward + repeats) / seconds, idle)


def _launches_s(terms: PartTerms, constants: Constants) -> tuple[float, float]:
    """Return the seconds that the host needs to launch a layer's kernels, collectives and ring messages.

    The two values are for the forward and the backward. Kernels for a ring's blocks after the first, and ZeRO's
    collectives per micro-batch, are not counted.
    """
    slower = 1.0
    if terms.launches > 1:
        slower += constants.tensor_launch * (terms.launches - 1) ** 2
        if terms.blocking:
            slower *= 1 + constants.blocking_launch * log2(terms.launches)
    kernels_s = constants.layer_launch_s * terms.launched * terms.launch_ratio
    calls = [sum([each.calls for each in way]) for way in (terms.forward, terms.backward)]
    # Keys and values travel around the ring in the forward and the backward. Their gradients travel once, with one more
    # message back to the rank that stores the keys.
    others = (terms.ring_size - 1) * terms.launched
    forward_calls, backward_calls = calls[0] + others, calls[1] + (2 * others + terms.launched if others else 0)
    return (
        slower * (kernels_s + forward_calls * constants.collective_launch_s),
        slower * (kernels_s * constants.backward_launch + backward_calls * constants.collective_launch_s),
    )


def exposed_by_ring(messages_s: Sequence[float], blocks_s: Sequence[float], size: int) -> tuple[float, float]:
    """Return the seconds by which a ring's messages lengthen attention, for the forward and the backward.

    `messages_s` has the seconds of one message of keys and values, and of one message of their gradients. `blocks_s`
    has the seconds of one block's forward and backward. While the forward computes a block, the next block's keys
    arrive. In the backward, gradients follow one block later over the same link. The last gradients arrive when there
    is no block left to compute, so their message is not hidden.
    """
    key_s, gradient_s = messages_s
    forward, backward = blocks_s
    between = (size - 2) * max(0.0, key_s + gradient_s - backward)
    ends = max(0.0, key_s - backward) + max(0.0, gradient_s - backward) + gradient_s
    return (size - 1) * max(0.0, key_s - forward), between + ends


def _elapsed(*parts: tuple[float, float]) -> list[float]:
    """Return the elapsed time of each part of a sequence, given each part's seconds (on the device, on the host).

    The host launches kernels ahead of the device. It may gain a lead in one part and lose it in the next, so the sums
    over all parts are compared. The total is shared among the parts in proportion to device time if the device is
    slower, and to host time if the host is slower.
    """
    device_s, host_s = map(sum, zip(*parts, strict=True))
    by_device, by_host = device_s**7, host_s**7
    longer = smooth_max(device_s, host_s) / (device_s * by_device + host_s * by_host)
    return [longer * (on_device * by_device + on_host * by_host) for on_device, on_host in parts]


def smooth_max(one: float, other: float) -> float:
    """Return the longer of two times, or a little more if they are close.

    Between single kernels, sometimes the one and sometimes the other is longer, so neither is hidden completely.
    """
    return sqrt(sqrt(sqrt(one**8 + other**8)))
