"""Host time to enqueue a step: CPU time of dslpar's engine, of a plain loop, and of a nanoGPT-like script.

A GPU that computes faster than its host enqueues has to wait. With 350 million parameters and 8 samples at a time, one
H200 computes for 101 ms of a step, and the host took 142 ms. Here the same 24 layers are so narrow that a CPU spends
its time like the host, in Python and torch's dispatch, and not in products. All run in bf16, dslpar at ZeRO 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import by_hand
from benchmarks.gpu import speed
from benchmarks.gpu.world import engine_of
from benchmarks.measure import Ratio, in_turns, ratio
from benchmarks.overhead import start_deepspeed
from benchmarks.sides import Step, side

SIZES = by_hand.Sizes(layers=24, hidden=64, heads=4, vocab=256, sequence=64, micro=1, accumulation=2)
TARGETS = {"plain torch": 1.05, "nanoGPT-like": 1.15}
CPU = torch.device("cpu")


def ratios() -> Iterator[Ratio]:
    """A step of ours over each of the others'."""
    torch.set_num_threads(1)
    for other, target in TARGETS.items():
        with side(step_of_dslpar, 1) as ours, side(partial(step_of_other, other), 1) as reference:
            name = f"dslpar / {other}, 24 narrow layers, CPU time a step"
            yield ratio(name, [cpu for (cpu,) in in_turns(ours, reference)], target)


def step_of_dslpar() -> Step:
    """Builds dslpar's engine."""
    start_deepspeed()
    engine = engine_of(speed.CONFIG.format(s=SIZES, train=""))
    return partial(engine.train_batch, speed.batches_of(SIZES, CPU))


def step_of_other(name: str) -> Step:
    """Builds the other side."""
    return partial(speed.OTHERS[name](SIZES, CPU), speed.batches_of(SIZES, CPU))
