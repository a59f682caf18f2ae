"""The cut of transformer layers over pipeline stages: counts of layers, stage 0 first.

`libai` repeats LiBai's automatic assignment (facts/stage_ids.json was observed by running it), `uniform` is DeepSpeed's
even cut, `cost` and `parameters` are the contiguous cut with the smallest largest stage, the classic linear partition,
by work and by parameters. No stage is ever empty. Letters: L layers, P stages, P <= L.

    >>> libai(24, 4), uniform(5, 4), counts_of([0, 0, 1], 2)
    ((6, 7, 7, 4), (2, 1, 1, 1), (2, 1))
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from dslpar.spec import GPT

Parts = tuple[int, ...]


def libai(num_layers: int, stages: int) -> Parts:
    """LiBai's automatic assignment; it gives the last stage fewer layers where it can, for the head's sake."""
    each, left = divmod(num_layers, stages)
    counts = [each] * stages
    if stages >= 4 and num_layers >= 8 and not left:
        extra = min(stages - 1, each)
        for stage in range(stages - extra, stages):
            counts[stage] += 1
        counts[-1] -= extra
    else:
        for stage in range(stages - left, stages):
            counts[stage] += 1
    return tuple(counts)


def uniform(num_layers: int, stages: int) -> Parts:
    """As even as can be; the first stages take what is left over."""
    each, left = divmod(num_layers, stages)
    return tuple(each + (stage < left) for stage in range(stages))


def balanced(first: int, layer: int, last: int, num_layers: int, stages: int) -> Parts:
    """The contiguous cut whose largest stage is smallest, and among those the evenest.

    Every layer weighs `layer`; the first stage bears `first` besides, and the last one `last`.
    """
    weights = [layer] * num_layers
    weights[0] += first
    weights[-1] += last
    return _split([0, *accumulate(weights)], stages)


def by_cost(model: GPT, stages: int, seq_len: int) -> Parts:
    """Balanced by the multiplications of a forward; the embedding is a look-up and costs next to nothing."""
    hidden, ffn = model.hidden_size, model.ffn_size
    layer = 4 * hidden * hidden + 2 * hidden * ffn + seq_len * hidden
    return balanced(0, layer, hidden * model.vocab_size, model.num_layers, stages)


def by_parameters(model: GPT, stages: int) -> Parts:
    """Balanced by the parameters that a stage holds; a tied table is held by the first and by the last stage."""
    hidden, ffn = model.hidden_size, model.ffn_size
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
    table = hidden * model.vocab_size
    return balanced(table + hidden * model.max_seq_len, layer, table + 2 * hidden, model.num_layers, stages)


LAYER_CLASSES = ("Embedding", "PositionEmbedding", "Block", "LayerNorm", "Head")


def by_type(pattern: str, num_layers: int, stages: int) -> Parts:
    """Balanced by the number of layers whose class name matches; as DeepSpeed's 'type:', case does not count."""
    token, position, block, norm, head = (
        int(re.search(pattern, name, re.IGNORECASE) is not None) for name in LAYER_CLASSES
    )
    return balanced(token + position, block, norm + head, num_layers, stages)


def counts_of(stage_ids: Sequence[int], stages: int) -> Parts:
    """Layers on each stage, from the stage of each layer."""
    return tuple(sum(stage == one for one in stage_ids) for stage in range(stages))


def ids_of(counts: Sequence[int]) -> Parts:
    """The stage of each layer, from the layers on each stage."""
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


def _split(sums: Sequence[int], stages: int) -> Parts:
    """Counts of the best cut, from prefix sums of the layers' weights."""
    low, high = -(-sums[-1] // stages), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sums, stages, middle) else (middle + 1, high)
    return _evenest(sums, stages, low)


def _fits(sums: Sequence[int], stages: int, bound: int) -> bool:
    """Whether `stages` non-empty runs of layers, none heavier than `bound`, hold all layers."""
    start, layers = 0, len(sums) - 1
    for after in reversed(range(stages)):
        end = min(bisect_right(sums, sums[start] + bound) - 1, layers - after)
        if end <= start:
            return False
        start = end
    return start == layers


def _evenest(sums: Sequence[int], stages: int, bound: int) -> Parts:
    """Of the cuts with no stage over `bound`, the one with the least sum of squares; equal ones favour late stages."""
    layers = len(sums) - 1
    best: dict[int, tuple[int, Parts]] = {0: (0, ())}
    for stage in range(stages):
        after: dict[int, tuple[int, Parts]] = {}
        for end in range(stage + 1, layers - stages + stage + 2):
            first = max(stage, bisect_left(sums, sums[end] - bound))
            cuts = [
                (best[start][0] + (sums[end] - sums[start]) ** 2, (*best[start][1], end - start))
                for start in range(first, end)
                if start in best
            ]
            if cuts:
                after[end] = min(cuts)
        best = after
    return best[layers][1]
