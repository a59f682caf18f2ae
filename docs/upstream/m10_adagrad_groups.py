"""ZeRO drops the parameter groups of torch.optim.Adagrad, and with them each group's lr and weight decay.

What happens: `initialize_optimizer_states` of ZeRO 1, 2 and 3 replaces an instance of torch.optim.Adagrad by a new one
over the flat partitions, made from `optimizer.defaults`. The new one has a single group. The settings of the groups,
and those that a scheduler has set, are lost. The scheduler goes on to change the old instance.

Expected: the new instance has the groups of the old one, with their settings.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m10_adagrad_groups.py
"""

import logging
import os
import sys

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed


def rates():
    """Return the learning rates of the groups that ZeRO 1 steps with."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.Adagrad(groups)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return [group["lr"] for group in engine.optimizer.optimizer.param_groups]


if __name__ == "__main__":
    found, expected = rates(), [0.1, 0.2]
    print(f"learning rates {found}, expected {expected}:", "fixed" if found == expected else "reproduced")
    sys.exit(1 if found == expected else 0)
