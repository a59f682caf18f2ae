"""Kernel times of a layer on a device: products, attention and the operations between them.

    layer = kernels_of(costs.layer.work, device, fused=True)     # needs only sizes and the device's data sheet
    products_s(layer.forward, constants, wide_tiles=True)        # seconds with fitted constants

A matrix product [rows, depth] @ [depth, columns] takes its operations over the device's peak, lengthened by three
losses:

1. Tiles and waves. A GPU computes the result in tiles, and one tile per multiprocessor at a time (a wave). Tiles that
   overlap the edge, and an incomplete last wave, compute nothing useful.
2. A small depth does not hide the loads of a tile.
3. A depth or a number of columns that is not a multiple of 64 is slower (misaligned).

A product takes at least as long as its operands take through memory. NVIDIA's guide to matrix multiplication explains a
GPU's efficiency by tiles and waves. The measured efficiencies in vTrain and Calculon show the effect of depth.
Attention runs at a share of the peak, and elementwise operations at the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from dslpar.costs.work import Grouped, Work
from dslpar.forecast.constants import Constants
from dslpar.forecast.device import Device

KERNEL_S = 4e-6
"""Fixed seconds per product's kernel, in addition to compute."""
MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that a product's loads and stores reach."""
MANY_WAVES, LAST_WAVE = 6, 0.92
"""With more than `MANY_WAVES` waves, at least the share `LAST_WAVE` of the tiles' elements counts as useful: the other
waves hide the incomplete last one."""
ALIGNED = 64
"""Depth and columns of a fast product are multiples of this number."""
SCORE_BYTES = 12
"""Bytes read and written per score in attention without a fused kernel: mask, softmax, dropout."""
ODD_HEAD, ODDEST_HEAD = 1.15, 2.0
"""Factors on the time of attention without a fused kernel. The first is for head sizes that are a multiple of 8 but not
of 64, and the second for head sizes that are no multiple of 8."""


class Kernel(NamedTuple):
    """The kernel of one matrix product."""

    peak_s: float
    """Seconds at the device's peak, including those of unused elements of tiles and waves."""
    shallow: float
    """1 / depth."""
    memory_s: float
    """Seconds to read the operands and write the result at the memory's bandwidth."""
    misaligned: bool
    """True if the depth or the number of columns is not a multiple of 64."""


class Kernels(NamedTuple):
    """Compute of one part of a model (a layer or the head) on a rank, as seconds at the peak of the data sheet.

    `Constants` hold the shares of these peaks that devices reach.
    """

    forward: tuple[Kernel, ...]
    """Matrix products of the forward."""
    backward: tuple[Kernel, ...]
    """Two products per forward product, for the gradients of inputs and weights; one if the weight is frozen."""
    fused_s: float
    """Fused attention's forward at the device's peak; 0 without a fused kernel."""
    scores_s: float
    """Matrix products of attention without a fused kernel, in the forward, at the device's peak; else 0."""
    scores_memory_s: float
    """Reads and writes of the scores without a fused kernel, at the memory's bandwidth; else 0."""
    elementwise_s: float
    """Reads and writes of elementwise operations, at the memory's bandwidth."""
    logits_s: float
    """One byte per logit, at the memory's bandwidth."""


def kernels_of(work: Work, device: Device, *, fused: bool, element_bytes: int = 2) -> Kernels:
    """Return the kernels of a part's work; `fused` is True if attention has a fused kernel."""
    per_s = device.flops_per_s  # the caller has chosen the dtype's peak (`Device.computing_in`)
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
    for num, each_rows, inputs, outputs, r in work.sums:
        elements = num * inputs * outputs
        sum_ = Kernel(2 * elements * r / per_s, 1 / r, 2 * elements * moved_s, misaligned=False)
        gradient_s = 2 * elements * each_rows / per_s / _filled(inputs, outputs, tile, num_sms)
        forward.append(sum_)
        # The sum's gradient is a product for each expert, and those of A and B are products with it.
        backward += [Kernel(gradient_s, 1 / each_rows, elements * moved_s, misaligned=False), sum_, sum_]
    for group in work.grouped:
        one, two = _grouped_kernels(group, device, moved_s)
        forward += [one] * group.times
        backward += list(two) * group.times
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


def _grouped_kernels(of: Grouped, device: Device, moved_s: float) -> tuple[Kernel, tuple[Kernel, Kernel]]:
    """Return the kernel of a grouped product, and those of its inputs' and weights' gradients.

    Each weight has tiles of its own, so few rows per weight leave tiles unfilled. All tiles share the kernel's waves.
    Weights and their gradients go through memory whole, however few their rows are.
    """
    num, rows, depth, columns, _ = of
    per_s, size, num_sms = device.flops_per_s, device.tile, device.num_sms
    misaligned = depth % ALIGNED != 0 or columns % ALIGNED != 0
    work_s = 2 * num * rows * depth * columns / per_s
    memory_s = num * (rows * depth + depth * columns + rows * columns) * moved_s

    def kernel(of_rows: float, of_columns: float, of_depth: float) -> Kernel:
        filled = _filled(of_rows, of_columns, size, num_sms, num)
        return Kernel(work_s / filled, 1 / of_depth, memory_s, misaligned)

    gradients = kernel(rows, depth, columns), kernel(depth, columns, max(rows, 1.0))
    return kernel(rows, columns, depth), gradients


def _filled(rows: float, columns: float, tile: tuple[int, int], num_sms: int, num: int = 1) -> float:
    """Return the useful share of the elements that the tiles and waves of `num` products in one kernel compute."""
    tile_rows, tile_columns = tile
    tiles = num * ceil(rows / tile_rows) * ceil(columns / tile_columns)
    waves = ceil(tiles / num_sms)
    filled = num * rows * columns / (tile_rows * tile_columns * waves * num_sms)
    return LAST_WAVE if waves > MANY_WAVES and filled < LAST_WAVE else filled


def products_s(kernels: Sequence[Kernel], constants: Constants, wide_tiles: bool) -> float:
    """Return the total seconds of products; `wide_tiles` is True for tiles wider than 128 columns (Hopper)."""
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
    """Return the seconds of attention's forward, without the projections before and after it."""
    fused = constants.fused_attention * (constants.wide_attention if wide_tiles else 1.0)
    return kernels.fused_s / fused + kernels.scores_s / constants.plain_attention + kernels.scores_memory_s
