"""Every collective of dslpar, out of place, and in pairs with its backward.

An `Axis` is one group of ranks as a handle: who belongs to it and where this rank stands in it. Over an axis of size 1
every function returns its argument: no collective, no copy, no node in the graph.

===============  ====================  ====================  ===========================================
differentiable   forward               backward              for
===============  ====================  ====================  ===========================================
`gathered`       all-gather            reduce-scatter        pieces, to the panel of a product
`scattered`      reduce-scatter        all-gather            partial products, to pieces
`summed`         all-reduce            identity              partial products, to equal copies
`shared`         identity              all-reduce            equal copies, to the panel of a product
`sliced`         this rank's slice     all-gather            equal copies, to pieces
`joined`         all-gather            this rank's slice     pieces, to equal copies
===============  ====================  ====================  ===========================================

The two conjugate pairs are Megatron-LM's f, g (arXiv 1909.08053) and its sequence-parallel ones (2205.05198); that they
are all one small table is how nanotron and picotron write them. `sliced`, `joined`, `summed` and `shared` trust that
copies are equal on all ranks of the axis, and keep them so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")

# torch 2.13 renamed two collectives and warns about the old names, which alone exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """One group of ranks: the ranks that differ from this one along some axes of the mesh alone."""

    size: int = 1
    """Ranks in the group."""
    index: int = 0
    """This rank's position among `peers`."""
    peers: tuple[int, ...] = (0,)
    """Global ranks of the group, in order."""
    group: dist.ProcessGroup | None = None
    """The group made real; None only where one process trains by itself."""

    def __deepcopy__(self, memo: object) -> Axis:
        """Itself: a copy of a layer talks to the same ranks."""
        return self


class Pending(NamedTuple):
    """A collective under way; its result is what `wait()` returns."""

    received: Tensor
    work: Sequence[Any] = ()
    rest: Callable[[Tensor], Tensor] | None = None
    """What makes the result of what was received."""

    def wait(self) -> Tensor:
        """Blocks (on an accelerator: its stream) until the result is there."""
        finish(self.work)
        return self.received if self.rest is None else self.rest(self.received)


# ---- plain collectives ----


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """The pieces of all ranks, joined along `dim` in the axis's order. Shapes must agree."""
    if axis.size == 1:
        return x
    flat = x.new_empty(axis.size * x.numel())  # flat: gloo takes no other form of "joined along the first dim"
    _all_gather(flat, x.reshape(-1), group=axis.group)
    pieces = flat.view(axis.size, *x.shape)
    dim %= x.dim()
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's piece, along `dim`, of the sum over all ranks."""
    return start_reduce_scatter(x, axis, dim).wait()


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum (or "max", "min") over all ranks, equal on all of them to the bit."""
    return x if axis.size == 1 else start_all_reduce_(x.clone(), axis, op).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Pending:
    """As `reduce_scatter`, without waiting.

    gloo's own takes twice as long as its all-reduce: there, each rank is sent its piece of all, and sums them up
    itself. That sends as many elements, and is counted as what it is for.
    """
    if axis.size == 1:
        return Pending(x)
    dim %= x.dim()
    pieces = in_blocks(x, dim, axis.size).movedim(dim, 0).contiguous()
    if _over_gloo(axis):
        pieces.stands_for = "reduce_scatter"  # type: ignore[attr-defined]  # tests.support.traffic_counter reads it
        received = torch.empty_like(pieces)
        return Pending(received, [dist.all_to_all_single(received, pieces, group=axis.group, async_op=True)], _total)
    piece = torch.empty_like(pieces[0])
    work = _reduce_scatter(piece.view(-1), pieces.view(-1), group=axis.group, async_op=True)
    return Pending(piece, [work])


def _over_gloo(axis: Axis) -> bool:
    return str(dist.get_backend(axis.group)) == "gloo"


def _total(pieces: Tensor) -> Tensor:
    return pieces.sum(0)


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """As `all_reduce`, without waiting, for temporaries that nothing else will read: it may write into `x` itself.

    gloo's own costs two ranks three times as much as to send all to each other, which are as many elements.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    if axis.size == 2 and op == "sum" and _over_gloo(axis):
        x.stands_for = "all_reduce"  # type: ignore[attr-defined]  # tests.support.traffic_counter reads it
        received, works = start_shift(x, axis)
        return Pending(received, works, x.add_)  # in either order the same number, to the bit
    return Pending(x, [dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=True)])


