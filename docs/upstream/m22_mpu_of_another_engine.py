"""An engine without an mpu takes its data ranks from the engine that was built before it.

What happens: `DeepSpeedEngine._configure_distributed_model` stores an engine's mpu in `deepspeed.utils.groups`, for the
whole process. An engine that is built later without an mpu does not clear it. It averages its gradients over the other
engine's data ranks, and nothing is reported. If the other mpu has model parallel ranks, `initialize` raises
"'NoneType' object has no attribute 'get_model_parallel_rank'".

Expected: without an mpu, an engine's data ranks are all ranks.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m22_mpu_of_another_engine.py
"""

import logging
import multiprocessing
import os
import sys
import tempfile
from types import SimpleNamespace

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


def data_ranks(rank, folder):
    """Build an engine whose ranks train alone, and one without an mpu; return the second one's number of data ranks."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    mpu = SimpleNamespace()
    for kind in ("model", "data"):
        setattr(mpu, f"get_{kind}_parallel_group", lambda: alone)
        setattr(mpu, f"get_{kind}_parallel_rank", lambda: 0)
        setattr(mpu, f"get_{kind}_parallel_world_size", lambda: 1)
    deepspeed.initialize(model=nn.Linear(1, 1), config=CONFIG, mpu=mpu)
    engine, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=CONFIG)
    return engine.dp_world_size


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(2) as ranks:
        found = ranks.starmap_async(data_ranks, [(rank, folder) for rank in range(2)], chunksize=1).get(200)[0]
    print(f"the engine without an mpu has {found} data rank, expected 2:", "fixed" if found == 2 else "reproduced")
    sys.exit(1 if found == 2 else 0)
