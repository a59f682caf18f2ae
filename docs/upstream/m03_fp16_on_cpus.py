"""fp16 is refused on CPUs on which torch computes it.

What happens: `CPU_Accelerator.is_fp16_supported` asks oneDNN whether the CPU has fast instructions for fp16. On other
CPUs it returns None, and `deepspeed.initialize` raises "Type fp16 is not supported on your device". torch computes
matrix products, norms and gradients in fp16 there too, only slower.

Expected: `initialize` succeeds, perhaps with a warning. Tests of fp16 then run on machines without a GPU.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m03_fp16_on_cpus.py
"""

import logging
import os
import sys

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

CONFIG = {"train_batch_size": 1, "fp16": {"enabled": True, "loss_scale": 1.0}, "zero_optimization": {"stage": 1}}


def of_torch():
    """Return the dtype of a gradient that torch computes in fp16."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).half(), torch.ones(1, 8, dtype=torch.float16)
    model(x).sum().backward()
    return model[0].weight.grad.dtype


def of_deepspeed():
    """Train a step in fp16; return what was raised."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
        engine.backward(engine(torch.ones(1, 8, dtype=torch.float16)).sum())
        engine.step()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    torch.ops.mkldnn._is_mkldnn_fp16_supported = lambda: False  # as on a CPU without AVX512-FP16
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    error = of_deepspeed()
    says = "fixed" if error == "none" else "reproduced"
    print(f"torch's gradient: {of_torch()}; error of DeepSpeed: {error}; expected none: {says}")
    sys.exit(1 if error == "none" else 0)
