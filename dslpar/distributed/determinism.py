"""`train.deterministic`: make steps bit-reproducible, given the same start, layout and machine.

    use_deterministic_algorithms(job)       # once torch is there; VARIABLES are set before (device_environment.py)

The settings are those of torch's notes on reproducibility, and NCCL's ring algorithm, which sums in rank order. NCCL's
tree and switch algorithms may sum in another order from run to run.
"""

from __future__ import annotations

from dslpar.layout.resolve import Job

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Variables for cuBLAS and NCCL, unless the user sets others."""


def use_deterministic_algorithms(job: Job) -> None:
    """Apply `train.deterministic` to torch, if the job sets it.

    torch then raises an error, which names the operation, if an operation has no deterministic implementation.
    """
    if not job.spec.train.deterministic:
        return
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory costs a write, and no result depends on that memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
