"""Several ranks over NCCL: tensor and context groups, pipelines and ZeRO give the losses of one rank.

Each rank takes a GPU. If there are fewer, all can share the first one, with an option of NCCL 2.31 and newer.

    LD_PRELOAD=/path/to/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 python -m benchmarks.gpu ranks

That tests the correctness of the NCCL branch, not its speed, since ranks take turns on the device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.gpu import processes, worlds
from benchmarks.gpu.processes import Ended
from benchmarks.gpu.rows import Row, at_most, holds
from benchmarks.gpu.runs import CLOSE
from benchmarks.gpu.worlds import Seen

LIMIT_S = 150
"""Time limit of all layouts with one number of ranks."""
CONFIG = """
model = dict(type='GPT', num_layers=4, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=64)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(global_size=16, accumulation=4)
train = dict(steps=6, save_interval=0, clip_grad_norm=1.0)
"""
OVERLAP = "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True, comm_overlap=True))"
OVERLAP_2D = "parallel = dict(tensor=dict(size=4, mode='2d', comm_overlap=True))"
BF16 = "precision = 'bf16'\nzero = 1"
LAYOUTS: Mapping[int, Mapping[str, str]] = {
    2: {
        "1d": "parallel = dict(tensor=dict(size=2, mode='1d'))",
        "1d, sequence": "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
        "1d, sequence, overlap": OVERLAP,
        "1d, sequence, overlap, bf16": f"{OVERLAP}\n{BF16}",
        "pipeline": "parallel = dict(pipeline=2)",
        "pipeline, interleaved": "parallel = dict(pipeline=2)\nschedule = dict(type='interleaved', num_model_chunks=2)",
        "pipeline, zero bubble": "parallel = dict(pipeline=2)\nschedule = dict(type='zero_bubble', num_model_chunks=2)",
        "data, ZeRO 1": "zero = 1",
        "data, ZeRO 2": "zero = 2",
        "data, ZeRO 3": "zero = 3",
        "data, ZeRO 1, bf16": BF16,
        "ring": "parallel = dict(context=dict(size=2, impl='ring'))",
        "ring, bf16": f"parallel = dict(context=dict(size=2, impl='ring'))\n{BF16}",
        "ulysses": "parallel = dict(context=dict(size=2, impl='ulysses'))",
    },
    4: {
        "1d": "parallel = dict(tensor=dict(size=4, mode='1d'))",
        "1d, sequence": "parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))",
        "2d": "parallel = dict(tensor=dict(size=4, mode='2d'))",
        "2d, overlap": OVERLAP_2D,
        "2d, overlap, bf16": f"{OVERLAP_2D}\n{BF16}",
        "1d 2, pipeline 2": "parallel = dict(tensor=dict(size=2, mode='1d'), pipeline=2)",
        "pipeline 2, data 2, ZeRO 1": "parallel = dict(pipeline=2)\nzero = 1",
        "ring of 4, bf16": f"parallel = dict(context=dict(size=4, impl='ring'))\n{BF16}",
        "ring 2, 1d 2": "parallel = dict(context=dict(size=2, impl='ring'), tensor=dict(size=2, mode='1d'))",
    },
    8: {
        "1d, sequence": "parallel = dict(tensor=dict(size=8, mode='1d', sequence=True))",
        "2.5d": "parallel = dict(tensor=dict(size=8, mode='2.5d', depth=2))",
        "3d": "parallel = dict(tensor=dict(size=8, mode='3d'))",
        "3d, overlap": "parallel = dict(tensor=dict(size=8, mode='3d', comm_overlap=True))",
    },
}
_SYMMETRIC = OVERLAP.replace("comm_overlap=True", "comm_overlap='symmetric_memory'")
THROUGH_SYMMETRIC_MEMORY: Mapping[str, str] = {
    "1d, sequence, symmetric memory": _SYMMETRIC,
    "1d, sequence, symmetric memory, bf16": f"{_SYMMETRIC}\n{BF16}",
}
"""Layouts of 2 ranks in a separate launch: CPUs have no symmetric memory, and two GPUs may not reach each other's."""
CLOSE_BF16 = 1e-2
"""Relative difference of bf16 losses on one rank and on several. Sums in other orders are two roundings of 2**-9 per
layer, over four layers, and the weights of half a dozen steps differ by as much.
"""
ON_CPU = 2
"""Number of gloo ranks, when the check itself is tested."""
SHARED = 8
"""Number of ranks that may share a GPU."""
SHARING: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Limits of NCCL's resources per rank, for many ranks on one device with mutual memory access."""


def most_ranks(device: torch.device) -> int:
    """Return how many ranks can run here."""
    if device.type == "cpu":
        return ON_CPU
    count = torch.cuda.device_count()
    return max(count, SHARED) if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else count


def over_nccl(device: torch.device) -> Iterator[Row]:
    """Check the largest difference of a loss from one rank's, for each layout that fits the ranks here."""
    most = most_ranks(device)
    ended, alone = train({"": CONFIG, BF16: CONFIG + BF16}, 1, device)
    if len(alone) < 2:
        yield failed("one rank", ended)
        return
    for world, layouts in (*LAYOUTS.items(), (2, THROUGH_SYMMETRIC_MEMORY)):
        on_cpus = layouts is THROUGH_SYMMETRIC_MEMORY and device.type == "cpu"
        if world > most or on_cpus:
            for layout in layouts:
                yield Row(f"{layout} on {world} ranks", "not run", f"{world} GPUs; here {0 if on_cpus else most}")
            continue
        ended, found = train({layout: CONFIG + keys for layout, keys in layouts.items()}, world, device)
        for layout, keys in layouts.items():
            name, precision = f"{layout} on {world} ranks", BF16 if BF16 in keys else ""
            if layout not in found:
                yield failed(name, ended)  # only the first failure; later layouts were not started
                continue
            pairs = zip(found[layout].losses, alone[precision].losses, strict=True)
            off = max(abs(own / other - 1) for own, other in pairs)
            yield at_most(f"{name}: losses against one", off, CLOSE_BF16 if precision else CLOSE)


def failed(name: str, ended: Ended) -> Row:
    """Return a row on the end of a launch that should have given more losses."""
    said = f"it hung: no end in {LIMIT_S} s" if ended.status is None else f"it failed: {ended.reason[:160]}"
    return holds(name, said, "a run", held=False)


def train(configs: Mapping[str, str], world: int, device: torch.device) -> tuple[Ended, dict[str, Seen]]:
    """Train configs on that many ranks, and return the results of those that finished."""
    with tempfile.TemporaryDirectory() as name:
        texts, output = Path(name) / "configs.json", Path(name) / "seen.jsonl"
        texts.write_text(json.dumps(configs))
        # --standalone uses a free port, so that leftovers of another run are not reached.
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command = [*launcher, "-m", "benchmarks.gpu.worlds", str(texts), str(output)]
        env = os.environ | {"DS_ACCELERATOR": device.type, "OMP_NUM_THREADS": "1"}
        if device.type == "cuda" and world > torch.cuda.device_count():
            env = {**SHARING, **env}
        ended = processes.run(command, LIMIT_S, env)
        return ended, worlds.read(output)
