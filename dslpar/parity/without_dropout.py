"""Disable dropout in built modules, on both sides of a comparison: each rank draws masks for its own piece."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from dslpar.layers.dropout import Dropout


def disable_dropout(module: nn.Module) -> bool:
    """Set the rate of every dropout module to 0; return whether any rate was different."""
    found = [each for each in module.modules() if isinstance(each, _DropoutNd | Dropout) and each.p]
    for each in found:
        each.p = 0.0
    return bool(found)
