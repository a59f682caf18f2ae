"""Variables that ranks set for torch, cuBLAS and NCCL, before any of them starts; what the user has set stands.

    os.environ.update(device_environment(job, os.environ))

Expandable segments, which keep a device's memory whole where sizes vary, are what torchtitan's start script asks for.
NCCL (2.26 and newer) promises progress to kernels of several communicators in flight only in a launch order: each axis
of the mesh has a communicator, gradients are reduced over one while layers use another, and all ranks launch in the
order of their program. On a CPU all of them are without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from dslpar.distributed.determinism import VARIABLES
from dslpar.layout.resolve import Job

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Its name since torch 2.9, which warns of the others; before; and on ROCm."""
_RENAMED_IN = (2, 9)


def device_environment(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job needs and `environ` does not have."""
    wanted = dict(VARIABLES) if job.spec.train.deterministic else {}
    if sum(size > 1 for size in job.mesh.sizes.values()) > 1:
        wanted["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    if not any(name in environ for name in _ALLOCATOR):
        wanted[_allocator_variable(version("torch"))] = "expandable_segments:True"
    return {name: value for name, value in wanted.items() if name not in environ}


def _allocator_variable(torch_version: str) -> str:
    """Return what a version of torch calls the variable.

    >>> _allocator_variable("2.13.0+cpu"), _allocator_variable("2.4.0")
    ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')
    """
    release = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    return _ALLOCATOR[release < _RENAMED_IN]
