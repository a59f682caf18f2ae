"""Tensors that autograd saves in a layer's forward."""

from __future__ import annotations

import torch


def saved_by(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Return the number of elements that a forward keeps alive for the backward."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    alive: list[torch.Tensor] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.is_floating_point() and saved.untyped_storage().data_ptr() not in parameters:
            alive.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        _y = layer(x)
    storages = {saved.untyped_storage().data_ptr(): saved.untyped_storage().nbytes() for saved in alive}
    return sum(storages.values()) / x.element_size()
