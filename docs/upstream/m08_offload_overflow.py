"""ZeRO 1 and 2 with an offloaded optimizer skip every step after the first overflow.

What happens: with fp32 accumulation of 16-bit gradients, an offloaded optimizer adds them up in the buffers of
`DeepSpeedZeroOptimizer.averaged_gradients`. When a step overflows, `reset_cpu_buffers` leaves these as they are:
infinite for ever. Every later step is skipped too, without an error. fp16 with a dynamic loss scale often overflows in
its first steps. bf16, used here, does after one bad batch.

Expected: the step that overflows is skipped, and the next one is applied. It is so without offload, where the overflow
branch of `step` sets `averaged_gradients` to None.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m08_offload_overflow.py
"""

import logging
import os
import sys

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

CONFIG = {
    "train_batch_size": 1,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


def skipped_steps():
    """Train three steps, of which the first overflows; return which were skipped."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    skipped = []
    for value in (float("inf"), 1.0, 1.0):
        engine.backward(engine(torch.full((1, 8), value, dtype=torch.bfloat16)).sum())
        engine.step()
        skipped.append(engine.optimizer.overflow)
    return skipped


if __name__ == "__main__":
    found, expected = skipped_steps(), [True, False, False]
    print(f"skipped: {found}, expected {expected}:", "fixed" if found == expected else "reproduced")
    sys.exit(1 if found == expected else 0)
