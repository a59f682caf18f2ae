"""ZeRO 1 copies each 16-bit gradient to fp32 before it adds it to the fp32 sum.

What happens: `_fill_param_grad_accum_attribute` computes `grad_accum.add_(grad.to(torch.float32))` in each micro-batch
but the first. The copy costs a write and a read of 4 bytes per parameter: 18 bytes move where 10 do.

Expected: `grad_accum.add_(grad)`. It adds the 16-bit numbers without rounding, so the sums are equal to the bit.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo. fp16 on any device does the same.
Run: python m15_gradient_copies.py
"""

import logging
import os
import sys

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 3,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


class Copies(TorchDispatchMode):
    """Counts copies of 16-bit tensors to fp32."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        copies = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16
        self.count += copies and result.dtype == torch.float32
        return result


if __name__ == "__main__":
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)
    for _ in range(2):
        loss = engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum()
        with Copies() as copies:
            engine.backward(loss)
        engine.step()
    print(f"copies of 5 gradients: {copies.count}, expected 0:", "reproduced" if copies.count else "fixed")
    sys.exit(0 if copies.count else 1)
