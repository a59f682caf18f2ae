"""Weight gradients apart from the backward: what a zero-bubble pipeline schedule puts off, linear by linear.

A linear's backward has two products. For B, dX = dY W, the stage before waits; for W, dW = dY^T X, only the optimizer
does, so a schedule may run it where the rank would else be idle (Zero Bubble Pipeline Parallelism, Qi et al., arXiv
2401.10241). Around a backward that is split, each linear puts its dW into a queue in place of computing it::

    linear = Linear(groups, 256, 1024, role="inward")
    with splitting():
        y = linear(x)                        # F
    aside = WeightGradients()
    with splitting(aside):
        y.backward(y_grad)                   # B: x.grad and the bias's gradient, and none of the weight
    aside.accumulate()                       # W: the weight's, as if the backward had brought it

torch.distributed.pipelining splits by walking the autograd graph twice, from the outputs to the inputs and then to the
weights. A Function, which computes both gradients in one backward, then runs whole both times, with its collectives;
here it runs once. All that is no matrix of a linear stays in B: biases, norms, tables that are looked up, adapters,
attention; and so do linears of other modules, such as torch's own.

A product that waits holds dY and X, as panels where these live until the backward anyway, and none of the weight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

Start = Callable[[], Callable[[], Tensor]]
"""Starts to gather what a product needs; returns what waits for that, and computes a weight gradient."""


class WeightGradients:
    """Weight gradients of one backward that are still to be computed, in the order in which it came to them.

    All ranks of a tensor group must compute theirs alike, since gathers and reductions belong to it. Not a value but a
    queue: the backward fills it, later ones take from its front, and `accumulate` empties it.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Start]] = deque()
        self._computed: list[tuple[Tensor, Tensor]] = []
        """Those from the front of the queue that were computed early: they wait for `accumulate`."""

    def __len__(self) -> int:
        """Return the number of products that wait; what was computed early does not."""
        return len(self._waiting)

    def put(self, weight: Tensor, start: Start) -> None:
        """Append the gradient of a leaf; nothing is computed yet."""
        self._waiting.append((weight, start))

    def start_first(self) -> Callable[[], None]:
        """Take the first product that waits, and start it; the result computes it, and keeps the value."""
        weight, start = self._waiting.popleft()
        compute = start()
        return lambda: self._computed.append((weight, compute()))

    def accumulate(self) -> None:
        """Compute what is left, and add the sum to each weight's gradient; autograd's hooks run once a weight.

        One weight after the other, so that no more than two of these gradients are in memory.
        """
        left = Counter([weight for weight, _ in (*self._computed, *self._waiting)])
        sums: dict[Tensor, Tensor] = {}
        for weight, gradient in self._in_order():
            sums[weight] = sums[weight] + gradient if weight in sums else gradient
            left[weight] -= 1
            if not left[weight]:
                # By autograd, and not `weight.grad +=`: ZeRO 1 sums in fp32 in the hooks of this accumulation.
                torch.autograd.backward([weight], [sums.pop(weight)])

    def _in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with a gradient, computed early or now, and empty the queue."""
        compute: Callable[[], None] | None = None
        while self._computed or self._waiting or compute is not None:
            # The next product's gathering is under way while the one before multiplies.
            following = self.start_first() if self._waiting else None
            if compute is not None:
                with torch.no_grad():
                    compute()
            compute = following
            while self._computed:
                yield self._computed.pop(0)


class Leaf(NamedTuple):
    """A weight whose gradient is put aside: the graph of its forward has no edge to it.

    With an edge, torch would run the weight's hooks in B as well, with no gradient, and DeepSpeed's take it for made.
    """

    weight: Tensor

    def stand_in(self) -> Tensor:
        """Return the same numbers as another leaf, which the forward uses, and whose gradient nobody takes."""
        return self.weight.detach().requires_grad_()


class Split(NamedTuple):
    """What the linears' forwards and backwards within `splitting` are to do."""

    into: WeightGradients | None
    older: Sequence[WeightGradients]

    def put(self, weight: Tensor, start: Start) -> None:
        """Put a gradient of this backward aside."""
        assert self.into is not None
        self.into.put(weight, start)

    def start_older(self) -> Callable[[], None] | None:
        """Start one product that waits from before; the result computes it. None: there is none."""
        first = next((each for each in self.older if len(each)), None)
        return None if first is None else first.start_first()


_active: Split | None = None
"""A variable of the module and not of a thread or context: autograd runs the backward of what is on an accelerator in
threads of its own, which see neither. One forward or backward runs at a time in a process, so it needs no lock."""


@contextmanager
def splitting(into: WeightGradients | None = None, older: Sequence[WeightGradients] = ()) -> Iterator[None]:
    """Split the backward of linears: around a forward, so that it can be; around a backward, with `into`, it is.

    The backward puts each weight's gradient into `into`. Where a linear reduces dX over ranks, one product of `older`
    is computed meanwhile, of the first that has one left; without, splitting would lose what an unsplit backward hides
    under its own dW. `into` may stand last in `older`: what this backward has put aside itself then serves too.

    A forward within has its backward within; what is recomputed there is so of itself. A forward outside has a backward
    that computes all. Ranks of a tensor group must agree.
    """
    global _active
    before, _active = _active, Split(into, older)
    try:
        yield
    finally:
        _active = before


def is_splitting() -> bool:
    """Whether linears run within `splitting`, forward or backward."""
    return _active is not None


def leaf_of(weight: Tensor) -> Leaf | None:
    """Return the weight, if its gradient is to be put aside: within `splitting`, of a leaf that needs one."""
    return Leaf(weight) if _active is not None and weight.requires_grad and weight.is_leaf else None


def split_backward(leaf: Leaf | None) -> Split | None:
    """Return what a backward that runs now is to do; None: to compute all gradients itself."""
    if _active is not None and _active.into is not None:
        return _active
    assert leaf is None, "a forward within `splitting` has its backward within `splitting(into)`"
    return None
