"""Models over dslpar.layers, as lists of layers."""

from dslpar.models.gpt import GPT
from dslpar.models.layered import LayeredModel, LayeredModule, LayerSpec, build_layer, build_module

__all__ = ["GPT", "LayerSpec", "LayeredModel", "LayeredModule", "build_layer", "build_module"]
