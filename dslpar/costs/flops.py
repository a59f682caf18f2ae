"""Model FLOPs per token by two conventions, and peak FLOP/s of devices.

Both conventions count only the multiplications and additions of matrix products. The forward has two per weight and
token, and the backward twice as many. Neither convention counts recomputation by activation checkpointing, like the
"model FLOPs" of PaLM (arXiv 2204.02311, appendix B). Rotary positions, norms and activation functions are not matrix
products. With grouped queries, each key and value head is projected once, and multiplied with each of its query heads.

`mfu_6n`      6 N per token. N is the number of multiplied weights: those of the blocks and the head, without embedding
              tables. C = 6 N comes from Kaplan et al. (arXiv 2001.08361). N here includes the head.
`mfu_causal`  adds the products of attention to `mfu_6n`. It counts half of the s * s scores per head and sequence (s
              tokens), which a causal mask leaves, like FlashAttention (arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Flops(NamedTuple):
    """FLOPs of one token, forward and backward, by the conventions `mfu_causal` and `mfu_6n`."""

    mfu_causal: int
    mfu_6n: int


def per_token(multiplied_weights: int, score_products: int, frozen: int = 0) -> Flops:
    """Return the FLOPs per token of a model, from its multiplied weights and its products of attention.

    frozen: number of the multiplied weights that are not trained. They have no gradient, so each needs a third fewer
        operations.
    score_products: multiplications in attention per token without a mask: layers * 2 * hidden size * sequence length.
        The factor 2 counts q with k and the softmax with v.
    """
    products = 6 * multiplied_weights - 2 * frozen
    return Flops(mfu_causal=products + 6 * score_products // 2, mfu_6n=products)


def peak_flops_per_s(device: str, dtype: str) -> float | None:
    """Return a device's peak FLOP/s in dense products of that dtype; None if unknown.

    device: the name that the driver reports.
    dtype: "fp16", "bf16" or "fp32"; the latter without TF32, which torch leaves off by default.

        >>> peak_flops_per_s("NVIDIA A100-SXM4-80GB", "bf16")
        312000000000000.0
        >>> peak_flops_per_s("NVIDIA GeForce RTX 4090", "bf16") is None
        True
    """
    if re.search(_PARTIAL_DEVICE, device):
        return None
    for pattern, peaks in PEAKS.items():
        if re.search(pattern, device):
            return peaks[dtype] * 1e12 if dtype in peaks else None
    return None


_PARTIAL_DEVICE = r"\bMIG\b|\bGRID\b|-\d+C$"
"""Matches names of NVIDIA's MIG instances and virtual GPUs: parts of a device, which have a lower peak."""


def _both(half: float, fp32: float) -> Mapping[str, float]:
    return {"fp16": half, "bf16": half, "fp32": fp32}


PEAKS: Mapping[str, Mapping[str, float]] = {
    # NVIDIA's data sheets; rates "with sparsity" are halved. V100 (2017), V100S (2019):
    r"\bV100S-PCIE\b": {"fp16": 130, "fp32": 16.4},
    r"\bV100-PCIE\b": {"fp16": 112, "fp32": 14},
    r"\bV100-SXM[23]\b": {"fp16": 125, "fp32": 15.7},
    r"\bA10$": _both(125, 31.2),
    r"\bA100\b": _both(312, 19.5),
    r"\bL4$": _both(121, 30.3),
    r"\bL40S$": _both(362.05, 91.6),
    r"\bH100 NVL\b": _both(835.5, 60),
    r"\bH100 PCIe\b": _both(756.5, 51),
    r"\bH100 80GB HBM3\b": _both(989.5, 67),
    r"\bH200 NVL\b": _both(835.5, 60),
    r"\bH200\b": _both(989.5, 67),
    r"\bB200\b": {"fp16": 2250, "bf16": 2250},
    # AMD's data sheets; torch sees each half of an MI250X as its own device. "MI250X / MI250" may be either.
    r"\bMI250X$": _both(191.5, 47.85),
    r"\bMI300X\b": _both(1307.4, 163.4),
}
"""TFLOP/s of dense products by device and dtype; the first pattern found in the device's name counts."""
