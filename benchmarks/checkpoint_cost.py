"""Wall time of saving and loading a checkpoint, over torch.distributed.checkpoint with the same tensors.

    python -m benchmarks checkpoint_cost

The tensors are an engine's own: shards of fp32 master weights, and both of Adam's states. Each side saves all of them,
every element once, and flushes its files to disk (torch's writer does so by default). dslpar also hashes them, and
writes index, manifest, random states and schedule. Each side loads its own files in place. dslpar first compares every
byte with its digest, and then restores the model's weights; torch does neither. The page cache is warm for both. Each
measurement covers all ranks together, from barrier to barrier.
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
"""19 M parameters: 228 MB of masters and states."""


def ratios() -> Iterator[Ratio]:
    """Two data ranks with ZeRO 1, and two of those on two tensor ranks each."""
    for world, tensor in ((2, 1), (4, 2)):
        with tempfile.TemporaryDirectory() as made:
            saves, loads = on_ranks(world, partial(measure, Path(made), world, tensor))[0]
        name = f"ours / torch.distributed.checkpoint, {world} ranks"
        yield ratio(f"{name}, save", saves, TARGET)
        yield ratio(f"{name}, load", loads, TARGET)


def measure(folder: Path, world: int, tensor: int) -> tuple[list[float], list[float]]:
    """The ratios of saves and of loads, on one of the ranks."""
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
    """An engine after one step: Adam has its states."""
    start_deepspeed()
    text = CONFIG.format(sequence=SEQUENCE, tensor=tensor, output_dir=str(output_dir))
    job = check.resolve(check.load_text(text, "checkpoint_cost.py"), world)
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, SEQUENCE, dtype=torch.int64)
    engine.train_batch([(ids, ids)])
    return engine


Tensors = dict[str, torch.Tensor]


def tensors_of(engine: Engine) -> Tensors:
    """Return the tensors that dslpar saves on this rank. Names differ per rank, so that torch saves all of them."""
    _, tensors = saving._collect_tensors(engine, engine.groups.rank)
    return {f"{key}@{engine.groups.rank}": tensor for key, tensor in tensors.items()}


def check_same_size(engine: Engine, tensors: Tensors, folder: Path) -> None:
    """Both sides write as many bytes, but for names and indices: torch leaves no tensor out as a copy of another."""
    save(engine)
    save_theirs(tensors, folder)
    ours, theirs = (
        sum(path.stat().st_size for path in side.rglob("*") if path.is_file())
        for side in (Path(engine.job.output_dir), folder)
    )
    assert abs(ours - theirs) < 0.02 * ours, f"{ours} bytes and {theirs}"


# The four that are timed -----------------------------------------------------------------------------------------


def timed(act: Callable[[], object]) -> Costs:
    """Wall seconds, until all ranks are through."""
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return (time.perf_counter() - began,)


def cleared(folder: Path) -> None:
    """Each save writes new files."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def save(engine: Engine) -> Costs:
    """Ours."""
    cleared(Path(engine.job.output_dir))
    return timed(partial(checkpoint.save, engine))


def save_theirs(tensors: Tensors, folder: Path) -> Costs:
    """torch's."""
    cleared(folder)
    return timed(partial(torch_save, tensors, checkpoint_id=folder))


def load(engine: Engine) -> Costs:
    """Ours: the newest, once all of it is known to be whole."""

    def newest() -> None:
        stored = checkpoint.find_checkpoint(engine.job, world_of(engine))
        assert stored is not None
        checkpoint.load(engine, stored)

    return timed(newest)


def load_theirs(tensors: Tensors, folder: Path) -> Costs:
    """torch's."""
    return timed(partial(torch_load, tensors, checkpoint_id=folder))
