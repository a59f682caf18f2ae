"""What a rank asks of its groups, call by call: the operation, the axes, and what this rank puts in.

    with recording(groups) as calls:
        loss(module(ids), labels).backward()
    calls[0]                     # Call(kind="all_reduce", axes="y", dtype="bf16", shape=(2, 128, 512), ...)

Every operation of torch.distributed on tensors of the meta device is seen, whoever calls it, in the forward and in
autograd's backward. It is noted and not run: there is nothing to send. (torch's own fake_collectives note operations in
the same way, for its estimates of memory.) Ring counts of bytes are those of `dslpar.costs.ring`.
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

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups

OTHER = "other"
"""The axes of a group that is no axis of the mesh."""


class Call(NamedTuple):
    """One operation over more than one rank, as a rank takes part in it; equal on all ranks that agree."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive."""
    axes: str
    """The letters on which the group's ranks differ: "y", "d q", "pipe"."""
    dtype: str
    shape: tuple[int, ...]
    """Of what this rank puts in; of a receive, of what comes."""
    num_bytes: Fraction
    """What this rank sends."""
    step: int = 0
    """Of a message: how many ranks of the group lie between its two ends, counted upwards, around the ring."""

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
    """Return 'bf16', or torch's own name."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def shown(dtype: str, shape: tuple[int, ...]) -> str:
    """Return 'bf16[2, 128, 512]'."""
    return f"{dtype}{list(shape)}"


@contextmanager
def recording(groups: Groups) -> Iterator[list[Call]]:
    """Note this rank's operations on meta tensors within; one that has no row in the table below raises in torch."""
    recorder = _Recorder(groups.mesh, groups.rank)
    with _scoped_library("c10d", "IMPL") as library:
        for name in _KINDS:
            library.impl(name, recorder.kernel(name), "Meta")
        yield recorder.calls


class _Kind(NamedTuple):
    kind: str
    argument: str
    """Which of the operation's arguments this rank puts in."""
    share: tuple[int, int]
    """Of it a ring of n sends (first + second * n) / n, so that (-1, 1) is (n-1)/n."""


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
"""By torch's name of an operation."""


class _Recorder:
    """Kernels of torch.distributed's operations for the meta device, which note them and are done at once.

    torch has none. As kernels they cost nothing where nothing is sent; a dispatch mode would be asked for every sum.
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
    """Return the letters on which these ranks differ: "d q"; "pipe[0, 3]" where they are some of an axis alone."""
    coords = [mesh.coord(each) for each in ranks]
    letters = [letter for letter in mesh.sizes if any(coord[letter] != coords[0][letter] for coord in coords)]
    if sorted(ranks) == sorted(mesh.peers(rank, *letters)):
        return " ".join(letters)
    if len(letters) == 1:
        return f"{letters[0]}{sorted(coord[letters[0]] for coord in coords)}"
    return OTHER


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for each in value for leaf in _flat(each)]
