"""The cut of transformer layers over pipeline stages: counts of layers, stage 0 first.

`libai` repeats LiBai's automatic assignment (facts/stage_ids.json was observed by running it), `uniform` is DeepSpeed's
even cut, `cost` and `parameters` are the contiguous cut with the smallest largest stage, by work
and by parameters. No stage is ever empty. Letters: L layers, P stages, P <= L.

    >>> libai(24, 4), uniform(5, 4), counts_of([0, 0, 1], 2)
    ((6, 7, 7, 4), (2, 1, 1, 1), (2, 1))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from heapq import heapify, heapreplace

from dslpar.schema.sections import GPT

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
    """The contiguous cut whose largest stage is smallest, and among those the evenest; then late stages take more.

    Every layer weighs `layer`; the first stage bears `first` besides, and the last one `last`. Since all layers weigh
    the same, giving each next one to the lightest stage is best.
    """
    loads = [layer] * stages
    loads[0] += first
    loads[-1] += last
    lightest = [(load, 1, -stage) for stage, load in enumerate(loads)]
    heapify(lightest)
    for _ in range(num_layers - stages):
        load, count, stage = lightest[0]
        heapreplace(lightest, (load + layer, count + 1, stage))
    return tuple(count for _, count, _ in sorted(lightest, key=lambda item: -item[2]))


def by_cost(model: GPT, stages: int, seq_len: int) -> Parts:
    """Balanced by the multiplications of a forward; the embedding is a look-up and costs next to nothing."""
    return balanced(0, _block_cost(model, seq_len), _head_cost(model), model.num_layers, stages)


def costs(model: GPT, counts: Sequence[int], seq_len: int) -> Parts:
    """What `by_cost` balances, of each stage of a cut: multiplications of a token's forward.

    >>> costs(GPT(num_layers=3, hidden_size=4, num_heads=1, vocab_size=10, max_seq_len=2), (2, 1), 2)
    (400, 240)
    """
    layer, last = _block_cost(model, seq_len), len(counts) - 1
    return tuple(count * layer + (stage == last) * _head_cost(model) for stage, count in enumerate(counts))


def imbalance(loads: Sequence[int]) -> float:
    """How much more the busiest stage does than the mean one: 0.0 is even, 0.5 half as much again."""
    return max(loads) * len(loads) / sum(loads) - 1


def _block_cost(model: GPT, seq_len: int) -> int:
    return block_weights(model) + seq_len * model.hidden_size  # of the causal scores, a half for each of two products


def _head_cost(model: GPT) -> int:
    return model.hidden_size * model.vocab_size


def by_parameters(model: GPT, stages: int) -> Parts:
    """Balanced by the parameters that a stage holds; a tied table is held by the first and by the last stage."""
    hidden = model.hidden_size
    table = hidden * model.vocab_size
    first = table + (hidden * model.max_seq_len if model.positions == "learned" else 0)
    return balanced(first, block_parameters(model), table + _norm(model), model.num_layers, stages)


def block_weights(model: GPT) -> int:
    """Elements of a block's matrices: attention's four (in one of them, less of keys and values), the MLP's two or
    three.
    """
    hidden, ffn = model.hidden_size, model.ffn_size
    qkv, up = hidden + 2 * kv_features(model), (2 if model.activation == "swiglu" else 1) * ffn
    return hidden * (qkv + hidden) + hidden * (up + ffn)


def block_parameters(model: GPT) -> int:
    """All of a block: its matrices, their biases if they have any, two norms."""
    hidden, up = model.hidden_size, (2 if model.activation == "swiglu" else 1) * model.ffn_size
    biases = hidden + 2 * kv_features(model) + hidden + up + hidden if model.bias else 0
    return block_weights(model) + biases + 2 * _norm(model)


def kv_features(model: GPT) -> int:
    """Features of all keys, or of all values, of a token."""
    return model.kv_heads * model.hidden_size // model.num_heads


def _norm(model: GPT) -> int:
    """Parameters of a norm: RMSNorm has no bias."""
    return model.hidden_size * (2 if model.bias and model.norm == "layernorm" else 1)


PATTERN = r"[\w|^$.]+"
"""What may follow 'type:': names, `|` between them, `^` `$` and `.` as in regular expressions."""


def layer_classes(model: GPT) -> tuple[str, str, str, str, str]:
    """Of the layers in order; the third is that of all blocks."""
    positions = "PositionEmbedding" if model.positions == "learned" else "Dropout"
    norm = "LayerNorm" if model.norm == "layernorm" else "RMSNorm"
    return "Embedding", positions, "Block", norm, "Head"


def by_type(pattern: str, model: GPT, stages: int) -> Parts:
    """Balanced by the number of layers whose class name matches; as DeepSpeed's 'type:', case does not count.

    `pattern` is of PATTERN's form: without groups and repetitions no match takes long.
    """
    token, position, block, norm, head = (
        int(re.search(pattern, name, re.IGNORECASE) is not None) for name in layer_classes(model)
    )
    return balanced(token + position, block, norm + head, model.num_layers, stages)


def contiguous(weights: Sequence[int], stages: int) -> Parts:
    """The contiguous cut whose heaviest stage is lightest; where it can, each stage has a layer that weighs something.

    >>> contiguous([8, 0, 4, 0, 4, 0], 2), contiguous([1, 0, 0, 0], 2)
    ((2, 4), (3, 1))
    """
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_filled(weights, middle) <= stages else (middle + 1, high)
    heavy = [index for index, weight in enumerate(weights) if weight]
    anchors = heavy if len(heavy) >= stages else list(range(len(weights)))
    begins, counts = 0, []
    for stages_after in range(stages - 1, 0, -1):
        last = anchors[len(anchors) - stages_after]  # the stages after this one need a layer each
        stop, load = begins, 0
        while stop < last and (load + weights[stop] <= low or stop == begins):
            load, stop = load + weights[stop], stop + 1
        counts.append(stop - begins)
        begins = stop
    return (*counts, len(weights) - begins)


def _num_filled(weights: Sequence[int], most: int) -> int:
    """Stages that are filled, from the left, with at most `most` each."""
    filled, load = 1, 0
    for weight in weights:
        if load + weight > most:
            filled, load = filled + 1, 0
        load += weight
    return filled


def counts_of(stage_ids: Sequence[int], stages: int) -> Parts:
    """Layers on each stage, from the stage of each layer."""
    return tuple(sum(stage == one for one in stage_ids) for stage in range(stages))


def ids_of(counts: Sequence[int]) -> Parts:
    """The stage of each layer, from the layers on each stage."""
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))
