"""Replicated state of a run: list this rank's state that other ranks hold equal copies of.

    for item in replicated_state(engine):
        item.title, item.copies, item.value    # 'weight blocks.0.norm.weight', Copies(("data", "y")), a tensor

`replicas` are the tensor axes that do not shard a weight (`Placement.replicas`). d is a tensor axis over which ZeRO may
shard like over data (docs/architecture.md, The cuboid). A master weight is the optimizer's fp32 copy.

=====================================  ========================================================================
state                                  equal over
=====================================  ========================================================================
weight, ZeRO 0 to 2                    data; d if ZeRO shards over d; `replicas`
weight, ZeRO 3                         the same if the weight stays gathered ("persistent"); a shard: `replicas` only
master weight, optimizer's tensors     without ZeRO, as the weight; with ZeRO, which shards them: `replicas` only
tied weight, and without ZeRO its      as the weight, and over the stages that hold it
optimizer's tensors
optimizer's counters and settings, lr  all ranks of a stage
step, samples, skipped, loss scale     all ranks
torch's generators, micro-batch seed   the tensor group
buffers of torch's SyncBatchNorm       data
=====================================  ========================================================================

Ranks of one ZeRO group get the same average of the gradients, so their copies are bit-identical. Ranks that only share
a tensor group, or a tied weight, average over replicas in separate groups, whose sums may have different orders. A sum
of two terms is the same in any order. A sum of more terms is the same over gloo, if the terms have the same place in
the same bucket. It need not be the same over NCCL, which chooses the order per group. So with more than two replicas,
tied copies are left out, and on accelerators also all copies of trained weights over tensor axes. For that reason
Megatron-LM compares parameters over data only (`--check-weight-hash-across-dp-replicas-interval`).

State that is sharded over all axes has no copy to compare with. Other buffers are not known to be equal: BatchNorm's
depend on a replica's samples and a rank's features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from dslpar.checkpoint import shards, train_state
from dslpar.checkpoint.shards import ParameterShard
from dslpar.core.mesh import TENSOR_AXES
from dslpar.engine.engine import Engine
from dslpar.engine.pipeline_module import Pipeline, global_name
from dslpar.layers import Mixture
from dslpar.layers.parameter import placement_of, stable_hash

_EVERY = ("pipe", "data", *TENSOR_AXES)
_AXES = (*_EVERY, "expert_data")


class Copies(NamedTuple):
    """A kind of copies: ranks that differ only on these axes hold equal copies of some state."""

    axes: tuple[str, ...]
    """Axes in the order of `_AXES`; axes of size 1 are left out."""
    stages: tuple[int, ...] = ()
    """For a tied weight, the "pipe" ranks that hold it."""


class Item(NamedTuple):
    """One piece of this rank's state, such as a weight, of which other ranks hold copies."""

    kind: str
    """'weight', 'master weight', 'exp_avg', ..."""
    name: str
    """The parameter's global name, with the range for a shard; or a description of other state."""
    copies: Copies
    """The ranks that hold equal copies."""
    value: Tensor | int
    """A tensor, or the hash of plain values, below 2^63."""

    @property
    def title(self) -> str:
        """Kind and name, such as 'weight blocks.0.norm.weight'."""
        return f"{self.kind} {self.name}"


def replicated_state(engine: Engine) -> Iterator[Item]:
    """Yield all state of this rank that other ranks hold copies of. Call it between two steps; not collective.

    Ranks that hold copies of each other yield the same kinds and names.
    """
    mesh = engine.groups.mesh
    for item in _all_state(engine):
        axes = tuple(axis for axis in _AXES if axis in item.copies.axes and mesh.size(axis) > 1)
        if item.copies.stages or axes:
            yield item._replace(copies=item.copies._replace(axes=axes))


def _all_state(engine: Engine) -> Iterator[Item]:
    yield from _plain_state(engine)
    yield from _random_state(engine)
    yield from _buffers(engine)
    copies = _ParameterCopies(engine)
    for shard in shards.parameter_shards(engine):
        yield from _parameter_state(shard, copies)


# ---- parameters and their optimizer state ----


