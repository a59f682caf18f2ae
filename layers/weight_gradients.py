"""Split backward: defer the weight gradients of linears, as zero-bubble pipeline schedules need it.

A linear's backward has two products. They are called B and W as in Zero Bubble Pipeline Parallelism (Qi et al., arXiv
2401.10241). B is dX = dY W, for which the previous pipeline stage waits. W is dW = dY^T X, for which only the optimizer
waits, so a schedule may run it when the rank would be idle otherwise. Within a split backward, each linear puts its dW
into a queue instead of computing it::

    linear = Linear(groups, 256, 1024, role="inward")
    with splitting():
        y = linear(x)                        # F
    aside = WeightGradients()
    with splitting(aside):
        y.backward(y_grad)                   # B: x.grad and the bias's gradient, and none of the weight
    aside.accumulate()                       # W: the weight's, as if the backward had brought it

torch.distributed.pipelining splits by walking the autograd graph twice, from the outputs to the inputs and then to the
weights. An autograd Function that computes dX and dW in one backward then runs twice, including its
collectives. Here it runs once. Only matrices of dslpar's linears are deferred. Biases, norms, embedding lookups,
adapters, attention, and other linears such as torch's own stay in B.

A deferred product keeps dY as a gathered panel, and X as the forward saved it: a panel if `keep` keeps it, else this
rank's piece. It keeps no weight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

Start = Callable[[], Callable[[], Tensor]]
"""Starts to gather a product's operands; returns a function that waits for them and computes a weight gradient."""


class WeightGradients:
    """Queue of the deferred weight gradients of one backward, in the order of that backward.

    All ranks of a tensor group must compute them in the same order, since each one includes gathers and reductions. The
    backward fills the queue, later backwards take from its front, and `accumulate` empties it.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Start]] = deque()
        self._computed: list[tuple[Tensor, Tensor]] = []
        """Gradients from the front of the queue that were computed early, and wait for `accumulate`."""

    def __len__(self) -> int:
        """Return the number of products to compute, without those computed early."""
        return len(self._waiting)

    def put(self, weight: Tensor, start: Start) -> None:
        """Append the deferred gradient of a weight; `start` will start to gather the operands."""
        self._waiting.append((weight, start))

    def start_first(self) -> Callable[[], None]:
        """Take the first product and start its gather; return a function that computes and keeps the gradient."""
        weight, start = self._waiting.popleft()
        compute = start()
        return lambda: self._computed.append((weight, compute()))

    def accumulate(self) -> None:
        """Compute the remaining products, and add the sums to the weights' gradients; hooks run once per weight.

        It finishes one weight after the other, so that no more than two of these gradients are in memory.
        """
        left = Counter([weight for weight, _ in (*self._computed, *self._waiting)])
        sums: dict[Tensor, Tensor] = {}
        for weight, gradient in self._in_order():
            sums[weight] = sums[weight] + gradient if weight in sums else gradient
            left[weight] -= 1
            if not left[weight]:
                # Through autograd, not `weight.grad +=`, since ZeRO 1 sums in fp32 in the hooks of this accumulation.
                torch.autograd.backward([weight], [sums.pop(weight)])

    def _in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with a gradient, computed early or now, and empty the queue."""
        compute: Callable[[], None] | None = None
        while self._computed or self._waiting or compute is not None:
            # The next product's gather runs while this product is computed.
            following = self.start_first() if self._waiting else None
            if compute is not None:
                with torch.no_grad():
                    compute()
            compute = following
            while self._computed:
                yield self._computed.pop(0)


class Leaf(NamedTuple):
    """Weight whose gradient is deferred. The graph of the forward has no edge to this weight.

    With an edge, torch would run the weight's hooks in B too, without a gradient, and DeepSpeed's hooks would treat the
    gradient as computed.
    """

    weight: Tensor

    def stand_in(self) -> Tensor:
        """Return another leaf with the same data for the forward; its gradient is not used."""
        return self.weight.detach().requires_grad_()


class Split(NamedTuple):
    """Queues of deferred products that linears use within `splitting`."""

    into: WeightGradients | None
    """Queue for the products that this backward defers; None: a forward."""
    older: Sequence[WeightGradients]
    """Queues of earlier backwards, and possibly `into`, whose products hide the reductions of dX."""

    def put(self, weight: Tensor, start: Start) -> None:
        """Defer a gradient of this backward."""
        assert self.into is not None
        self.into.put(weight, start)

    def start_older(self) -> Callable[[], None] | None:
        """Start the first product of `older`; return a function that computes it, or None if there is no product."""
        first = next((each for each in self.older if len(each)), None)
        return None if first is None else first.start_first()


_active: Split | None = None
"""A module variable, not one of a thread or context, because autograd runs the backward for an accelerator in threads
of its own. It needs no lock, since one forward or backward runs at a time in a process."""


@contextmanager
def splitting(into: WeightGradients | None = None, older: Sequence[WeightGradients] = ()) -> Iterator[None]:
    """Split the backward of linears. Use it around a forward without `into`, and around its backward with `into`.

    The backward puts each weight's gradient into `into`. While a linear reduces dX over ranks, it computes one deferred
    product, from the first queue in `older` that is not empty. Otherwise splitting would expose the reduction, which an
    unsplit backward hides under its own dW. `into` may be the last queue in `older`. Then this backward's own deferred
    products serve too.

    If a forward runs within `splitting`, its backward must too. This includes recomputed forwards. The backward of a
    forward outside `splitting` computes all gradients. All ranks of a tensor group must use the same contexts.
    """
    global _active
    before, _active = _active, Split(into, older)
    try:
        yield
    finally:
        _active = before


def is_splitting() -> bool:
    """Return whether a `splitting` context is active, around a forward or a backward."""
    return _active is not None


def leaf_of(weight: Tensor) -> Leaf | None:
    """Return a `Leaf` if the weight's gradient is deferred: within `splitting`, for a leaf that needs a gradient."""
    return Leaf(weight) if _active is not None and weight.requires_grad and weight.is_leaf else None


def split_backward(leaf: Leaf | None) -> Split | None:
    """Return the active split of a backward; None: the backward computes all gradients itself."""
    if _active is not None and _active.into is not None:
        return _active
    assert leaf is None, "a forward within `splitting` has its backward within `splitting(into)`"
    return None
