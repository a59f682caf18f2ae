"""Compare all tensor modes on 4 and on 8 ranks: cost per rank of a step of two transformer blocks.

    python -m benchmarks.modes

Hidden 256, 8 heads, micro-batches of 8 samples of 128 tokens, fp32, over gloo; forward and backward, no optimizer.

cpu ms     CPU time of all ranks together, waiting excluded; the median of steps that the modes take in turns
of 1d      the same over 1d's
weights    bytes of the parameters that a rank holds
saved      bytes that its forward keeps for the backward, weights and the input excluded
peak       the most that torch's allocator holds at once within a step: weights, what is saved, gradients, temporaries;
           the median of three steps, within some 10 %: gloo's threads let go of what they sent when they come to it
sent       elements that a rank sends, by ring counts (tests.support.traffic_counter)

Megabytes are 10^6 bytes, on the rank with the most. Ranks share the cores of this machine, so CPU time measures the
work, not the time on a cluster.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.sides import on_ranks
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, initialize, placement
from tests.support.traffic_counter import counting

LAYERS, HIDDEN, HEADS, MICRO, SEQUENCE = 2, 256, 8, 8, 128
WARM_UP, STEPS = 1, 5

MODES: dict[int, dict[str, mesh.TensorMesh]] = {
    4: {
        "1d": mesh.TensorMesh(y=4, mode="1d"),
        "1d, sequence": mesh.TensorMesh(y=4, mode="1d", residual="sequence"),
        "2d": mesh.TensorMesh(q=2, y=2, mode="2d", residual="hidden"),
        "2.5d, depth 4": mesh.TensorMesh(d=4, mode="2.5d", residual="hidden"),
        "cuboid 1x2x2": mesh.TensorMesh(y=2, z=2, mode="cuboid", residual="hidden", keep="none"),
        "cuboid 2x1x2": mesh.TensorMesh(q=2, z=2, mode="cuboid", residual="hidden", keep="none"),
        "sequence, ring": mesh.TensorMesh(d=4, mode="sequence", split="sequence"),
        "sequence, ulysses": mesh.TensorMesh(d=4, mode="sequence", split="sequence", impl="ulysses"),
    },
    8: {
        "1d": mesh.TensorMesh(y=8, mode="1d"),
        "1d, sequence": mesh.TensorMesh(y=8, mode="1d", residual="sequence"),
        "2.5d, depth 2": mesh.TensorMesh(d=2, q=2, y=2, mode="2.5d", residual="hidden"),
        "3d": mesh.TensorMesh(q=2, y=2, z=2, mode="3d", residual="batch", inner="batch", keep="none"),
        "3d, sequence, heads": mesh.TensorMesh(q=2, y=2, z=2, mode="3d", residual="sequence", keep="none"),
        "cuboid 2x4x1": mesh.TensorMesh(q=2, y=4, mode="cuboid", residual="hidden", keep="none"),
        "cuboid 2x2x2": mesh.TensorMesh(q=2, y=2, z=2, mode="cuboid", residual="hidden", keep="none"),
        "sequence, ring": mesh.TensorMesh(d=8, mode="sequence", split="sequence"),
        "sequence, ulysses": mesh.TensorMesh(d=8, mode="sequence", split="sequence", impl="ulysses"),
    },
}
HEADER = f"{'mode':22} {'cpu ms':>8} {'of 1d':>6} {'weights MB':>11} {'saved MB':>9} {'peak MB':>8} {'sent':>10}"


class Cost(NamedTuple):
    """Cost of one rank."""

    cpu_s: tuple[float, ...]
    """Seconds of each step."""
    weights_bytes: int
    saved_bytes: int
    peak_bytes: int
    sent: int


def main() -> int:
    """Print the tables."""
    torch.set_num_threads(1)
    print(__doc__)
    for world, modes in MODES.items():
        print(f"{world} ranks\n{HEADER}", flush=True)
        for line in lines(list(modes), on_ranks(world, partial(costs, list(modes.values())))):
            print(line, flush=True)
        print()
    return 0


def lines(names: list[str], ranks: list[list[Cost]]) -> Iterator[str]:
    """Yield a line per mode; the first is the reference of the others."""
    by_mode = list(zip(*ranks, strict=True))
    cpu_s = [[sum(step) for step in zip(*(cost.cpu_s for cost in mode), strict=True)] for mode in by_mode]
    for name, mode, steps in zip(names, by_mode, cpu_s, strict=True):
        over_first = median(mine / first for mine, first in zip(steps, cpu_s[0], strict=True))
        weights, saved, peak, sent = (max(cost[i] for cost in mode) for i in range(1, len(Cost._fields)))
        bytes_of = f"{weights / 1e6:11.2f} {saved / 1e6:9.2f} {peak / 1e6:8.2f}"
        yield f"{name:22} {median(steps) * 1e3:8.1f} {over_first:6.2f} {bytes_of} {sent:10,}"


# A rank ---------------------------------------------------------------------------------------------------------


def costs(modes: list[mesh.TensorMesh]) -> list[Cost]:
    """Return the cost of each mode on this rank. All are built first, and then step in turns."""
    sides = [Side(Groups(Mesh(tensor=tensor))) for tensor in modes]
    for side in sides:
        for _ in range(WARM_UP):
            side.step()
    cpu_s = [[cpu_s_of(side.step) for side in sides] for _ in range(STEPS)]
    return [side.cost(tuple(mine)) for side, mine in zip(sides, zip(*cpu_s, strict=True), strict=True)]


def cpu_s_of(step: Callable[[], None]) -> float:
    """Return the CPU seconds of this process, all threads included."""
    began = time.process_time()
    step()
    return time.process_time() - began


class Side:
    """The blocks of one mode, with this rank's shard of one micro-batch."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.model = nn.Sequential(*(Block(groups, HIDDEN, HEADS) for _ in range(LAYERS)))
        initialize(self.model, groups, seed=1)
        at = placement.residual(groups.tensor, MICRO, SEQUENCE, HIDDEN)
        self.x = torch.randn(at.local_shape).requires_grad_()
        self.y_grad = torch.randn(at.local_shape)

    def step(self) -> None:
        """Run forward and backward, with gradients reset before and after."""
        self.model(self.x).backward(self.y_grad)
        self.model.zero_grad()
        self.x.grad = None

    def cost(self, cpu_s: tuple[float, ...]) -> Cost:
        """Return the cost, with more steps to count the other columns."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        with counting(self.groups) as sent:
            self.step()
        peak = median(self.peak_bytes() for _ in range(3))
        return Cost(cpu_s, weights, self.saved_bytes(), weights + int(peak), int(sent.elements.total))

    def saved_bytes(self) -> int:
        """Return the bytes of storages that the forward keeps, each counted once."""
        held = {storage(tensor) for tensor in (*self.model.parameters(), self.x)}
        saved: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            if storage(value) not in held:
                saved[storage(value)] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            y = self.model(self.x)
        y.backward(self.y_grad)
        self.model.zero_grad()
        return sum(saved.values())

    def peak_bytes(self) -> int:
        """Return the peak allocation of one step, from the allocations and releases that torch's profiler records."""
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with without_stderr(), torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            self.step()
        events = profile.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        held = peak = 0
        for _, change in changes:
            held += change
            peak = max(peak, held)
        return peak


@contextmanager
def without_stderr() -> Iterator[None]:
    """Silence the profiler, which prints its start, its end, and memory whose allocation it did not see."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as elsewhere:
        os.dup2(elsewhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def storage(tensor: Tensor) -> int:
    """Return the id of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


if __name__ == "__main__":
    sys.exit(main())
