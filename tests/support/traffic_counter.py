"""Count what this rank sends through torch.distributed: elements, bytes and calls, by collective and axis.

    with counting(groups) as sent:
        loss(module(ids), labels).backward()
    sent.elements.of("y")                               # Traffic, as dslpar.costs.traffic has it
    sent.calls[("all_reduce", "y")]

Every operation that goes through torch's dispatcher is counted: dslpar's, DeepSpeed's and DTensor's, in the forward, in
autograd's backward, and asynchronous ones. Ring counts, for n ranks:

================  =========================================================================
all_gather        (n-1)/n of all pieces together
reduce_scatter    (n-1)/n of what each rank puts in
all_reduce        twice that
all_to_all        what goes to other ranks: (n-1)/n of it where the parts are equal; where it stands for
                  another collective (over gloo our reduce-scatter is one), it is counted as that
send              all of it
broadcast         all of it, for the source alone; that others pass it on is not counted
scatter           what goes to other ranks, for the source alone
reduce, gather    all that a rank puts in, for every rank but the one that gets the result
================  =========================================================================

An axis is named by its letters with more than one rank: "y", "d q", "data", "pipe". Groups are identified by their
ranks, so DeepSpeed's own group over the data axis is "data". If the tensor group is the whole world, its letters name
the world, too. A message goes along the axes on which its two ends differ. A group that is no axis of the mesh is
"other".

The mode steps aside for DTensor, as torch's debug modes do, and sees the plain collectives that DTensor calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from operator import floordiv, mod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._dynamo  # once, here: otherwise each rank that counts imports it, which takes seconds
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dslpar.core.mesh import Mesh
from dslpar.costs.collective_traffic import Key, Number, Traffic
from dslpar.distributed import gloo_collectives
from dslpar.distributed.groups import Groups

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor

OTHER = "other"


class Sent:
    """Everything sent so far."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self._elements: defaultdict[Key, Number] = defaultdict(int)
        self._bytes: defaultdict[Key, Number] = defaultdict(int)
        self._calls: Counter[Key] = Counter()

    @property
    def elements(self) -> Traffic:
        """Elements by (collective, axis)."""
        return Traffic(self._elements)

    @property
    def bytes(self) -> Traffic:
        """Bytes by (collective, axis)."""
        return Traffic(self._bytes)

    @property
    def calls(self) -> Mapping[Key, int]:
        """Number of sends by (collective, axis)."""
        return dict(self._calls)

    def add(self, call: _Call) -> None:
        """Add one call over more than one rank."""
        key = (call.collective, self._axis(call))
        self._elements[key] += call.elements
        self._bytes[key] += call.elements * call.itemsize
        self._calls[key] += 1

    def _axis(self, call: _Call) -> str:
        """Return the letters on which the call's ranks differ, if its group holds all ranks that differ only there."""
        coords = [self._mesh.coord(rank) for rank in call.ranks]
        letters = [letter for letter in self._mesh.sizes if len({coord[letter] for coord in coords}) > 1]
        if letters == ["d"] and self._mesh.tensor.impl == "hybrid":
            ulysses = self._mesh.tensor.ulysses
            turns, places = ({f(coord["d"], ulysses) for coord in coords} for f in (floordiv, mod))
            if 1 in (len(turns), len(places)):
                return "ulysses" if len(turns) == 1 else "ring"
        whole = sorted(call.ranks) == sorted(self._mesh.peers(self._rank, *letters))
        return " ".join(letters) if whole or call.collective == "send" else OTHER


class _Call(NamedTuple):
    """One collective, with this rank's part in it."""

    collective: str
    ranks: Sequence[int]
    elements: Number
    itemsize: int


@contextmanager
def counting(groups: Groups) -> Iterator[Sent]:
    """Count what this rank sends inside the `with`, in the mesh of `groups`.

    Raises: NotImplementedError for an operation of torch.distributed without a row in the table.
    """
    sent = Sent(groups.mesh, groups.rank)
    counter = _Counting(sent)
    with counter, ExitStack() as stack:
        for name, collective in _OVER_GLOO.items():
            function = getattr(gloo_collectives, name)
            stack.enter_context(patch.object(gloo_collectives, name, counter.named(collective, function)))
        yield sent


