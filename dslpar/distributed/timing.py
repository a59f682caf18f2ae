"""Time matrix products, copies and all-reduces on this rank's device, for `dslpar measure`.

Each operation runs a few times untimed. A round then repeats it for a tenth of a second, between two synchronizations
of the device. The fastest of several rounds counts, because other load on the machine only adds time.
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
"""(rows, depth, columns): tokens of a micro-batch, and input and output features of a rank's part of a layer."""
SUM_BYTES = tuple(1 << power for power in range(12, 29, 2))
COPIED_BYTES = 1 << 28
ROUNDS, ROUND_S = 5, 0.1


def time_products(device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]]) -> list[Timed]:
    """Time matrix products of these sizes."""
    found = []
    for rows, depth, columns in sizes:
        x = torch.randn(rows, depth, device=device, dtype=dtype)
        w = torch.randn(columns, depth, device=device, dtype=dtype)
        y = torch.empty(rows, columns, device=device, dtype=dtype)
        seconds = _seconds(lambda x=x, w=w, y=y: torch.mm(x, w.t(), out=y), device)  # type: ignore[misc]
        found.append(Timed((rows, depth, columns), seconds))
    return found


def time_copies(device: torch.device, num_bytes: int = COPIED_BYTES) -> float:
    """Return the bytes per second that a copy of a large tensor reads and writes."""
    source = torch.zeros(num_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def time_sums(axis: Axis, device: torch.device, sizes: Sequence[int] = SUM_BYTES) -> list[TimedSum]:
    """Time all-reduces of these sizes in bytes over an axis. All ranks of the axis must call it together."""
    found = []
    for num_bytes in sizes:
        x = torch.zeros(num_bytes // 4, device=device)
        # A fixed number of repeats: all ranks must repeat equally often.
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
