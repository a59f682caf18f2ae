"""Wait of the steps for a checkpoint that a thread writes, over the wait for one that is written at once.

    python -m benchmarks save_stall

The checkpoint of a GPT of 50 M parameters with AdamW and ZeRO 1 on two data ranks has 600 MB. Steps wait for a thread's
checkpoint twice: for the copy, and for publishing once all ranks have written. Steps would fill the time in between.
The copy reuses the memory of an earlier save, as all but a run's first one do. A line's name has the seconds of both
waits.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.checkpoint_cost import cleared, save, timed
from benchmarks.measure import Costs, Ratio, ratio
from benchmarks.overhead import start_deepspeed
from benchmarks.sides import on_ranks
from dslpar import checkpoint
from dslpar.checkpoint import HostBuffers
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.linter import check

TARGET = 0.5
"""A copy of memory that is there, over hashing the same bytes and bringing them to the disk."""
PAIRS = 15
WORLD = 2
SEQUENCE = 8
CONFIG = """
model = dict(type='GPT', num_layers=7, hidden_size=768, num_heads=8, vocab_size=256, max_seq_len={sequence})
zero = dict(stage=1)
optimizer = dict(type='AdamW', lr=3e-4)
train = dict(output_dir={output_dir!r})
"""


def ratios() -> Iterator[Ratio]:
    """One line: the wait of a step."""
    with tempfile.TemporaryDirectory() as made:
        waits = on_ranks(WORLD, partial(measure, Path(made)))[0]
    begun, published, whole = (median(seconds) for seconds in zip(*waits, strict=True))
    shares = [(begin_s + publish_s) / save_s for begin_s, publish_s, save_s in waits]
    name = f"wait for a save, {begun:.2f} + {published:.2f} s / {whole:.2f} s at once"
    yield ratio(name, shares, TARGET)


def measure(folder: Path) -> list[tuple[float, float, float]]:
    """Seconds of a copy, of publishing, and of a save that is written at once."""
    warnings.simplefilter("ignore")
    engine, buffers = trained(folder), HostBuffers()
    begin_and_publish(engine, buffers)
    waits = []
    for _ in range(PAIRS):
        begin_s, publish_s = begin_and_publish(engine, buffers)
        (save_s,) = save(engine)
        waits.append((begin_s, publish_s, save_s))
    return waits


def trained(output_dir: Path) -> Engine:
    """An engine after one step: Adam has its states."""
    start_deepspeed()
    text = CONFIG.format(sequence=SEQUENCE, output_dir=str(output_dir))
    job = check.resolve(check.load_text(text, "save_stall.py"), WORLD)
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, SEQUENCE, dtype=torch.int64)
    engine.train_batch([(ids, ids)])
    return engine


def begin_and_publish(engine: Engine, buffers: HostBuffers) -> Costs:
    """Wall seconds of both, with all that is between them outside."""
    cleared(Path(engine.job.output_dir))
    pending: list[checkpoint.PendingSave] = []
    (begin_s,) = timed(lambda: pending.append(checkpoint.begin_save(engine, buffers)))
    while not pending[0].is_written:
        time.sleep(0.01)
    return begin_s, *timed(pending[0].publish)
