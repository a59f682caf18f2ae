"""Without ZeRO in fp32, a pipeline's gradient norm counts tied weights once per stage.

What happens: `clip_grad_norm_` (deepspeed/runtime/utils.py) adds up the gradients of all parameters marked as
`tensor_model_parallel`, such as Megatron's embeddings. It does not read `ds_pipe_replicated`, by which `PipelineModule`
marks the copies of a tied weight. The norm is too large, so gradients are clipped too much. The norms of ZeRO and of
the 16-bit optimizers read the mark.

Expected: each weight counts once. With SGD, lr 1 and a clipped gradient, a step then moves the weights by exactly
`gradient_clipping`.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m04_tied_norm.py
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

CLIPPING = 0.01
CONFIG = {
    "train_batch_size": 4,
    "gradient_clipping": CLIPPING,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
}


def distance(rank, folder):
    """Train one step of two stages that share one matrix; return how far it moved."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [TiedLayerSpec("tied", nn.Linear, 8, 8, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    (weight,) = model.parameters()
    weight.tensor_model_parallel = True
    before = weight.detach().clone()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    engine.train_batch(iter([(torch.ones(4, 8), torch.ones(4, 8))]))
    return (weight.detach() - before).norm().item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(2) as ranks:
        found = ranks.starmap_async(distance, [(rank, folder) for rank in range(2)], chunksize=1).get(200)
    wrong = abs(found[0] - CLIPPING) > 1e-2 * CLIPPING
    print(f"the weight moved by {found[0]:.5f}, expected {CLIPPING}:", "reproduced" if wrong else "fixed")
    sys.exit(0 if wrong else 1)
