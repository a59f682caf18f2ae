"""Without ZeRO in fp32, `get_global_grad_norm()` returns None.

What happens: `DeepSpeedEngine._take_model_step` takes the norm from `optimizer._global_grad_norm`. Plain torch
optimizers, which fp32 gets without ZeRO, have no such attribute. With `gradient_clipping` DeepSpeed computes a norm, in
`clip_fp32_gradients`, and drops it. For the same reason a gradient that is not finite is neither found nor skipped.

Expected: the norm of the averaged gradient before clipping, as at ZeRO 1.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m11_norm_is_none.py
"""

import logging
import os
import sys

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed


def norm_of_a_step(stage):
    """Train one step at a stage of ZeRO; return the norm that the engine reports."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"train_batch_size": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    return norm if norm is None else float(norm)


if __name__ == "__main__":
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    zero_0, zero_1 = norm_of_a_step(0), norm_of_a_step(1)
    wrong = zero_0 != zero_1
    print(f"norm without ZeRO {zero_0}, at ZeRO 1 {zero_1}, expected 2.0:", "reproduced" if wrong else "fixed")
    sys.exit(0 if wrong else 1)
