"""Weight prefetch (`comm_overlap`): gather the next weight and reduce the last weight gradient during other products.

    operand_shardings.prefetch_weights(module)   # once; from then on in each forward and backward of the module
    ... (module, enabled=False)                  # at ZeRO 3, which empties Parameters, and where torch compiles layers

Terms: d and q are axes of the cuboid (docs/architecture.md). A panel is a weight gathered over q, or its gradient
before the reduction over q. A pass is one forward or one backward of the module; the class `Run` is a pass.

If weights are in pieces over q (2d, 2.5d, 3d, cuboids), W is gathered before a product. After a product, dW is summed
over q, and then over d. Prefetching runs these collectives under the products of other linears. It expects that a pass
gathers weights in the same order as the last pass of its kind that began with the same weight:

=========  ====================================  =====================================================================
           starts                                is waited for
=========  ====================================  =====================================================================
forward    the next W: before this product       by the next linear, before its product
backward   the next W: after dgrad               by the next linear, before dgrad
           dW over q: after wgrad                by the next linear, after dgrad
           dW over d: then                       after the next linear's wgrad, when autograd takes the gradient
=========  ====================================  =====================================================================

So two panels are in memory at a time instead of one: the panels of this W and of the next W, or the panels of a W and
of a dW. No product hides the gather of the first weight of a pass, nor the reduction of dW for the first linear of the
forward.

AxoNN has these overlaps. arXiv 2305.13525 overlaps the reduction of dX. 2502.08145 gathers weights one layer ahead, and
waits for all reductions of dW at the end of the backward. Here each dW is waited for one linear later, so that no
second panel stays in memory, and DeepSpeed gets each gradient in its usual order. DeepSpeed's ZeRO 3 and torch's FSDP
(`forward_prefetch`) follow the order of the last pass too.

Autograd receives the late gradient through a stand-in for the weight (late_reduction.py), not through a callback at the
backward's end.

Ranks of a tensor group must run the same linears in the same order. They must also change weights alike, so that all of
them use a prefetched panel, or all of them discard it. A panel is used only for the weight from which it was gathered,
and only if torch's version counter shows no change. (The counter misses in-place writes through `.data`.) A panel does
not outlive its pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from dslpar.distributed.collectives import Pending
from dslpar.layers.gather_reduce import Sharding
from dslpar.layers.late_reduction import StandIn, WeightReduction


class PrefetchedWeight:
    """Handle of one linear's weight, by which the linears before and after it prefetch the weight."""

    def __init__(self, prefetch: WeightPrefetch, sharding: Sharding) -> None:
        self._prefetch, self.sharding = prefetch, sharding
        self.parameter: Tensor | None = None
        """The Parameter in the linear's last forward. A strong reference, so that all ranks decide alike: a Parameter
        that the program has replaced lives until the linear's next forward."""

    @property
    def run(self) -> Run:
        """The pass in progress."""
        return self._prefetch.run

    def enter_forward(self, parameter: Tensor) -> StandIn | None:
        """Record that this linear's product comes next; return a stand-in for its weight if dW may be late."""
        self.parameter = parameter
        return self.run.enter(self).stand_in(parameter)


class Run:
    """A pass, forward or backward. This base class does no prefetching: each product waits for its own weight."""

    def enter(self, weight: PrefetchedWeight) -> Run:
        """Record that this weight is gathered next."""
        return self

    def stand_in(self, parameter: Tensor) -> StandIn | None:
        """Return a stand-in for the entered weight, or None if its gradient cannot be late."""
        return None

    def gather(self, stored: Tensor, sharding: Sharding) -> Tensor:
        """Return the panel of the entered weight."""
        return sharding.gather(stored)

    def start_next(self) -> None:
        """Start to gather the next weight if there is room for its panel. Later calls do nothing."""

    def put(self, reduction: WeightReduction) -> None:
        """Record a dW whose sum over q has started."""

    def start_over_d(self) -> None:
        """Continue the reduction that `put` recorded: free its panel, start the sum over d. Call it after a product."""


WAITING = Run()
"""Pass without prefetching, for products outside any pass."""


class _Ahead(NamedTuple):
    """Prefetched weight, with the state that shows whether the weight has changed since."""

    weight: PrefetchedWeight
    parameter: Tensor
    version: int
    """The Parameter's version counter when the gather started."""
    address: int
    """The Parameter's memory address at that time."""
    gathering: Pending

    def is_of(self, weight: PrefetchedWeight, stored: Tensor) -> bool:
        """Return whether this is the prefetched `weight`, unchanged since its gather started."""
        unchanged = self.parameter._version == self.version
        return weight is self.weight and unchanged and stored.data_ptr() == self.address


