"""Partition of layers into pipeline stages: the number of layers per stage, from stage 0 on.

There are five methods, the same for every model. 'libai' repeats LiBai's automatic assignment (observed by running it).
'uniform' is DeepSpeed's even partition. 'cost', 'parameters' and 'type:REGEX' give each layer a weight. The load of a
stage is the sum of its layers' weights, and these three methods minimize the load of the heaviest stage. If a rank
holds several stages (`dslpar.layout.chunks`), they minimize the load of the heaviest rank, since a rank computes all of
its stages.

The weights come from a model family's closed forms (`dslpar.layout.family_interface`), from the classes that a config
lists (`dslpar.layout.listed_layers`), or from the built layers (`dslpar.engine.partition`). There must be at least as
many layers as stages. Then no stage is empty.

    >>> libai(24, 4), uniform(5, 4), counts_of([0, 0, 1], Chunks(2)), counts_of([0, 1, 1, 0, 1], Chunks(2, 2))
    ((6, 7, 7, 4), (2, 1, 1, 1), (2, 1), (1, 2, 1, 1))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from dslpar.layout.chunks import Chunks

Counts = tuple[int, ...]
"""Number of layers on each stage."""


class EvenWeights(NamedTuple):
    """Weights of a model whose layers all weigh the same."""

    first: int
    """Additional weight of the first stage (embeddings)."""
    layer: int
    """Weight of each layer."""
    last: int
    """Additional weight of the last stage (final norm, head)."""

    def loads(self, counts: Sequence[int]) -> Counts:
        """Return the load of each stage.

        >>> EvenWeights(first=1, layer=10, last=4).loads((2, 1))
        (21, 14)
        """
        loads = [self.layer * count for count in counts]
        loads[0] += self.first
        loads[-1] += self.last
        return tuple(loads)


Weights = EvenWeights | Sequence[int]
"""Weights of layers: in closed form, or one by one."""


def automatic(
    method: str, num_layers: int, chunks: Chunks, weights_by: Callable[[str], Weights | None]
) -> Counts | None:
    """Partition the layers by a method's name; None if the method needs weights that are not known.

    `weights_by` takes 'cost', 'parameters' or 'type:REGEX', and returns the layers' weights by that method.
    """
    if method in ("libai", "uniform"):
        return {"libai": libai, "uniform": uniform}[method](num_layers, chunks.stages)
    weights = weights_by(method)
    if isinstance(weights, EvenWeights):
        return balanced(weights, num_layers, chunks)
    return None if weights is None else balanced_listed(weights, chunks)


def libai(num_layers: int, num_stages: int) -> Counts:
    """Partition as LiBai does: the last stage gets fewer layers if possible, since it also computes the head."""
    each, left = divmod(num_layers, num_stages)
    counts = [each] * num_stages
    # LiBai relieves the last stage only with at least 4 stages and 8 layers, if all stages would be equal.
    if num_stages >= 4 and num_layers >= 8 and not left:
        extra = min(num_stages - 1, each)
        for stage in range(num_stages - extra, num_stages):
            counts[stage] += 1
        counts[-1] -= extra
    else:
        for stage in range(num_stages - left, num_stages):
            counts[stage] += 1
    return tuple(counts)


def distribute_layers(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers on each stage as in ColossalAI's policies, which give the remainder to the middle stages.

    This is for programs that call ColossalAI's function of this name. The result fits `counts` of a pipeline.

    >>> distribute_layers(9, 4), distribute_layers(11, 4)
    ([2, 2, 3, 2], [2, 3, 3, 3])

    Raises:
        ValueError: num_stages is below 1, or num_layers is below 0.
    """
    if num_layers < 0 or num_stages < 1:
        raise ValueError(f"{num_layers} layers over {num_stages} stages")
    each, left = divmod(num_layers, num_stages)
    first = num_stages // 2 - left // 2
    return [each + (first <= stage < first + left) for stage in range(num_stages)]


def uniform(num_layers: int, num_stages: int) -> Counts:
    """Partition as evenly as possible; the first stages take the remainder."""
    each, left = divmod(num_layers, num_stages)
    return tuple(each + (stage < left) for stage in range(num_stages))


