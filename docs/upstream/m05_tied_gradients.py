"""ZeRO 1 in half precision with fp32 accumulation: the copies of a pipeline's tied weight drift apart.

What happens: `PipelineEngine._exec_reduce_tied_grads` sums `weight.grad` over the stages of a tied weight. ZeRO 1 that
accumulates in fp32 has moved the gradient to `weight.grad_accum` by then, and `weight.grad` is None. Nothing is summed,
and nothing is reported. Each stage updates its copy by its own gradient.

Expected: the gradient is summed over the stages, so the copies stay equal. `BF16_Optimizer`, which bf16 gets without
offload, is handled. fp16 is not, nor is bf16 with an offloaded optimizer, as here.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m05_tied_gradients.py
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
from deepspeed.pipe import PipelineModule, TiedLayerSpec

CONFIG = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


def weight_after_a_step(rank, folder):
    """Train one step of two stages that share one matrix; return this stage's copy."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layers = [TiedLayerSpec("tied", nn.Linear, 8, 8, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    batch = torch.linspace(-1, 1, 32, dtype=torch.bfloat16).view(4, 8)
    engine.train_batch(iter([(batch, batch.flip(1))]))
    return next(model.parameters()).detach().float().tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(2) as ranks:
        found = ranks.starmap_async(weight_after_a_step, [(rank, folder) for rank in range(2)], chunksize=1).get(200)
    first, last = torch.tensor(found)
    apart = (first - last).abs().max().item()
    print(f"after a step the copies differ by {apart:.3f}, expected 0:", "reproduced" if apart else "fixed")
    sys.exit(0 if apart else 1)
