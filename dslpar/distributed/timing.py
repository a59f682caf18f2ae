"""Timings of products, copies and all-reduces on the devices at hand: what `dslpar measure` runs on each rank.

Each is run a few times before it is timed, then so often that it takes a tenth of a second, from one wait for the
device to the next; of several such rounds the fastest counts: what else a machine does only ever adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.forecast.timings import Timed, TimedSum

PRODUCTS = tuple(
    (rows, depth, columns)
    for rows in (2048, 8192)
    for depth, columns in ((512, 4096), (1024, 4096), (4096, 1024), (4096, 4096), (4096, 16384), (8192, 8192))
)
"""Rows, depth and columns: tokens of a micro-batch, and features of a rank's part of a layer."""
SUM_BYTES = tuple(1 << power for power in range(12, 29, 2))
COPIED_BYTES = 1 << 28
ROUNDS, ROUND_S = 5, 0.1


def time_products(device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]]) -> list[Timed]:
    """Time products of these sizes."""
    found = []
    for rows, depth, columns in sizes:
        x = torch.randn(rows, depth, device=device, dtype=dtype)
        w = torch.randn(columns, depth, device=device, dtype=dtype)
        y = torch.empty(rows, columns, device=device, dtype=dtype)
        seconds = _seconds(lambda x=x, w=w, y=y: torch.mm(x, w.t(), out=y), device)  # type: ignore[misc]
        found.append(Timed((rows, depth, columns), seconds))
    return found


def time_copies(device: torch.device, num_bytes: int = COPIED_BYTES) -> float:
    """Return the bytes that a copy of a large tensor reads and writes in a second."""
    source = torch.zeros(num_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def time_sums(axis: Axis, device: torch.device, sizes: Sequence[int] = SUM_BYTES) -> list[TimedSum]:
    """Time all-reduces of so many bytes over an axis; all its ranks together."""
    found = []
    for num_bytes in sizes:
        x = torch.zeros(num_bytes // 4, device=device)
        # As often on every rank: a rank alone cannot decide how often that is.
        seconds = _seconds(lambda x=x: collectives.all_reduce(x, axis), device, repeats=10)  # type: ignore[misc]
        found.append(TimedSum(float(num_bytes), seconds))
    return found


def _seconds(run: Callable[[], object], device: torch.device, repeats: int | None = None) -> float:
    once = min(_round(run, device, 1) for _ in range(3))
    repeats = repeats or max(1, min(1000, round(ROUND_S / max(once, 1e-6))))
    return min(_round(run, device, repeats) for _ in range(ROUNDS))


def _round(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
