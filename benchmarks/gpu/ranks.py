"""Several GPUs over NCCL: tensor groups, pipelines and ZeRO over data ranks give the losses of one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Ended
from benchmarks.gpu.rows import Row, at_most, holds
from benchmarks.gpu.runs import CLOSE, losses_of, write_text

LIMIT_S = 75
"""For a run of six steps; the half of it is imports and the start of ranks."""
CONFIG = """
model = dict(type='GPT', num_layers=4, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=64)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(global_size=16, accumulation=2)
train = dict(steps=6, save_interval=0, clip_grad_norm=1.0)
data = dict(files=['text.txt'])
"""
OVERLAP = "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True, comm_overlap=True))"
BF16 = "precision = 'bf16'\nzero = 1"
LAYOUTS: Mapping[int, Mapping[str, str]] = {
    2: {
        "1d": "parallel = dict(tensor=dict(size=2, mode='1d'))",
        "1d, sequence": "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
        "1d, sequence, overlap": OVERLAP,
        "1d, sequence, overlap, bf16": f"{OVERLAP}\n{BF16}",
        "pipeline": "parallel = dict(pipeline=2)",
        "data, ZeRO 1": "zero = 1",
        "data, ZeRO 2": "zero = 2",
        "data, ZeRO 3": "zero = 3",
        "data, ZeRO 1, bf16": BF16,
    },
    4: {
        "1d": "parallel = dict(tensor=dict(size=4, mode='1d'))",
        "1d, sequence": "parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))",
        "2d": "parallel = dict(tensor=dict(size=4, mode='2d'))",
        "1d 2, pipeline 2": "parallel = dict(tensor=dict(size=2, mode='1d'), pipeline=2)",
        "pipeline 2, data 2, ZeRO 1": "parallel = dict(pipeline=2)\nzero = 1",
    },
    8: {
        "3d": "parallel = dict(tensor=dict(size=8, mode='3d'))",
        "1d, sequence": "parallel = dict(tensor=dict(size=8, mode='1d', sequence=True))",
    },
}
CLOSE_BF16 = 1e-2
"""Relative, of losses in bf16 on one rank and on several: two roundings of 2**-9 in a layer, of sums in other orders,
over four layers; and the weights of half a dozen steps differ by as much."""
ON_CPU = 2
"""Ranks over gloo, where the check itself is checked."""


def over_nccl(device: torch.device) -> Iterator[Row]:
    """For each layout that the GPUs here can hold: the largest distance of a loss from one GPU's."""
    count = torch.cuda.device_count() if device.type == "cuda" else ON_CPU
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        alone: dict[str, list[float]] = {}
        for world, layouts in LAYOUTS.items():
            for layout, keys in layouts.items():
                if world > count:
                    yield Row(f"{layout} on {world} ranks", "not run", f"{world} GPUs; here {count}")
                    continue
                precision = BF16 if BF16 in keys else ""
                if precision not in alone:
                    ended, alone[precision] = _run(folder, precision, 1)
                    if not alone[precision]:
                        yield _failed(f"one rank{', bf16' if precision else ''}", ended)
                if alone[precision]:
                    yield _compare(folder, f"{layout} on {world} ranks", keys, world, alone[precision])


def _compare(folder: Path, name: str, keys: str, world: int, alone: list[float]) -> Row:
    ended, losses = _run(folder, keys, world)
    if ended.status != 0 or len(losses) != len(alone):
        return _failed(name, ended)
    off = max(abs(own / other - 1) for own, other in zip(losses, alone, strict=True))
    return at_most(f"{name}: losses against one", off, CLOSE_BF16 if BF16 in keys else CLOSE)


def _failed(name: str, ended: Ended) -> Row:
    said = f"it hung: no end in {LIMIT_S} s" if ended.status is None else f"it failed: {ended.reason[:160]}"
    return holds(name, said, "a run", held=False)


def _run(folder: Path, keys: str, world: int) -> tuple[Ended, list[float]]:
    """Train on so many ranks; also the losses, of a run that ended in order."""
    config, output = folder / "cfg.py", folder / "run"
    config.write_text(f"{CONFIG}{keys}\n")
    # --standalone: at a free port, so that what may be left of another run is not met.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [*launcher, "train.py", "--config", str(config), f"train.output_dir={output}"]
    ended = processes.run(command, LIMIT_S, os.environ)
    metrics = output / "metrics.jsonl"
    losses = losses_of(output) if ended.status == 0 else []
    metrics.unlink(missing_ok=True)
    return ended, losses
