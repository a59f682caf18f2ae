"""Sum the gradients of a part's vectors (biases, gains, position tables) over tensor ranks in one all-reduce.

dslpar's own blocks pass stand-ins for their vectors to the layers within them. transformers' code has no such
stand-ins, so the layers of a part request them. The first request in a forward makes the stand-ins of the whole part,
and they are dropped when the forward ends. Many small reductions become one, as with DDP's buckets (arXiv 2006.15704).
"""

from __future__ import annotations

from torch import nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import Layer, Shared, Vectors


class VectorsInForward(Vectors):
    """Vectors of a part, with the same stand-ins throughout a forward."""

    def __init__(self, part: nn.Module, groups: Groups) -> None:
        super().__init__(part, groups)
        self._shared: Shared | None = None

    def share(self) -> Shared:
        """Return the stand-ins of this forward."""
        if self._shared is None:
            self._shared = super().share()
        return self._shared

    def clear(self, *_: object) -> None:
        """Drop the stand-ins, and the graph with them."""
        self._shared = None


def coalesce_vector_gradients(part: nn.Module, groups: Groups) -> None:
    """Have the layers of a part share the stand-ins for their vectors in each forward."""
    if groups.axis("tensor").size == 1:
        return  # every gradient is complete
    vectors = VectorsInForward(part, groups)
    part.vectors = vectors  # type: ignore[assignment]
    for layer in part.modules():
        if isinstance(layer, Layer):
            layer.vectors = vectors
    part.register_forward_pre_hook(vectors.clear)  # clears after a failed forward too
    part.register_forward_hook(vectors.clear)
