"""Collectives of dslpar: out of place, blocking or asynchronous, and in differentiable pairs with their backward.

An `Axis` is a handle to one group of ranks: its members, and this rank's position among them. Over an axis of size 1
every function returns its argument: no collective, no copy, no node in the graph.

Terms: a *piece* is a rank's shard of a tensor. A *panel* is the operand of a rank's local matrix product. A *partial
product* is the result of that product, which must still be summed over ranks. *Equal copies* are one tensor, held by
all ranks.

=========================  ==================  ==================  =============================================
differentiable             forward             backward            the forward turns
=========================  ==================  ==================  =============================================
`all_gather_autograd`      all-gather          reduce-scatter      pieces into the panel of a product
`reduce_scatter_autograd`  reduce-scatter      all-gather          partial products into pieces
`all_to_all_autograd`      all-to-all          all-to-all          pieces along one dim into pieces along another
`reduce_from_group`        all-reduce          identity            partial products into equal copies
`copy_to_group`            identity            all-reduce          equal copies into the panel of a product
`scatter_to_group`         this rank's slice   all-gather          equal copies into pieces
`gather_from_group`        all-gather          this rank's slice   pieces into equal copies
=========================  ==================  ==================  =============================================

The first three are named after torch's functional collectives, the last four after Megatron-LM's mappings, such as its
f and g (arXiv 1909.08053) and its sequence-parallel pairs (2205.05198). nanotron and picotron also define such pairs in
one small module. The last four rely on equal copies: these, and their gradients, must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dslpar.distributed import gloo_collectives

Value = TypeVar("Value")
Collective = Callable[[Tensor], Tensor]

# torch 2.13 renamed two collectives and warns about the old names. Older versions have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """One group of ranks: those that differ from this rank only along some axes of the mesh."""

    size: int = 1
    """Number of ranks in the group."""
    index: int = 0
    """This rank's position among `peers`."""
    peers: tuple[int, ...] = (0,)
    """Global ranks of the group, in order."""
    group: dist.ProcessGroup | None = None
    """torch's process group; None only if a single process trains alone."""
    group_name: str = field(default="", compare=False, repr=False)
    """The group's name for torch's functional collectives."""

    def __post_init__(self) -> None:
        """Store the group's name, because torch.compile cannot read attributes of a process group."""
        if self.group is not None:
            object.__setattr__(self, "group_name", self.group.group_name)

    def __deepcopy__(self, memo: object) -> Axis:
        """Return itself: a copy of a layer communicates with the same ranks."""
        return self


class Pending(NamedTuple):
    """A started collective; `wait()` returns its result."""

    received: Tensor
    """The tensor into which torch receives."""
    work: Sequence[dist.Work] = ()
    """torch's handles to wait for."""
    finish: Callable[[Tensor], Tensor] | None = None
    """Computes the result from `received`; None: `received` is the result."""
    sent: Tensor | None = None
    """The tensor being sent, kept alive until `wait`."""

    def wait(self) -> Tensor:
        """Block (on an accelerator: block its stream) until the result is there, and return it."""
        for work in self.work:
            work.wait()
        return self.received if self.finish is None else self.finish(self.received)


_functional = torch.ops._c10d_functional
"""torch's collectives as ops that torch.compile can trace: without Work handles, and not in place."""


def _traced(received: Tensor, finish: Callable[[Tensor], Tensor] | None = None) -> Pending:
    """Wrap the result of a functional collective as a Pending."""

    def wait(received: Tensor) -> Tensor:
        received = _functional.wait_tensor(received)
        return received if finish is None else finish(received)

    return Pending(received, (), wait)