def balanced(weights: EvenWeights, num_layers: int, chunks: Chunks) -> Counts:
    """Partition layers of equal weight: minimize the load of the heaviest rank, then the unevenness of ranks.

    The stages of each rank are as even as possible too, since the other ranks wait for each stage. Ties go to late
    ranks and late stages.

    >>> balanced(EvenWeights(first=0, layer=2, last=3), 8, Chunks(pipe=2, num=2))
    (2, 2, 3, 1)
    """
    besides = weights.loads([0] * chunks.stages)
    counts = [0] * chunks.stages
    for rank, num in enumerate(_fill(loads_of_ranks(besides, chunks), weights.layer, num_layers, chunks.num)):
        counts[rank :: chunks.pipe] = _fill(besides[rank :: chunks.pipe], weights.layer, num, 1)
    return tuple(counts)


def _fill(loads: Sequence[int], layer: int, num_layers: int, least: int) -> Counts:
    """Distribute layers over ranks or stages that already have these loads; each one gets at least `least` layers.

    Since all layers weigh the same, it is optimal to give each layer to the rank or stage with the smallest load.
    """
    lightest = [(load + least * layer, least, -place) for place, load in enumerate(loads)]
    heapify(lightest)
    for _ in range(num_layers - least * len(loads)):
        load, count, place = lightest[0]
        heapreplace(lightest, (load + layer, count + 1, place))
    return tuple(count for _, count, _ in sorted(lightest, key=lambda item: -item[2]))


def balanced_listed(weights: Sequence[int], chunks: Chunks) -> Counts:
    """Partition layers of different weights. With one chunk per rank, the result is that of `contiguous`.

    With several chunks, steps improve the partition of `contiguous` as long as `_unevenness` decreases. A step moves
    one layer to a neighbouring stage, or lets a stage take a layer from one neighbour and pass a layer to the other.
    The result need not be the best partition, which only a full search would find.

    >>> contiguous([4, 1, 1, 4, 1, 1], 4), balanced_listed([4, 1, 1, 4, 1, 1], Chunks(pipe=2, num=2))
    ((1, 2, 1, 2), (1, 1, 1, 3))

    Ranks then have loads of 5 and 7, in place of 8 and 4; the best partition, (2, 2, 1, 1), has 6 and 6.
    """
    counts = list(contiguous(weights, chunks.stages))
    if chunks.num == 1:
        return tuple(counts)
    sums = [0, *accumulate(weights)]
    best = _unevenness(sums, counts, chunks)
    while True:
        improved = min(((_unevenness(sums, each, chunks), each) for each in _moved(counts)), default=(best, counts))
        if improved[0] >= best:
            return tuple(counts)
        best, counts = improved


