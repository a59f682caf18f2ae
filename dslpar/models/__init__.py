"""Models as lists of layers: dslpar's own families over dslpar.layers, and adapters for other models.

Each family has one folder (such as `gpt`), with all that dslpar knows about it, and is registered in
dslpar.schema.families. Names are imported lazily, since a family's section, layout, costs and rules need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dslpar.core import requirements
from dslpar.schema.families import FAMILIES, class_of

if TYPE_CHECKING:
    from dslpar.models.gpt.model import GPT
    from dslpar.models.layered import LayeredModel, LayeredModule, LayerSpec, assemble, build_layer, build_module
    from dslpar.models.moco.model import MoCo
    from dslpar.models.resmlp.model import ResMLP
    from dslpar.models.sequential import Layers, ModelFromConfig, Sequential, SingleModule, Stage

_NAMES = {
    "layered": ("LayerSpec", "LayeredModel", "LayeredModule", "build_layer", "build_module", "assemble"),
    "sequential": ("Layers", "ModelFromConfig", "Sequential", "Stage", "SingleModule"),
}
"""Public names by module; the families' models come from FAMILIES."""

__all__ = [
    "GPT", "LayerSpec", "LayeredModel", "LayeredModule", "Layers", "MoCo", "ModelFromConfig", "ResMLP", "Sequential",
    "SingleModule", "Stage", "assemble", "build_layer", "build_module",
]  # fmt: skip


def __getattr__(name: str) -> object:
    try:
        if name in FAMILIES:
            return class_of(name, "model")
        for module, names in _NAMES.items():
            if name in names:
                return getattr(import_module(f"dslpar.models.{module}"), name)
    except ModuleNotFoundError as error:
        raise requirements.reraise(error, f"dslpar.models.{name}") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
