"""The cut of layers over pipeline stages: layers on each stage, stage 0 first, from what each layer weighs.

The methods are the same for every model; where the weights come from differs: from a family's closed forms
(`dslpar.layout.family`), from the classes that a config lists (`dslpar.layout.listed_layers`), or from the built layers
(`dslpar.engine.partition`). `libai` repeats LiBai's automatic assignment (observed by running it), `uniform` is
DeepSpeed's even cut; 'cost', 'parameters' and 'type:REGEX' are the contiguous cut whose heaviest stage is lightest. No
stage is ever empty. Where a rank holds several stages (`dslpar.layout.chunks`), it is the heaviest rank that is
lightest: it computes all of its own. Letters: L layers, P ranks, V stages, P <= V <= L.

    >>> libai(24, 4), uniform(5, 4), counts_of([0, 0, 1], Chunks(2)), counts_of([0, 1, 1, 0, 1], Chunks(2, 2))
    ((6, 7, 7, 4), (2, 1, 1, 1), (2, 1), (1, 2, 1, 1))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from dslpar.core.named_tuple import NamedTuple
from dslpar.layout.chunks import Chunks

Counts = tuple[int, ...]
"""Layers on each stage."""


class EvenWeights(NamedTuple):
    """What layers weigh that all weigh the same: each of them, and what the first and last stage bear besides."""

    first: int
    layer: int
    last: int

    def loads(self, counts: Sequence[int]) -> Counts:
        """Return what each stage of a cut bears.

        >>> EvenWeights(first=1, layer=10, last=4).loads((2, 1))
        (21, 14)
        """
        loads = [self.layer * count for count in counts]
        loads[0] += self.first
        loads[-1] += self.last
        return tuple(loads)


Weights = EvenWeights | Sequence[int]
"""Of the layers of a cut: in closed form, or one by one."""


def automatic(
    method: str, num_layers: int, chunks: Chunks, weights_by: Callable[[str], Weights | None]
) -> Counts | None:
    """Cut by a method that config and program may name; None where it needs weights that are not known.

    `weights_by` gives what the layers weigh by 'cost', 'parameters' or 'type:REGEX'.
    """
    if method in ("libai", "uniform"):
        return {"libai": libai, "uniform": uniform}[method](num_layers, chunks.stages)
    weights = weights_by(method)
    if isinstance(weights, EvenWeights):
        return balanced(weights, num_layers, chunks)
    return None if weights is None else balanced_listed(weights, chunks)


def libai(num_layers: int, num_stages: int) -> Counts:
    """Cut as LiBai does; it gives the last stage fewer layers where it can, for the head's sake."""
    each, left = divmod(num_layers, num_stages)
    counts = [each] * num_stages
    # LiBai relieves the last stage only from 4 stages and 8 layers on, where all stages would be equal.
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
    """Return the layers on each stage as ColossalAI's policies count them: what is left over goes to the middle.

    It is arithmetic alone, for programs that have it; `counts` of a pipeline takes the result.

    >>> distribute_layers(9, 4), distribute_layers(11, 4)
    ([2, 2, 3, 2], [2, 3, 3, 3])

    Raises:
        ValueError: there is no stage, or a number of layers below 0.
    """
    if num_layers < 0 or num_stages < 1:
        raise ValueError(f"{num_layers} layers over {num_stages} stages")
    each, left = divmod(num_layers, num_stages)
    first = num_stages // 2 - left // 2
    return [each + (first <= stage < first + left) for stage in range(num_stages)]


def uniform(num_layers: int, num_stages: int) -> Counts:
    """Cut as evenly as can be; the first stages take what is left over."""
    each, left = divmod(num_layers, num_stages)
    return tuple(each + (stage < left) for stage in range(num_stages))


def balanced(weights: EvenWeights, num_layers: int, chunks: Chunks) -> Counts:
    """Cut so that the heaviest rank is lightest, of those cuts the evenest; then late ranks and stages take more.

    The stages of a rank are as even as they can be: the others wait for each of them.

    >>> balanced(EvenWeights(first=0, layer=2, last=3), 8, Chunks(pipe=2, num=2))
    (2, 2, 3, 1)
    """
    besides = weights.loads([0] * chunks.stages)
    counts = [0] * chunks.stages
    for rank, num in enumerate(_fill(loads_of_ranks(besides, chunks), weights.layer, num_layers, chunks.num)):
        counts[rank :: chunks.pipe] = _fill(besides[rank :: chunks.pipe], weights.layer, num, 1)
    return tuple(counts)


def _fill(loads: Sequence[int], layer: int, num_layers: int, least: int) -> Counts:
    """Return the layers of each of some places that bear these loads already, `least` or more.

    Since all layers weigh the same, giving each next one to the lightest place is best.
    """
    lightest = [(load + least * layer, least, -place) for place, load in enumerate(loads)]
    heapify(lightest)
    for _ in range(num_layers - least * len(loads)):
        load, count, place = lightest[0]
        heapreplace(lightest, (load + layer, count + 1, place))
    return tuple(count for _, count, _ in sorted(lightest, key=lambda item: -item[2]))


