"""Find each parameter of this rank in DeepSpeed's engine: weight, optimizer state, and position in the full tensor.

    for shard in parameter_shards(engine):
        shard.name, shard.box, shard.start, shard.stop   # elements [start, stop) of the piece `box`, in row-major order
        shard.weight, shard.states, shard.scalars        # views of what DeepSpeed trains: read and written in place

The *local piece* of a parameter is this rank's tensor-parallel shard. ZeRO may divide it further over data ranks, into
flat ranges. The *master* of a parameter is the tensor that the optimizer steps. DeepSpeed stores masters in five ways,
depending on ZeRO's stage and the precision. Each way has one function in this module:

========================  =================================  =====================================================
optimizer                 master                             range of the local piece on this rank
========================  =================================  =====================================================
torch's own               the parameter itself               all of it
FP16_UnfusedOptimizer     an fp32 copy of each parameter     all of it
FP16_Optimizer            one flat fp32 tensor per group     all of it
ZeRO 1, 2, BF16           shard of such a tensor             a range, or nothing (`p._hp_mapping`)
ZeRO 3                    one flat tensor per sub-group      an equal range for each rank (`grad_position`)
========================  =================================  =====================================================

A checkpoint stores each tensor as boxes (the local pieces, see `slices`), and each box as flat ranges. Megatron-LM's
distributed optimizer does the same (`ShardedTensor` with a `flattened_range`). torch.distributed.checkpoint has boxes
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslpar.checkpoint.index import copy_name
from dslpar.checkpoint.slices import Box, box_of, full_box
from dslpar.engine.engine import Engine
from dslpar.layers.parameter import placement_of
from dslpar.layers.placement import Placement

SPLIT_FROM = 1 << 16
"""Pieces of at least this many elements are written in parts, one per replica; smaller ones by a single replica."""

Scalar = int | float | bool | Tensor
"""Optimizer value of a whole parameter, such as its step: a plain number or a 0-dim tensor."""


OptimizerState = MutableMapping[Tensor, dict[str, Any]]
"""State of an optimizer, by the tensor that it steps."""
ParameterGroup = MutableMapping[str, Any]
"""Parameter group of a torch optimizer."""


class Master(NamedTuple):
    """The part of a parameter's master on this rank."""

    tensor: Tensor
    """Tensor that the optimizer steps: the parameter itself, an fp32 copy, or a flat tensor of many parameters."""
    offset: int
    """Position of this parameter's first element in the flattened `tensor`."""
    start: int
    """First element of the parameter's local piece that `tensor` holds."""
    stop: int
    """End of the range of the local piece that `tensor` holds, exclusive."""
    state: OptimizerState
    """State of the whole optimizer; `tensor` is one of its keys."""
    group: ParameterGroup
    """Optimizer group of `tensor`."""
    group_number: int
    """Position of `group` in the optimizer's groups, which are stepped in this order."""

    @property
    def tensor_state(self) -> dict[str, Any]:
        """The optimizer's state of `tensor`; empty before the optimizer's first step."""
        return self.state.get(self.tensor, {})

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return a view of this parameter's elements in `tensor`: the master, or an optimizer tensor of its shape."""
        if self.offset == 0 and self.stop - self.start == tensor.numel():
            return tensor.detach()
        return tensor.detach().view(-1).narrow(0, self.offset, self.stop - self.start)


class ParameterShard(NamedTuple):
    """One parameter on this rank: its tensors, and the range of the full tensor that they hold."""

    name: str
    """Global name: the name in the model without a pipeline, the same in every layout."""
    shape: tuple[int, ...]
    """Full shape, unpadded."""
    box: Box
    """Elements of the full tensor in the local piece."""
    start: int
    """First element of the local piece that this rank holds."""
    stop: int
    """End of the range that this rank holds, exclusive; equal to `start` if the rank holds nothing."""
    write_range: range
    """Elements of the local piece that this rank writes. Together the ranks write each element once."""
    weight: Tensor
    """Elements [start, stop) of the master, or of the weight if there is none; row-major order of the local piece."""
    master: Master | None
    """None: the optimizer does not train this parameter, or not on this rank."""
    tied_copy_rank: int | None
    """This rank's pipeline rank if the parameter is a copy of a tied weight, which an earlier pipeline rank owns."""
    parameter: nn.Parameter
    """Parameter of the module; its own tensor may be half precision, or empty (ZeRO 3)."""

    def stored_name(self, same_layout: bool) -> str:
        """Return the name in the index. A tied copy has its own name, which only the same layout uses."""
        if same_layout and self.tied_copy_rank is not None:
            return copy_name(self.name, self.tied_copy_rank)
        return self.name

    @property
    def trained(self) -> bool:
        """Return whether the parameter requires a gradient."""
        return self.parameter.requires_grad

    @property
    def states(self) -> dict[str, Tensor]:
        """Optimizer tensors of the weight's shape, as views of the same elements."""
        if self.master is None:
            return {}
        return {key: self.master.view_of(value) for key, value in self._weight_shaped().items()}

    @property
    def scalars(self) -> dict[str, Scalar]:
        """Optimizer values of the whole parameter."""
        shaped = self._weight_shaped()  # for a 0-dim parameter these are 0-dim as well
        return {
            key: value
            for key, value in self._state().items()
            if key not in shaped and (value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float))
        }

    @property
    def irregular(self) -> dict[str, Tensor]:
        """Optimizer tensors of other shapes, such as Adafactor's rows and columns."""
        shaped = self._weight_shaped()
        tensors = {key: value for key, value in self._state().items() if isinstance(value, Tensor) and value.dim()}
        return {key: value for key, value in tensors.items() if key not in shaped}

    def _weight_shaped(self) -> dict[str, Any]:
        shape = None if self.master is None else self.master.tensor.shape
        return {key: value for key, value in self._state().items() if getattr(value, "shape", "none") == shape}

    def _state(self) -> dict[str, Any]:
        return {} if self.master is None else self.master.tensor_state


