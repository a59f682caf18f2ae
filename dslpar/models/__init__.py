"""Models over dslpar.layers, as lists of layers; and other people's."""

from dslpar.models.gpt import GPT
from dslpar.models.layered import LayeredModel, LayeredModule, LayerSpec, build_layer, build_module, module_of
from dslpar.models.sequential import Layers, ModelFromConfig, Sequential, Stage, Whole

__all__ = [
    "GPT", "LayerSpec", "LayeredModel", "LayeredModule", "Layers", "ModelFromConfig", "Sequential", "Stage", "Whole",
    "build_layer", "build_module", "module_of",
]  # fmt: skip
