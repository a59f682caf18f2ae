"""Several GPUs over NCCL: tensor groups and pipelines give the losses of one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.rows import Row, at_most, holds
from benchmarks.gpu.runs import CLOSE, ROOT

CONFIG = """
model = dict(type='GPT', num_layers=4, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=64)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(global_size=16, accumulation=2)
train = dict(steps=6, save_interval=0, clip_grad_norm=1.0)
data = dict(files=['text.txt'])
"""
LAYOUTS = {
    2: {
        "1d": "tensor=dict(size=2, mode='1d')",
        "1d, sequence": "tensor=dict(size=2, mode='1d', sequence=True)",
        "pipeline": "pipeline=2",
    },
    4: {"2d": "tensor=dict(size=4, mode='2d')", "1d 2, pipeline 2": "tensor=dict(size=2, mode='1d'), pipeline=2"},
    8: {"3d": "tensor=dict(size=8, mode='3d')", "1d": "tensor=dict(size=8, mode='1d', sequence=True)"},
}


def over_nccl(device: torch.device) -> Iterator[Row]:
    """For each layout that the GPUs here can hold: the largest distance of a loss from one GPU's, in float32."""
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))
        alone = _losses(folder, "", 1)
        for world, layouts in LAYOUTS.items():
            for layout, parallel in layouts.items():
                if world > count:
                    yield Row(f"{layout} on {world} GPUs", "not run", f"{world} GPUs; here {count}")
                    continue
                losses = _losses(folder, f"parallel = dict({parallel})\n", world)
                if len(losses) != len(alone):
                    yield holds(f"{layout} on {world} GPUs", "it failed", "a run", held=False)
                    continue
                off = max(abs(own / other - 1) for own, other in zip(losses, alone, strict=True))
                yield at_most(f"{layout} on {world} GPUs: losses against one", off, CLOSE)


def _losses(folder: Path, more: str, world: int) -> list[float]:
    config, output = folder / "cfg.py", folder / "run"
    config.write_text(CONFIG + more)
    command = [
        "torchrun",
        f"--nproc-per-node={world}",
        "train.py",
        "--config",
        str(config),
        f"train.output_dir={output}",
    ]
    subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, timeout=120, check=False)
    metrics = output / "metrics.jsonl"
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    metrics.unlink(missing_ok=True)
    return losses
