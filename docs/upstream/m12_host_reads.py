"""ZeRO's step reads its norms on the host one by one, with offload one per parameter.

What happens: the step scans all gradients for an overflow and reads the answer, computes a norm per group, and reads
that too wherever it compares it. With an offloaded optimizer, `complete_grad_norm_calculation_for_cpu_offload` reads
`norm.item()` of each parameter. On an accelerator each read makes the host wait for the device, which then has no work.

Expected: the norms add up on the device. The host reads one number per step, and an overflow shows in it, as a gradient
that is not finite has no finite norm.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m12_host_reads.py
"""

import logging
import os
import sys

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads(num_parameters, **zero):
    """Return how often a step reads a number."""
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    config |= {"zero_optimization": {"stage": 2, **zero}, "zero_force_ds_cpu_optimizer": False}
    config["zero_allow_untested_optimizer"] = True  # of SGD, which itself reads nothing
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(num_parameters)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    with Reads() as found:
        engine.step()
    return found.count


if __name__ == "__main__":
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = [reads(10), reads(10, offload_optimizer={"device": "cpu"}), reads(20, offload_optimizer={"device": "cpu"})]
    says = "reproduced" if max(found) > 1 else "fixed"
    print(f"reads in a step of 10 parameters, 10 offloaded and 20 offloaded: {found}, expected 1: {says}")
    sys.exit(0 if says == "reproduced" else 1)
