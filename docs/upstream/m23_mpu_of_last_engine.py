"""Without ZeRO, an engine averages its gradients over the data ranks of the engine that was built last.

What happens: `DeepSpeedEngine._reduce_non_expert_gradients` reads the data ranks from `deepspeed.utils.groups` in each
step. They are those of the mpu that the last `initialize` stored there for the whole process. The engine's own mpu, and
`engine.seq_data_parallel_group`, are not used, and nothing is reported. ZeRO uses its own group.

Expected: each engine averages over the data ranks of its own mpu.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m23_mpu_of_last_engine.py
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

SGD = {"type": "SGD", "params": {"lr": 1.0}}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": SGD}


def distance(rank, folder):
    """Build an engine whose ranks train alone, and one over all ranks; return how far the first one steps."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    engines = []
    for data in (alone, torch.distributed.group.WORLD):
        mpu = SimpleNamespace()
        for kind, group in (("model", alone), ("data", data)):
            setattr(mpu, f"get_{kind}_parallel_group", lambda group=group: group)
            setattr(mpu, f"get_{kind}_parallel_rank", lambda group=group: torch.distributed.get_rank(group))
            setattr(mpu, f"get_{kind}_parallel_world_size", lambda group=group: torch.distributed.get_world_size(group))
        model = nn.Linear(1, 1, bias=False)
        engines.append(deepspeed.initialize(model=model, config=CONFIG, mpu=mpu)[0])
    weight = engines[0].module.weight
    before = weight.item()
    engines[0].backward(engines[0](torch.full((1, 1), rank + 1.0)).sum())
    engines[0].step()
    return round(before - weight.item(), 3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(2) as ranks:
        found = ranks.starmap_async(distance, [(rank, folder) for rank in range(2)], chunksize=1).get(200)
    print(f"the steps are {found}, expected [1.0, 2.0]:", "fixed" if found == [1.0, 2.0] else "reproduced")
    sys.exit(1 if found == [1.0, 2.0] else 0)
