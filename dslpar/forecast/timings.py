"""Fit constants of the forecast to timings of single kernels and collectives, which `dslpar measure` makes.

    constants = constants_of(Timings(products=(Timed((8192, 4096, 4096), 1.1e-3),)), device, Nodes.usual(device))

`dslpar plan --calibrate` needs training runs, while these timings need a minute on the devices. Matrix products of
several depths determine `product_efficiency` and `product_depth`. All-reduces of several sizes determine the efficiency
and the latency of links, within a node or between nodes. The other constants keep their defaults. vTrain and Calculon
also start from a few such timings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import NamedTuple

from dslpar.costs.work import Product, Work
from dslpar.forecast.constants import BOUNDS, DEFAULT, Constants
from dslpar.forecast.device import Device
from dslpar.forecast.kernels import Kernel, kernels_of, products_s
from dslpar.forecast.links import Group, Nodes, transfer

STEPS = (0.5, 0.2, 0.08, 0.03, 0.01, 0.003)
"""Step sizes of the fit, in the logarithm of a constant, from coarse to fine."""


class Timed(NamedTuple):
    """A timed product [rows, depth] @ [depth, columns]."""

    product: tuple[int, int, int]
    seconds: float


class TimedSum(NamedTuple):
    """A timed all-reduce over all ranks."""

    num_bytes: float
    """Size of the tensor on each rank."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Timings of single operations on this machine's devices."""

    products: tuple[Timed, ...] = ()
    sums: tuple[TimedSum, ...] = ()
    world_size: int = 1
    copied_gb_per_s: float | None = None
    """Bandwidth of copying a large tensor, reads plus writes; reported only, no constant uses it."""


def constants_of(timings: Timings, device: Device, nodes: Nodes, element_bytes: int = 2) -> Constants:
    """Return the default constants with those replaced that the timings determine.

    `device` must have the peak of the timed dtype (`Device.computing_in`).
    """
    constants = DEFAULT
    if timings.products:
        parts = [_kernels(each, device, element_bytes) for each in timings.products]
        wide = device.tile[1] > 128

        def product_loss(made: Constants) -> float:
            return _loss([(products_s([part], made, wide), seconds) for part, seconds in parts])

        constants = _fitted(constants, ("product_efficiency", "product_depth"), product_loss)
    if timings.sums and timings.world_size > 1:
        size = timings.world_size
        group = Group(size, min(size, nodes.per_node), 1.0)
        sent = 2 * (size - 1) / size
        transfers = [
            (transfer("all_reduce", group, device, nodes, sent * each.num_bytes), each.seconds) for each in timings.sums
        ]

        def sum_loss(made: Constants) -> float:
            return _loss([(each.seconds(made), seconds) for each, seconds in transfers])

        names = ("nic_efficiency", "nic_latency_s") if group.across else ("link_efficiency", "link_latency_s")
        constants = _fitted(constants, names, sum_loss)
    return constants


def _kernels(timed: Timed, device: Device, element_bytes: int) -> tuple[Kernel, float]:
    work = Work(products=(Product(*map(float, timed.product)),))
    return kernels_of(work, device, fused=True, element_bytes=element_bytes).forward[0], timed.seconds


def _loss(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean square of log(forecast / measured)."""
    return sum(log(forecast / measured) ** 2 for forecast, measured in pairs) / len(pairs)


def _fitted(start: Constants, names: Sequence[str], loss: Callable[[Constants], float]) -> Constants:
    """Fit the constants in `names` by coordinate descent with smaller and smaller steps, within their bounds."""
    best, least = start, loss(start)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in names:
                for factor in (exp(step), exp(-step)):
                    low, high = BOUNDS[name]
                    trial = replace(best, **{name: min(max(getattr(best, name) * factor, low), high)})
                    if (found := loss(trial)) < least * (1 - 1e-9):
                        best, least, moved = trial, found, True
    return best
