"""The next linear's weight is gathered, and the last one's gradient reduced, under a product: with `comm_overlap`.

    matmul_sharding.prefetch_weights(module)     # once; from then on in each forward and backward of the module
    ... (module, enabled=False)                  # at ZeRO 3, which empties Parameters, and where torch compiles layers

Where weights are in pieces over q (2d, 2.5d, 3d, cuboids), W is gathered before a product, and dW summed over q, and
then over d, after one. In the order in which weights were gathered in the last forward, or backward, that began with
the same one, these run under others' products:

=========  ====================================  =====================================================================
           begins                                is waited for
=========  ====================================  =====================================================================
forward    the next W: before this product       by the next linear, before its product
backward   the next W: after dgrad               by the next linear, before dgrad
           dW over q: after wgrad                by the next linear, after dgrad
           dW over d: then                       after the next linear's wgrad, when autograd takes the gradient
=========  ====================================  =====================================================================

So two panels are there at a time, where there was one: those of this W and the next, or of a W and a dW. What is first
in a forward or backward is waited for at once; so is dW of the linear that is first in the forward.

AxoNN has these overlaps: of dX's reduction in arXiv 2305.13525; in 2502.08145 gathers of weights a layer ahead, and
reductions of dW that are waited for when the backward is over. Here that is one linear later, so that no second panel
waits, and DeepSpeed finds each gradient at its time. The order of the last pass is what DeepSpeed's ZeRO 3 and torch's
FSDP (`forward_prefetch`) go by.

The late gradient comes to autograd by a stand-in for the weight (late_gradient.py), not by a callback at the backward's
end.

Ranks of a tensor group run the same linears in the same order, and must change weights alike: a panel that came ahead
is used, or thrown away, by all of them. It is used for the weight that it was gathered of, if that is unchanged as
torch counts changes (what works on `.data` in place it does not count), and does not outlive its forward or backward.
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
from dslpar.layers.late_gradient import StandIn, WeightReduction


class PrefetchedWeight:
    """One linear's weight, as the linears before and after it know it."""

    def __init__(self, prefetch: WeightPrefetch, sharding: Sharding) -> None:
        self._prefetch, self.sharding = prefetch, sharding
        self.parameter: Tensor | None = None
        """The Parameter, as its linear has last used it. Held, so that all ranks decide alike by it: one that a program
        has replaced lives until its linear's next forward."""

    @property
    def run(self) -> Run:
        """The forward or backward that is under way."""
        return self._prefetch.run

    def enter_forward(self, parameter: Tensor) -> StandIn | None:
        """Begin this linear's product; return what to put in the weight's place, if its gradient may be late."""
        self.parameter = parameter
        return self.run.enter(self).stand_in(parameter)


class Run:
    """A forward or backward that prefetches nothing: each product waits for its own weight."""

    def enter(self, weight: PrefetchedWeight) -> Run:
        """Note that this weight is the next one to be gathered."""
        return self

    def stand_in(self, parameter: Tensor) -> StandIn | None:
        """Return a stand-in for the weight that was entered."""
        return None

    def gather(self, stored: Tensor, sharding: Sharding) -> Tensor:
        """Return the panel of the weight that was entered."""
        return sharding.gather(stored)

    def start_next(self) -> None:
        """Begin to gather the next weight, where there is room for its panel; once, however often it is called."""

    def put(self, reduction: WeightReduction) -> None:
        """Note the reduction that is under way over q."""

    def start_over_d(self) -> None:
        """Go on with the reduction that is under way: free its panel, and sum over d. Call it after a product."""


WAITING = Run()


class _Ahead(NamedTuple):
    """A weight that is gathered before it is needed."""

    weight: PrefetchedWeight
    parameter: Tensor
    version: int
    address: int
    gathering: Pending

    def is_of(self, weight: PrefetchedWeight, stored: Tensor) -> bool:
        """Whether this is the weight, and nothing has changed it since."""
        unchanged = self.parameter._version == self.version
        return weight is self.weight and unchanged and stored.data_ptr() == self.address


_Orders = dict[tuple[str, PrefetchedWeight], list[PrefetchedWeight]]
"""In which weights were gathered the last time, by kind of run and first weight."""


class _Prefetching(Run):
    """One forward or backward, as far as it has come."""

    def __init__(self, kind: str, orders: _Orders) -> None:
        self._kind, self._orders = kind, orders
        self._order: list[PrefetchedWeight] = []
        self._expected: Sequence[PrefetchedWeight] = ()
        """What the last run of the kind gathered; () from where this one goes another way."""
        self._ahead: _Ahead | None = None
        self._stand_in: StandIn | None = None
        """For the next weight."""
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
        """The next weight, if it is known, and its Parameter."""
        position = len(self._order)
        weight = self._expected[position] if position < len(self._expected) else None
        parameter = None if weight is None else weight.parameter
        return None if weight is None or parameter is None or parameter.is_inference() else (weight, parameter)

    def stand_in(self, parameter: Tensor) -> StandIn | None:
        mine, self._stand_in = self._stand_in, None
        following = self._next
        # Of a weight that is used twice in a row, gradients would be added in another order.
        if following is not None and following[1] is not parameter and torch.is_grad_enabled():
            other = following[1]
            if other.requires_grad:
                self._stand_in = StandIn.of_parameter(other)
        is_of_it = mine is not None and mine.parameter is parameter and mine.weight.data_ptr() == parameter.data_ptr()
        return mine if is_of_it and parameter.requires_grad and torch.is_grad_enabled() else None

    def gather(self, stored: Tensor, sharding: Sharding) -> Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            panel = ahead.gathering.wait()  # also if it is of no use: on all ranks alike
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
        """Keep the order; wait for a gathering that is still under way, which all ranks have begun."""
        if self._order:
            self._orders[self._kind, self._order[0]] = self._order
        if self._ahead is not None:
            self._ahead.gathering.wait()
        self._ahead = self._stand_in = self._reduction = None


class WeightPrefetch:
    """What a module's linears know of each other: the orders of the last runs, and the runs that are under way."""

    def __init__(self) -> None:
        self._orders: _Orders = {}
        self._forward: _Prefetching | None = None
        self._backwards: dict[int, _Prefetching] = {}
        """By torch's number of the backward: one may run within another."""
        self._hooks: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightPrefetch:
        """Return one that knows of nothing yet: a copied module, whose hooks are copies, runs by itself."""
        copy = memo[id(self)] = WeightPrefetch()
        return copy

    @property
    def run(self) -> Run:
        """The forward or backward that is under way; outside of the module's, one that prefetches nothing."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return WAITING if self._forward is None else self._forward
        if backward not in self._backwards:
            self._backwards[backward] = _Prefetching("backward", self._orders)
            Variable._execution_engine.queue_callback(partial(self._end_backward, backward))
        return self._backwards[backward]

    def _end_backward(self, backward: int) -> None:
        run = self._backwards.pop(backward, None)
        if run is not None:  # none: a forward that another one's callback has run has ended it
            run.end()

    def watch(self, module: nn.Module) -> None:
        """Take each call of the module for a run."""
        self._hooks += [
            module.register_forward_pre_hook(self._begin_forward),
            module.register_forward_hook(self._end_forward, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            kind = "forward" if torch.is_grad_enabled() else "evaluation"
            self._forward = _Prefetching(kind, self._orders)
            self._backwards.clear()  # of some that an exception has ended: their peers may never send

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            run, self._forward = self._forward, None
            if run is not None and output is not None:  # else an exception has ended it: the same holds
                run.end()
