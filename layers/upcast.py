"""Upcast what must be computed more precisely than it is stored: statistics of norms, losses, scores of a ring."""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return `x` in float32; what is float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
