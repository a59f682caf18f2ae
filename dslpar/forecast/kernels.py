"""Kernel times of a layer on a device: products, attention and the operations between them.

    layer = kernels_of(costs.layer.work, device, fused=True)     # of sizes and a data sheet alone
    products_s(layer.forward, constants, wide_tiles=True)        # what a calibration says they take

A product takes its operations over the device's peak, times three losses: tiles at its edges and in its last wave that
compute nothing; a depth too small to hide the loads of a tile; a depth or columns that are not a multiple of 64. It
takes at least as long as its operands take through memory. NVIDIA's guide to matrix multiplication explains a GPU's
efficiency by tiles and waves; the measured efficiencies in vTrain and Calculon show the effect of depth. Attention and
the operations between products are one kind each: operations at a share of the peak, bytes at the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from dslpar.costs.work import Work
from dslpar.forecast.constants import Constants
from dslpar.forecast.device import Device

KERNEL_S = 4e-6
"""Seconds that any kernel takes from its start to its end."""
MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that a product's loads and stores reach."""
MANY_WAVES, LAST_WAVE = 6, 0.92
"""With more than this many waves, other waves hide the empty tiles of the last one, up to this filled share."""
ALIGNED = 64
SCORE_BYTES = 12
"""Bytes read and written per score if attention keeps its scores: mask, softmax, dropout."""
ODD_HEAD, ODDEST_HEAD = 1.15, 2.0
"""Factors on attention that keeps its scores: for head sizes that are a multiple of 8 but not of 64, and for others."""


class Kernel(NamedTuple):
    """One product."""

    peak_s: float
    """Seconds at the device's peak, including what tiles waste."""
    shallow: float
    """1 / depth."""
    memory_s: float
    """Seconds that its operands take through memory."""
    misaligned: bool
    """True if its depth or its columns are not a multiple of 64."""


class Kernels(NamedTuple):
    """Compute of a rank, in seconds before any constant of a calibration is applied."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    """Two products per forward product, for the gradients of inputs and weights; one if the weight is frozen."""
    fused_s: float
    """Fused attention, at the device's peak."""
    scores_s: float
    """Products of attention that keeps its scores, at the device's peak."""
    scores_memory_s: float
    """The scores that attention keeps, through memory."""
    elementwise_s: float
    """All elements between products, through memory."""
    logits_s: float
    """One byte of each logit, through memory."""


def kernels_of(work: Work, device: Device, *, fused: bool, element_bytes: int = 2) -> Kernels:
    """Return the kernels of a layer, or of a head."""
    per_s = device.flops_per_s  # of the compute type (`Device.computing_in`)
    memory_per_s = device.hbm_gb_per_s * 1e9
    moved_s = element_bytes / (memory_per_s * MEMORY_SHARE)
    tile, num_sms = device.tile, device.num_sms
    forward, backward = [], []
    trained = [(each, True) for each in (*work.products, *work.adapters)]
    for (rows, depth, columns), has_weight_gradient in trained + [(each, False) for each in work.frozen]:
        misaligned = depth % ALIGNED != 0 or columns % ALIGNED != 0
        work_s = 2 * rows * depth * columns / per_s
        memory_s = (rows * depth + depth * columns + rows * columns) * moved_s
        forward.append(Kernel(work_s / _filled(rows, columns, tile, num_sms), 1 / depth, memory_s, misaligned))
        backward.append(Kernel(work_s / _filled(rows, depth, tile, num_sms), 1 / columns, memory_s, misaligned))
        if has_weight_gradient:
            backward.append(Kernel(work_s / _filled(depth, columns, tile, num_sms), 1 / rows, memory_s, misaligned))
    fused_s = scores_s = scores_memory_s = 0.0
    for queries, keys, head_size, causal in work.scores:
        seconds = 4 * queries * keys / per_s
        if fused:
            fused_s += seconds / 2 if causal else seconds
        else:
            odd = 1.0 if head_size % ALIGNED == 0 else ODD_HEAD if head_size % 8 == 0 else ODDEST_HEAD
            scores_s += odd * seconds
            scores_memory_s += odd * SCORE_BYTES * queries / head_size * keys / memory_per_s
    return Kernels(
        tuple(forward),
        tuple(backward),
        fused_s,
        scores_s,
        scores_memory_s,
        element_bytes * work.elementwise / memory_per_s,
        work.losses / memory_per_s,
    )


def _filled(rows: float, columns: float, tile: tuple[int, int], num_sms: int) -> float:
    """Return the share of its tiles' and waves' elements that a product of this size fills."""
    tile_rows, tile_columns = tile
    tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns)
    waves = ceil(tiles / num_sms)
    filled = rows * columns / (tile_rows * tile_columns * waves * num_sms)
    return LAST_WAVE if waves > MANY_WAVES and filled < LAST_WAVE else filled


def products_s(kernels: Sequence[Kernel], constants: Constants, wide_tiles: bool) -> float:
    """Return the seconds that products take, one after the other."""
    efficiency, half_depth = constants.product_efficiency, constants.product_depth
    if wide_tiles:
        efficiency *= constants.wide_products
    misalignment = constants.misaligned_products
    total = KERNEL_S * len(kernels)
    for peak_s, shallow, memory_s, misaligned in kernels:
        seconds = peak_s * (1 + half_depth * shallow) / efficiency
        if misaligned:
            seconds *= misalignment
        total += seconds if seconds > memory_s else memory_s
    return total


def attention_s(kernels: Kernels, constants: Constants, wide_tiles: bool) -> float:
    """Return the seconds of attention's forward, without the products around it."""
    fused = constants.fused_attention * (constants.wide_attention if wide_tiles else 1.0)
    return kernels.fused_s / fused + kernels.scores_s / constants.plain_attention + kernels.scores_memory_s
