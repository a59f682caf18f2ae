"""One-rank world on a device, and an engine in it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.linter import check


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Make this process the only rank, in a launcher's environment."""
    import deepspeed

    logging.disable(logging.WARNING)
    deepspeed_patches.skip_shm_op()
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        try:
            yield
        finally:
            dist.destroy_process_group()


def engine_of(config: str) -> Engine:
    """Return the engine of a config's text."""
    job = check.resolve(check.load_text(config, "gpu.py"), 1)
    return build_engine(job, Groups(job.mesh), all_counted=True)
