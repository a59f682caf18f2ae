"""Cost of `train.check_replicas`: CPU time of a comparison of replicas, in percent of 50 steps without one.

    python -m benchmarks replica_check

Two engines of one GPT take steps of 512 tokens per rank in turns, and one of them compares after each step. Its extra
time per step, divided by 50, is the cost of a comparison every 50 steps. It includes everything that a comparison does:
hashes, the all-gather, and the verdict. Without ZeRO the most is hashed: weights and both of Adam's moments. The share
falls with the tokens per step: a step of T tokens computes 6 T operations per weight, a comparison 2 per word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.measure import Ratio, in_turns, ratio
from benchmarks.overhead import start_deepspeed
from benchmarks.sides import Step, side
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.linter import check
from dslpar.training.replica_check import ReplicaCheck

TARGET = 0.5
"""Percent."""
INTERVAL = 50
WORLD = 2
SEQUENCE = 128
CONFIG = """
model = dict(type='GPT', num_layers=4, hidden_size=256, num_heads=4, vocab_size=256, max_seq_len={sequence})
optimizer = dict(type='AdamW', lr=3e-4)
batch = dict(micro_size=4)
train = dict(steps=100000, check_replicas={interval})
"""
LAYOUTS = {
    "data 2": "parallel = dict(data=2)\n",
    "data 2, ZeRO 1": "parallel = dict(data=2)\nzero = 1\n",
    "1d sequence": "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True))\n",
}


def ratios() -> Iterator[Ratio]:
    """A line a layout."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name, layout in LAYOUTS.items():
        with side(partial(steps, layout, 1), WORLD) as comparing, side(partial(steps, layout, None), WORLD) as plain:
            shares = [(cpu - 1) / INTERVAL * 100 for (cpu,) in in_turns(comparing, plain)]
        yield ratio(f"{name}: % of a step, comparing every {INTERVAL}", shares, TARGET)


def steps(layout: str, interval: int | None) -> Step:
    """A step, and what `train.check_replicas` adds to it."""
    start_deepspeed()
    text = CONFIG.format(sequence=SEQUENCE, interval=interval) + layout
    job = check.resolve(check.load_text(text, "replica_check.py"), WORLD)
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    replicas = ReplicaCheck(engine)
    ids = torch.arange(4 * SEQUENCE).view(4, SEQUENCE) % 256

    def step() -> None:
        engine.train_batch([(ids, ids)])
        assert replicas.after_step() is None, "replicas differ"

    return step