_OVER_GLOO = {
    "start_reduce_scatter": "reduce_scatter",
    "start_all_reduce_of_two": "all_reduce",
    "start_exchange": "send",
}
"""The collective that each function sends the elements of, by other operations of torch."""


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, sent: Sent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = sent
        self._stands_for: str | None = None

    def named(self, collective: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose operations are counted as that collective; of nested ones, as the outer one."""

        def counted(*args: Any) -> Any:
            before, self._stands_for = self._stands_for, self._stands_for or collective
            try:
                return function(*args)
            finally:
                self._stands_for = before

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its plain collectives come here again
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _NAMESPACES:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = func._schema.name.partition("::")[2].strip("_")
        if name in _SILENT:
            return
        if name not in _SENDS:
            raise NotImplementedError(f"tests.support.traffic_counter does not know what {func} sends")
        collective, sends, what = _SENDS[name]
        arguments = dict(zip((item.name for item in func._schema.arguments), args, strict=False)) | dict(kwargs)
        group, tensors = _group_of(arguments), arguments.get(what, arguments.get("input"))
        elements = sends(tensors, group, arguments) if group.size() > 1 else 0
        if elements:
            ranks = dist.get_process_group_ranks(group)
            if collective == "send":
                ranks = [ranks[group.rank()], ranks[arguments["dst"]]]
            first = _first(tensors)
            self.sent.add(_Call(self._stands_for or collective, ranks, elements, first.element_size()))


_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

Tensors = Any
"""A tensor, or nested lists of tensors."""


def _size(tensors: Tensors) -> int:
    return int(tensors.numel()) if isinstance(tensors, Tensor) else sum(map(_size, tensors))


def _first(tensors: Tensors) -> Tensor:
    return tensors if isinstance(tensors, Tensor) else _first(tensors[0])


def _group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    name = arguments["group_name"]
    return name if isinstance(name, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def _ring(tensors: Tensors, group: dist.ProcessGroup, _: Mapping[str, Any]) -> Number:
    return Fraction(group.size() - 1, group.size()) * _size(tensors)


def _twice(tensors: Tensors, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> Number:
    return 2 * _ring(tensors, group, arguments)


def _to_others(pieces: Tensors, group: dist.ProcessGroup, _: Mapping[str, Any]) -> Number:
    """Return this rank's share of an all-gather in a ring: n - 1 times the size of a piece."""
    return (group.size() - 1) * _size(pieces)


def _parts(tensors: Tensors, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> Number:
    """Return what leaves this rank, from a tensor cut along its first dim (equally or as given), or a list of parts."""
    if not isinstance(tensors, Tensor):
        return sum(_size(part) for index, part in enumerate(tensors) if index != group.rank())
    splits: list[int] | None = arguments.get("input_split_sizes")
    if not splits:
        return _ring(tensors, group, arguments)
    return _size(tensors) - splits[group.rank()] * (_size(tensors) // max(sum(splits), 1))


def _whole(tensors: Tensors, group: dist.ProcessGroup, _: Mapping[str, Any]) -> Number:
    return _size(tensors)


def _at_the_root(tensors: Tensors, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> Number:
    return _size(tensors) if group.rank() == arguments.get("root_rank", arguments.get("src")) else 0


def _parts_at_the_root(tensors: Tensors, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> Number:
    return _parts(tensors[0], group, arguments) if group.rank() == arguments["root_rank"] else 0


def _but_the_root(tensors: Tensors, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> Number:
    return _size(tensors) if group.rank() != arguments["root_rank"] else 0


_SENDS: Mapping[str, tuple[str, Callable[[Tensors, dist.ProcessGroup, Mapping[str, Any]], Number], str]] = {
    # torch.distributed
    "allgather": ("all_gather", _ring, "output_tensors"),
    "allgather_base": ("all_gather", _ring, "output_tensor"),
    "allgather_coalesced": ("all_gather", _ring, "output_lists"),
    "allgather_into_tensor_coalesced": ("all_gather", _ring, "outputs"),
    "reduce_scatter": ("reduce_scatter", _ring, "input_tensors"),
    "reduce_scatter_base": ("reduce_scatter", _ring, "input_tensor"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _ring, "inputs"),
    "allreduce": ("all_reduce", _twice, "tensors"),
    "allreduce_coalesced": ("all_reduce", _twice, "tensors"),
    "alltoall": ("all_to_all", _parts, "input_tensors"),
    "alltoall_base": ("all_to_all", _parts, "input"),
    "send": ("send", _whole, "tensors"),
    "broadcast": ("broadcast", _at_the_root, "tensors"),
    "scatter": ("scatter", _parts_at_the_root, "input_tensors"),
    "reduce": ("reduce", _but_the_root, "tensors"),
    "gather": ("gather", _but_the_root, "input_tensors"),
    # functional collectives, which DTensor uses
    "all_gather_into_tensor": ("all_gather", _to_others, "input"),
    "all_gather_into_tensor_out": ("all_gather", _to_others, "input"),
    "all_gather_into_tensor_coalesced": ("all_gather", _to_others, "inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", _ring, "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", _ring, "input"),
    "all_reduce": ("all_reduce", _twice, "input"),
    "all_reduce_coalesced": ("all_reduce", _twice, "inputs"),
    "all_to_all_single": ("all_to_all", _parts, "input"),
    "shard_dim_alltoall": ("all_to_all", _ring, "input"),
    "isend": ("send", _whole, "tensor"),
}
"""torch's name of an operation without underscores -> collective, count of what this rank sends, its argument."""

_SILENT = (
    "recv",
    "recv_any_source",
    "irecv",
    "barrier",
    "monitored_barrier",
    "check_for_nan",
    "wait_tensor",
    "wrap_tensor_autograd",
)
"""Operations that send no elements."""
