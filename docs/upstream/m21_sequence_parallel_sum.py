"""ZeRO 3 averages gradients over sequence parallel ranks, where ZeRO 1 and 2 sum them.

What happens: each sequence parallel rank has the gradient of its part of the sequence, and the whole gradient is their
sum. ZeRO 1 and 2 divide by `world size / sequence_parallel_size`. So does ZeRO 3 in `__avg_scatter_contiguous_grads`,
but not in `__avg_scatter_grads`, its default: `reduce_scatter_coalesced` divides by the whole world size. The gradient
is too small by the factor `sequence_parallel_size`. Issue #6841 asks about it.

Expected: the same gradient at every stage of ZeRO.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m21_sequence_parallel_sum.py
"""

import logging
import multiprocessing
import os
import sys
import tempfile

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.runtime.sequence_parallel import parallel_state_sp

SIZE = 2


def norms(rank, folder):
    """Return the gradient norm of a step at ZeRO 1, 2 and 3, of a sequence of 4 ones that is cut over the ranks."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(
        auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=SIZE
    )
    parallel_state_sp.initialize_sequence_parallel(SIZE)
    found = []
    for stage in (1, 2, 3):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)
        engine.backward(engine(torch.ones(1, 4 // SIZE, 1)).sum())
        engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(SIZE) as ranks:
        found = ranks.starmap_async(norms, [(rank, folder) for rank in range(SIZE)], chunksize=1).get(200)[0]
    wrong = found != [4.0] * 3
    print(f"norms at ZeRO 1, 2 and 3: {found}, expected 4.0:", "reproduced" if wrong else "fixed")
    sys.exit(0 if wrong else 1)
