"""ZeRO 1 in bf16 raises on a pipeline stage whose only parameters are tied copies.

What happens: with fp32 accumulation, ZeRO 1 in bf16 uses `BF16_Optimizer`. Its step collects the gradients that this
rank counts in the norm: no copies of tied weights, and on tensor ranks from 1 on only parameters marked as model
parallel. If none is left, `get_global_norm_of_tensors` raises "stack expects a non-empty TensorList". The other ranks
wait in the norm's all-reduce. Besides, `BF16_Optimizer` all-reduces whole gradients, where `DeepSpeedZeroOptimizer`
reduces each one to its owner: 3 (N - 1) / N instead of 2 (N - 1) / N numbers per parameter and step.

Expected: the rank adds 0 to the norm, and the step succeeds, as it does in fp32.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m06_bf16_zero1.py
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
    "zero_optimization": {"stage": 1},
}


def error_of_a_step(rank, folder):
    """Train one step of two stages that share one matrix; return what was raised."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layers = [TiedLayerSpec("tied", nn.Linear, 8, 8, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    batch = torch.ones(4, 8, dtype=torch.bfloat16)
    try:
        engine.train_batch(iter([(batch, batch)]))
    except RuntimeError as error:
        return f"{type(error).__name__} in {type(engine.optimizer).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(2) as ranks:
        found = [ranks.apply_async(error_of_a_step, (rank, folder)) for rank in range(2)][1].get(200)
    print(f"error on the last stage: {found}; expected none:", "fixed" if found == "none" else "reproduced")
    sys.exit(1 if found == "none" else 0)
