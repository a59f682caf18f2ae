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
        >>> peak_flops_per_s("NVIDIA GeForce GTX 1080", "bf16") is None
        True
    """
    if is_partial(device):
        return None
    for chip in CHIPS.values():
        if re.search(chip.driver, device):
            tflops: float | None = getattr(chip, dtype, None)
            return None if tflops is None else tflops * 1e12
    return None


def is_partial(device: str) -> bool:
    """Return whether a name that the driver reports is that of a part of a device, which has a lower peak.

    NVIDIA's MIG instances and virtual GPUs are such parts.
    """
    return re.search(r"\bMIG\b|\bGRID\b|-\d+C$", device) is not None


class Chip(NamedTuple):
    """Peaks of a chip in dense products, TFLOP/s; None if the chip has no such products."""

    driver: str
    """Regular expression for the names that drivers report."""
    fp16: float
    bf16: float | None
    fp32: float
    """Without TF32."""


CHIPS: Mapping[str, Chip] = {
    # NVIDIA's data sheets; rates "with sparsity" are halved. V100 (2017), V100S (2019):
    "V100S PCIe": Chip(r"\bV100S-PCIE\b", 130, None, 16.4),
    "V100 PCIe": Chip(r"\bV100-PCIE\b", 112, None, 14),
    "V100": Chip(r"\bV100-SXM[23]\b", 125, None, 15.7),
    "A10": Chip(r"\bA10$", 125, 125, 31.2),
    "A100": Chip(r"\bA100\b", 312, 312, 19.5),
    "L4": Chip(r"\bL4$", 121, 121, 30.3),
    "L40S": Chip(r"\bL40S$", 362.05, 362.05, 91.6),
    "RTX 4090": Chip(r"\bRTX 4090$", 165.2, 165.2, 82.6),
    "H100 NVL": Chip(r"\bH100 NVL\b", 835.5, 835.5, 60),
    "H100 PCIe": Chip(r"\bH100 PCIe\b", 756.5, 756.5, 51),
    "H100": Chip(r"\bH100 80GB HBM3\b|\bH100.*96GB\b", 989.5, 989.5, 67),
    "H200 NVL": Chip(r"\bH200 NVL\b", 835.5, 835.5, 60),
    "H200": Chip(r"\bH200\b", 989.5, 989.5, 67),
    "H800": Chip(r"\bH800\b", 989.5, 989.5, 67),
    "GH200": Chip(r"\bGH200\b", 989.5, 989.5, 67),
    "B200": Chip(r"\bB200\b", 2250, 2250, 75),
    "GB200": Chip(r"\bGB200\b", 2500, 2500, 80),
    "B300": Chip(r"\bB300\b", 2250, 2250, 76),
    # AMD's data sheets; torch sees each half of an MI250X as its own device. "MI250X / MI250" may be either.
    "MI250X": Chip(r"\bMI250X$", 191.5, 191.5, 47.85),
    "MI300X": Chip(r"\bMI300X\b", 1307.4, 1307.4, 163.4),
    "MI325X": Chip(r"\bMI325X\b", 1307.4, 1307.4, 163.4),
}
"""Chips by name; the first whose `driver` matches a device's name counts."""
