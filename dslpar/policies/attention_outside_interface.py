"""Attention of models that compute scores in their own code, without transformers' attention interface (Bloom).

The code runs unchanged, on this rank's samples and heads. Its arguments besides the residual are fitted to these
samples and heads. A mask recipe becomes an additive mask, and values per sample and head (alibi, arXiv 2108.12409) are
sliced. The code must attend to whole sequences, so modes that split the sequence are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.policies.attention import Recipe


def fit_arguments(region: nn.Module, groups: Groups, by_head: Sequence[str], num_heads: int) -> None:
    """Register a hook that fits the arguments of an attention region to this rank's samples and heads.

    Arguments in `by_head` have shape [samples * heads, ...], for all samples or for one. Call this after the region's
    entrance was registered: its hook runs first, so the first argument then has the local shape.
    """
    cuts = placement.inner_cuts(groups.tensor)

    def piece(numbers: Tensor, batch: int) -> Tensor:
        numbers = torch.unflatten(numbers, 0, (-1, num_heads))
        numbers = placement.take(numbers, 1, groups.tensor, groups.coord, cuts.features)
        if len(numbers) == 1:
            numbers = numbers.expand(batch, *numbers.shape[1:])
        else:
            numbers = placement.take(numbers, 0, groups.tensor, groups.coord, cuts.batch)
        return numbers.flatten(0, 1)

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if groups.axis(*cuts.sequence).size > 1:
            message = f"{type(module).__name__} computes its scores itself over whole sequences, which this mode splits"
            raise_finding("TEN235", message, "use another tensor mode", key="parallel.tensor")
        x: Tensor = args[0]
        fitted: dict[str, Tensor | None]
        fitted = {name: piece(value, len(x)) for name, value in kwargs.items() if name in by_head}
        fitted |= {name: value.added(groups, x) for name, value in kwargs.items() if isinstance(value, Recipe)}
        return args, kwargs | fitted

    region.register_forward_pre_hook(hook, with_kwargs=True)
