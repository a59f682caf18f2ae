"""Engines of many configs, one after the other, on the ranks of one launch: `torchrun ... -m benchmarks.gpu.worlds`.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.gpu.worlds CONFIGS OUTPUT

CONFIGS is a file of JSON, texts of configs by name; a line of OUTPUT is what one of them gave: the losses of its steps
over the same random tokens for every layout, and by rank what it holds of the pipeline and the most memory that torch
gave out in the last step. Ranks start once for all: on a machine with few cores that takes longer than the steps.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dslpar.data.order import micro_batches
from dslpar.distributed import bootstrap
from dslpar.distributed.collectives import gather_objects
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.linter import check
from dslpar.schema.sections import TokenModel

STEPS = 3
SEED = 1


class Seen(NamedTuple):
    """The results of a layout."""

    name: str
    losses: list[float]
    peaks: list[tuple[int, int]]
    """Of each rank: its place in the pipeline, and bytes beyond those of before; none on a CPU."""


class _Tokens:
    """Random tokens, small ids more often than large ones: something can be learned."""

    num_samples = 64
    all_counted = True

    def __init__(self, length: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.tokens = (torch.rand(self.num_samples, length + 1, generator=generator) ** 4 * vocab).long()

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids, and those that follow them."""
        rows = self.tokens[list(samples)]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def of_config(name: str, text: str, device: torch.device) -> Seen:
    """Train STEPS steps."""
    world_size = int(os.environ["WORLD_SIZE"])
    job = check.resolve(check.load_text(text, "gpu.py"), world_size)
    model, mesh = job.spec.model, job.mesh
    assert isinstance(model, TokenModel)
    groups = Groups(mesh)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # what an engine before has left
    engine = build_engine(job, groups, all_counted=True)
    samples, losses = _Tokens(model.max_seq_len, model.vocab_size), []
    for step in range(STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        first = step * job.batch.global_size
        batches = micro_batches(samples, job.batch, SEED, first, mesh.data, groups.coord["data"])
        losses.append(engine.train_batch(batches))
    peaks: list[tuple[int, int]] = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        own = groups.coord["pipe"], torch.cuda.max_memory_allocated() - before
        peaks = gather_objects(own, groups.axis("pipe", "data", "tensor"))
    del engine, groups
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Seen(name, losses, peaks)


def _start_libraries(device: torch.device) -> None:
    """Multiply forward and backward: what torch gives cuBLAS to work in, in either thread, stands from then on.

    The forecast has it outside of what torch gives out for a step (`dslpar.forecast.stage_memory.CONTEXT`).
    """
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()


def main(configs: str, output: str) -> None:
    """Train each config; rank 0 writes what they gave."""
    dist_env = bootstrap.read_distributed_env(os.environ)
    bootstrap.setup_distributed(dist_env, os.environ)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    _start_libraries(device)
    for name, text in json.loads(Path(configs).read_text()).items():
        seen = of_config(name, text, device)
        if dist_env.rank == 0:
            with open(output, "a") as lines:
                lines.write(json.dumps(seen) + "\n")
    bootstrap.teardown_distributed()


def read(output: Path) -> dict[str, Seen]:
    """Return by name what has been written."""
    lines = output.read_text().splitlines() if output.exists() else []
    return {seen.name: seen for seen in (Seen(*json.loads(line)) for line in lines)}


if __name__ == "__main__":
    main(*sys.argv[1:])