# ---- plain collectives ----


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, contiguous: bool = True) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`, in the axis's order; shapes must agree.

    The ranks' pieces arrive one after the other in memory. With contiguous=False, the result is a view of this memory,
    and `dim` is its slowest dim (unless `dim` is the last one).
    """
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():
        return start_all_gather(x, axis, dim, contiguous=contiguous).wait()
    piece, finish = _to_gather(x, axis, dim, contiguous)
    flat = x.new_empty(axis.size * x.numel())  # flat: the only form that gloo accepts
    _all_gather(flat, piece.reshape(-1), group=axis.group)
    return finish(flat)


def start_all_gather(x: Tensor, axis: Axis, dim: int = 0, *, contiguous: bool = True) -> Pending:
    """Start `all_gather`."""
    if axis.size == 1:
        return Pending(x)
    piece, finish = _to_gather(x, axis, dim, contiguous)
    if torch.compiler.is_compiling():
        return _traced(_functional.all_gather_into_tensor(piece.reshape(-1), axis.size, axis.group_name), finish)
    flat = x.new_empty(axis.size * x.numel())
    return Pending(flat, [_all_gather(flat, piece.reshape(-1), group=axis.group, async_op=True)], finish)


def _to_gather(x: Tensor, axis: Axis, dim: int, contiguous: bool) -> tuple[Tensor, Collective]:
    """Return the tensor to send, and a function that makes the result from the flat received tensor."""
    dim %= x.dim()
    if contiguous or dim == x.dim() - 1:
        return x, partial(_joined, size=axis.size, shape=x.shape, dim=dim)
    piece = x.movedim(dim, 0)
    shape = axis.size * piece.shape[0], *piece.shape[1:]
    return piece, lambda flat: flat.view(shape).movedim(0, dim)


def _joined(flat: Tensor, size: int, shape: torch.Size, dim: int) -> Tensor:
    """Concatenate along `dim` pieces of `shape` that are stored one after the other."""
    return flat.view(size, *shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over all ranks; return this rank's piece of the sum along `dim`, with the memory order of `x`."""
    return start_reduce_scatter(x, axis, dim).wait()


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Return the sum (or "max", "min") over all ranks, bit-identical on all of them."""
    return x if axis.size == 1 else start_all_reduce_(x.clone(), axis, op).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Pending:
    """Start `reduce_scatter`."""
    if axis.size == 1:
        return Pending(x)
    dim %= x.dim()
    pieces = torch.unflatten(x, dim, (axis.size, -1)).movedim(dim, 0)
    finish: Collective | None = None
    if not pieces.is_contiguous() and x.movedim(dim, 0).is_contiguous():
        # `dim` is the slowest in memory, so pieces along it are contiguous and need no copy.
        pieces = torch.unflatten(x.movedim(dim, 0), 0, (axis.size, -1))
        finish = partial(_with_first_dim_at, dim=dim)
    pieces = pieces.contiguous()
    if torch.compiler.is_compiling():
        piece = _functional.reduce_scatter_tensor(pieces.view(-1), "sum", axis.size, axis.group_name)
        return _traced(piece.view(pieces.shape[1:]), finish)
    if gloo_collectives.serves(axis.group):
        received, work = gloo_collectives.start_reduce_scatter(pieces, axis.group)
        return Pending(received, [work], lambda pieces: finish(pieces.sum(0)) if finish else pieces.sum(0))
    piece = torch.empty_like(pieces[0])
    return Pending(piece, [_reduce_scatter(piece.view(-1), pieces.view(-1), group=axis.group, async_op=True)], finish)


def _with_first_dim_at(x: Tensor, dim: int) -> Tensor:
    return x.movedim(0, dim)


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Start `all_reduce` of a temporary that nothing else reads: it may overwrite `x`."""
    if axis.size == 1:
        return Pending(x)
    if torch.compiler.is_compiling():
        return _traced(_functional.all_reduce(x.contiguous(), op, axis.group_name))
    x = x.contiguous()
    if axis.size == 2 and op == "sum" and gloo_collectives.serves(axis.group):
        received, work = gloo_collectives.start_all_reduce_of_two(x, axis.index, axis.group)
        return Pending(received, [work], sent=x)._replace(finish=x.add_)
    return Pending(x, [dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=True)])


def start_all_reduce_coalesced_(
    tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype | None = None, scale: float = 1.0
) -> Callable[[], None]:
    """Start summing many tensors of one dtype over `axis`, in place, with one all-reduce in `dtype`.

    The returned function waits for the all-reduce and multiplies the sums by `scale`.
    """
    flat = torch.cat([each.detach().flatten() for each in tensors])
    pending = start_all_reduce_(flat if dtype is None else flat.to(dtype), axis)

    def finish() -> None:
        summed = pending.wait()
        summed = summed if scale == 1.0 else summed.mul_(scale)
        parts = torch.split(summed, [each.numel() for each in tensors])
        for each, part in zip(tensors, parts, strict=True):
            each.detach().copy_(part.view_as(each))

    return finish


def start_reduce_(x: Tensor, axis: Axis, root: int) -> Pending:
    """Start an in-place reduce of `x`, a temporary, to the axis's `root`-th rank; elsewhere `x` becomes undefined."""
    if axis.size == 1:
        return Pending(x)
    return Pending(x, [dist.reduce(x, axis.peers[root], group=axis.group, async_op=True)])


def start_broadcast_(x: Tensor, axis: Axis, root: int) -> Pending:
    """Start broadcasting `x` of the axis's `root`-th rank into `x` on the other ranks."""
    if axis.size == 1:
        return Pending(x)
    return Pending(x, [dist.broadcast(x, axis.peers[root], group=axis.group, async_op=True)])


def start_all_gather_(x: Tensor, axis: Axis) -> Pending:
    """Start an in-place all-gather of a vector of equal parts, one per rank; this rank has set its own part."""
    if axis.size == 1:
        return Pending(x)
    own = x.view(axis.size, -1)[axis.index]
    return Pending(x, [_all_gather(x, own, group=axis.group, async_op=True)])


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Split `x` along `split_dim`, send a piece to each rank, and concatenate received pieces along `concat_dim`."""
    if axis.size == 1:
        return x
    split_dim, concat_dim = split_dim % x.dim(), concat_dim % x.dim()
    parts = torch.unflatten(x, split_dim, (axis.size, -1)).movedim(split_dim, 0).contiguous()
    if torch.compiler.is_compiling():
        equal = [1] * axis.size
        received = _traced(_functional.all_to_all_single(parts, equal, equal, axis.group_name)).wait()
    else:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=axis.group)
    return received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def exchange_rows(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send consecutive rows of `x`, `sent[rank]` to each rank; return the rows of all ranks, `received[rank]` each.

    Any number may be 0.
    """
    if axis.size == 1:
        return x
    rows = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(rows, x.contiguous(), list(received), list(sent), group=axis.group)
    return rows


def start_ring_shift(x: Tensor, axis: Axis, received: Tensor | None = None) -> Pending:
    """Start sending `x` to the ring's next rank and receiving the previous rank's `x`, into `received` if given."""
    if torch.compiler.is_compiling():
        # torch has no functional send: use an all-to-all in which each rank sends to one other rank only.
        to, of = (
            [len(x) if rank == (axis.index + step) % axis.size else 0 for rank in range(axis.size)] for step in (1, -1)
        )
        return _traced(_functional.all_to_all_single(x.contiguous(), of, to, axis.group_name))
    received = torch.empty_like(x) if received is None else received
    if axis.size == 2 and gloo_collectives.serves(axis.group):
        return Pending(received, [gloo_collectives.start_exchange(x, received, axis.index, axis.group)], sent=x)
    ahead, behind = (axis.peers[(axis.index + step) % axis.size] for step in (1, -1))
    # In one batch: NCCL would hang if two ranks both send before either receives.
    operations = [dist.P2POp(dist.isend, x, ahead, axis.group), dist.P2POp(dist.irecv, received, behind, axis.group)]
    return Pending(received, dist.batch_isend_irecv(operations), sent=x)


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Return the tensor of the axis's `source`-th rank; shapes and dtypes must agree."""
    if axis.size == 1:
        return x
    copy = x.detach().clone()  # torch broadcasts in place, and `x` may be a parameter
    dist.broadcast(copy, axis.peers[source], group=axis.group)
    return copy


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis have reached this call."""
    if axis.size > 1:
        wait_for_all(axis.group)


def wait_for_all(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group, or of the world, have reached this call."""
    # Otherwise NCCL guesses the device from the rank's number, which is wrong if each rank sees only one device.
    is_nccl = str(dist.get_backend(group)) == "nccl"
    dist.barrier(group=group, device_ids=[torch.cuda.current_device()] if is_nccl else None)


def broadcast_object(value: Value, axis: Axis, source: int = 0) -> Value:
    """Return the (picklable) value of the axis's `source`-th rank."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, axis.peers[source], group=axis.group)
    return box[0]


def gather_objects(value: Value, axis: Axis) -> list[Value]:
    """Return the (picklable) values of all ranks, in the axis's order, on every rank."""
    if axis.size == 1:
        return [value]
    values = [value] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


# ---- differentiable pairs ----


def all_gather_autograd(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All-gather along `dim`; backward: reduce-scatter."""
    return _pair(x, axis, partial(all_gather, axis=axis, dim=dim), partial(reduce_scatter, axis=axis, dim=dim))


def reduce_scatter_autograd(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reduce-scatter along `dim`; backward: all-gather."""
    return _pair(x, axis, partial(reduce_scatter, axis=axis, dim=dim), partial(all_gather, axis=axis, dim=dim))


def all_to_all_autograd(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """All-to-all; backward: the all-to-all that undoes it."""
    forward = partial(all_to_all, axis=axis, split_dim=split_dim, concat_dim=concat_dim)
    backward = partial(all_to_all, axis=axis, split_dim=concat_dim, concat_dim=split_dim)
    return _pair(x, axis, forward, backward)


def exchange_rows_autograd(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`exchange_rows`; backward: the exchange that undoes it."""
    forward = partial(exchange_rows, axis=axis, sent=sent, received=received)
    return _pair(x, axis, forward, partial(exchange_rows, axis=axis, sent=received, received=sent))


def reduce_from_group(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce; backward: identity."""
    return _pair(x, axis, partial(all_reduce, axis=axis), _identity)


def copy_to_group(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward: all-reduce."""
    return _pair(x, axis, _identity, partial(all_reduce, axis=axis))


def copy_to_group_coalesced(tensors: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """`copy_to_group` for many small tensors of one dtype, with one all-reduce for all their gradients."""
    if axis.size == 1 or not tensors:
        return tuple(tensors)
    return tuple(_CopyToGroupCoalesced.apply(axis, *tensors))  # type: ignore[no-untyped-call]


def scatter_to_group(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice along `dim`; backward: all-gather."""
    return _pair(x, axis, partial(_slice, axis=axis, dim=dim), partial(all_gather, axis=axis, dim=dim))


def gather_from_group(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All-gather along `dim`; backward: this rank's slice."""
    return _pair(x, axis, partial(all_gather, axis=axis, dim=dim), partial(_slice, axis=axis, dim=dim))


def _pair(x: Tensor, axis: Axis, forward: Collective, backward: Collective) -> Tensor:
    if axis.size == 1:
        return x
    result: Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # a new tensor: autograd makes no node for the same object


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.chunk(axis.size, dim)[axis.index].contiguous()


class _Pair(torch.autograd.Function):
    """Run one collective in the forward, and another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.backward_collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_collective(grads[0]), None, None


class _CopyToGroupCoalesced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd passes zeros for unused outputs, so the bucket's length is the same on all ranks.
        bucket = torch.cat([grad.flatten() for grad in grads])
        summed = torch.split(start_all_reduce_(bucket, ctx.axis).wait(), [grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(summed, grads, strict=True))