_Orders = dict[tuple[str, PrefetchedWeight], list[PrefetchedWeight]]
"""{(kind of pass, its first weight): the order in which the last such pass gathered weights}."""


class _Prefetching(Run):
    """Pass with prefetching; its `kind` is "forward", "evaluation" or "backward"."""

    def __init__(self, kind: str, orders: _Orders) -> None:
        self._kind, self._orders = kind, orders
        self._order: list[PrefetchedWeight] = []
        self._expected: Sequence[PrefetchedWeight] = ()
        """The weights in the order of the last such pass; () once this pass has deviated from it."""
        self._ahead: _Ahead | None = None
        self._stand_in: StandIn | None = None
        """Stand-in for the next weight."""
        self._reduction: WeightReduction | None = None

    def enter(self, weight: PrefetchedWeight) -> Run:
        position = len(self._order)
        self._order.append(weight)
        if position == 0:
            self._expected = self._orders.get((self._kind, weight), ())
        elif self._expected[position : position + 1] != [weight]:
            self._expected = ()
        return self

    @property
    def _next(self) -> tuple[PrefetchedWeight, Tensor] | None:
        """The expected next weight and its Parameter, or None."""
        position = len(self._order)
        weight = self._expected[position] if position < len(self._expected) else None
        parameter = None if weight is None else weight.parameter
        return None if weight is None or parameter is None or parameter.is_inference() else (weight, parameter)

    def stand_in(self, parameter: Tensor) -> StandIn | None:
        mine, self._stand_in = self._stand_in, None
        following = self._next
        # A weight that is used twice in a row gets no stand-in: its gradients would be added in another order.
        if following is not None and following[1] is not parameter and torch.is_grad_enabled():
            other = following[1]
            if other.requires_grad:
                self._stand_in = StandIn.of_parameter(other)
        is_of_it = mine is not None and mine.parameter is parameter and mine.weight.data_ptr() == parameter.data_ptr()
        return mine if is_of_it and parameter.requires_grad and torch.is_grad_enabled() else None

    def gather(self, stored: Tensor, sharding: Sharding) -> Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            panel = ahead.gathering.wait()  # wait even if the panel is not used, as all ranks do
            if ahead.is_of(self._order[-1], stored):
                return panel
            del ahead, panel
        return sharding.gather(stored)

    def start_next(self) -> None:
        following = self._next
        if self._ahead is None and self._reduction is None and following is not None:
            weight, parameter = following
            gathering = weight.sharding.start_gather(parameter.detach())
            self._ahead = _Ahead(weight, parameter, parameter._version, parameter.data_ptr(), gathering)

    def put(self, reduction: WeightReduction) -> None:
        self._reduction = reduction

    def start_over_d(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.start_over_d()

    def end(self) -> None:
        """Save the order; wait for a gather that is still in progress, since all ranks have started it."""
        if self._order:
            self._orders[self._kind, self._order[0]] = self._order
        if self._ahead is not None:
            self._ahead.gathering.wait()
        self._ahead = self._stand_in = self._reduction = None


class WeightPrefetch:
    """State shared by a module's linears: the orders of the last passes, and the passes in progress."""

    def __init__(self) -> None:
        self._orders: _Orders = {}
        self._forward: _Prefetching | None = None
        self._backwards: dict[int, _Prefetching] = {}
        """Backwards in progress, by torch's graph task id, since one backward may run within another."""
        self._hooks: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightPrefetch:
        """Return an empty state: a copied module has copies of the hooks, and prefetches independently."""
        copy = memo[id(self)] = WeightPrefetch()
        return copy

    @property
    def run(self) -> Run:
        """The pass in progress; `WAITING` between passes."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return WAITING if self._forward is None else self._forward
        if backward not in self._backwards:
            self._backwards[backward] = _Prefetching("backward", self._orders)
            Variable._execution_engine.queue_callback(partial(self._end_backward, backward))
        return self._backwards[backward]

    def _end_backward(self, backward: int) -> None:
        run = self._backwards.pop(backward, None)
        if run is not None:  # None if a forward, run in the callback of another backward, has cleared it
            run.end()

    def watch(self, module: nn.Module) -> None:
        """Treat each call of the module as a forward pass."""
        self._hooks += [
            module.register_forward_pre_hook(self._begin_forward),
            module.register_forward_hook(self._end_forward, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            kind = "forward" if torch.is_grad_enabled() else "evaluation"
            self._forward = _Prefetching(kind, self._orders)
            self._backwards.clear()  # drop backwards that an exception ended; do not wait, as peers may never send

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            run, self._forward = self._forward, None
            if run is not None and output is not None:  # None after an exception: then do not wait either
                run.end()
