"""`train.deterministic`: the same bits each time a step is taken, from the same start on the same layout and machine.

    use_deterministic_algorithms(job)       # once torch is there; VARIABLES are set before (device_environment.py)

torch's list of what makes a run reproducible (its notes on randomness), and NCCL's ring, whose order of summands is
that of its ranks; its trees and switches may choose another one from run to run.
"""

from __future__ import annotations

from dslpar.layout.resolve import Job

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""What cuBLAS and NCCL are told, unless the user tells them something else."""


def use_deterministic_algorithms(job: Job) -> None:
    """Have torch refuse, by an error that names it, an operation of which it has no deterministic form."""
    if not job.spec.train.deterministic:
        return
    import torch

    torch.use_deterministic_algorithms(True)
    # No result depends on it, and it costs a write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
