"""DeepSpeedCPUAdam: a run resumed from a checkpoint differs in its last bits from the run that went on.

What happens: `Adam_Optimizer::IncrementStep` (csrc/includes/cpu_adam.h) multiplies the betas' powers in fp32 from step
to step. A new instance, as after a restart, begins with `std::pow(beta, step)` instead. The two differ by rounding, and
so do the bias corrections and the weights.

Expected: a step depends on its number alone, for example by `pow` in double precision in each step. torch.optim.AdamW
resumes to the bit.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU.
Run: python m20_cpu_adam_resume.py  (compiles the op with g++, which takes about a minute at the first time)
"""

import logging
import os
import sys

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.ops.adam import DeepSpeedCPUAdam

NUM_STEPS = 60


def trained(cls, resumes):
    """Return a weight after all steps; with `resumes`, a second instance takes the second half."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(77, generator=generator))
    optimizer = cls([p], lr=1e-2)
    for step in range(NUM_STEPS):
        if resumes and step == NUM_STEPS // 2:
            stored = optimizer.state_dict()
            optimizer = cls([p], lr=1e-2)
            optimizer.load_state_dict(stored)
        p.grad = torch.randn(77, generator=generator)
        optimizer.step()
    return p.detach()


if __name__ == "__main__":
    logging.disable()
    differing = {
        cls.__name__: int((trained(cls, resumes=False) != trained(cls, resumes=True)).sum())
        for cls in (torch.optim.AdamW, DeepSpeedCPUAdam)
    }
    wrong = differing["DeepSpeedCPUAdam"] > 0
    print(f"weights of 77 that differ: {differing}, expected 0 and 0:", "reproduced" if wrong else "fixed")
    sys.exit(0 if wrong else 1)
