"""Classes that sampled configs name: a user's model, a list of layers, a gradient handler, an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dslpar


class Module(nn.Module):
    """A plain module in one piece."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Chain(nn.Sequential):
    """A chain of layers that lint cannot list."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(depth)))


class Listed(dslpar.ModelFromConfig):
    """A model that makes its list of layers itself."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        self.layers_cfg = [dict(type="Linear", in_features=width, out_features=width) for _ in range(depth)]


class Handler(dslpar.BaseGradientHandler):
    """A gradient handler with an argument that does nothing."""

    def __init__(self, model: Any, optimizer: Any, scale: float = 1.0) -> None:
        super().__init__(model, optimizer)
        self.scale = scale

    def handle_gradient(self) -> None:
        return


class Descent(torch.optim.SGD):
    """A user's optimizer."""