class _ParameterCopies:
    """Computes which ranks hold copies of a parameter."""

    def __init__(self, engine: Engine) -> None:
        mesh, replicas = engine.groups.mesh, engine.groups.zero_axis.size
        self._zero_axes = mesh.zero_axes
        self._any_order_is_equal = replicas <= 2
        self._over_tensor = replicas <= 2 or engine.deepspeed.device.type == "cpu"
        module = engine.deepspeed.module
        tied: Mapping[str, Any] = getattr(module, "tied_comms", {})
        self._stages = {
            getattr(comm["module"], attribute): tuple(sorted(mesh.coord(rank)["pipe"] for rank in comm["ranks"]))
            for comm in tied.values()
            for attribute in comm["weight_attr"]
            if len(comm["ranks"]) > 1
        }

    def of(self, p: nn.Parameter, sharded: bool) -> Copies:
        """Return the ranks that hold this rank's part of a parameter; `sharded`: ZeRO ranks hold different parts."""
        placement = placement_of(p)
        axes = list(TENSOR_AXES if placement is None else placement.replicas)
        zero_axes = ("expert_data",) if placement is not None and placement.is_expert else self._zero_axes
        if p.requires_grad and not self._over_tensor:
            axes = [axis for axis in axes if axis in zero_axes]
        if sharded:
            return Copies(tuple(axis for axis in axes if axis not in zero_axes))
        tied = self._stages.get(p, ()) if self._any_order_is_equal or not p.requires_grad else ()
        return Copies((*zero_axes, *axes), tied)


def _parameter_state(shard: ParameterShard, copies: _ParameterCopies) -> Iterator[Item]:
    p, master = shard.parameter, shard.master
    is_sharded = hasattr(p, "ds_tensor") or hasattr(p, "_hp_mapping")
    part = f"{shard.name}[{shard.start}:{shard.stop}]" if is_sharded else shard.name
    whole, own = copies.of(p, sharded=False), copies.of(p, sharded=is_sharded)
    if hasattr(p, "ds_tensor"):  # ZeRO 3
        if shard.start < shard.stop:  # the last shard ends with padding, which is not initialized
            yield Item("weight", part, own, p.ds_tensor.view(-1)[: shard.stop - shard.start])
        if getattr(p, "ds_persist", False) and p.numel() == p.ds_numel:  # type: ignore[attr-defined]
            yield Item("gathered weight", shard.name, whole, p)
    else:
        yield Item("weight", shard.name, whole, p)
    if master is None or shard.start == shard.stop:
        return
    if master.tensor is not p:
        yield Item("master weight", part, own, shard.weight)
    for key, state in shard.states.items():
        yield Item(key, part, own, state)
    if not is_sharded:  # with ZeRO they belong to a flat tensor of many parameters
        for key, value in (shard.scalars | shard.irregular).items():
            yield Item(key, part, own, value if isinstance(value, Tensor) else stable_hash(value))


# ---- counters, settings, generators, buffers ----


def _plain_state(engine: Engine) -> Iterator[Item]:
    everywhere, of_stage = Copies(_EVERY), Copies(("data", *TENSOR_AXES))
    values = train_state.collect(engine)
    for name, value in (values["counts"] | values["scale"]).items():
        yield Item("counter" if name in values["counts"] else "loss scaler's", name, everywhere, stable_hash(value))
    # Stages may have different parameter groups.
    yield Item("LR scheduler's", "state", of_stage, stable_hash(values["schedule"]))
    optimizer = engine.deepspeed.optimizer
    for number, group in enumerate(optimizer.param_groups):
        settings = train_state.group_values(group)
        yield Item("optimizer's", f"settings of group {number}", of_stage, stable_hash(settings))
    for number, flat in enumerate(_flat_masters(optimizer)):
        for key, value in optimizer.optimizer.state.get(flat, {}).items():
            if not isinstance(value, Tensor):
                yield Item("optimizer's", f"{key} of flat tensor {number}", of_stage, stable_hash(value))
            elif value.dim() == 0:
                yield Item("optimizer's", f"{key} of flat tensor {number}", of_stage, value)


def _flat_masters(optimizer: Any) -> list[Tensor]:
    """Return the flat tensors that ZeRO's optimizer updates on this rank; all ranks of a stage have as many."""
    for attribute in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    return []


def _random_state(engine: Engine) -> Iterator[Item]:
    """Yield random states. Dropout masks come from torch's CPU generator, which must be equal in a tensor group."""
    device, tensor_group = engine.deepspeed.device, Copies(TENSOR_AXES)
    yield Item("random state", "of torch, CPU", tensor_group, torch.get_rng_state())
    if device.type != "cpu":
        yield Item("random state", "of torch, device", tensor_group, get_accelerator().get_rng_state())
    seed = engine.deepspeed.module.micro_batch_seed
    yield Item("seed", "of the last micro-batch", tensor_group, stable_hash(seed))


def _buffers(engine: Engine) -> Iterator[Item]:
    whole = engine.deepspeed.module
    rename = partial(global_name, layer_names=whole.layer_names) if isinstance(whole, Pipeline) else str
    for path, module in whole.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            for name, buffer in module.named_buffers(recurse=False):
                yield Item("buffer", rename(f"{path}.{name}"), Copies(("data",)), buffer)
        elif isinstance(module, Mixture) and module.bias is not None:
            yield Item("buffer", rename(f"{path}.bias"), Copies(("data", *TENSOR_AXES)), module.bias)
