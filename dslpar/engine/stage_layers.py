"""Map a model's layers to pipeline stages and ranks, without building anything.

    >>> stage_parts([None, 0, 1, 2, None, -1], [2, 1])       # embedding, three blocks, norm, head
    [0, 3, 6]

The first stage also has the layers before the blocks, and the last stage the layers after the blocks. This module needs
no DeepSpeed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from dslpar.layout.chunks import Chunks
from dslpar.models.layered import LayerSpec

TIED_WEIGHT = "weight"
"""The only module attribute that two stages may share."""


def stage_parts(layer_idx: Sequence[int | None], counts: Sequence[int]) -> list[int]:
    """Return the position of each stage's first layer, then the number of layers (DeepSpeed's "parts").

    `layer_idx` has each layer's index (see `LayerSpec`); `counts` has the number of indices on each stage.

        >>> stage_parts([None, 0, 1, 2, None, -1], [2, 1])       # embedding, three blocks, norm, head
        [0, 3, 6]

    Raises:
        ValueError: the indices do not increase, or their number is not the sum of `counts`.
    """
    known = [index % sum(counts) if index is not None and index >= -sum(counts) else index for index in layer_idx]
    indices = [index for index in known if index is not None]
    if indices != sorted(indices) or sorted(set(indices)) != list(range(sum(counts))):
        raise ValueError(f"layer_idx {list(layer_idx)} do not increase from 0 to {sum(counts) - 1}")
    begins = [known.index(before) for before in accumulate(counts[:-1])]
    return [0, *begins, len(known)]


def held_layers(specs: Sequence[LayerSpec], counts: Sequence[int], chunks: Chunks, rank: int) -> list[str]:
    """Return the module names of a rank's stages, in order; `counts` is as in `stage_parts`, or () for one stage.

    Raises:
        ValueError: the pipeline has no such rank.
    """
    parts = parts_of(specs, counts)
    if not 0 <= rank < chunks.pipe:
        raise ValueError(f"there is no rank {rank}: the pipeline has {chunks.pipe}")
    held = (spec for stage in chunks.held_by(rank) for spec in specs[parts[stage] : parts[stage + 1]])
    # Without duplicates: a dropout module may run twice.
    return list(dict.fromkeys(name for spec in held for name in spec.module_names))


def shared_params(specs: Sequence[LayerSpec], counts: Sequence[int], chunks: Chunks) -> list[dict[int, str]]:
    """Return, for each weight that several pipeline ranks hold, its name by rank."""
    parts = parts_of(specs, counts)
    found = []
    for owner in dict.fromkeys(spec.owner for spec in specs if spec.tied):
        names: dict[int, str] = {}
        for index, spec in enumerate(specs):
            if spec.owner == owner:
                rank = chunks.rank_of(bisect(parts, index) - 1)
                names.setdefault(rank, f"{spec.name}.{TIED_WEIGHT}")
        found += [names] if len(names) > 1 else []
    return found


def parts_of(specs: Sequence[LayerSpec], counts: Sequence[int]) -> list[int]:
    """Return the position of each stage's first layer, as `stage_parts`; with one stage, layers need no index."""
    one_stage = len(counts) < 2
    return [0, len(specs)] if one_stage else stage_parts([spec.layer_idx for spec in specs], counts)
