"""Environment variables for torch, cuBLAS and NCCL, set before these start; the user's settings take precedence.

    os.environ.update(device_environment(job, os.environ))

Expandable segments avoid fragmentation of device memory if sizes vary. torchtitan's start script sets them, too. With
kernels of several communicators in flight, NCCL (2.26 and newer) guarantees progress only if all ranks launch them in
the same order. Here each mesh axis has a communicator, gradients are reduced over one while layers use another, and all
ranks launch in program order. On a CPU none of these variables has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from dslpar.distributed.determinism import VARIABLES
from dslpar.layout.resolve import Job

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variable's name since torch 2.9 (which warns about the others), before 2.9, and on ROCm."""
_RENAMED_IN = (2, 9)


def device_environment(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job needs and `environ` does not set."""
    wanted = dict(VARIABLES) if job.spec.train.deterministic else {}
    if sum(size > 1 for size in job.mesh.sizes.values()) > 1:
        wanted["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    if not any(name in environ for name in _ALLOCATOR):
        wanted[_allocator_variable(version("torch"))] = "expandable_segments:True"
    return {name: value for name, value in wanted.items() if name not in environ}


def _allocator_variable(torch_version: str) -> str:
    """Return the allocator variable's name in a torch version.

    >>> _allocator_variable("2.13.0+cpu"), _allocator_variable("2.4.0")
    ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')
    """
    release = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    return _ALLOCATOR[release < _RENAMED_IN]
