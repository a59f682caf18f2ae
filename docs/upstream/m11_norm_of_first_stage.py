"""Without ZeRO in fp32, a pipeline's gradient norm is that of its first stage alone.

What happens: `clip_grad_norm_` (deepspeed/runtime/utils.py) counts a parameter if it is marked as model parallel, or if
`mpu.get_model_parallel_rank()` is 0. In a `PipelineParallelGrid` this is the rank among all ranks of a replica, of
pipeline and tensor parallelism, so only rank 0's parameters count. ZeRO asks `bwc_tensor_model_parallel_rank` instead,
which is 0 on every stage. The norm is too small, so gradients are clipped too little.

Expected: the gradients of all stages count. With SGD, lr 1 and a clipped gradient, a step then moves the weights of all
stages together by exactly `gradient_clipping`.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m11_norm_of_first_stage.py
"""

import logging
import math
import multiprocessing
import os
import sys
import tempfile

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.pipe import PipelineModule

CLIPPING = 0.01
CONFIG = {
    "train_batch_size": 4,
    "gradient_clipping": CLIPPING,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
}


def distance(rank, folder):
    """Train one step of two stages of a matrix each; return how far this stage's moved."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    (weight,) = model.parameters()
    before = weight.detach().clone()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    engine.train_batch(iter([(torch.ones(4, 8), torch.ones(4, 8))]))
    return (weight.detach() - before).norm().item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(2) as ranks:
        found = ranks.starmap_async(distance, [(rank, folder) for rank in range(2)], chunksize=1).get(200)
    wrong = abs(math.hypot(*found) - CLIPPING) > 1e-2 * CLIPPING
    print(f"the stages moved by {found}, expected {CLIPPING} together:", "reproduced" if wrong else "fixed")
    sys.exit(0 if wrong else 1)