def parameter_shards(engine: Engine) -> list[ParameterShard]:
    """Return every parameter of this rank, in the model's order, which is equal on all replicas. No collective."""
    masters, groups = find_masters(engine), engine.groups
    coord = groups.coord
    replicated = Placement(groups.tensor, (), ())
    shards = []
    # The order is equal on all ranks of `copies`, so they divide small parameters by `number` without communication.
    for number, (name, p) in enumerate(engine.named_parameters()):
        placement, master = placement_of(p), masters.get(p)
        shape = tuple(getattr(p, "ds_shape", p.shape)) if placement is None else placement.shape
        start, stop, weight = _local_elements(p, master)
        copies = groups.expert_data_axis if placement is not None and placement.is_expert else groups.zero_axis
        write_range = _replica_range(p, number, copies.index, copies.size)
        if write_range is None:
            write_range = range(start, stop)
        is_owner = (placement or replicated).is_stepped_at(coord)
        shard = ParameterShard(
            name=name,
            shape=shape,
            box=full_box(shape) if placement is None else box_of(placement, coord),
            start=start,
            stop=stop,
            write_range=write_range if is_owner else range(0),
            weight=weight,
            master=master,
            tied_copy_rank=coord["pipe"] if getattr(p, "ds_pipe_replicated", False) else None,
            parameter=p,
        )
        shards.append(shard)
    return shards


def _local_elements(p: nn.Parameter, master: Master | None) -> tuple[int, int, Tensor]:
    """Return (start, stop, tensor): the range of the local piece that this rank holds, and the tensor of its values."""
    if master is not None:
        return master.start, master.stop, master.view_of(master.tensor)
    if hasattr(p, "ds_tensor"):  # a frozen parameter in ZeRO 3
        start, stop = _zero_3_range(p)
        return start, stop, p.ds_tensor.detach().view(-1)[: stop - start]
    if getattr(p, "_hp_mapping", "none") is None:  # ZeRO 1 or 2: the shard is on another rank
        return 0, 0, p.detach().view(-1)[:0]
    return 0, p.numel(), p.detach()


def _zero_3_range(p: nn.Parameter) -> tuple[int, int]:
    """Return the range (start, stop) that this rank holds of a parameter sharded by ZeRO 3."""
    # Shards have equal lengths on all ranks, so the last shards are padded, and may hold only padding.
    length, numel = p.partition_numel(), p.ds_numel  # type: ignore[attr-defined]
    start = dist.get_rank(p.ds_process_group) * length  # type: ignore[attr-defined]
    return min(start, numel), min(start + length, numel)


