"""Late weight gradients: autograd receives them one linear later, so that products hide their reduction.

A linear's dW is summed over ranks while the backward goes on to the linear before it in the forward. Autograd takes dW
after the backward of that linear, without a callback at the backward's end. For this the product uses a stand-in for
the weight: a graph node that is created before the node of the preceding linear. Of the nodes that wait in a device's
queue, autograd runs the one created last first. So the stand-in's backward runs after the preceding linear's backward,
and the hooks of the gradient's accumulation run after the stand-in's backward.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers.gather_reduce import Sharding


class WeightReduction:
    """Asynchronous sum of dW over the cuboid's axes q (reduce-scatter), then d (all-reduce)."""

    def __init__(self, panel: Tensor, over_q: Sharding, over_d: Axis) -> None:
        self._over_q: Pending | None = over_q.start_reduce(panel)
        self._over_d: Pending | None = None
        self._depth = over_d

    def start_over_d(self) -> None:
        """Wait for this rank's piece of the sum over q, which frees the panel; start the sum over d. Only once."""
        if self._over_q is not None:
            # q comes before d because after the reduce-scatter over q only 1/q of the gradient is left to all-reduce.
            piece, self._over_q = self._over_q.wait(), None
            self._over_d = collectives.start_all_reduce_(piece, self._depth)

    def wait(self) -> Tensor:
        """Return this rank's piece, summed over q and d."""
        self.start_over_d()
        assert self._over_d is not None
        return self._over_d.wait()


class LateGradient:
    """Hands a reduction from a linear's backward to the backward of its weight's stand-in."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._reduction: WeightReduction | None = None
        self._thread = 0

    def put(self, reduction: WeightReduction) -> Tensor:
        """Store the reduction; return a placeholder gradient for autograd, which nothing reads.

        The placeholder is a tensor because torch before 2.6 queues a node without a gradient on the CPU, whose thread
        would run it beside the nodes of an accelerator's queue.
        """
        self._reduction, self._thread = reduction, get_ident()
        return self._weight.detach()

    def take(self) -> Tensor | None:
        """Return the gradient; None if this backward has computed no gradient of the weight."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return None
        assert self._thread == get_ident(), "order holds within one of autograd's queues alone"
        return reduction.wait()


class StandIn(NamedTuple):
    """Stand-in of a weight for one product; its gradient may arrive after the next linear's backward."""

    weight: Tensor
    parameter: Tensor
    late: LateGradient

    @classmethod
    def of_parameter(cls, parameter: Tensor) -> StandIn:
        """Make a stand-in. Call it before the preceding linear makes its node."""
        late = LateGradient(parameter)
        return cls(_StandIn.apply(parameter, late), parameter, late)  # type: ignore[no-untyped-call]


class _StandIn(torch.autograd.Function):
    """Identity as a separate graph node. The result shares the weight's memory but is no view of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: LateGradient) -> Tensor:
        ctx.late = late
        ctx.set_materialize_grads(False)
        return weight.detach()  # no view: torch refuses views of a weight that a hook changes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.late.take(), None
