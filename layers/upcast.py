"""Upcast tensors for computations that need more precision: statistics of norms, losses, attention scores."""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return `x` in float32; a float64 tensor is returned unchanged."""
    return x if x.dtype == torch.float64 else x.float()
