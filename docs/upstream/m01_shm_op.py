"""On CPUs `init_distributed` compiles an op for half a minute, whose all-reduce ignores its group.

What happens: `TorchBackend.__init__` builds the op ShareMemCommBuilder, which only `inference_all_reduce` uses. No
setting turns it off, so the first start of a training on each machine waits for g++. `inference_all_reduce` then calls
`inference_all_reduce_(tensor)`, without its arguments `group` and `op`: it adds up the tensors of all ranks. Besides,
nothing calls `shared_close`: each rank leaves 66 MiB in /dev/shm. #7625 asks for a way around the op.

Expected: the op is built at the first `inference_all_reduce`, and used only if the group has all ranks.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU with AVX2 and gloo; g++ and ninja.
Run: python m01_shm_op.py  (the first time it takes as long as the compiler)
"""

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.comm.comm

SIZE = 4


def start(rank, folder):
    """Add up a one of each rank of a pair; return the sum, the seconds until then, and whether there is an op."""
    logging.disable()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_SIZE=str(SIZE), MASTER_PORT=Path(folder).name)
    begin = time.perf_counter()
    deepspeed.init_distributed(
        auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=SIZE
    )
    seconds = time.perf_counter() - begin
    pairs = [deepspeed.comm.new_group(pair) for pair in ([0, 1], [2, 3])]
    ones = torch.ones(16)
    deepspeed.comm.inference_all_reduce(ones, group=pairs[rank // 2])
    return ones[0].item(), seconds, deepspeed.comm.comm.cdb.shm_comm_op is not None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(SIZE) as ranks:
        arguments = [(rank, folder) for rank in range(SIZE)]
        total, seconds, has_op = ranks.starmap_async(start, arguments, chunksize=1).get(600)[0]
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{Path(folder).name}_*"):
        left.unlink()
    wrong = has_op or total != 2.0
    print(f"init_distributed took {seconds:.0f} s and made the op: {has_op}, expected False;", end=" ")
    print(f"the sum over a pair is {total}, expected 2.0:", "reproduced" if wrong else "fixed")
    sys.exit(0 if wrong else 1)