def balanced_listed(weights: Sequence[int], chunks: Chunks) -> Counts:
    """Cut layers that weigh different things; with one chunk a rank it is `contiguous`.

    With several, that cut is improved as long as the heaviest rank gets lighter by it, or ranks or stages more even: a
    layer goes to the stage beside its own, or a stage gives one away at its one end and takes one at the other. It need
    not be the best cut of all, which only a search would find.

    >>> contiguous([4, 1, 1, 4, 1, 1], 4), balanced_listed([4, 1, 1, 4, 1, 1], Chunks(pipe=2, num=2))
    ((1, 2, 1, 2), (2, 2, 1, 1))
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
    """Yield the cuts that differ by one layer that a stage gives to the next one, or the one after that, or back."""
    for distance in (1, 2):
        for stage in range(len(counts) - distance):
            for giver, taker in ((stage, stage + distance), (stage + distance, stage)):
                if counts[giver] > 1:
                    moved = list(counts)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield moved


def _unevenness(sums: Sequence[int], counts: Sequence[int], chunks: Chunks) -> tuple[int, int, int, int]:
    """Return what a cut is judged by: stages that weigh nothing, the heaviest rank, squares of ranks and of stages."""
    loads = [after - before for before, after in pairwise(sums[end] for end in accumulate(counts, initial=0))]
    of_ranks = loads_of_ranks(loads, chunks)
    return loads.count(0), max(of_ranks), sum(load * load for load in of_ranks), sum(load * load for load in loads)


def loads_of_ranks(loads: Sequence[int], chunks: Chunks) -> Counts:
    """Return what each rank bears, from what each stage bears."""
    return tuple(sum(loads[rank :: chunks.pipe]) for rank in range(chunks.pipe))


def contiguous(weights: Sequence[int], num_stages: int) -> Counts:
    """Cut so that the heaviest stage is lightest; where it can, each stage has a layer that weighs something.

    >>> contiguous([8, 0, 4, 0, 4, 0], 2), contiguous([1, 0, 0, 0], 2)
    ((2, 4), (3, 1))
    """
    # The least load that suffices, by bisection: filling stages from the left tells whether one does.
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_filled(weights, middle) <= num_stages else (middle + 1, high)
    heavy = [index for index, weight in enumerate(weights) if weight]
    anchors = heavy if len(heavy) >= num_stages else list(range(len(weights)))
    begin, counts = 0, []
    for stages_after in range(num_stages - 1, 0, -1):
        last = anchors[len(anchors) - stages_after]  # the stages after this one need a layer each
        stop, load = begin, 0
        while stop < last and (load + weights[stop] <= low or stop == begin):
            load, stop = load + weights[stop], stop + 1
        counts.append(stop - begin)
        begin = stop
    return (*counts, len(weights) - begin)


def _num_filled(weights: Sequence[int], limit: int) -> int:
    """Return how many stages are filled, from the left, with at most `limit` each."""
    filled, load = 1, 0
    for weight in weights:
        if load + weight > limit:
            filled, load = filled + 1, 0
        load += weight
    return filled


def imbalance(loads: Sequence[int]) -> float:
    """Return how much more the busiest stage does than the mean one: 0.0 is even, 0.5 half as much again."""
    return max(loads) * len(loads) / sum(loads) - 1


# Layers by class and by layer_idx ---------------------------------------------------------------------------------


def is_pattern(text: str) -> bool:
    """Whether it may follow 'type:': names, `|` between them, `^` `$` and `.` as in regular expressions.

    Without groups and repetitions no match takes long.
    """
    return re.fullmatch(r"[\w|^$.]+", text, re.ASCII) is not None


def num_matches(method: str, class_names: Sequence[str]) -> int:
    """Return how many of these classes 'type:REGEX' matches; as DeepSpeed's 'type:', case does not count."""
    pattern = method.removeprefix("type:")
    return sum(re.search(pattern, name, re.IGNORECASE) is not None for name in class_names)


def group_layers(layer_idx: Sequence[int | None]) -> list[list[int]]:
    """Return the positions of the layers at each index of the cut.

    A layer without an index goes with the one before it (at the beginning: after it), -1 with the last index. Where no
    layer has one, each is an index of its own.

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
    """Whether layers go on from rank to rank, and from some rank to the first one for each further chunk.

    >>> in_order([0, 1, 0, 1], Chunks(2, 2)), in_order([0, 1, 0, 1], Chunks(2)), in_order([1, 2, 1], Chunks(3, 2))
    (True, False, False)
    """
    falls = [after for before, after in pairwise(stage_ids) if after < before]
    return len(falls) < chunks.num and not any(falls)


def counts_of(stage_ids: Sequence[int], chunks: Chunks) -> Counts:
    """Return the layers on each stage, from the rank of each layer: with v chunks, ids begin at 0 again v-1 times."""
    stages = list(stage_ids)
    if chunks.num > 1:
        begun_again = accumulate((after < before for before, after in pairwise(stages)), initial=0)
        stages = [chunk * chunks.pipe + rank for chunk, rank in zip(begun_again, stages, strict=False)]
    return tuple(stages.count(stage) for stage in range(chunks.stages))


def ids_of(counts: Sequence[int], chunks: Chunks) -> tuple[int, ...]:
    """Return the rank of the axis "pipe" that holds each layer, from the layers on each stage."""
    return tuple(chunks.rank_of(stage) for stage, count in enumerate(counts) for _ in range(count))
