"""Weights of layers that a config lists (`layers_cfg`), from the layers' types, since no layer is built yet.

>>> model = OtherModel(target="Sequential", args={"layers_cfg": [dict(type=t) for t in ("Linear", "ReLU") * 2]})
>>> weights(model, "cost"), weights(model, "type:relu"), weights(model, "parameters")
([1, 0, 1, 0], [0, 1, 0, 1], None)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from dslpar.layout.stages import group_layers, num_matches
from dslpar.schema.sections import OtherModel


def weights(model: OtherModel, method: str) -> list[int] | None:
    """Return the weight of each group of layers that stays on one stage (`stages.group_layers`).

    By 'cost', every layer with parameters weighs 1. By 'type:REGEX', every layer that matches weighs 1. By
    'parameters', the result is None, since that method needs the built layers.
    """
    layers, names = model.layers or (), class_names(model)
    if method == "parameters":
        return None
    weigh = _num_with_parameters if method == "cost" else lambda names: num_matches(method, names)
    return [
        weigh([names[position] for position in group])
        for group in group_layers([layer.get("layer_idx") for layer in layers])
    ]


def without_parameters(model: OtherModel, counts: Sequence[int]) -> list[int]:
    """Return the stages of a partition that have no parameters; classes outside torch.nn count as having some.

    >>> model = OtherModel(target="Sequential", args={"layers_cfg": [dict(type=t) for t in ("Linear", "ReLU")]})
    >>> without_parameters(model, (1, 1))
    [1]
    """
    weighed, ends = weights(model, "cost") or [], list(accumulate(counts))
    return [stage for stage, end in enumerate(ends) if not any(weighed[end - counts[stage] : end])]


def are_all_of_torch(model: OtherModel) -> bool:
    """Return whether the config lists the layers and all are classes of torch.nn; any other class may do anything.

    >>> are_all_of_torch(OtherModel(target="Sequential", args={"layers_cfg": [dict(type="Linear"), dict(type="a.B")]}))
    False
    """
    from dslpar.schema.torch_layers import LAYERS  # imported here, as below: most configs list no layers

    names = [str(layer.get("type", layer.get("_target_"))) for layer in model.layers or ()]
    return bool(names) and all(name.removeprefix("torch.nn.") in LAYERS for name in names)


def class_names(model: OtherModel) -> list[str]:
    """Return the name of each layer's class, without its module."""
    return [str(layer.get("type", layer.get("_target_"))).rpartition(".")[2] for layer in model.layers or ()]


def _num_with_parameters(names: Sequence[str]) -> int:
    from dslpar.schema.torch_layers import LAYERS

    return sum(name not in LAYERS or LAYERS[name].parameters for name in names)
