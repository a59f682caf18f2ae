"""What is computed more finely than it is stored: statistics of norms, losses, the scores of a ring."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """In float32, or in float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()
