"""Record a rank's collectives and messages: the operation, the axes of its group, and the form of this rank's input.

    with recording(groups) as calls:
        loss(module(ids), labels).backward()
    calls[0]                     # Call(kind="all_reduce", axes="y", dtype="bf16", shape=(2, 128, 512), ...)

The recorder sees every torch.distributed operation on meta tensors, in the forward and in autograd's backward. It
records the operation and sends nothing. The number of bytes follows the ring formulas of
`dslpar.costs.collective_traffic`. torch's fake_collectives record operations in the same way, for torch's estimates of
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.library import _scoped_library

from dslpar.core.mesh import Mesh, expand
from dslpar.distributed.groups import Groups

OTHER = "other"
"""Name in place of axes for a group that is not a group of the mesh's axes."""


class Call(NamedTuple):
    """One collective or message, from the view of one rank."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive."""
    axes: str
    """Axes on which the group's ranks differ: "y", "d q", "pipe"."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of this rank's input; for a receive, the shape of the received tensor."""
    num_bytes: Fraction
    """Bytes that this rank sends."""
    step: int = 0
    """For a message: (peer's rank - own rank) modulo the group's size. For a collective: 0."""

    @property
    def form(self) -> str:
        """Dtype and shape: 'bf16[2, 128, 512]'."""
        return shown(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.kind} of {self.form} over {self.axes}"


_DTYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a short name such as 'bf16', or torch's own name without "torch."."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def shown(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a form as text: 'bf16[2, 128, 512]'."""
    return f"{dtype}{list(shape)}"


@contextmanager
def recording(groups: Groups) -> Iterator[list[Call]]:
    """Record this rank's operations on meta tensors in the body; torch raises an error for those not in `_KINDS`."""
    recorder = _Recorder(groups.mesh, groups.rank)
    with _scoped_library("c10d", "IMPL") as library:
        for name in _KINDS:
            library.impl(name, recorder.kernel(name), "Meta")
        yield recorder.calls


class _Kind(NamedTuple):
    kind: str
    argument: str
    """Name of the argument that is this rank's input."""
    share: tuple[int, int]
    """In a group of n ranks, a rank sends (first + second * n) / n of that argument: (-1, 1) is (n-1)/n."""


_RING = (-1, 1)
_KINDS: Mapping[str, _Kind] = {
    "_allgather_base_": _Kind("all_gather", "output_tensor", _RING),
    "_reduce_scatter_base_": _Kind("reduce_scatter", "input_tensor", _RING),
    "allgather_": _Kind("all_gather", "output_tensors", _RING),
    "allreduce_": _Kind("all_reduce", "tensors", (-2, 2)),
    "alltoall_base_": _Kind("all_to_all", "input", _RING),
    "broadcast_": _Kind("broadcast", "tensors", (0, 1)),
    "recv_": _Kind("receive", "tensors", (0, 0)),
    "reduce_": _Kind("reduce", "tensors", (0, 1)),
    "reduce_scatter_": _Kind("reduce_scatter", "input_tensors", _RING),
    "send": _Kind("send", "tensors", (0, 1)),
}
"""Operations by their name in torch."""


class _Recorder:
    """Kernels of torch.distributed's operations for the meta device: they record the operation and complete at once.

    torch has no kernels for these operations on the meta device. A dispatch mode could record them too, but it would
    run for every tensor operation.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.calls: list[Call] = []
        self._mesh, self._rank = mesh, rank
        self._axes: dict[str, str] = {}

    def kernel(self, name: str) -> Callable[..., Any]:
        """Return the kernel of an operation."""
        schema = getattr(torch.ops.c10d, name).default._schema
        names = [each.name for each in schema.arguments]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._note(_KINDS[name], dict(zip(names, args, strict=False)) | kwargs)
            work = FakeWork().boxed()
            return work if len(schema.returns) == 1 else (args[0], work)

        return run

    def _note(self, of: _Kind, arguments: Mapping[str, Any]) -> None:
        kind, argument, (constant, factor) = of
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        size = group.size()
        if size == 1:
            return
        tensors = _flat(arguments.get(argument, arguments.get("input")))
        elements = sum(each.numel() for each in tensors)
        sent = Fraction(constant + factor * size, size) * elements * tensors[0].element_size()
        if kind in ("broadcast", "reduce"):
            at_root = group.rank() == arguments["root_rank"]
            sent *= at_root if kind == "broadcast" else not at_root
        other = arguments.get("dst", arguments.get("src"))
        call = Call(
            kind=kind,
            axes=self._axes_of(group),
            dtype=dtype_name(tensors[0].dtype),
            shape=tuple(tensors[0].shape) if len(tensors) == 1 else (elements,),
            num_bytes=sent,
            step=0 if other is None else (other - group.rank()) % size,
        )
        self.calls.append(call)

    def _axes_of(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = axes_of(self._mesh, self._rank, dist.get_process_group_ranks(group))
        return self._axes[name]


def axes_of(mesh: Mesh, rank: int, ranks: list[int]) -> str:
    """Return the axes on which these ranks differ: "d q", or "pipe[0, 3]" if they are a part of one axis.

    A group that holds all experts has the name "e", with the tensor axes, also if it has all data ranks.
    """
    coords = [mesh.coord(each) for each in ranks]
    if mesh.size("e") > 1 and sorted(ranks) == sorted(mesh.peers(rank, "expert")):
        return " ".join(letter for letter in expand(("expert",)) if mesh.size(letter) > 1)
    letters = [letter for letter in mesh.sizes if any(coord[letter] != coords[0][letter] for coord in coords)]
    if sorted(ranks) == sorted(mesh.peers(rank, *letters)):
        return " ".join(letters)
    if len(letters) == 1:
        return f"{letters[0]}{sorted(coord[letters[0]] for coord in coords)}"
    return OTHER


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for each in value for leaf in _flat(each)]
