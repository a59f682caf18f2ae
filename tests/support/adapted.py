"""Layers of dslpar.layers with frozen weights and LoRA adapters, as `model.lora` makes them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

R = 3
"""Rank of all adapters."""


def adapted(layer: nn.Module, targets: Mapping[str, tuple[slice, ...]]) -> nn.Module:
    """Freeze all parameters of a layer, and add adapters over these blocks to its linears of these names."""
    layer.requires_grad_(False)
    for name, blocks in targets.items():
        for index, each in enumerate(blocks):
            layer.get_submodule(name).add_adapter(R, scale=2.0, name=f"{index}_", blocks=each)  # type: ignore[operator]
    return layer


Q, V, ALL = slice(0, 1), slice(2, 3), slice(None)
