"""ColossalAI's `colossalai.global_variables`: the tensor mode of the launched run."""

from __future__ import annotations

from dslpar.compat.context import global_context
from dslpar.compat.missing import names_of

__all__ = ["tensor_parallel_env"]


class TensorParallelEnv:
    """The tensor mode of the launched run, and the sizes that ColossalAI derives from it."""

    @property
    def mode(self) -> str | None:
        """'1d', '2d', '2.5d', '3d' or 'sequence'; None without tensor parallelism."""
        tensor = global_context.run.groups.tensor
        return tensor.mode if tensor.size > 1 else None

    @property
    def summa_dim(self) -> int:
        """Side of the square of 2d."""
        return global_context.run.groups.tensor.q

    @property
    def tesseract_dim(self) -> int:
        """Side of the square of 2.5d."""
        return global_context.run.groups.tensor.q

    @property
    def tesseract_dep(self) -> int:
        """Depth of 2.5d."""
        return global_context.run.groups.tensor.d

    @property
    def depth_3d(self) -> int:
        """Side of the cube of 3d."""
        return global_context.run.groups.tensor.q


tensor_parallel_env = TensorParallelEnv()
"""The launched run's tensor mode."""


__path__: list[str] = []
__getattr__ = names_of(__name__)
