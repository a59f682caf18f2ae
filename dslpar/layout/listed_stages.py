"""The cut of layers that a config lists (`layers_cfg`): by what their types tell, since nothing of them is built yet.

Layers of one layer_idx go together, those without one go with their neighbour before (at the beginning: after).

    >>> model = OtherModel(target="Sequential", args={"layers_cfg": [dict(type=t) for t in ("Linear", "ReLU") * 4]})
    >>> counts(model, "cost", 2), counts(model, "type:relu", 3), counts(model, "parameters", 2)
    ((4, 4), (5, 2, 1), None)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from dslpar.layout.stages import Parts, contiguous
from dslpar.schema.sections import OtherModel


def counts(model: OtherModel, method: str, stages: int) -> Parts | None:
    """Layers on each stage by 'cost' (those with parameters weigh the same) or 'type:REGEX'; by 'parameters': None."""
    if method == "parameters":
        return None
    if method == "cost":
        return contiguous(_weights(model, _has_parameters), stages)
    return contiguous(matches(model, method.removeprefix("type:")), stages)


def matches(model: OtherModel, pattern: str) -> list[int]:
    """How many of the layers at each index have a class that matches."""
    return _weights(model, lambda name: re.search(pattern, name, re.IGNORECASE) is not None)


def without_parameters(model: OtherModel, counts: Sequence[int]) -> list[int]:
    """Stages of a cut none of whose layers has parameters; a class of the author's own counts as one that has.

    >>> model = OtherModel(target="Sequential", args={"layers_cfg": [dict(type=t) for t in ("Linear", "ReLU")]})
    >>> without_parameters(model, (1, 1))
    [1]
    """
    weights, ends = _weights(model, _has_parameters), list(accumulate(counts))
    return [stage for stage, end in enumerate(ends) if not any(weights[end - counts[stage] : end])]


def class_names(model: OtherModel) -> list[str]:
    """The name of each layer's class, without its module."""
    return [_class_name(layer) for layer in model.layers or ()]


def _class_name(layer: Mapping[str, Any]) -> str:
    return str(layer.get("type", layer.get("_target_"))).rpartition(".")[2]


def _has_parameters(name: str) -> bool:
    from dslpar.schema.torch_layers import LAYERS

    return name not in LAYERS or LAYERS[name].parameters


def _weights(model: OtherModel, weighs: Callable[[str], bool]) -> list[int]:
    """How many of the layers at each index weigh something."""
    layers, num_layers = model.layers or (), model.num_layers or 0
    weights, index = [0] * num_layers, 0
    alone = all(layer.get("layer_idx") is None for layer in layers)
    for number, layer in enumerate(layers):
        placed = number if alone else layer.get("layer_idx")
        index = index if placed is None else placed % num_layers
        weights[index] += weighs(_class_name(layer))
    return weights
