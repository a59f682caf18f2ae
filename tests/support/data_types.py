"""Tensors of every dtype that checkpoints support."""

from __future__ import annotations

import torch

from dslpar.checkpoint.tensor_file import DTYPES

LENGTHS = {"F32": 5, "BF16": 3, "F64": 2, "BOOL": 7, "F8_E4M3": 1, "U8": 0, "I64": 4, "F16": 6}


def one_each() -> dict[str, torch.Tensor]:
    """Return a tensor per dtype, of small odd lengths; one is empty."""
    return {name: torch.arange(length).to(DTYPES[name]) for name, length in LENGTHS.items()}
