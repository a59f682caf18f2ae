"""Distribute any tensor over the mesh: torch's DTensor and DeviceMesh on the process groups of the layers.

    run = dslpar.start("config.py")                       # parallel = dict(data=2, tensor=dict(size=2, mode='1d'))
    mesh = run.get_layer_placement(0)                     # ranks [[0, 1], [2, 3]]: data, tensor
    placements = run.get_nd_sbp([split(0), split(1)])     # dim 0 over data, dim 1 over tensor
    noise = run.distribute(torch.randn(16, 8), placements, mesh)
    noise.to_local().shape                                # (8, 4) on each of the four ranks
    noise.full_tensor()                                   # (16, 8), on all of them

There is one placement per dim of the mesh: `split(dim)`, `broadcast` (equal copies) or `partial_sum`. The names are
LiBai's and OneFlow's ("sbp"). torch's Shard, Replicate and Partial mean the same and may be used instead. The tensors
are DTensors, with products, sums, `redistribute` and gradients. This module needs torch 2.5; training does not use it.

A rank outside a mesh, on another pipeline stage, may run every line above. It holds an empty tensor, its
`full_tensor()` is empty, and torch's `mesh.get_coordinate()` is None. If a size does not divide, the first ranks hold
more, as in torch.chunk. The mesh uses the process groups of `Groups` and makes none.

The layers' own parameters are plain tensors with a `Placement`. It can express more than DTensor: blocks, each of which
is cut over all ranks. `as_dtensor` shows a parameter as a DTensor if it has no such blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed.device_mesh import DeviceMesh

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import expand
from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import Placement as Sbp
except ImportError:  # 2.4's, under another name, squares a partial sum part by part
    raise ImportError(f"torch {torch.__version__} has no DTensor that computes right: 2.5 is the first") from None

AXES = ("pipe", "data", "tensor", "x", "d", "q", "y", "z")
"""Names of mesh dims; "tensor" is all of d, q, y and z (docs/architecture.md, "The cuboid"), and "x" is d and q."""

broadcast = Replicate()
"""Equal copies on all ranks of this dim of the mesh."""
partial_sum = Partial()
"""The tensor is the sum of what these ranks hold."""


def split(dim: int) -> Shard:
    """Return the placement of pieces along `dim` of the tensor, one for each rank of this dim of the mesh."""
    return Shard(dim)


def device_mesh(groups: Groups, *names: str) -> DeviceMesh:
    """Make a mesh of the ranks that differ from this one on the named axes only, one dim per name, in their order.

    Raises:
        DslparError: an axis does not exist, or two overlap.
    """
    axes = expand(names)
    if not names or not set(names) <= set(AXES) or sum(len(expand((name,))) for name in names) != len(axes):
        message = f"there is no mesh over {', '.join(map(repr, names)) or 'no axes'}"
        raise_finding("TEN231", message, f"axes that do not overlap, of {', '.join(map(repr, AXES))}")
    origin = {axis: 0 if axis in axes else index for axis, index in groups.coord.items()}
    return _mesh_at(groups, groups.mesh.rank(origin), names)


def stage_mesh(groups: Groups, stage: int) -> DeviceMesh:
    """Make the mesh (data, tensor) of a pipeline stage, as LiBai's `get_layer_placement`. Any rank may call it."""
    return _mesh_at(groups, groups.mesh.rank({"pipe": stage}), ("data", "tensor"))


def nd_sbp(placements: Sequence[Sbp]) -> tuple[Sbp, Sbp]:
    """Check and return the placements over data and over tensor, as LiBai's `get_nd_sbp`.

    LiBai drops the placement of an axis with a single rank. Here a stage's mesh keeps both dims, so both are returned.

    Raises:
        DslparError: there are not two placements.
    """
    if len(placements) != 2 or not all(isinstance(each, Sbp) for each in placements):
        message = f"{list(placements)!r} are not a placement over data and one over tensor"
        raise_finding("TEN232", message, "such as [split(0), broadcast]")
    return placements[0], placements[1]


