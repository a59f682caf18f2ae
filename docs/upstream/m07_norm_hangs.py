"""ZeRO 1 in a pipeline hangs if stages have different numbers of parameter groups.

What happens: `DeepSpeedZeroOptimizer.scaled_global_norm` all-reduces the norm of each parameter group over the pipeline
by itself. A stage of matrices alone has one group, and a stage with biases has two: with and without weight decay. The
second all-reduce of the one stage meets no partner, and the step never ends.

Expected: the step succeeds. All stages reduce the same number of norms, for example one sum of squares.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU and gloo.
Run: python m07_norm_hangs.py  (a rank that waits for 12 s prints its stack and ends)
"""

import faulthandler
import logging
import multiprocessing
import os
import sys
import tempfile
import threading

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.pipe import PipelineModule

HUNG = 3


def train_a_step(rank, folder):
    """Train a step of two stages: a matrix, and a matrix with a bias."""
    logging.disable()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # not needed here, and slow to compile
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    matrices, vectors = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    faulthandler.dump_traceback_later(12)
    threading.Timer(13, os._exit, (HUNG,)).start()
    engine.train_batch(iter([(torch.ones(4, 8), torch.ones(4, 8))]))
    os._exit(0)


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=train_a_step, args=(rank, folder), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        ranks[1].join(200)
    found = {HUNG: "hangs: reproduced", 0: "succeeds: fixed"}[ranks[1].exitcode]
    print(f"expected that the last stage's step succeeds; it {found}")
    sys.exit(0 if ranks[1].exitcode else 1)
