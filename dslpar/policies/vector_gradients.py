"""Gradients of a part's vectors (biases, gains, tables of positions), summed over tensor ranks in one all-reduce where
each backward sums them.

Blocks of dslpar's hand stand-ins for their vectors to the layers within them. transformers' code knows of none: so the
layers of a part ask for them, the first one in a forward makes those of all, and they are let go when it ends. That
many small reductions are one is DDP's idea of buckets (arXiv 2006.15704).
"""

from __future__ import annotations

from torch import nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import Layer, Shared, Vectors


class VectorsInForward(Vectors):
    """The vectors of a part, whose stand-ins are the same while its forward runs."""

    def __init__(self, part: nn.Module, groups: Groups) -> None:
        super().__init__(part, groups)
        self._shared: Shared | None = None

    def share(self) -> Shared:
        """Return the stand-ins of this forward."""
        if self._shared is None:
            self._shared = super().share()
        return self._shared

    def clear(self, *_: object) -> None:
        """Let the stand-ins go, and the graph with them."""
        self._shared = None


def coalesce_vector_gradients(part: nn.Module, groups: Groups) -> None:
    """Have the layers of a part share the stand-ins for their vectors in each forward."""
    if groups.axis("tensor").size == 1:
        return  # every gradient is whole
    vectors = VectorsInForward(part, groups)
    part.vectors = vectors  # type: ignore[assignment]
    for layer in part.modules():
        if isinstance(layer, Layer):
            layer.vectors = vectors
    part.register_forward_pre_hook(vectors.clear)  # also after one that has failed
    part.register_forward_hook(vectors.clear)