def _moved(counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the partitions in which one stage has a layer less, and a stage at distance 1 or 2 has a layer more."""
    for distance in (1, 2):
        for stage in range(len(counts) - distance):
            for giver, taker in ((stage, stage + distance), (stage + distance, stage)):
                if counts[giver] > 1:
                    moved = list(counts)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield moved


def _unevenness(sums: Sequence[int], counts: Sequence[int], chunks: Chunks) -> tuple[int, int, int, int]:
    """Return the sort key of a partition; a smaller key is a better partition.

    The key has the number of stages with load 0, the load of the heaviest rank, the sum of the squared loads of ranks,
    and the sum of the squared loads of stages.
    """
    loads = [after - before for before, after in pairwise(sums[end] for end in accumulate(counts, initial=0))]
    of_ranks = loads_of_ranks(loads, chunks)
    return loads.count(0), max(of_ranks), sum(load * load for load in of_ranks), sum(load * load for load in loads)


def loads_of_ranks(loads: Sequence[int], chunks: Chunks) -> Counts:
    """Return the load of each rank from the loads of the stages."""
    return tuple(sum(loads[rank :: chunks.pipe]) for rank in range(chunks.pipe))


def contiguous(weights: Sequence[int], num_stages: int) -> Counts:
    """Minimize the load of the heaviest stage; if possible, each stage has a layer whose weight is not 0.

    >>> contiguous([8, 0, 4, 0, 4, 0], 2), contiguous([1, 0, 0, 0], 2)
    ((2, 4), (3, 1))
    """
    # Bisect for the smallest sufficient load. A load suffices if stages that are filled up to it from the left are no
    # more than num_stages.
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_filled(weights, middle) <= num_stages else (middle + 1, high)
    heavy = [index for index, weight in enumerate(weights) if weight]
    anchors = heavy if len(heavy) >= num_stages else list(range(len(weights)))
    begin, counts = 0, []
    for stages_after in range(num_stages - 1, 0, -1):
        last = anchors[len(anchors) - stages_after]  # each later stage needs a layer
        stop, load = begin, 0
        while stop < last and (load + weights[stop] <= low or stop == begin):
            load, stop = load + weights[stop], stop + 1
        counts.append(stop - begin)
        begin = stop
    return (*counts, len(weights) - begin)


def _num_filled(weights: Sequence[int], limit: int) -> int:
    """Return the number of stages that are filled from the left with a load of at most `limit` each."""
    filled, load = 1, 0
    for weight in weights:
        if load + weight > limit:
            filled, load = filled + 1, 0
        load += weight
    return filled


def imbalance(loads: Sequence[int]) -> float:
    """Return the load of the busiest stage over the mean load, minus 1: 0.0 is even, 0.5 is 50 % above the mean."""
    return max(loads) * len(loads) / sum(loads) - 1


# Layers by class and by layer_idx ---------------------------------------------------------------------------------


def is_pattern(text: str) -> bool:
    """Return whether a text may follow 'type:': letters, digits, `_`, and the operators `|`, `^`, `$` and `.`.

    Groups and repetitions are not allowed, since matching them can take exponential time.
    """
    return re.fullmatch(r"[\w|^$.]+", text, re.ASCII) is not None


def num_matches(method: str, class_names: Sequence[str]) -> int:
    """Return how many of these classes 'type:REGEX' matches; case is ignored, as in DeepSpeed's 'type:'."""
    pattern = method.removeprefix("type:")
    return sum(re.search(pattern, name, re.IGNORECASE) is not None for name in class_names)


def group_layers(layer_idx: Sequence[int | None]) -> list[list[int]]:
    """Group layers that must stay on one stage: return the positions of the layers with each `layer_idx`.

    A layer without an index has the index of the layer before it, and 0 at the beginning. -1 means the last index. If
    no layer has an index, each layer is a group of its own.

    >>> group_layers([None, 0, 1, None, 1, -1]), group_layers([None, None])
    ([[0, 1], [2, 3, 4, 5]], [[0], [1]])
    """
    if all(index is None for index in layer_idx):
        return [[position] for position in range(len(layer_idx))]
    groups: list[list[int]] = [[] for _ in range(1 + max(0, *(index or 0 for index in layer_idx)))]
    current = 0
    for position, index in enumerate(layer_idx):
        current = current if index is None else index
        groups[current].append(position)
    return groups


def in_order(stage_ids: Sequence[int], chunks: Chunks) -> bool:
    """Return whether the ranks of successive layers never decrease, except back to 0 once per chunk after the first.

    >>> in_order([0, 1, 0, 1], Chunks(2, 2)), in_order([0, 1, 0, 1], Chunks(2)), in_order([1, 2, 1], Chunks(3, 2))
    (True, False, False)
    """
    falls = [after for before, after in pairwise(stage_ids) if after < before]
    return len(falls) < chunks.num and not any(falls)


def counts_of(stage_ids: Sequence[int], chunks: Chunks) -> Counts:
    """Return the number of layers on each stage, from the rank of each layer (`in_order` describes the ranks)."""
    stages = list(stage_ids)
    if chunks.num > 1:
        begun_again = accumulate((after < before for before, after in pairwise(stages)), initial=0)
        stages = [chunk * chunks.pipe + rank for chunk, rank in zip(begun_again, stages, strict=False)]
    return tuple(stages.count(stage) for stage in range(chunks.stages))


def ids_of(counts: Sequence[int], chunks: Chunks) -> tuple[int, ...]:
    """Return the rank of the axis "pipe" that holds each layer, from the layers on each stage."""
    return tuple(chunks.rank_of(stage) for stage, count in enumerate(counts) for _ in range(count))