def all_to_all(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """Cuts `x` along `split_dim`, one piece a rank; joins what the others sent along `join_dim`."""
    if axis.size == 1:
        return x
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    parts = in_blocks(x, split_dim, axis.size).movedim(split_dim, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
    return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)


def start_shift(x: Tensor, axis: Axis) -> tuple[Tensor, list[Any]]:
    """Sends `x` to the next rank of the ring, receives the previous one's; the tensor is whole after `finish`."""
    received = torch.empty_like(x)
    ahead, behind = (axis.peers[(axis.index + step) % axis.size] for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, x, ahead, axis.group),
        dist.P2POp(dist.irecv, received, behind, axis.group),
    ]
    return received, dist.batch_isend_irecv(operations)


def finish(works: Sequence[Any]) -> None:
    """Waits for what `start_shift` began."""
    for work in works:
        work.wait()


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """The tensor of the axis's `source`-th rank; shapes and dtypes must agree."""
    if axis.size == 1:
        return x
    copy = x.detach().clone()
    dist.broadcast(copy, axis.peers[source], group=axis.group)
    return copy


def barrier(axis: Axis) -> None:
    """Returns when all ranks of the axis have come here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def broadcast_object(value: Value, axis: Axis, source: int = 0) -> Value:
    """The (picklable) value of the axis's `source`-th rank."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, axis.peers[source], group=axis.group)
    return box[0]


def gather_objects(value: Value, axis: Axis) -> list[Value]:
    """The (picklable) values of all ranks, in the axis's order, on every rank."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def in_blocks(x: Tensor, dim: int, num_blocks: int) -> Tensor:
    """`dim` as (num_blocks, rest): a view."""
    return x.reshape(*x.shape[:dim], num_blocks, -1, *x.shape[dim + 1 :])


# ---- the same, differentiable ----


def gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All-gather along `dim`; backward: reduce-scatter."""
    return _pair(x, axis, partial(all_gather, axis=axis, dim=dim), partial(reduce_scatter, axis=axis, dim=dim))


def scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reduce-scatter along `dim`; backward: all-gather."""
    return _pair(x, axis, partial(reduce_scatter, axis=axis, dim=dim), partial(all_gather, axis=axis, dim=dim))


def summed(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce; backward: identity."""
    return _pair(x, axis, partial(all_reduce, axis=axis), _identity)


def shared(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward: all-reduce."""
    return _pair(x, axis, _identity, partial(all_reduce, axis=axis))


def sliced(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice along `dim`; backward: all-gather."""
    return _pair(x, axis, partial(_slice, axis=axis, dim=dim), partial(all_gather, axis=axis, dim=dim))


def joined(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All-gather along `dim`; backward: this rank's slice."""
    return _pair(x, axis, partial(all_gather, axis=axis, dim=dim), partial(_slice, axis=axis, dim=dim))


def exchanged(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """All-to-all; backward: the all-to-all that undoes it."""
    there = partial(all_to_all, axis=axis, split_dim=split_dim, join_dim=join_dim)
    back = partial(all_to_all, axis=axis, split_dim=join_dim, join_dim=split_dim)
    return _pair(x, axis, there, back)


def shared_together(tensors: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """`shared` for many small tensors of one dtype, with one all-reduce for all their gradients."""
    if axis.size == 1 or not tensors:
        return tuple(tensors)
    return tuple(_SharedTogether.apply(axis, *tensors))  # type: ignore[no-untyped-call]


Move = Callable[[Tensor], Tensor]


def _pair(x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
    if axis.size == 1:
        return x
    result: Tensor = _Pair.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.chunk(axis.size, dim)[axis.index].contiguous()


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


class _SharedTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bucket = torch.cat([grad.flatten() for grad in grads])
        whole = torch.split(start_all_reduce_(bucket, ctx.axis).wait(), [grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(whole, grads, strict=True))
