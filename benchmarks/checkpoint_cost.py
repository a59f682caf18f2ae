"""Checkpoint cost relative to torch.distributed.checkpoint for the same tensors: wall time of a save and of a load.

    python -m benchmarks checkpoint_cost

The tensors are an engine's own: shards of fp32 master weights, and both Adam states. Each side saves every element
once, and flushes its files to disk, as torch's writer does by default. dslpar also hashes them, and writes index,
manifest, random states and schedule. Each side loads its save in place. dslpar first checks every byte against its
digest, and restores the model's weights. torch does neither. The page cache is warm for both. Each measurement covers
all ranks together, from barrier to barrier.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from benchmarks.measure import Costs, Ratio, in_turns, ratio
from benchmarks.overhead import start_deepspeed
from benchmarks.sides import on_ranks
from dslpar import checkpoint
from dslpar.checkpoint import saving
from dslpar.checkpoint.collective import world_of
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.linter import check

TARGET = 1.1
PAIRS = 15
SEQUENCE = 8

CONFIG = """
model = dict(type='GPT', num_layers=6, hidden_size=512, num_heads=8, vocab_size=256, max_seq_len={sequence})
parallel = dict(tensor=dict(size={tensor}, mode='1d'))
zero = dict(stage=1)
optimizer = dict(type='AdamW', lr=3e-4)
train = dict(output_dir={output_dir!r})
"""
"""19 M parameters: 228 MB of master weights and states."""


def ratios() -> Iterator[Ratio]:
    """Measure two data ranks with ZeRO 1, and the same with two tensor ranks each."""
    for world, tensor in ((2, 1), (4, 2)):
        with tempfile.TemporaryDirectory() as made:
            saves, loads = on_ranks(world, partial(measure, Path(made), world, tensor))[0]
        name = f"ours / torch.distributed.checkpoint, {world} ranks"
        yield ratio(f"{name}, save", saves, TARGET)
        yield ratio(f"{name}, load", loads, TARGET)


def measure(folder: Path, world: int, tensor: int) -> tuple[list[float], list[float]]:
    """Return the ratios of saves and of loads, on one of the ranks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    engine = trained(folder / "ours", world, tensor)
    theirs = tensors_of(engine)
    tasks = (
        (partial(save, engine), partial(save_theirs, theirs, folder / "theirs")),
        (partial(load, engine), partial(load_theirs, theirs, folder / "theirs")),
    )
    check_same_size(engine, theirs, folder / "theirs")
    saves, loads = ([pair[0] for pair in in_turns(*task, pairs=PAIRS)] for task in tasks)
    return saves, loads


def trained(output_dir: Path, world: int, tensor: int) -> Engine:
    """Return an engine after one step, when Adam has its states."""
    start_deepspeed()
    text = CONFIG.format(sequence=SEQUENCE, tensor=tensor, output_dir=str(output_dir))
    job = check.resolve(check.load_text(text, "checkpoint_cost.py"), world)
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, SEQUENCE, dtype=torch.int64)
    engine.train_batch([(ids, ids)])
    return engine


Tensors = dict[str, torch.Tensor]


def tensors_of(engine: Engine) -> Tensors:
    """Return dslpar's tensors on this rank, under names that are unique per rank, so that torch saves each, too."""
    _, tensors = saving._collect_tensors(engine, engine.groups.rank)
    return {f"{key}@{engine.groups.rank}": tensor for key, tensor in tensors.items()}


def check_same_size(engine: Engine, tensors: Tensors, folder: Path) -> None:
    """Check that both sides write equally many bytes, apart from names and indices: torch drops no tensor as a copy."""
    save(engine)
    save_theirs(tensors, folder)
    ours, theirs = (
        sum(path.stat().st_size for path in side.rglob("*") if path.is_file())
        for side in (Path(engine.job.output_dir), folder)
    )
    assert abs(ours - theirs) < 0.02 * ours, f"{ours} bytes and {theirs}"


# The four that are timed -----------------------------------------------------------------------------------------


def timed(act: Callable[[], object]) -> Costs:
    """Return wall seconds until all ranks have finished."""
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return (time.perf_counter() - began,)


def cleared(folder: Path) -> None:
    """Empty the folder, so that each save writes new files."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def save(engine: Engine) -> Costs:
    """Save with dslpar."""
    cleared(Path(engine.job.output_dir))
    return timed(partial(checkpoint.save, engine))


def save_theirs(tensors: Tensors, folder: Path) -> Costs:
    """Save with torch."""
    cleared(folder)
    return timed(partial(torch_save, tensors, checkpoint_id=folder))


def load(engine: Engine) -> Costs:
    """Load the newest checkpoint with dslpar, after verifying all of it."""

    def newest() -> None:
        stored = checkpoint.find_checkpoint(engine.job, world_of(engine))
        assert stored is not None
        checkpoint.load(engine, stored)

    return timed(newest)


def load_theirs(tensors: Tensors, folder: Path) -> Costs:
    """Load with torch."""
    return timed(partial(torch_load, tensors, checkpoint_id=folder))
