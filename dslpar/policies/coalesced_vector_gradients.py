"""Sum the gradients of a block's vectors (biases, gains, position tables) over tensor ranks in one all-reduce.

A *vector* is a parameter that a rank applies to its own tokens only, so its gradient must be summed over ranks. A
stand-in is a tensor that a layer uses instead of a vector, and in whose backward this sum is done (`layers.parameter`).
dslpar's own blocks make the stand-ins of all their vectors and pass them to their layers. transformers' code does not,
so here each layer asks for them. The first request in a forward makes the stand-ins of the whole part (a block, or a
module around the blocks), and the end of the forward drops them. So many small reductions become one all-reduce per set
of axes in each backward, as with DDP's buckets (arXiv 2006.15704). `engine/vector_reduction.py` sums once per step.
"""

from __future__ import annotations

from torch import nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import Layer, Shared, Vectors


class VectorsInForward(Vectors):
    """Vectors of a part, which makes their stand-ins once per forward."""

    def __init__(self, part: nn.Module, groups: Groups) -> None:
        super().__init__(part, groups)
        self._shared: Shared | None = None

    def share(self) -> Shared:
        """Return {vector: stand-in} of this forward."""
        if self._shared is None:
            self._shared = super().share()
        return self._shared

    def clear(self, *_: object) -> None:
        """Drop the stand-ins, which keep the autograd graph alive. This is a hook."""
        self._shared = None


def coalesce_vector_gradients(part: nn.Module, groups: Groups) -> None:
    """Register hooks with which all layers of a part share one set of stand-ins in each forward."""
    if groups.axis("tensor").size == 1:
        return  # every gradient is complete
    vectors = VectorsInForward(part, groups)
    part.vectors = vectors  # type: ignore[assignment]
    for layer in part.modules():
        if isinstance(layer, Layer):
            layer.vectors = vectors
    part.register_forward_pre_hook(vectors.clear)  # clears after a failed forward too
    part.register_forward_hook(vectors.clear)