def _replica_range(p: nn.Parameter, number: int, index: int, size: int) -> range | None:
    """Return the range that replica `index` of `size` writes of a parameter that all replicas hold.

    None: ZeRO shards the parameter, so each rank writes its shard. Large parameters are divided equally over the
    replicas, so that none writes while the others wait. Of the small parameters each replica writes every `size`-th.
    """
    if hasattr(p, "ds_tensor") or hasattr(p, "_hp_mapping"):
        return None
    length = p.numel()
    if length < SPLIT_FROM:
        return range(length if number % size == index else 0)
    return range(length * index // size, length * (index + 1) // size)


# ---- DeepSpeed's optimizers ----


def find_masters(engine: Engine) -> dict[nn.Parameter, Master]:
    """Return the master of each parameter that the optimizer steps on this rank."""
    optimizer = engine.deepspeed.optimizer
    for attribute, masters in _MASTERS_BY_ATTRIBUTE.items():
        if hasattr(optimizer, attribute):
            return dict(masters(optimizer))
    return {  # a torch optimizer steps the parameters themselves: no ZeRO, fp32
        p: Master(p, 0, 0, p.numel(), optimizer.state, group, number)
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }


Masters = Iterator[tuple[nn.Parameter, Master]]


def _fp16_unfused_masters(wrapper: Any) -> Masters:
    """Yield the masters of FP16_UnfusedOptimizer: no ZeRO, half precision."""
    inner = wrapper.optimizer
    groups = zip(inner.param_groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    for number, (group, parameters, copies) in enumerate(groups):
        for p, master in zip(parameters, copies, strict=True):
            yield p, Master(master, 0, 0, p.numel(), inner.state, group, number)


def _fp16_masters(wrapper: Any) -> Masters:
    """Yield the masters of FP16_Optimizer: no ZeRO, half precision, FusedAdam."""
    inner = wrapper.optimizer
    groups = zip(inner.param_groups, wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)
    for number, (group, parameters, flat) in enumerate(groups):
        offset = 0
        for p in parameters:
            yield p, Master(flat, offset, 0, p.numel(), inner.state, group, number)
            offset += p.numel()


def _sharded_masters(zero: Any, groups: Sequence[Sequence[nn.Parameter]], flats: Sequence[Tensor]) -> Masters:
    """Yield the masters in this rank's shard of each group's flat tensor."""
    state = zero.optimizer.state
    for number, (group, parameters, flat) in enumerate(zip(zero.optimizer.param_groups, groups, flats, strict=True)):
        for p in parameters:
            mapping: Any = p._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                local, master = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield p, Master(flat, master.start, local.start, local.start + local.numel, state, group, number)


def _zero_3_masters(zero: Any) -> Masters:
    for sub_group, parameters in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        number = zero.sub_group_to_group_id[sub_group]
        group = zero.optimizer.param_groups[number]
        for p in parameters:
            _, offset, _ = zero.grad_position[zero.get_param_id(p)]
            yield p, Master(flat, offset, *_zero_3_range(p), zero.optimizer.state, group, number)


_MASTERS_BY_ATTRIBUTE: Mapping[str, Callable[[Any], Masters]] = {
    "fp32_partitioned_groups_flat": _zero_3_masters,
    "single_partition_of_fp32_groups": lambda zero: _sharded_masters(
        zero, zero.bit16_groups, zero.single_partition_of_fp32_groups
    ),
    # BF16_Optimizer: a pipeline without ZeRO, in bf16.
    "fp32_groups_flat_partition": lambda zero: _sharded_masters(
        zero, zero.bf16_groups, zero.fp32_groups_flat_partition
    ),
    "fp32_groups_flat": _fp16_masters,
    "fp32_groups": _fp16_unfused_masters,
}
"""Attribute of DeepSpeed's optimizer wrapper -> function that yields its masters. The first attribute that exists
decides, so the order matters. (The classes have no common base class to test for.)
"""


# ---- loading ----


def step_order(shard: ParameterShard) -> int:
    """Return the sort key of a shard: the order in which an optimizer creates its state at its first step."""
    return -1 if shard.master is None else shard.master.group_number


def set_scalars(master: Master, scalars: Mapping[str, Scalar]) -> None:
    """Set the scalar optimizer state of a master. Tensors are overwritten in place, since kernels may refer to them."""
    state = master.state[master.tensor]
    # torch's optimizers keep their step counter on the CPU, unless a kernel on the device reads it.
    on_device = master.group.get("capturable") or master.group.get("fused")
    device = master.tensor.device if on_device else torch.device("cpu")
    for key, stored in scalars.items():
        value = _as_counted(stored, master.group) if key == "step" else stored
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            state[key].copy_(value)
        else:
            state[key] = value.to(device) if isinstance(value, Tensor) else value


def _as_counted(step: Scalar, group: ParameterGroup) -> Scalar:
    """Return a step counter in this optimizer's type: a number for DeepSpeedCPUAdam, a tensor for torch's Adam.

    Which of these steps offloaded parameters depends on the host, so the checkpoint's type may be the other one.
    """
    if isinstance(step, Tensor) and "bias_correction" in group:
        return int(step)
    if not isinstance(step, Tensor) and "capturable" in group:
        return torch.tensor(float(step))
    return step


def state_tensor(shard: ParameterShard, key: str, dtype: torch.dtype) -> Tensor:
    """Return the shard's elements of the optimizer tensor `key`; the tensor is created with zeros if it is missing."""
    assert shard.master is not None, f"{shard.name} is not trained here"
    tensor, state = shard.master.tensor, shard.master.state[shard.master.tensor]
    # The optimizer creates its state at its first step, which a new engine has not taken.
    if key not in state:
        state[key] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    return shard.master.view_of(state[key])


def before_load(engine: Engine) -> None:
    """Have ZeRO 3 free the full parameters that it has gathered: a load fills only the shards."""
    zero = engine.deepspeed.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        # As in DeepSpeed's own load: "persistent" (small) parameters stay gathered between steps.
        zero.checkpoint_event_prologue()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)


def after_load(engine: Engine) -> None:
    """Copy the masters to the weights that the model computes with. All ranks must call it together.

    With ZeRO 1 and 2, each rank has filled only the masters of its own shard, so that ranks do not read the same bytes
    from disk. The weights are then gathered from all shards, as after a step. ZeRO 3 gathers its persistent parameters
    again, and drops the secondary copies of zero_hpz_partition_size.
    """
    optimizer: Any = engine.deepspeed.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups_flat"):
        for weights, masters in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            weights.data.copy_(masters.data)
    elif hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)
