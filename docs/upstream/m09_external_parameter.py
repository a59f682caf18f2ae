"""ZeRO 3 with activation checkpointing: a parameter of another module is empty after a checkpoint is loaded.

What happens: `ZeROOrderedDict` registers a parameter that another module's forward reads when it finds it empty there.
`load_checkpoint` gathers all persistent (small) parameters, so at the first forward they are not empty, and nothing is
registered. In the first forward the owner's hook releases them all the same. In the backward, activation checkpointing
runs the reading module once more, which finds an empty tensor and raises.

Expected: the step succeeds after `load_checkpoint`, as without. `deepspeed.zero.register_external_parameter` avoids it.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m09_external_parameter.py
"""

import logging
import os
import sys
import tempfile

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed


class Reader(nn.Sequential):
    def forward(self, x):
        return self[0](x * self[0].weight).square()  # reads a weight of its norm, and then calls the norm


class Model(nn.Sequential):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self[1], self[0](x), use_reentrant=False).sum()


def error_of_a_step(loads, folder):
    """Train one step of a new engine; return what was raised."""
    model = Model(nn.Linear(8, 8), Reader(nn.LayerNorm(8)))
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    if loads:
        engine.load_checkpoint(folder)
    try:
        engine.backward(engine(torch.ones(1, 8)))
    except RuntimeError as error:
        return str(error)
    engine.save_checkpoint(folder)
    return "none"


if __name__ == "__main__":
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        first, second = error_of_a_step(False, folder), error_of_a_step(True, folder)
    print(f"error: {first}; after loading: {second}; expected none:", "fixed" if second == "none" else "reproduced")
    sys.exit(1 if second == "none" else 0)
