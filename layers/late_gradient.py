"""A weight's gradient that comes to autograd after the next linear's backward, under whose products it is reduced.

No callback at the backward's end brings late gradients. In place of a weight the product has a stand-in, a node of the
graph that is made before the node of the linear that comes before. Autograd runs first what was made last, of the nodes
that wait in a device's queue, so the stand-in has its turn after that linear's backward, and hooks of the gradient's
accumulation run after it.
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
    """The sum of dW over q, and then over d, under way."""

    def __init__(self, panel: Tensor, over_q: Sharding, over_d: Axis) -> None:
        self._over_q: Pending | None = over_q.start_reduce(panel)
        self._over_d: Pending | None = None
        self._depth = over_d

    def start_over_d(self) -> None:
        """Wait for this rank's piece of the sum over q, which frees the panel, and begin to sum it over d; once."""
        if self._over_q is not None:
            # Over q before d: of the reduce-scattered gradient only 1/q is left to all-reduce.
            piece, self._over_q = self._over_q.wait(), None
            self._over_d = collectives.start_all_reduce_(piece, self._depth)

    def wait(self) -> Tensor:
        """Return this rank's piece, summed over q and d."""
        self.start_over_d()
        assert self._over_d is not None
        return self._over_d.wait()


class LateGradient:
    """Where a linear leaves a reduction to the backward of its weight's stand-in."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._reduction: WeightReduction | None = None
        self._thread = 0

    def put(self, reduction: WeightReduction) -> Tensor:
        """Leave the gradient of this backward; return what autograd is to have in its place, which nobody reads.

        Not None: of a node that gets none, torch before 2.6 takes its turn in the queue of the CPU, whose thread would
        run it beside those of an accelerator's queue.
        """
        self._reduction, self._thread = reduction, get_ident()
        return self._weight.detach()

    def take(self) -> Tensor | None:
        """Return the gradient; None, where this backward has made none."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return None
        assert self._thread == get_ident(), "order holds within one of autograd's queues alone"
        return reduction.wait()


class StandIn(NamedTuple):
    """A weight for one product, whose gradient may come after the next linear's backward."""

    weight: Tensor
    parameter: Tensor
    late: LateGradient

    @classmethod
    def of_parameter(cls, parameter: Tensor) -> StandIn:
        """Make one: before the node of the linear that comes before the parameter's."""
        late = LateGradient(parameter)
        return cls(_StandIn.apply(parameter, late), parameter, late)  # type: ignore[no-untyped-call]


class _StandIn(torch.autograd.Function):
    """The same numbers, as a node of its own: neither keeps the other alive."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: LateGradient) -> Tensor:
        ctx.late = late
        ctx.set_materialize_grads(False)
        return weight.detach()  # no view: where a hook changes the weight, torch refuses views of it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.late.take(), None