def distribute(tensor: torch.Tensor, placements: Sequence[Sbp], mesh: DeviceMesh, source: int | None = 0) -> DTensor:
    """Distribute a tensor that is whole on every rank over the mesh; all ranks of the mesh must call it together.

    Rank `source` of each mesh dim sends the other ranks their pieces of its tensor; by default the mesh's first rank
    does. With None nothing is sent: each rank takes its piece of its own tensor, and the tensors must be equal. As in
    torch's `distribute_tensor`, the tensor must be a leaf of the graph. The DTensor has memory of its own. Any `source`
    but 0 needs torch 2.7.

    Raises:
        DslparError: the number of placements is not that of the mesh's dims, or a placement splits a dim that the
            tensor does not have.
    """
    _check(tensor, placements, mesh)
    if tensor.is_leaf:  # a copy, since torch's broadcast writes into the tensor; torch refuses tensors that are no leaf
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    kwargs = {} if source == 0 else {"src_data_rank": source}  # torch has the argument since 2.7
    with warnings.catch_warnings():  # torch 2.5 warns about random numbers on CPUs
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        return distribute_tensor(tensor, mesh, list(placements), **kwargs)


def as_dtensor(p: torch.Tensor, groups: Groups) -> DTensor:
    """Show a layer's parameter as a DTensor over this rank's tensor group, without a copy; gradients flow back to it.

    A tensor without a `Placement` counts as equal copies on all ranks. The DTensor includes padding rows.

    Raises:
        DslparError: the parameter has blocks that are cut one by one (q, k, v; gate, up). DTensor cannot express this.
    """
    at = placement_of(p)
    if at is None:
        return DTensor.from_local(p, device_mesh(groups, "tensor"), [broadcast], run_check=False)
    if at.blocks and any(groups.mesh.size(*letters) > 1 for letters in at.cuts[:1]):
        rows = ", ".join(map(str, at.blocks))
        message = f"the parameter has blocks of {rows} rows, and each rank has a shard of each block"
        raise_finding("TEN233", message, "gather it (dslpar.layers.gather), and distribute the result")
    # If two axes cut one dim, DTensor takes the first mesh dim as the slow cut. Each letter cuts one dim only.
    dims = {letter: dim for dim, letters in enumerate(at.cuts) for letter in letters}
    mesh = device_mesh(groups, *dims, *at.replicas)
    placements = [*(split(dim) for dim in dims.values()), *(broadcast for _ in at.replicas)]
    return DTensor.from_local(p, mesh, placements, run_check=False)


def _mesh_at(groups: Groups, origin: int, names: Sequence[str]) -> DeviceMesh:
    """Make the mesh over the named axes whose first rank is `origin`.

    torch uses a mesh's groups only on ranks of the mesh, so other ranks may pass groups of their own.
    """
    ranks = torch.tensor(origin)
    for name in names:
        ranks = ranks[..., None] + torch.tensor(groups.mesh.peers(origin, name)) - origin
    members = [cast("dist.ProcessGroup", groups.axis(name).group) for name in names]
    return DeviceMesh.from_group(members, get_accelerator().device_name(), ranks, mesh_dim_names=tuple(names))


def _check(tensor: torch.Tensor, placements: Sequence[Sbp], mesh: DeviceMesh) -> None:
    if len(placements) != mesh.ndim:
        message = f"{len(placements)} placements over a mesh of {mesh.ndim} dims {mesh.mesh_dim_names}"
        raise_finding("TEN232", message, "one for each dim of the mesh: split(dim), broadcast or partial_sum")
    for each in placements:
        if not isinstance(each, Sbp):
            raise_finding("TEN232", f"{each!r} is not a placement", "split(dim), broadcast or partial_sum")
        if isinstance(each, Shard) and not -tensor.dim() <= each.dim < tensor.dim():
            message = f"split({each.dim}) of a tensor of shape {tuple(tensor.shape)}"
            dims = f"a dim from 0 to {tensor.dim() - 1}" if tensor.dim() else "broadcast or partial_sum"
            raise_finding("TEN232", message, dims)
